"""Inputs for the tests: values, memory layouts inside guarded buffers, comparison by bits, hypothesis strategies."""

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from lstmcell_bwd import lstm_cell_backward, reference

DTYPES = ("float32", "float64", "float16", "bfloat16")
NAMES = ("grad_hy", "grad_cy", "cx", "cy", "gates")
OUTPUTS = ("grad_gates", "grad_cx", "grad_bias")
GUARD = 0xA5


def dtype_of(name):
    """Return the dtype of a name in DTYPES."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


# ---- values -------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The five arrays of a call."""

    grad_hy: np.ndarray | None
    grad_cy: np.ndarray | None
    cx: np.ndarray
    cy: np.ndarray
    gates: np.ndarray


def make_inputs(batch, hidden, dtype=np.float32, seed=0, kind="ordinary"):
    """Make the arrays of a call.

    Parameters
    ----------
    batch, hidden : int
    dtype : dtype
    seed : int
    kind : {"ordinary", "saturated", "scaled", "cancel", "raw"}
        What a forward pass leaves; with |cy| up to 40; with gradients over twelve orders of magnitude; with the two
        terms of total cancelling; with gates of any value.
    """
    rng = np.random.default_rng(seed)
    shape = batch, hidden
    a, cx = rng.normal(size=(batch, 4 * hidden)), rng.normal(size=shape)
    _, cy, gates = reference.lstm_cell_forward(a, np.zeros_like(a), cx)
    grad_hy, grad_cy = rng.normal(size=shape), rng.normal(size=shape)
    if kind == "saturated":
        cy = rng.uniform(-40, 40, shape)
    elif kind == "scaled":
        size = 3 if np.dtype(dtype).itemsize == 2 else 6
        grad_hy, grad_cy = (grad * 10 ** rng.uniform(-size, size, shape) for grad in (grad_hy, grad_cy))
    elif kind == "cancel":
        grad_cy = -grad_hy * gates[:, 3 * hidden :] / np.cosh(cy) ** 2 * (1 + 1e-3 * rng.normal(size=shape))
    elif kind == "raw":
        gates = rng.normal(size=(batch, 4 * hidden)) * 2
    return Inputs(*(x.astype(dtype) for x in (grad_hy, grad_cy, cx, cy, gates)))


def special_values(dtype):
    """Return the numbers at which floating-point code breaks, finite and not, as float64."""
    limit = reference.limits(dtype)
    sizes = [0, limit.smallest_subnormal, 3 * limit.smallest_subnormal, limit.smallest_normal]
    sizes += [limit.smallest_normal - limit.smallest_subnormal, limit.eps, 1 - limit.eps / 2, 1, 1 + limit.eps]
    sizes += [8.5, 21.7, 36.9, 37.1, 43.4, 43.6, 52, 88.8, 319, 321, 354, 355, 710, limit.largest / 2, limit.largest]
    sizes = [size for size in sizes if size <= limit.largest]
    return [*sizes, *(-size for size in sizes), math.inf, -math.inf, math.nan]


# ---- comparison -----------------------------------------------------------------------------------------------------


def bits(array):
    """Return the bits of an array as unsigned integers; every NaN counts as the same."""
    array = np.ascontiguousarray(array)
    array = array.astype(array.dtype.newbyteorder("="))
    unsigned = array.view(f"u{array.dtype.itemsize}").copy()
    unsigned[np.isnan(array)] = np.iinfo(unsigned.dtype).max
    return unsigned


