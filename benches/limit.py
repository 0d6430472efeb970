"""The same-bytes limit: how fast this machine moves the operator's bytes when next to nothing is computed.

`contenders(...)` gives the variants of limit.c on given arrays; the fastest of them in the same run is "the limit".

    from benches import limit, measure
    variants = limit.contenders(grad_hy, grad_cy, cx, cy, gates, grad_gates, grad_cx, num_threads=1)
    turns = {name: measure.turn(run) for name, run in variants.items()}
    turns["lstmcell_bwd"] = measure.turn(measure.repeat(lstm_cell_backward, ..., out=...))
    measured = measure.take_turns(turns)
    measured.ratio("lstmcell_bwd", *variants)         # time over the limit

The C source is compiled by the system's compiler when it is first needed and kept under build/benches, once for any CPU
and once more for the best instruction set that this one runs. `python -m benches.limit` builds and times it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

__all__ = ["VARIANTS", "LimitUnavailableError", "contenders", "instruction_set"]

SOURCE = Path(__file__).with_name("limit.c")
FLAGS = ["-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC"]
LEVEL_FLAGS = {"avx2": ["-mavx2"], "avx512": ["-mavx512f", "-mprefer-vector-width=512"]}

# Name: shape of the loop and whether its stores bypass the cache, as in limit.c.
VARIANTS = {
    "limit: rows": (0, False),
    "limit: tiles": (1, False),
    "limit: tiles, streaming": (1, True),
    "limit: flat": (2, False),
    "limit: flat, streaming": (2, True),
}


class LimitUnavailableError(RuntimeError):
    """The limit cannot be built here; the message says why."""


class _Arrays(ctypes.Structure):
    """`arrays_t` of limit.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("grad_hy", "grad_cy", "cx", "cy", "gates", "grad_gates", "grad_cx")),
        ("rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    ]


def _compiled(flags: list[str]) -> Path:
    """Compile the library with some more flags, unless it is in build/benches already."""
    compiler = shlex.split(os.environ.get("CC", "") or sysconfig.get_config_var("CC") or "cc")[0]
    command = [compiler, *FLAGS, *flags]
    key = hashlib.sha256(SOURCE.read_bytes() + repr((command, platform.machine())).encode()).hexdigest()[:16]
    folder = SOURCE.parents[1] / "build" / "benches"
    library = folder / f"limit-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch, "limit.so")
            try:
                subprocess.run([*command, str(SOURCE), "-o", str(built)], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                msg = f"{SOURCE.name} does not compile: {getattr(error, 'stderr', None) or error}"
                raise LimitUnavailableError(msg) from error
            built.replace(library)
    return library


@functools.cache
def _library() -> tuple[ctypes.CDLL, str]:
    """Load the library for this CPU, with the name of its instruction set."""
    library, isa = ctypes.CDLL(str(_compiled([]))), "baseline"
    level = library.same_bytes_level()
    if level > 0:
        isa = ("avx2", "avx512")[level - 1]
        library = ctypes.CDLL(str(_compiled(LEVEL_FLAGS[isa])))
    library.same_bytes_move.argtypes = [
        ctypes.POINTER(_Arrays),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    library.same_bytes_move.restype = None
    return library, isa


def instruction_set() -> str:
    """Return the instruction set that the limit uses here: "baseline", "avx2" or "avx512"."""
    return _library()[1]


def contenders(
    grad_hy: np.ndarray,
    grad_cy: np.ndarray,
    cx: np.ndarray,
    cy: np.ndarray,
    gates: np.ndarray,
    grad_gates: np.ndarray,
    grad_cx: np.ndarray,
    num_threads: int = 1,
) -> dict[str, Callable[[int], None]]:
    """Prepare all variants on the given arrays.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy : ndarray, shape (N, H), C-contiguous, all of one dtype (any)
    gates : ndarray, shape (N, 4*H)
    grad_gates, grad_cx : ndarray, shapes (N, 4*H) and (N, H)
        Are overwritten: with `gates`, and with the other four XORed bit by bit.
    num_threads : int

    Returns
    -------
    dict of str to callable
        The names of `VARIANTS`; each value moves everything as often as it is told to.

    Raises
    ------
    ValueError
        For arrays that are not as above.
    LimitUnavailableError
        Where there is no compiler.
    """
    library, _ = _library()
    planes = {"grad_hy": grad_hy, "grad_cy": grad_cy, "cx": cx, "cy": cy, "grad_cx": grad_cx}
    rows, hidden = cx.shape
    wanted = dict.fromkeys(planes, (rows, hidden)) | dict.fromkeys(("gates", "grad_gates"), (rows, 4 * hidden))
    given = planes | {"gates": gates, "grad_gates": grad_gates}
    for name, array in given.items():
        if array.shape != wanted[name] or array.dtype != cx.dtype or not array.flags.c_contiguous:
            msg = (
                f"`{name}` must be a C-contiguous array of shape {wanted[name]} and dtype {cx.dtype}, "
                f"got shape {array.shape}, dtype {array.dtype}, strides {array.strides}"
            )
            raise ValueError(msg)
    pointers = {name: array.ctypes.data for name, array in given.items()}
    arrays = _Arrays(**pointers, rows=rows, row_bytes=hidden * cx.itemsize)

    def variant(shape: int, streaming: bool) -> Callable[[int], None]:
        def run(number: int, keep: object = given) -> None:
            library.same_bytes_move(ctypes.byref(arrays), shape, streaming, num_threads, number)

        return run

    return {name: variant(*how) for name, how in VARIANTS.items()}


def main() -> None:
    """Print what each variant reaches here, in GB/s, with float32."""
    from benches.data import SIZES, inputs, outputs, shape
    from benches.measure import take_turns, turn

    print(f"same-bytes limit, {instruction_set()}: GB/s; median of five rounds")
    for name in SIZES:
        arrays = [*inputs(*shape(name)), *outputs(*shape(name))[:2]]
        for num_threads in (1, 2):
            variants = contenders(*arrays, num_threads=num_threads)
            measured = take_turns({variant: turn(run) for variant, run in variants.items()})
            size = sum(array.nbytes for array in arrays)
            speeds = (
                f"{variant.removeprefix('limit: ')} {size / measured.time(variant).median / 1e9:.1f}"
                for variant in variants
            )
            print(f"{name}, {num_threads} thread(s): {', '.join(speeds)}")


if __name__ == "__main__":
    main()
