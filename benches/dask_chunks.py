"""What Dask costs for each chunk, and from which size of a chunk on it pays.

    python -m benches.dask_chunks [rows of a chunk ...]

Inputs lie in chunks where they are computed, and the results stay there, as in the middle of a training step. What is
timed is the whole of a call: building the graph, scheduling it, computing it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import distributed
import numpy as np

import lstmcell_bwd.dask
from benches import data, facts
from benches.measure import ROUNDS, Measured, Quote, quote, repeat, take_turns, turn
from lstmcell_bwd import BIAS_LEAF_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["main", "on_cluster", "overhead", "sizes"]

HIDDEN = 256
ROWS = (512, 2048, 8192, 16384)  # of a chunk
CHUNKS = 8
BYTES_OF_A_ROW = 13 * HIDDEN * 4  # read and written, float32
FEW, MANY = 16, 80  # chunks of next to no work, whose times tell the cost of each
serial = itertools.count()


def block(field: str, rows: int, hidden: int) -> np.ndarray:
    """Make one chunk of an input."""
    return np.tile(getattr(data.inputs(BIAS_LEAF_ROWS, hidden), field), (rows // BIAS_LEAF_ROWS, 1))


def as_it_is(array: np.ndarray, _number: int) -> np.ndarray:
    """Return a chunk; the number only gives the task another name."""
    return array


def lazy_inputs(chunks: int, rows: int, hidden: int) -> list[da.Array]:
    """Make the five inputs, not yet computed."""
    return [
        da.map_blocks(
            block,
            field,
            rows,
            hidden,
            chunks=((rows,) * chunks, (hidden * (4 if field == "gates" else 1),)),
            meta=np.empty((0, 0), np.float32),
        )
        for field in data.Inputs._fields
    ]


def call(persist: Callable[..., Any], arrays: Sequence[da.Array]) -> None:
    """Compute the gradients once; a cluster would recognise the tasks of the call before by their names."""
    gates = arrays[4].map_blocks(as_it_is, next(serial), meta=arrays[4]._meta)
    persist(*lstmcell_bwd.dask.lstm_cell_backward(*arrays[:4], gates))


def on_cluster(client: distributed.Client, *collections: Any) -> tuple[Any, ...]:
    """Compute collections on a cluster and leave their chunks on its workers."""
    collections = client.persist(collections)
    with client.as_current():
        distributed.wait(collections)
    return collections


@contextlib.contextmanager
def schedulers(workers: int) -> Iterator[dict[str, Callable[..., Any]]]:
    """Start the schedulers; each is a function that computes collections and leaves their chunks where they are."""
    options = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(workers)
        on_threads = functools.partial(dask.persist, scheduler="threads", num_workers=workers)
        yield {"threads": on_threads, "cluster": functools.partial(on_cluster, client)}


def overhead(persist: Callable[..., Any]) -> tuple[Quote, Quote]:
    """Measure what a call costs before its first chunk, and for each chunk, in seconds."""
    inputs = {name: persist(*lazy_inputs(chunks, BIAS_LEAF_ROWS, 8)) for name, chunks in (("few", FEW), ("many", MANY))}
    seconds = take_turns({name: turn(repeat(call, persist, arrays)) for name, arrays in inputs.items()}).seconds
    each = [(many - few) / (MANY - FEW) for few, many in zip(seconds["few"], seconds["many"], strict=True)]
    once = [few - FEW * one for few, one in zip(seconds["few"], each, strict=True)]
    return quote(once), quote(each)


def sizes(persists: dict[str, Callable[..., Any]], rows: int, workers: int) -> Measured:
    """Measure one call on the whole batch, on one thread and on several, and the same in chunks by each scheduler."""
    whole = [block(field, CHUNKS * rows, HIDDEN) for field in data.Inputs._fields]
    plain = functools.partial(lstmcell_bwd.lstm_cell_backward, *whole)
    turns = {"one": turn(repeat(plain, num_threads=1)), "several": turn(repeat(plain, num_threads=workers))}
    for name, persist in persists.items():
        turns[name] = turn(repeat(call, persist, persist(*lazy_inputs(CHUNKS, rows, HIDDEN))))
    return take_turns(turns)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="the backward pass in chunks, by threads and by a cluster")
    parser.add_argument("rows", nargs="*", type=int, default=ROWS, help="rows of a chunk, multiples of BIAS_LEAF_ROWS")
    asked = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    known = facts.facts()
    print(", ".join(str(known[name]) for name in ("cpus", "cpu", "instruction_set", "numpy", "commit")))
    print(f"dask {dask.__version__}, distributed {distributed.__version__}; medians of {ROUNDS} rounds (smallest)")
    with schedulers(workers) as persists:
        for name, persist in persists.items():
            once, each = (f"{q.median * 1e3:.2f} ms ({q.smallest * 1e3:.2f})" for q in overhead(persist))
            print(f"Dask, {name}: {once} for a call and {each} for each chunk")
        print(f"\n{CHUNKS} chunks; the last three columns: times as fast as one call on 1 thread\n")
        head = [
            "rows of a chunk",
            "bytes of a chunk",
            "1 thread",
            f"{workers} threads",
            *(f"Dask, {n}" for n in persists),
        ]
        print("|", " | ".join(head), "|")
        print("|" + "---|" * len(head))
        for rows in asked.rows:
            measured = sizes(persists, rows, workers)
            ratios = [measured.ratio("one", name) for name in ("several", *persists)]
            moved = f"{rows * BYTES_OF_A_ROW / 2**20:.1f} MiB"
            cells = [str(rows), moved, f"{measured.time('one').median * 1e3:.2f} ms"]
            print("|", " | ".join([*cells, *(f"{q.median:.2f} ({q.smallest:.2f})" for q in ratios)]), "|", flush=True)


if __name__ == "__main__":
    main()
