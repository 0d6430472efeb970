"""What `lstmcell-bwd bench` measures: the operator, the NumPy expression, and the same bytes without arithmetic."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lstmcell_bwd import lstm_cell_backward
from lstmcell_bwd._api import choose_threads
from lstmcell_bwd._check import Backward, Case
from lstmcell_bwd._expression import numpy_backward
from lstmcell_bwd._measure import Quote, repeat, take_turns, turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["SIZES", "THREADS", "Row", "limit_module", "measure"]

SIZES = ((32, 128), (64, 512), (256, 1024), (1024, 256), (4096, 1000), (4096, 1024), (16384, 256))
THREADS = (1, 2)


class Row(NamedTuple):
    """One size on one number of threads. Ratios are (smallest, median) of the rounds.

    Attributes
    ----------
    batch, hidden : int
    threads : int
        The most that a call may use.
    seconds : float
        Median time of one call of `lstm_cell_backward` with `out`.
    numpy_seconds : float
        The same of the NumPy expression, which always runs on one thread.
    gigabytes_per_second : float
        Bytes of the inputs and outputs over the time.
    over_limit : Quote or None
        Time over that of the fastest kernel that moves the same bytes; None where that is not built.
    speedup : Quote
        Time of the NumPy expression over ours.
    """

    batch: int
    hidden: int
    threads: int
    seconds: float
    numpy_seconds: float
    gigabytes_per_second: float
    over_limit: Quote | None
    speedup: Quote


def limit_module() -> tuple[Any, str]:
    """Return the kernel that moves the same bytes, from the repository's `benches`, or None and why it is not there.

    Returns
    -------
    module : module or None
    reason : str
    """
    try:
        limit = importlib.import_module("benches.limit")
    except ImportError:
        return None, "its source is in benches/ of the repository: run `python -m lstmcell_bwd bench` in a clone"
    try:
        limit.instruction_set()
    except limit.LimitUnavailableError as error:
        return None, str(error)
    return limit, ""


def measure(sizes: Sequence[tuple[int, int]], rounds: int, limit: Any) -> Iterator[list[Row]]:
    """Measures sizes in float32, by the rule of `_measure`.

    Parameters
    ----------
    sizes : sequence of (N, H)
    rounds : int
    limit : module or None
        From `limit_module`.

    Yields
    ------
    list of Row
        For one size after the other, one row for each number of threads.
    """
    for batch, hidden in sizes:
        arrays: Any = Backward.make_inputs(Case("float32", (batch, hidden), "ordinary"))
        out = (
            np.ones((batch, 4 * hidden), np.float32),
            np.ones((batch, hidden), np.float32),
            np.ones(4 * hidden, np.float32),
        )
        turns: dict[str, Callable[[], float]] = {"numpy": turn(repeat(numpy_backward, *arrays, out))}
        variants: dict[int, list[str]] = {}
        for threads in THREADS:
            # The number is a limit, for this package as for the others: a small call uses fewer.
            used = choose_threads(0, batch, hidden, threads)
            ours = repeat(lstm_cell_backward, *arrays, out=out, device="cpu", num_threads=used)
            turns[f"ours {threads}"] = turn(ours)
            runs = limit.contenders(*arrays, *out[:2], num_threads=threads) if limit else {}
            variants[threads] = [f"{name} {threads}" for name in runs]
            turns.update((f"{name} {threads}", turn(run)) for name, run in runs.items())
        measured = take_turns(turns, rounds)
        size = sum(array.nbytes for array in (*arrays, *out[:2]))
        rows = []
        for threads in THREADS:
            seconds = measured.time(f"ours {threads}").median
            over_limit = measured.ratio(f"ours {threads}", *variants[threads]) if variants[threads] else None
            speedup = measured.ratio("numpy", f"ours {threads}")
            numpy_seconds = measured.time("numpy").median
            rows.append(Row(batch, hidden, threads, seconds, numpy_seconds, size / seconds / 1e9, over_limit, speedup))
        yield rows