def assert_same_bits(result, expected, outputs=OUTPUTS):
    """Compare two results bit by bit; NaN equals NaN, -0 does not equal 0."""
    for name in outputs:
        a, b = getattr(result, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype, name
            assert a.shape == b.shape, name
            np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def assert_within_bounds(result, inputs, most=math.inf, **exact):
    """Compare a result with the reference, in the units of the bounds that the package promises, or of `most`."""
    errors = reference.error_in_units(result, *inputs, **exact)
    for name, error, bound in zip(OUTPUTS, errors, reference.bounds(result.grad_cx.dtype), strict=True):
        bound = min(bound, most)
        assert error is None or error <= bound, f"{name}: {error} units, allowed are {bound}"


def plain_call(inputs, has_bias=True, **options):
    """Call with contiguous arrays on one thread: what every other way of calling must equal bit by bit."""
    arrays = [None if x is None else np.ascontiguousarray(x, np.dtype(x.dtype).newbyteorder("=")) for x in inputs]
    return lstm_cell_backward(*arrays, has_bias, num_threads=1, **options)


# ---- layouts --------------------------------------------------------------------------------------------------------

# Row and column stride in bytes, of a [rows, columns] array of elements of `size` bytes.
LAYOUTS = {
    "contiguous": lambda rows, columns, size: (columns * size, size),
    "fortran": lambda rows, columns, size: (size, rows * size),
    "rows_reversed": lambda rows, columns, size: (-columns * size, size),
    "columns_reversed": lambda rows, columns, size: (columns * size, -size),
    "all_reversed": lambda rows, columns, size: (-columns * size, -size),
    "fortran_reversed": lambda rows, columns, size: (-size, -rows * size),
    "every_other_row": lambda rows, columns, size: (2 * columns * size, size),
    "every_other_column": lambda rows, columns, size: (2 * columns * size, 2 * size),
    "slice_of_wider": lambda rows, columns, size: ((columns + 5) * size, size),
    "slice_of_transposed": lambda rows, columns, size: (2 * size, (2 * rows + 3) * size),
    "odd_row_stride": lambda rows, columns, size: (columns * size + 1, size),
    "packed_record_field": lambda rows, columns, size: (columns * (size + 3), size + 3),
}


class Guarded:
    """An array of any layout in a buffer of its own, whose other bytes are watched.

    Parameters
    ----------
    shape : tuple of int
        One or two axes.
    dtype : dtype
    layout : str
        A key of LAYOUTS.
    values : ndarray, optional
        What the array holds; by default NaN everywhere.
    offset : int
        Bytes that shift the whole array, to misalign it.

    Attributes
    ----------
    array : ndarray
    """

    def __init__(self, shape, dtype, layout="contiguous", values=None, offset=0):
        dtype = np.dtype(dtype)
        rows, columns = shape if len(shape) == 2 else (1, *shape)
        strides = LAYOUTS[layout](rows, columns, dtype.itemsize)
        reaches = [(count - 1) * stride if count else 0 for count, stride in zip((rows, columns), strides, strict=True)]
        lowest = sum(min(0, reach) for reach in reaches)
        highest = sum(max(0, reach) for reach in reaches) + dtype.itemsize
        start = 128 + offset - lowest
        self.buffer = np.full(highest + start + 128, GUARD, np.uint8)
        strides = strides[2 - len(shape) :]
        self.array = np.ndarray(shape, dtype, self.buffer, start, strides)
        outside = np.ones(self.buffer.shape, bool)
        np.ndarray((*shape, dtype.itemsize), bool, outside, start, (*strides, 1))[...] = False
        self.outside = np.flatnonzero(outside)
        self.array[...] = np.nan if values is None else values
        self.before = self.buffer.copy()

    def assert_guards_intact(self):
        """Fail if a byte that is not part of an element was written."""
        assert (self.buffer[self.outside] == GUARD).all()

    def assert_unchanged(self):
        """Fail if any byte was written, elements included."""
        assert (self.buffer == self.before).all()


def guard_inputs(inputs, layouts, offset=0):
    """Put each array of a call into a guarded buffer; `layouts` is one name or one per array."""
    layouts = [layouts] * 5 if isinstance(layouts, str) else layouts
    return [
        None if x is None else Guarded(x.shape, x.dtype, layout, x, offset)
        for x, layout in zip(inputs, layouts, strict=True)
    ]


def guard_outputs(batch, hidden, dtype, layouts="contiguous", has_bias=True, offset=0):
    """Make guarded outputs full of NaN; `layouts` is one name or three."""
    layouts = [layouts] * 3 if isinstance(layouts, str) else layouts
    shapes = (batch, 4 * hidden), (batch, hidden), (4 * hidden,)
    outputs = [Guarded(shape, dtype, layout, None, offset) for shape, layout in zip(shapes, layouts, strict=True)]
    return outputs if has_bias else [*outputs[:2], None]


def arrays_of(guarded):
    """Return the arrays in a list of Guarded, None where there is none."""
    return [None if g is None else g.array for g in guarded]


# ---- hypothesis -----------------------------------------------------------------------------------------------------


@st.composite
def input_arrays(draw, dtype):
    """Draw the arrays of a call: odd sizes, ordinary to extreme values, missing gradients."""
    batch = draw(st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 65, 100])), label="batch")
    hidden = draw(st.one_of(st.integers(0, 19), st.sampled_from([31, 32, 33, 63, 65, 130])), label="hidden")
    kind = draw(st.sampled_from(["ordinary", "saturated", "scaled", "cancel", "raw"]), label="kind")
    inputs = make_inputs(batch, hidden, dtype, draw(st.integers(0, 2**16), label="seed"), kind)
    for name, array in inputs._asdict().items():
        if array.size and draw(st.booleans(), label=f"special {name}"):
            for value in draw(st.lists(st.sampled_from(special_values(dtype)), max_size=3), label=name):
                array.flat[draw(st.integers(0, array.size - 1), label="place")] = value
    missing = draw(st.sampled_from([(), (), (), ("grad_hy",), ("grad_cy",), ("grad_hy", "grad_cy")]), label="missing")
    return inputs._replace(**dict.fromkeys(missing))
