"""What the benchmark files share: sizes, prepared calls, and how something is skipped."""

from __future__ import annotations

import functools
import sys

from benches import data, facts
from lstmcell_bwd import lstm_cell_backward

try:
    from asv_runner.benchmarks.mark import SkipNotImplemented
except ImportError:  # the tests run the benchmarks without asv
    SkipNotImplemented = NotImplementedError

__all__ = ["DTYPES", "MEMORY_SIZES", "SIZES", "THREADS", "SkipNotImplemented", "arrays", "prepared", "shape"]

SIZES = data.SIZES
MEMORY_SIZES = ("4096x1024",)
DTYPES = data.DTYPES
shape = data.shape
THREADS = (1, 2)


@functools.cache
def announce() -> None:
    """Say what is measured; asv shows it with --show-stderr."""
    known = facts.facts()
    del known["commit"]  # of this folder; asv knows the one under test
    print(", ".join(f"{name} {value}" for name, value in known.items()), file=sys.stderr)


announce()


def arrays(size: str, dtype: str = "float32", kind: str = "ordinary"):
    """Make inputs and outputs of a size; asv calls `setup` before each sample, and one set serves them all."""
    if dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            msg = "ml_dtypes is not installed"
            raise SkipNotImplemented(msg) from None
    return _arrays(size, dtype, kind)


@functools.lru_cache(maxsize=1)
def _arrays(size, dtype, kind):
    return data.inputs(*shape(size), dtype, kind), data.outputs(*shape(size), dtype)


def prepared(size: str, dtype: str = "float32", threads: int = 1, kind: str = "ordinary", **keywords):
    """Make a call with `out=` on the data of a size."""
    inputs, out = arrays(size, dtype, kind)
    return functools.partial(lstm_cell_backward, *inputs, out=out, num_threads=threads, **keywords)
