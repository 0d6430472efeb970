"""A character LSTM on real text: what `lstmcell-bwd demo` trains.

One layer, float32, plain NumPy for the matrix products and the optimiser, `lstm_cell_forward` for the cell, and a
function of the caller's choice for the cell's backward pass. Truncated back-propagation through time: every update
continues the text, and the state, where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lstmcell_bwd._api import lstm_cell_forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Array: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.intp]
Out: TypeAlias = tuple[Array, Array, Array]
# grad_hy, grad_cy, cx, cy, gates, out
CellBackward: TypeAlias = Callable[[Array, Array, Array, Array, Array, Out], object]

__all__ = ["Caches", "CharacterLSTM", "Corpus", "Progress", "Settings", "Timing", "read_corpus", "train"]

HELD_OUT = 0.05  # share of the text, at its end, that is never trained on


class Settings(NamedTuple):
    """Sizes and constants of one training run.

    Attributes
    ----------
    hidden, batch, steps : int
        Hidden size H, sequences per update N, and characters per sequence and update T.
    updates : int
        Number of updates.
    reports : int
        Number of times the held-out text is evaluated, the start and the end included; more often at first, when
        the loss falls fast.
    learning_rate : float
        Adam's step at the start; it falls to a tenth of that along half a cosine.
    largest_norm : float
        Gradients whose norm is larger are scaled down to it.
    seed : int
        Of the initial weights and of the sample.
    """

    hidden: int = 192
    batch: int = 64
    steps: int = 32
    updates: int = 1500
    reports: int = 11
    learning_rate: float = 8e-3
    largest_norm: float = 1.0
    seed: int = 1


class Corpus(NamedTuple):
    """A text as indices into its alphabet.

    Attributes
    ----------
    alphabet : str
        The different characters, in order of code point.
    training, held_out : ndarray of intp
        The text's beginning, and the rest of it.
    """

    alphabet: str
    training: Indices
    held_out: Indices

    @property
    def unigram(self) -> float:
        """Bits per character on the held-out text for somebody who knows only the training text's frequencies."""
        counts = np.bincount(self.training, minlength=len(self.alphabet)) + 1.0
        return float(-np.log2(counts / counts.sum())[self.held_out].mean())


def read_corpus() -> Corpus:
    """Return the Python language reference, as the standard library carries it for `help()`."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    alphabet, indices = np.unique(codes, return_inverse=True)
    end = round(len(text) * (1 - HELD_OUT))
    return Corpus("".join(map(chr, alphabet)), indices[:end], indices[end:])


class Caches(NamedTuple):
    """What the forward pass keeps of one window of T characters in N sequences.

    Attributes
    ----------
    characters : ndarray of intp, shape (T, N)
    hy : ndarray of float32, shape (T + 1, N, H)
        Outputs; element t is what enters step t.
    cy : ndarray of float32, shape (T + 1, N, H)
        Cell states, likewise.
    gates : ndarray of float32, shape (T, N, 4*H)
        Activated gates, in the order i, f, g, o.
    """

    characters: Indices
    hy: Array
    cy: Array
    gates: Array

    @classmethod
    def empty(cls, steps: int, batch: int, hidden: int) -> Caches:
        """Room for a window, to be filled by `CharacterLSTM.forward`."""
        return cls(
            np.empty((steps, batch), np.intp),
            np.empty((steps + 1, batch, hidden), np.float32),
            np.empty((steps + 1, batch, hidden), np.float32),
            np.empty((steps, batch, 4 * hidden), np.float32),
        )


class CellInputs(NamedTuple):
    """The arguments of one call of the cell's backward pass, in their order."""

    grad_hy: Array
    grad_cy: Array
    cx: Array
    cy: Array
    gates: Array


