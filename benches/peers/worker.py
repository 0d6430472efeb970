"""Contenders in a process of their own. Started by `run`; they take turns on request.

Requests and answers are JSON, one a line. {"size": [N, H], "threads": T} prepares and checks the contenders and is
answered with the names of what can take turns and the reasons of those that cannot run; {"turn": NAME} is answered with
the turn's median in seconds. Anything that goes wrong is answered with {"error": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import numpy as np

from benches import data, measure
from benches.peers.contenders import CONTENDERS, VERSIONS_OF

__all__ = ["check", "serve"]

# Others lose digits that this package keeps; what is looked for here is another formula, order or a missing output.
TOLERANCE = 1e-3
# The turns of ten other processes lie before each: long enough for caches and clock to be what they are in the long
# run. With a fifth of it, calls from memory take up to 15 % more behind other systems than alone.
LEAST_SECONDS = 0.05


def check(results, inputs) -> None:
    """Raise unless results agree with the operator in float64, to a thousandth of each output's largest element."""
    exact = data.outputs(*inputs.cx.shape, "float64")
    data.numpy_backward(*(array.astype(np.float64) for array in inputs), exact)
    for name, value, wanted in zip(("grad_gates", "grad_cx", "grad_bias"), results, exact, strict=True):
        if value is None:
            continue
        error = np.abs(np.asarray(value, np.float64) - wanted).max() / np.abs(wanted).max()
        if value.shape != wanted.shape or not error <= TOLERANCE:
            msg = f"`{name}` must be the operator's within {TOLERANCE}, got an error of {error:.3g}"
            raise ValueError(msg)


def prepare(name, inputs, threads):
    """Prepare a contender on the data of a size: its turns, after one checked run of each."""
    runs, results = CONTENDERS[name](inputs, threads)
    for run in runs.values():
        run(1)
        if results is not None:
            check(results(), inputs)
    return {label: measure.turn(run, least_seconds=LEAST_SECONDS) for label, run in runs.items()}


def reason(error):
    """Return what goes wrong in one line."""
    traceback.print_exc()
    return f"{type(error).__name__}: {error}".splitlines()[0]


def serve(names, requests, answer) -> None:
    """Answer requests until there are no more."""
    turns = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "turn" in request:
                answer({"seconds": turns[request["turn"]]()})
            else:
                turns, versions, missing = {}, {}, {}
                inputs = data.inputs(*request["size"])
                for name in names:
                    try:
                        turns |= prepare(name, inputs, request["threads"])
                        # By module: a distribution may have another name, as tensorflow-cpu.
                        versions |= {package: sys.modules[package].__version__ for package in VERSIONS_OF[name]}
                    except Exception as error:
                        missing[name] = reason(error)
                answer({"turns": list(turns), "versions": versions, "missing": missing})
        except Exception as error:
            answer({"error": reason(error)})


def main() -> None:
    """Serve the contenders named on the command line over standard input and output."""
    # What a library prints must not reach the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(sys.argv[1:], sys.stdin, lambda reply: print(json.dumps(reply), file=answers))


if __name__ == "__main__":
    main()
