"""Measures `lstmcell_bwd.torch.LSTMCell` beside `torch.nn.LSTMCell` on the CPU; writes benches/results/NAME.json.

    python -m benches.torch_cell NAME [--sizes BATCHxINPUTxHIDDENxSTEPS ...] [--threads ...]

A step is what training repeats, without loss and optimiser: the cell over all steps of a sequence, and the backward
pass from given gradients of all hidden states. Measured are the whole step; the same without the matrix products; and
the bytes that autograd keeps between the two passes, parameters and inputs left out. For every number of threads there
is a process restricted to as many CPUs, where the two cells take turns by the rule of `benches.measure`. The table goes
between the two marker lines of README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import types
import unittest.mock

from benches import ROOT, measure
from benches.facts import facts
from benches.peers import RESULTS
from benches.peers.table import duration, emphasised, markdown, origin

__all__ = ["measure_size", "replaced", "table"]

SIZES = ("32x128x256x50", "64x256x512x35", "16x512x1024x25")
KINDS = ("products left out", "whole step")
MARKED = re.compile(r"<!-- torch-cell:begin (\S+) -->\n.*?<!-- torch-cell:end -->", re.DOTALL)
# CPUs first, before any library counts them.
START = """
import os, sys
os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv.pop(1).split(",")])
sys.path.append(sys.argv.pop(1))
from benches import torch_cell
torch_cell.serve(*sys.argv[1:])
"""
EXPLANATION = (
    "float32. *products left out*: a training step (all steps of the sequence forward, then backward) without the "
    "matrix products, but with PyTorch's additions of the weights' gradients, which ours leaves to the products; "
    "*whole step*: with them; *kept*: for the backward pass. Ratios are PyTorch's time over ours, the median of five "
    "rounds and in brackets the smallest, bold where PyTorch is the faster one."
)


def cells(size):
    """Return both cells with the same parameters; inputs, gradients of the hidden states, and the first state."""
    import torch

    from lstmcell_bwd.torch import LSTMCell

    batch, inputs, hidden, steps = size
    torch.manual_seed(0)
    theirs, ours = torch.nn.LSTMCell(inputs, hidden), LSTMCell(inputs, hidden)
    ours.load_state_dict(theirs.state_dict())
    xs, gradients = torch.randn(steps, batch, inputs), torch.randn(steps, batch, hidden)
    return {"PyTorch": theirs, "lstmcell_bwd": ours}, xs, gradients, torch.zeros(batch, hidden)


def training_step(cell, xs, gradients, zeros, parameters):
    """Make a function that does one training step with anything that is called like a cell."""
    import torch

    xs, gradients = xs.unbind(), gradients.unbind()

    def step():
        for parameter in parameters:
            parameter.grad = None
        state = zeros, zeros
        outputs = []
        for x in xs:
            state = cell(x, state)
            outputs.append(state[0])
        torch.autograd.backward(outputs, gradients)

    return step


def without_products(name, cell, size, *data):
    """Make a function that does one training step but for the matrix products, whose results are there already.

    Both cells are called as the modules they are. In ours the products are replaced. Where one adds to the gradient of
    a weight, the addition is a part of it: `addmm` takes as long as `mm` at these sizes (0.92 to 1.10 times). In
    PyTorch's module `lstm_cell` is replaced by what `at::lstm_cell` does behind its products, called from here; there
    the biases belong to the products, which start from a copy of them in every row. It is followed by the engine's
    additions: that of every step's gradient of a weight, but for one, to those of the other steps, and that of the two
    gradients of a hidden state. PyTorch's nodes of the products themselves are left out, ours are not.
    """
    import torch

    import lstmcell_bwd.torch

    batch, _, hidden, steps = size
    step = training_step(cell, *data, list(cell.parameters()))
    if name == "lstmcell_bwd":
        products, grad_hx = itertools.cycle(torch.zeros(2, batch, 4 * hidden)), torch.zeros(batch, hidden)
        fakes = {
            "linear": lambda *_: next(products),
            "mm": lambda *_, out=grad_hx: out,
            "addmm": lambda *_, out: out,
        }
        return with_fakes(lstmcell_bwd.torch, fakes, step)

    def behind_products(_, state, *__):
        gates = cell.bias_hh.expand(batch, -1).clone().add_(cell.bias_ih.expand(batch, -1).clone())
        i, f, g, o = gates.unsafe_chunk(4, 1)
        i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
        cy = (f * state[1]).add_(i * g)
        return o * cy.tanh(), cy

    fakes = {"_VF": types.SimpleNamespace(lstm_cell=behind_products)}
    step = with_fakes(torch.nn.modules.rnn, fakes, step)
    sums = [torch.zeros_like(weight) for weight in (cell.weight_ih, cell.weight_hh)]
    gradients = [torch.zeros_like(weight) for weight in sums]
    grad_hy, grad_hx = torch.zeros(2, batch, hidden)

    def theirs():
        step()
        for _ in range(steps - 1):
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient)
            torch.add(grad_hy, grad_hx)

    return theirs


def with_fakes(module, fakes, step):
    """Make a function that does a step with other values for some names of a module."""

    def run():
        with unittest.mock.patch.multiple(module, **fakes):
            step()

    return run


def kept_bytes(step, left_out):
    """Count the bytes that a step's forward pass keeps for its backward pass, beside the given tensors."""
    import torch

    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    for tensor in left_out:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def measure_size(size):
    """Measure both cells on one size with the number of threads that this process has.

    Parameters
    ----------
    size : sequence of (batch, input, hidden, steps)

    Returns
    -------
    dict
        `seconds` and `ratio` (smallest, median) of "products left out" and "whole step", and the bytes "kept".
    """
    modules, xs, *rest = cells(size)
    turns, kept = {}, {}
    for name, cell in modules.items():
        parameters = list(cell.parameters())
        whole = training_step(cell, xs, *rest, parameters)
        part = without_products(name, cell, size, xs, *rest)
        kept[name] = kept_bytes(whole, [*parameters, xs])
        turns["whole step", name] = measure.turn(measure.repeat(whole))
        turns["products left out", name] = measure.turn(measure.repeat(part))
    measured = measure.take_turns(turns)
    row = {"kept": kept}
    for kind in KINDS:
        row[kind] = {
            "seconds": {name: list(measured.time((kind, name))) for name in modules},
            "ratio": list(measured.ratio((kind, "PyTorch"), (kind, "lstmcell_bwd"))),
        }
    return row