class CharacterLSTM:
    """An LSTM layer between an embedding of characters and a softmax over characters.

    Parameters
    ----------
    characters : int
        Size of the alphabet.
    hidden : int
        Hidden size H.
    rng : numpy.random.Generator
        For the initial weights.

    Attributes
    ----------
    weights : dict of str to ndarray
        `embedding` (characters, 4*H), `recurrent` (H, 4*H), `bias` (4*H,), `output` (H, characters) and
        `output_bias` (characters,).
    """

    def __init__(self, characters: int, hidden: int, rng: np.random.Generator) -> None:
        def uniform(*shape: int) -> Array:
            limit = hidden**-0.5
            return rng.uniform(-limit, limit, shape).astype(np.float32)

        self.characters = characters
        self.hidden = hidden
        self.weights = {
            # As large as the gates need it: with the usual small values the first epoch passes without learning.
            "embedding": 2 * rng.standard_normal((characters, 4 * hidden), np.float32),
            "recurrent": uniform(hidden, 4 * hidden),
            "bias": np.zeros(4 * hidden, np.float32),
            "output": uniform(hidden, characters),
            "output_bias": np.zeros(characters, np.float32),
        }

    def initial_state(self, batch: int) -> tuple[Array, Array]:
        """Return the outputs and cell states before the first character: zeros of shape (N, H)."""
        return np.zeros((batch, self.hidden), np.float32), np.zeros((batch, self.hidden), np.float32)

    def forward(
        self, characters: Indices, state: tuple[Array, Array], caches: Caches | None = None
    ) -> tuple[Caches, Array]:
        """Read T characters of N sequences.

        Parameters
        ----------
        characters : ndarray of intp, shape (T, N)
        state : tuple of ndarray, each of shape (N, H)
            Outputs and cell states that enter the first step.
        caches : Caches, optional
            Overwritten; by default new ones are made. (A window's caches are megabytes, and touching fresh memory
            costs more than the cell's backward pass.)

        Returns
        -------
        caches : Caches
        logits : ndarray of float32, shape (T, N, characters)
        """
        weights = self.weights
        steps, batch = characters.shape
        caches = Caches.empty(steps, batch, self.hidden) if caches is None else caches
        caches.characters[:] = characters
        _, hy, cy, gates = caches
        # The embedding is the product of the one-hot input with its weights; the activated gates take its place.
        np.take(weights["embedding"], characters, axis=0, out=gates, mode="clip")
        hy[0], cy[0] = state
        for t in range(steps):
            out = hy[t + 1], cy[t + 1], gates[t]
            lstm_cell_forward(gates[t], hy[t] @ weights["recurrent"], cy[t], weights["bias"], out=out)
        return caches, hy[1:] @ weights["output"] + weights["output_bias"]

    def backward(
        self, caches: Caches, grad_logits: Array, grad_gates: Array, cell_backward: CellBackward
    ) -> tuple[dict[str, Array], float]:
        """Gradients of all weights.

        Parameters
        ----------
        caches : Caches
        grad_logits : ndarray of float32, shape (T, N, characters)
        grad_gates : ndarray of float32, shape (T, N, 4*H)
            Scratch memory.
        cell_backward : callable
            Called as cell_backward(grad_hy, grad_cy, cx, cy, gates, (grad_gates, grad_cx, grad_bias)) for every step
            from the last to the first.

        Returns
        -------
        gradients : dict of str to ndarray
            As `weights`.
        seconds : float
            Time spent in `cell_backward`.
        """
        weights = self.weights
        steps, batch, width = caches.gates.shape
        grad_hy = grad_logits @ weights["output"].T
        grad_cy, grad_cx = np.zeros((2, batch, self.hidden), np.float32)
        grad_bias = np.zeros(width, np.float32)
        step_bias = np.empty_like(grad_bias)
        into_hidden = weights["recurrent"].T
        seconds = 0.0
        for t in reversed(range(steps)):
            if t < steps - 1:
                grad_hy[t] += grad_gates[t + 1] @ into_hidden
            out = (grad_gates[t], grad_cx, step_bias)
            begin = perf_counter()
            cell_backward(grad_hy[t], grad_cy, caches.cy[t], caches.cy[t + 1], caches.gates[t], out)
            seconds += perf_counter() - begin
            grad_bias += step_bias
            grad_cy, grad_cx = grad_cx, grad_cy
        rows = steps * batch
        flat_gates = grad_gates.reshape(rows, width)
        flat_logits = grad_logits.reshape(rows, self.characters)
        one_hot = np.zeros((rows, self.characters), np.float32)
        one_hot[np.arange(rows), caches.characters.reshape(rows)] = 1
        gradients = {
            "embedding": one_hot.T @ flat_gates,
            "recurrent": caches.hy[:-1].reshape(rows, self.hidden).T @ flat_gates,
            "bias": grad_bias,
            "output": caches.hy[1:].reshape(rows, self.hidden).T @ flat_logits,
            "output_bias": flat_logits.sum(axis=0),
        }
        return gradients, seconds

    def sample(self, prompt: Sequence[int], count: int, temperature: float, rng: np.random.Generator) -> list[int]:
        """Continues a text by `count` characters, each drawn from the softmax of logits / temperature."""
        state = self.initial_state(1)
        text = list(prompt)
        unread = np.array(text, np.intp)[:, None]
        for _ in range(count):
            caches, logits = self.forward(unread, state)
            state = caches.hy[-1], caches.cy[-1]
            scaled = logits[-1, 0].astype(np.float64) / temperature
            chances = np.exp(scaled - scaled.max())
            text.append(int(rng.choice(self.characters, p=chances / chances.sum())))
            unread = np.array([text[-1:]], np.intp)
        return text

    def evaluate(self, text: Indices, batch: int = 16, steps: int = 256) -> float:
        """Bits per character on a text, read as `batch` sequences side by side."""
        streams = text[: len(text) // batch * batch].reshape(batch, -1).T
        state = self.initial_state(batch)
        total = 0.0
        for begin in range(0, len(streams) - 1, steps):
            targets = streams[begin + 1 : begin + 1 + steps]
            caches, logits = self.forward(streams[begin : begin + len(targets)], state)
            state = caches.hy[-1], caches.cy[-1]
            total += cross_entropy(logits, targets)[0] * targets.size
        return total / ((len(streams) - 1) * batch)


def cross_entropy(logits: Array, targets: Indices) -> tuple[float, Array]:
    """Mean bits per character, and the gradient of the mean in nats with respect to the logits."""
    chances = logits - logits.max(axis=-1, keepdims=True)
    np.exp(chances, out=chances)
    chances /= chances.sum(axis=-1, keepdims=True)
    at_target = (*np.indices(targets.shape, sparse=True), targets)
    bits = float(-np.log2(chances[at_target], dtype=np.float64).mean())
    chances[at_target] -= 1
    chances /= targets.size
    return bits, chances


class Adam:
    """Adam (Kingma and Ba 2015) with the gradients' global norm limited."""

    def __init__(self, weights: dict[str, Array], largest_norm: float) -> None:
        self.weights = weights
        self.largest_norm = largest_norm
        self.mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.updates = 0

    def update(self, gradients: dict[str, Array], learning_rate: float) -> None:
        """Move the weights one step against the gradients."""
        self.updates += 1
        norm = float(np.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients.values())))
        scale = np.float32(min(1.0, self.largest_norm / max(norm, 1e-12)))
        step = np.float32(learning_rate * (1 - 0.99**self.updates) ** 0.5 / (1 - 0.9**self.updates))
        for name, gradient in gradients.items():
            mean, square = self.mean[name], self.square[name]
            gradient *= scale
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.01) * (gradient * gradient - square)
            self.weights[name] -= step * mean / (np.sqrt(square) + np.float32(1e-8))


