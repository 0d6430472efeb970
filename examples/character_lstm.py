"""The character model of `lstmcell-bwd demo` in PyTorch; one line of it is this package's.

    python examples/character_lstm.py [--updates 300] [--hidden 192]

Trains on the Python language reference that the standard library carries, and prints bits per character.
"""

import argparse
import math
import time

import torch
from torch.nn.functional import cross_entropy, one_hot

from lstmcell_bwd._demo import Settings, read_corpus
from lstmcell_bwd.torch import LSTMCell  # the line that changes: from torch.nn import LSTMCell


class CharacterLSTM(torch.nn.Module):
    """An LSTM cell between characters and the logits of the next ones."""

    def __init__(self, characters, hidden):
        super().__init__()
        self.cell = LSTMCell(characters, hidden)
        self.output = torch.nn.Linear(hidden, characters)
        torch.nn.init.normal_(self.cell.weight_ih, std=2)  # as large as the gates need it

    def forward(self, characters, state):
        """Read T characters of N sequences, shape (T, N); return logits and state."""
        outputs = []
        for step in one_hot(characters, self.cell.input_size).float():
            state = self.cell(step, state)
            outputs.append(state[0])
        return self.output(torch.stack(outputs)), state


def train(settings):
    """Train by truncated back-propagation through time; yield bits per character of every update's window."""
    torch.manual_seed(settings.seed)
    corpus = read_corpus()
    model = CharacterLSTM(len(corpus.alphabet), settings.hidden)
    optimiser = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    text = torch.from_numpy(corpus.training)
    streams = text[: len(text) // settings.batch * settings.batch].view(settings.batch, -1).t()
    state, position = None, 0
    for update in range(1, settings.updates + 1):
        if position + settings.steps >= len(streams):
            state, position = None, 0
        window = streams[position : position + settings.steps + 1]
        position += settings.steps
        logits, state = model(window[:-1], state)
        state = [tensor.detach() for tensor in state]
        loss = cross_entropy(logits.flatten(0, 1), window[1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.largest_norm)
        cosine = math.cos(math.pi * update / settings.updates)
        optimiser.param_groups[0]["lr"] = settings.learning_rate * (0.55 + 0.45 * cosine)
        optimiser.step()
        yield loss.item() / math.log(2)


def main():
    """Train, and print the mean of the last twentieth of the updates, twenty times."""
    defaults = Settings(updates=300)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=defaults.updates)
    parser.add_argument("--hidden", type=int, default=defaults.hidden)
    options = parser.parse_args()
    settings = defaults._replace(updates=options.updates, hidden=options.hidden)
    began, bits, every = time.perf_counter(), [], max(1, options.updates // 20)
    for update, latest in enumerate(train(settings), 1):
        bits.append(latest)
        if update % every == 0:
            mean = sum(bits[-every:]) / every
            print(
                f"update {update:5d}   {mean:.3f} bits per character   {time.perf_counter() - began:6.1f} s", flush=True
            )


if __name__ == "__main__":
    main()
