"""The backward pass over Dask arrays that are chunked along the batch; needs the extra "dask".

Every chunk is one task, which computes all of its results in one pass over its rows. The bias travels between workers
as `BiasPart`, so its bits, like all others, are those of one call on the whole batch.
"""

# ruff: noqa: EM101 - the literal is the name of the argument, which the error's text is made from
from __future__ import annotations

import importlib.util
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lstmcell_bwd import BIAS_LEAF_ROWS, choose_device, combine_bias, lstm_cell_backward_part
from lstmcell_bwd._arguments import bad_argument, check_arguments, wrong_type
from lstmcell_bwd._types import LSTMCellGradients

if importlib.util.find_spec("dask") is None:
    raise ModuleNotFoundError("lstmcell_bwd.dask needs the package dask: pip install 'lstmcell_bwd[dask]'", name="dask")

import dask.array as da
from dask.base import is_dask_collection

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from lstmcell_bwd._api import _NonFinite
    from lstmcell_bwd._types import BiasPart, LSTMCellPart
    from lstmcell_bwd.errors import InvalidParameterError

__all__ = ["lstm_cell_backward"]


def lstm_cell_backward(
    grad_hy: da.Array | ArrayLike | None,
    grad_cy: da.Array | ArrayLike | None,
    cx: da.Array | ArrayLike,
    cy: da.Array | ArrayLike,
    gates: da.Array | ArrayLike,
    has_bias: bool = True,
    *,
    rechunk: bool = False,
    num_threads: int | None = 1,
    nonfinite: _NonFinite = "nan",
) -> LSTMCellGradients:
    """Gradients of an LSTM cell over Dask arrays: `lstmcell_bwd.lstm_cell_backward`, lazily and by chunks of the batch.

    The results have the bits of one call on the whole batch, for every chunking that is accepted, any number of workers
    and any scheduler.

    Parameters
    ----------
    grad_hy, grad_cy : dask array or array_like of shape (N, H), or None
        Gradients of the cell's outputs hy and cy; None stands for zeros.
    cx, cy : dask array or array_like, shape (N, H)
        Cell state that entered the cell and cell state that left it.
    gates : dask array or array_like, shape (N, 4*H)
        Gates after their activation, four blocks of H columns in the order i, f, g, o.
    has_bias : bool, default True
        Whether to compute the gradient of the bias.
    rechunk : bool, default False
        Whether to rechunk what does not fit. Otherwise all dask arrays must have the same chunks along the batch, which
        end at multiples of `BIAS_LEAF_ROWS` rows except for the last, and one chunk along the other axis. On request
        the first dask array among `cx`, `cy`, `gates`, `grad_hy`, `grad_cy` sets the chunks, with the ends moved down
        to such multiples.
    num_threads : int or None, default 1
        Threads of the kernel within each task. Dask runs as many tasks at once as a worker has threads (`nthreads`), so
        one thread for each keeps a worker to what it was given. More pay where a worker runs one large chunk at a time.
        None leaves the choice to the rule of `lstmcell_bwd.get_num_threads` in the worker's process.
    nonfinite : {"nan", "ieee"}
        As for `lstmcell_bwd.lstm_cell_backward`.

    Returns
    -------
    LSTMCellGradients
        Named tuple (grad_gates, grad_cx, grad_bias) of dask arrays of the shapes (N, 4*H), (N, H) and (4*H,), of the
        inputs' dtype; grad_bias is None without bias. Nothing has been computed.

    Raises
    ------
    NullPointerError, UnsupportedDtypeError
        As `lstmcell_bwd.lstm_cell_backward`, before any graph is built; also if no argument is a dask array, or one is
        another collection of Dask.
    InvalidParameterError
        Likewise; also if the size of a chunk is unknown, or if chunks do not fit and `rechunk` is off.

    See Also
    --------
    lstmcell_bwd.lstm_cell_backward_part, lstmcell_bwd.combine_bias : what the tasks call.

    Notes
    -----
    Compute or persist the three results together, as in ``dask.compute(*gradients)``: where Dask optimises their graphs
    one by one, the kernel runs for each. All tasks run on the CPU. NumPy arrays are cut to the chunks of the dask
    arrays and become part of the graph.

    Examples
    --------
    >>> import dask.array as da
    >>> from lstmcell_bwd.dask import lstm_cell_backward
    >>> one = da.ones((64, 8), chunks=(32, -1), dtype="float32")
    >>> gradients = lstm_cell_backward(one, one, one, one, da.ones((64, 32), chunks=(32, -1), dtype="float32"))
    >>> gradients.grad_cx
    dask.array<grad_cx_of, shape=(64, 8), dtype=float32, chunksize=(32, 8), chunktype=numpy.ndarray>
    """
    if rechunk is not True and rechunk is not False:
        raise wrong_type("rechunk", "a bool", rechunk)
    # In the order of the checks, which is that of the operator: the required ones first.
    given = {"cx": cx, "cy": cy, "gates": gates, "grad_hy": grad_hy, "grad_cy": grad_cy}
    seen = {name: _stand_in(name, value) for name, value in given.items()}
    checked = check_arguments(seen["grad_hy"], seen["grad_cy"], seen["cx"], seen["cy"], seen["gates"], has_bias, None)
    choose_device(
        checked.grad_hy,
        checked.grad_cy,
        checked.cx,
        checked.cy,
        checked.gates,
        checked.has_bias,
        device="cpu",  # tensors on an NPU are refused
        num_threads=num_threads,
        nonfinite=nonfinite,
    )
    arrays = _chunked_alike(
        {name: value if isinstance(value, da.Array) else getattr(checked, name) for name, value in given.items()},
        rechunk,
    )
    rows = arrays["cx"].chunks[0]
    dtype, width = checked.dtype, 4 * checked.hidden
    parts = da.map_blocks(
        backward_of,
        *arrays.values(),
        has_bias=checked.has_bias,
        num_threads=num_threads,
        nonfinite=nonfinite,
        chunks=(rows, (1,)),
        meta=np.empty((0, 0), object),
    )

    def of_each_part(field: Any, columns: int, kind: Any) -> Any:
        return parts.map_blocks(field, chunks=(rows, (columns,)), meta=np.empty((0, 0), kind))

    grad_bias: Any = None
    if checked.has_bias and checked.batch > 0 and checked.hidden > 0:
        grad_bias = da.blockwise(
            grad_bias_of,
            "g",
            of_each_part(bias_parts_of, 1, object),
            "nh",
            dtype,
            None,
            new_axes={"g": width},
            concatenate=False,
            meta=np.empty(0, dtype),
        )
    elif checked.has_bias:
        grad_bias = da.zeros(width, dtype=dtype)
    return LSTMCellGradients(
        of_each_part(grad_gates_of, width, dtype), of_each_part(grad_cx_of, checked.hidden, dtype), grad_bias
    )