class Timing(NamedTuple):
    """Seconds of one update that did its backward pass twice, once with either function for the cell.

    Attributes
    ----------
    cell, peer : float
        Time in the cell's backward pass: of the function that trains, and of the other one.
    rest : float
        Time of everything else in the update.
    """

    cell: float
    peer: float
    rest: float


class Progress(NamedTuple):
    """State of a training run after an update, or before the first one.

    Attributes
    ----------
    update : int
        Updates done.
    characters : int
        Characters trained on so far.
    training_bits : float
        Bits per character of this update's window, before the update (NaN before the first one).
    held_out_bits : float or None
        Bits per character on the held-out text, in the updates that report it.
    timing : Timing or None
        In the updates that measure.
    cells : list of CellInputs
        What the cell's backward pass was given for every step, in the updates that report.
    """

    update: int
    characters: int
    training_bits: float
    held_out_bits: float | None
    timing: Timing | None
    cells: list[CellInputs]


def train(
    model: CharacterLSTM,
    corpus: Corpus,
    settings: Settings,
    cell_backward: CellBackward,
    peer: CellBackward,
    measure_every: int = 10,
) -> Iterator[Progress]:
    """Trains a model, one update for every element of the iterator.

    Parameters
    ----------
    model : CharacterLSTM
    corpus : Corpus
    settings : Settings
    cell_backward : callable
        The cell's backward pass that trains the model; called as `CharacterLSTM.backward` says.
    peer : callable
        Another one. In every `measure_every`-th update the backward pass is done with both, alternately first, and
        timed; what the peer returns is thrown away.

    Yields
    ------
    Progress
    """
    batch, steps = settings.batch, settings.steps
    streams = corpus.training[: len(corpus.training) // batch * batch].reshape(batch, -1).T
    optimiser = Adam(model.weights, settings.largest_norm)
    reports = {round(share**2 * settings.updates) for share in np.linspace(0, 1, settings.reports)}
    state = model.initial_state(batch)
    position = 0
    caches = Caches.empty(steps, batch, settings.hidden)
    grad_gates = np.empty_like(caches.gates)
    yield Progress(0, 0, float("nan"), model.evaluate(corpus.held_out), None, [])
    for update in range(1, settings.updates + 1):
        if position + steps >= len(streams):
            state = model.initial_state(batch)
            position = 0
        begin = perf_counter()
        _, logits = model.forward(streams[position : position + steps], state, caches)
        training_bits, grad_logits = cross_entropy(logits, streams[position + 1 : position + 1 + steps])
        state = caches.hy[-1].copy(), caches.cy[-1].copy()
        position += steps

        spare = 0.0
        peer_seconds = None
        measured = update % measure_every == 0
        peer_first = update // measure_every % 2 == 1
        cells: list[CellInputs] = []
        for second in (False, True):
            if second != peer_first:
                gradients, cell_seconds = model.backward(caches, grad_logits, grad_gates, cell_backward)
            elif measured:
                spare = perf_counter()
                peer_seconds = model.backward(caches, grad_logits, grad_gates, peer)[1]
                spare = perf_counter() - spare
        learning_rate = settings.learning_rate * (0.55 + 0.45 * np.cos(np.pi * update / settings.updates))
        optimiser.update(gradients, learning_rate)
        seconds = perf_counter() - begin - spare

        held_out_bits = None
        if update in reports:
            held_out_bits = model.evaluate(corpus.held_out)
            model.backward(caches, grad_logits, grad_gates, recorder(cells, cell_backward))
        timing = None if peer_seconds is None else Timing(cell_seconds, peer_seconds, seconds - cell_seconds)
        yield Progress(update, update * batch * steps, training_bits, held_out_bits, timing, cells)


def recorder(cells: list[CellInputs], cell_backward: CellBackward) -> CellBackward:
    """Return the same function, which also keeps a copy of its inputs."""

    def record(grad_hy: Array, grad_cy: Array, cx: Array, cy: Array, gates: Array, out: Out) -> object:
        cells.append(CellInputs(grad_hy.copy(), grad_cy.copy(), cx.copy(), cy.copy(), gates.copy()))
        return cell_backward(grad_hy, grad_cy, cx, cy, gates, out)

    return record