def serve(threads, *sizes) -> None:
    """Measure sizes with a number of threads; print one JSON row for each."""
    import torch

    torch.set_num_threads(int(threads))
    for size in sizes:
        row = {"size": size, "threads": int(threads), "torch": torch.__version__}
        print(json.dumps(row | measure_size([int(number) for number in size.split("x")])), flush=True)


def start(threads, sizes):
    """Measure in a process of as many CPUs as threads; yield its rows."""
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[-threads:])
    command = [sys.executable, "-P", "-c", START, cpus, str(ROOT), str(threads), *sizes]
    environment = os.environ | {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        sys.exit(process.returncode)


def table(results: dict) -> str:
    """Make the table from what was measured, as Markdown."""
    rows = []
    for row in results["rows"]:
        cells = [row["size"].replace("x", ", "), str(row["threads"])]
        for kind in KINDS:
            cells += [duration(row[kind]["seconds"][name][1]) for name in ("PyTorch", "lstmcell_bwd")]
            smallest, median = row[kind]["ratio"]
            cells.append(emphasised(f"{median:.2f} ({smallest:.2f})", median < 1))
        cells += [f"{row['kept'][name] / 1e6:.1f} MB" for name in ("PyTorch", "lstmcell_bwd")]
        rows.append(cells)
    head = ["batch, input, hidden, steps", "threads"]
    head += [text for kind in KINDS for text in (f"{kind}: PyTorch", "ours", "ratio")]
    return "\n".join([*markdown([*head, "kept: PyTorch", "ours"], rows), "", EXPLANATION, *origin(results)])


def replaced(text: str, name: str, new: str) -> str:
    """Return a page with another table, made of the results file of that name.

    Raises
    ------
    ValueError
        Unless the page has the two marker lines once.
    """
    if len(MARKED.findall(text)) != 1:
        msg = f"the text must have {MARKED.pattern} once"
        raise ValueError(msg)
    return MARKED.sub(lambda _: f"<!-- torch-cell:begin {name} -->\n{new}\n<!-- torch-cell:end -->", text)


def main() -> int:
    """Measure; write the results file and the table."""
    parser = argparse.ArgumentParser(description="measure the PyTorch cell of this package beside PyTorch's own")
    parser.add_argument("name", help="the results go to benches/results/NAME.json")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="BATCHxINPUTxHIDDENxSTEPS")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    options = parser.parse_args()
    results = {"facts": facts(), "versions": {}, "missing": {}, "rows": []}
    for threads in options.threads:
        for row in start(threads, options.sizes):
            results["versions"]["torch"] = row.pop("torch")
            results["rows"].append(row)
            print(row["size"], threads, {kind: row[kind]["ratio"] for kind in KINDS}, flush=True)
    (RESULTS / f"{options.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    page = ROOT / "README.md"
    page.write_text(replaced(page.read_text(), options.name, table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