# ---- tasks; their names are those that Dask shows -------------------------------------------------------------------


def backward_of(
    cx: np.ndarray,
    cy: np.ndarray,
    gates: np.ndarray,
    grad_hy: np.ndarray | None,
    grad_cy: np.ndarray | None,
    *,
    block_info: dict[Any, Any],
    **options: Any,
) -> LSTMCellPart:
    """Compute one chunk; Dask says in `block_info` where in the batch it lies."""
    first_row = block_info[None]["array-location"][0][0] if len(cx) else 0
    return lstm_cell_backward_part(grad_hy, grad_cy, cx, cy, gates, first_row=first_row, **options)


def grad_gates_of(part: LSTMCellPart) -> np.ndarray:
    return part.grad_gates


def grad_cx_of(part: LSTMCellPart) -> np.ndarray:
    return part.grad_cx


def bias_parts_of(part: LSTMCellPart) -> list[BiasPart]:
    return part.parts


def grad_bias_of(chunks: list[list[list[BiasPart]]], dtype: np.dtype[Any]) -> np.ndarray:
    """Add up the parts of all chunks, each of which stands alone in its row of the grid of chunks."""
    return combine_bias(itertools.chain.from_iterable(parts for (parts,) in chunks), dtype)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _stand_in(name: str, value: Any) -> Any:
    """Return what the rules on arguments can look at: for a dask array one of its shape and dtype without memory."""
    if not isinstance(value, da.Array):
        if is_dask_collection(value):
            raise wrong_type(name, "a dask array", value)
        return value
    if isinstance(value._meta, np.ma.MaskedArray) or not isinstance(value._meta, np.ndarray):
        raise wrong_type(name, "a dask array of NumPy arrays without a mask", value._meta)
    if any(math.isnan(size) for size in value.shape):
        raise bad_argument(name, "have chunks of known sizes (`compute_chunk_sizes` finds them)", value.shape)
    return np.broadcast_to(np.empty((), value.dtype), value.shape)


def _chunked_alike(arrays: dict[str, Any], rechunk: bool) -> dict[str, Any]:
    """Return all arrays as dask arrays with one chunking, which the bias tree allows."""
    lazy = {name: array for name, array in arrays.items() if isinstance(array, da.Array)}
    if not lazy:
        raise wrong_type("cx", "a dask array where no other argument is one", arrays["cx"])
    leader = next(iter(lazy))
    rows = lazy[leader].chunks[0]
    ends = list(itertools.accumulate(rows))
    if rechunk:
        cuts = sorted({0, *(end if end == ends[-1] else end - end % BIAS_LEAF_ROWS for end in ends)})
        rows = tuple(last - first for first, last in itertools.pairwise(cuts)) or rows
    elif any(end % BIAS_LEAF_ROWS and end != ends[-1] for end in ends):
        size = -(-max(rows) // BIAS_LEAF_ROWS) * BIAS_LEAF_ROWS
        wanted = (
            f"chunks along the batch that end at multiples of BIAS_LEAF_ROWS = {BIAS_LEAF_ROWS}, like chunks of {size}"
        )
        raise _wrong_chunks(leader, wanted, rows)
    else:
        for name, array in lazy.items():
            if array.chunks[0] != rows:
                raise _wrong_chunks(name, f"the chunks of `{leader}` along the batch, {_short(rows)}", array.chunks[0])
            if array.numblocks[1] != 1:
                raise _wrong_chunks(name, "all columns in one chunk", array.chunks[1])

    def chunked(array: Any) -> Any:
        if array is None:
            return None
        return array.rechunk((rows, -1)) if isinstance(array, da.Array) else da.from_array(array, chunks=(rows, -1))

    return {name: chunked(array) for name, array in arrays.items()}


def _wrong_chunks(name: str, wanted: str, chunks: tuple[int, ...]) -> InvalidParameterError:
    """Make the error for chunks that do not fit."""
    return bad_argument(name, f"have {wanted} (`rechunk=True` sees to it)", f"chunks of {_short(chunks)}")


def _short(chunks: tuple[int, ...]) -> str:
    """Write the sizes of chunks, of many the first few."""
    return str(chunks) if len(chunks) <= 6 else f"({', '.join(map(str, chunks[:6]))}, ...)"
