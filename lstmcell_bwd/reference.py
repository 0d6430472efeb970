"""The operators in plain NumPy, and what their results are measured by: scales, bounds, and the Inf and NaN rule.

Slow, readable, and accurate: it works in float64 (or in NumPy's long double, to judge float64 results) and uses no
formula that cancels. It is meant for reading, for tests, and for checking a device.

Notation, for batch N and hidden size H: `i`, `f`, `g`, `o` are the activated gates (input, forget, cell, output), four
blocks of H columns of `gates` in that order; `t = tanh(cy)`, `s = 1 - t**2`, `E = exp(-2 |cy|)`. The formulas are those
of the published operator `aclnnThnnFusedLstmCellBackward` of Ascend CANN, which are PyTorch's of
`_thnn_fused_lstm_cell_backward_impl`::

    total   = grad_hy * o * s + grad_cy
    grad_cx = total * f
    d_i = total * g  * i * (1 - i)        d_g = total * i * (1 - g**2)
    d_f = total * cx * f * (1 - f)        d_o = grad_hy * t * o * (1 - o)
    grad_gates = [d_i, d_f, d_g, d_o]     grad_bias = sum of grad_gates over the batch

and, of the forward pass, with `a` the sum of the two matrix products and the biases::

    i, f, o = sigmoid(a_i), sigmoid(a_f), sigmoid(a_o)      g = tanh(a_g)
    cy = f * cx + i * g         hy = o * tanh(cy)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lstmcell_bwd._arguments import missing, wrong_rank, wrong_shape
from lstmcell_bwd._types import LSTMCellGradients, LSTMCellState

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = [
    "READS",
    "Limits",
    "bounds",
    "error_in_units",
    "errors_in_units",
    "exact_column_sums",
    "forward_errors",
    "in_range",
    "limits",
    "lstm_cell_backward",
    "lstm_cell_forward",
    "nonfinite_mask",
    "scales",
    "wide_dtype",
]

READS = {
    "d_i": ("grad_hy", "o", "cy", "grad_cy", "g", "i"),
    "d_f": ("grad_hy", "o", "cy", "grad_cy", "cx", "f"),
    "d_g": ("grad_hy", "o", "cy", "grad_cy", "i", "g"),
    "d_o": ("grad_hy", "cy", "o"),
    "grad_cx": ("grad_hy", "o", "cy", "grad_cy", "f"),
}
"""The inputs that the formula of each output reads. Under the operator's rule for Inf and NaN (`nonfinite="nan"`) an
output element is NaN if one of these is Inf or NaN at its place."""


class Limits(NamedTuple):
    """What a floating-point type can hold, as Python floats.

    Attributes
    ----------
    eps : float
        Distance from 1 to the next larger number.
    smallest_normal : float
    smallest_subnormal : float
    largest : float
        Largest finite number.
    """

    eps: float
    smallest_normal: float
    smallest_subnormal: float
    largest: float


class Units(NamedTuple):
    """One figure for each output: an error, or a bound.

    Attributes
    ----------
    grad_gates, grad_cx : float
    grad_bias : float or None
        None without bias.
    """

    grad_gates: float
    grad_cx: float
    grad_bias: Any


def limits(dtype: DTypeLike) -> Limits:
    """Return what a dtype can hold; of `ml_dtypes.bfloat16` too, without importing that package.

    Parameters
    ----------
    dtype : dtype
        float32, float64, float16 or bfloat16 (of any byte order).

    Returns
    -------
    Limits
    """
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return Limits(2.0**-7, 2.0**-126, 2.0**-133, (2 - 2.0**-7) * 2.0**127)
    info = np.finfo(dtype)
    return Limits(float(info.eps), float(info.smallest_normal), float(info.smallest_subnormal), float(info.max))


def arithmetic_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the type that the operator computes in: float32 for the half types, else the dtype itself."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def wide_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a type wide enough to judge results of a dtype by: float64, or the long double for float64 data.

    Where the platform's long double is float64 itself, judging float64 adds the reference's own error of about 3 units.
    """
    return np.dtype(np.longdouble if np.dtype(dtype).itemsize == 8 else np.float64)


def checked_arrays(
    grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, gates: Any, dtype: DTypeLike
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the five inputs in the working precision, a missing gradient as zeros."""
    for name, value in (("cx", cx), ("cy", cy), ("gates", gates)):
        if value is None:
            raise missing(name)
    state, arrays = None, []
    for name, value in (("cx", cx), ("cy", cy), ("gates", gates), ("grad_hy", grad_hy), ("grad_cy", grad_cy)):
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            array = np.zeros(state, dtype) if value is None else np.asarray(value).astype(dtype)
        if state is None:
            state = array.shape
            if len(state) != 2:
                raise wrong_rank(name, state)
        check_shape(name, array, state, blocks=4 if name == "gates" else 1)
        arrays.append(array)
    cx, cy, gates, grad_hy, grad_cy = arrays
    return grad_hy, grad_cy, cx, cy, gates


def check_shape(name: str, array: NDArray[Any], state: tuple[int, ...], blocks: int) -> None:
    """Raise unless an array has the shape (N, blocks * H), where `state` is (N, H), the shape of `cx`."""
    wanted = (state[0], blocks * state[1])
    if array.shape != wanted:
        raise wrong_shape(name, "(N, 4*H)" if blocks == 4 else "(N, H)", wanted, "cx", state, array.shape)


def sigmoid(a: NDArray[Any]) -> Any:
    """Return 1 / (1 + exp(-a)) without overflow, accurate at both ends."""
    e = np.exp(-np.abs(a))
    return np.where(a >= 0, 1, e) / (1 + e)


def tanh_and_slope(cy: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return tanh(cy), 1 - tanh(cy)**2 and E = exp(-2 |cy|), with every digit at any cy.

    tanh|x| = (1 - E) / (1 + E) = -expm1(-2|x|) / (1 + E), and 1 - tanh(x)**2 = 4 E / (1 + E)**2.
    """
    e = np.exp(-2 * np.abs(cy))
    t = np.copysign(-np.expm1(-2 * np.abs(cy)) / (1 + e), cy)
    return t, 4 * e / ((1 + e) * (1 + e)), e


def two_sum(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a + b, rounded, and what rounding cut off (Knuth, The Art of Computer Programming 2, 4.2.2)."""
    total = a + b
    seen = total - a
    return total, (a - (total - seen)) + (b - seen)


def exact_sum(terms: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of the terms, rounded about once however much cancels; where it overflows as plain addition."""
    parts: list[NDArray[Any]] = list(np.broadcast_arrays(*terms))
    with np.errstate(all="ignore"):
        plain = sum(parts[1:], start=parts[0])
    # Each pass moves the sum to the end and leaves what was cut off (Ogita, Rump and Oishi, Accurate Sum and Dot
    # Product): as if added in four times the precision.
    with np.errstate(all="ignore"):
        for _ in range(3):
            for k in range(1, len(parts)):
                parts[k], parts[k - 1] = two_sum(parts[k], parts[k - 1])
        total = sum(parts[1:], start=parts[0])
        total = np.where(total == 0, 0 * plain, total)  # with the sign that a zero has
    return np.where(np.isfinite(total), total, plain)


def checked_forward_arrays(
    input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any, hidden_bias: Any, dtype: DTypeLike
) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Return the terms of the sum `a`, and `cx`, in the working precision."""
    for name, value in (("input_gates", input_gates), ("hidden_gates", hidden_gates), ("cx", cx)):
        if value is None:
            raise missing(name)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        terms, cx = [], np.asarray(cx).astype(dtype)
        if cx.ndim != 2:
            raise wrong_rank(name, cx.shape)
        for name, product in (("input_gates", input_gates), ("hidden_gates", hidden_gates)):
            terms.append(np.asarray(product).astype(dtype))
            check_shape(name, terms[-1], cx.shape, blocks=4)
        for name, bias in (("input_bias", input_bias), ("hidden_bias", hidden_bias)):
            if bias is not None:
                terms.append(np.asarray(bias).astype(dtype))
                wanted = (4 * cx.shape[1],)
                if terms[-1].shape != wanted:
                    raise wrong_shape(name, "(4*H,)", wanted, "cx", cx.shape, terms[-1].shape)
    return terms, cx


def lstm_cell_forward(
    input_gates: Any,
    hidden_gates: Any,
    cx: Any,
    input_bias: Any = None,
    hidden_bias: Any = None,
    *,
    dtype: DTypeLike = np.float64,
) -> LSTMCellState:
    """Compute the forward pass of an LSTM cell from its two matrix products.

    Parameters
    ----------
    input_gates, hidden_gates : array_like, shape (N, 4*H)
        The products of the input and of the hidden state with their weights, four blocks of H columns: i, f, g, o.
    cx : array_like, shape (N, H)
        Cell state that enters the cell.
    input_bias, hidden_bias : array_like of shape (4*H,), optional
        Added to the products.
    dtype : dtype, default float64
        Working precision and dtype of the results, float64 or `numpy.longdouble`.

    Returns
    -------
    LSTMCellState
        (hy, cy, gates): hidden state and cell state that leave the cell, and the activated gates, which the backward
        pass takes.

    Raises
    ------
    NullPointerError, InvalidParameterError
        As `lstmcell_bwd.lstm_cell_forward`, for a missing array and for a wrong shape.
    """
    terms, cx = checked_forward_arrays(input_gates, hidden_gates, cx, input_bias, hidden_bias, dtype)
    with np.errstate(all="ignore"):
        a_i, a_f, a_g, a_o = np.split(exact_sum(terms), 4, axis=1)
        i, f, g, o = sigmoid(a_i), sigmoid(a_f), np.tanh(a_g), sigmoid(a_o)
        cy = f * cx + i * g
        hy = o * np.tanh(cy)
    return LSTMCellState(hy, cy, np.concatenate([i, f, g, o], axis=1))


def forward_errors(
    state: LSTMCellState,
    input_gates: Any,
    hidden_gates: Any,
    cx: Any,
    input_bias: Any = None,
    hidden_bias: Any = None,
    exact: LSTMCellState | None = None,
) -> LSTMCellState:
    """Measure the error of every element of a forward pass as a share of what the package allows itself.

    Parameters
    ----------
    state : LSTMCellState
        The result to judge, of the dtype that was computed with.
    input_gates, hidden_gates, cx, input_bias, hidden_bias : array_like
        The inputs of the call.
    exact : LSTMCellState, optional
        The true result; by default `lstm_cell_forward` in `wide_dtype`.

    Returns
    -------
    LSTMCellState
        Shares; up to 1 is allowed. With S the sum of the sizes of the terms of a gate's sum `a`, and eps of the type
        that is computed in, that is `4 * eps * (1 + S)` times the size of a gate; times `|f * cx| + |i * g|` for cy,
        with the largest S of i, f and g; and for hy, with the largest S of all gates, times `|o * tanh(cy)|`, or where
        the terms of cy cancel, what their allowance costs tanh: `|o| * (1 - tanh(cy)**2) * (|f * cx| + |i * g|)`. No
        size is taken below the smallest normal number of the result's dtype, nor are f and i in these products below
        that of the type that is computed in: a large cx brings the digits to light that f lost there. For float16 and
        bfloat16 a rounding of 0.51 of their own eps is added. Elements whose exact value, or a term of it, is not
        finite in the type that is computed in, or no number of the result's dtype, have an error of 0.
    """
    dtype = state.hy.dtype
    wide = wide_dtype(dtype)
    inside, outside = limits(arithmetic_dtype(dtype)), limits(dtype)
    terms, cx = checked_forward_arrays(input_gates, hidden_gates, cx, input_bias, hidden_bias, wide)
    if exact is None:
        exact = lstm_cell_forward(input_gates, hidden_gates, cx, input_bias, hidden_bias, dtype=wide)
    with np.errstate(all="ignore"):
        i, f, g, o = np.split(exact.gates, 4, axis=1)
        sizes = sum((np.abs(term) for term in terms[1:]), start=np.abs(terms[0]))
        s_i, s_f, s_g, s_o = np.split(sizes, 4, axis=1)
        s_cell = np.maximum(np.maximum(s_i, s_f), s_g)
        f_size, i_size = (np.maximum(np.abs(gate), inside.smallest_normal) for gate in (f, i))
        cell = f_size * np.abs(cx) + i_size * np.abs(g)
        t, slope, _ = tanh_and_slope(exact.cy)
        scales = (
            (np.maximum(s_cell, s_o), np.abs(o) * np.maximum(np.abs(t), slope * cell)),
            (s_cell, cell),
            (sizes, np.abs(exact.gates)),
        )
        shares = []
        for value, truth, (sums, size) in zip(state, exact, scales, strict=True):
            allowed = 4 * inside.eps * (1 + sums) * np.maximum(size, inside.smallest_normal)
            if dtype.itemsize == 2:
                allowed += 0.51 * outside.eps * np.maximum(size, outside.smallest_normal)
            share = quotient(distance(value, truth, None, wide), allowed)
            good = (sums <= inside.largest) & (size + allowed <= inside.largest) & (np.abs(truth) <= outside.largest)
            shares.append(np.where(good, share, 0).astype(np.float64))
    return LSTMCellState(*shares)


def lstm_cell_backward(
    grad_hy: Any,
    grad_cy: Any,
    cx: Any,
    cy: Any,
    gates: Any,
    has_bias: bool = True,
    *,
    nonfinite: str = "nan",
    dtype: DTypeLike = np.float64,
) -> LSTMCellGradients:
    """Compute the backward pass of an LSTM cell from its activated gates.

    Parameters
    ----------
    grad_hy, grad_cy : array_like of shape (N, H), or None
        Gradients of the cell's outputs; None stands for zeros.
    cx, cy : array_like, shape (N, H)
        Cell state that entered the cell and cell state that left it.
    gates : array_like, shape (N, 4*H)
        Activated gates, four blocks of H columns in the order i, f, g, o.
    has_bias : bool, default True
        Whether to compute the gradient of the bias.
    nonfinite : {"nan", "ieee"}
        "nan": an output element is NaN if an input element that it reads (`READS`) is Inf or NaN. "ieee": plain
        arithmetic.
    dtype : dtype, default float64
        Working precision and dtype of the results, float64 or `numpy.longdouble`.

    Returns
    -------
    LSTMCellGradients
        (grad_gates, grad_cx, grad_bias); grad_bias is None without bias.

    Raises
    ------
    NullPointerError, InvalidParameterError
        As `lstmcell_bwd.lstm_cell_backward`, for a missing array and for a wrong shape.

    Notes
    -----
    In float64 the result is within about 3 float64 units (`error_in_units`) of the exact one.
    """
    inputs = checked_arrays(grad_hy, grad_cy, cx, cy, gates, dtype)
    grad_hy, grad_cy, cx, cy, gates = inputs
    i, f, g, o = np.split(gates, 4, axis=1)
    with np.errstate(all="ignore"):
        t, s, _ = tanh_and_slope(cy)
        total = grad_hy * o * s + grad_cy
        d_i = total * g * i * (1 - i)
        d_f = total * cx * f * (1 - f)
        d_g = total * i * ((1 - g) * (1 + g))
        d_o = grad_hy * t * o * (1 - o)
        grad_gates = np.concatenate([d_i, d_f, d_g, d_o], axis=1)
        grad_cx = total * f
        if nonfinite == "nan":
            in_gates, in_cx, _ = nonfinite_mask(*inputs)
            grad_gates[in_gates] = np.nan
            grad_cx[in_cx] = np.nan
        grad_bias = grad_gates.sum(axis=0) if has_bias else None
    return LSTMCellGradients(grad_gates, grad_cx, grad_bias)


def nonfinite_mask(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, gates: Any) -> LSTMCellGradients:
    """Mark the elements that are NaN under the operator's rule, because an input that they read is Inf or NaN.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy, gates : array_like
        As for `lstm_cell_backward`.

    Returns
    -------
    LSTMCellGradients
        Boolean arrays; the bias counts as reading every row of its column.
    """
    grad_hy, grad_cy, cx, cy, gates = checked_arrays(grad_hy, grad_cy, cx, cy, gates, np.float64)
    bad = {
        name: ~np.isfinite(array)
        for name, array in zip(
            ("grad_hy", "grad_cy", "cx", "cy", "i", "f", "g", "o"),
            (grad_hy, grad_cy, cx, cy, *np.split(gates, 4, axis=1)),
            strict=True,
        )
    }
    nan = {output: np.logical_or.reduce([bad[name] for name in names]) for output, names in READS.items()}
    in_gates = np.concatenate([nan["d_i"], nan["d_f"], nan["d_g"], nan["d_o"]], axis=1)
    return LSTMCellGradients(in_gates, nan["grad_cx"], in_gates.any(axis=0))


def scales(
    grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, gates: Any, dtype: DTypeLike = np.float64
) -> LSTMCellGradients:
    """Return what an element's error is measured against: its size, were it not for cancellation in `total`.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy, gates : array_like
        As for `lstm_cell_backward`.
    dtype : dtype, default float64
        Working precision.

    Returns
    -------
    LSTMCellGradients
        For d_o the size of the exact value; for the other elements of grad_gates and for grad_cx the size that it has
        when `|total|` is replaced by `|grad_hy * o * s| + |grad_cy|`; for grad_bias the sum of its terms' scales.
    """
    grad_hy, grad_cy, cx, cy, gates = checked_arrays(grad_hy, grad_cy, cx, cy, gates, dtype)
    i, f, g, o = np.split(gates, 4, axis=1)
    with np.errstate(all="ignore"):
        t, s, _ = tanh_and_slope(cy)
        total = np.abs(grad_hy * o * s) + np.abs(grad_cy)
        d_i = total * np.abs(g * i * (1 - i))
        d_f = total * np.abs(cx * f * (1 - f))
        d_g = total * np.abs(i * ((1 - g) * (1 + g)))
        d_o = np.abs(grad_hy * t * o * (1 - o))
        grad_gates = np.concatenate([d_i, d_f, d_g, d_o], axis=1)
        return LSTMCellGradients(grad_gates, total * np.abs(f), grad_gates.sum(axis=0))


def in_range(
    grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, gates: Any, dtype: DTypeLike | None = None
) -> LSTMCellGradients:
    """Mark the elements for which the bounds are promised.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy, gates : array_like
        As for `lstm_cell_backward`.
    dtype : dtype, optional
        The dtype of the result to judge; by default that of `cx`.

    Returns
    -------
    LSTMCellGradients
        Boolean arrays. An element is in range if E, s, grad_hy * o, their product, total and every partial product of
        its formula, taken from left to right, lie between the smallest normal and the largest finite number of the
        type that the operator computes in, or are 0, and if it is itself no larger than its dtype's largest number. A
        bias column is in range if all its elements are, and their scales add up to a finite number of the dtype.

    Notes
    -----
    Products within 8 eps of the largest number count as too large: the rounding of earlier factors may carry them past.
    Likewise where the two terms of total cancel and 8 eps of the larger one, multiplied by the factors that follow, is
    too large.
    """
    dtype = np.dtype(np.asarray(cx).dtype if dtype is None else dtype)
    wide = wide_dtype(dtype)
    inside, outside = limits(arithmetic_dtype(dtype)), limits(dtype)
    largest = inside.largest * (1 - 8 * inside.eps)
    last = outside.largest * (1 - 8 * outside.eps) if dtype.itemsize >= 4 else outside.largest
    arrays = checked_arrays(grad_hy, grad_cy, cx, cy, gates, wide)
    grad_hy, grad_cy, cx, cy, gates = arrays
    i, f, g, o = np.split(gates, 4, axis=1)

    def normal(x):
        return (x == 0) | ((np.abs(x) >= inside.smallest_normal) & (np.abs(x) <= largest))

    def chain(first, *factors, error=0):
        """Tell whether a product and all its partial products are in range, and the product representable.

        `error` is what rounding may have added to the first factor.
        """
        good, reach = normal(first), np.abs(first) + error
        for factor in factors:
            first, reach = first * factor, reach * np.abs(factor)
            good &= normal(first) & (reach <= largest)
        return good & (reach <= last)

    with np.errstate(all="ignore"):
        t, s, e = tanh_and_slope(cy)
        total = grad_hy * o * s + grad_cy
        error = 8 * inside.eps * (np.abs(grad_hy * o * s) + np.abs(grad_cy))
        good = normal(e) & normal(s) & normal(grad_hy * o) & normal(grad_hy * o * s) & normal(total)
        good_gates = np.concatenate(
            [
                good & chain(total, g, i, 1 - i, error=error),
                good & chain(total, cx, f, 1 - f, error=error),
                good & chain(total, i, (1 - g) * (1 + g), error=error) & normal((1 - g) * (1 + g)),
                chain(grad_hy, t, o, 1 - o),
            ],
            axis=1,
        )
        good_cx = good & chain(total, f, error=error)
        # tanh and exp of Inf are finite, so what reads Inf is not out of range by its size alone.
        nonfinite = nonfinite_mask(*arrays)
        good_gates &= ~nonfinite.grad_gates
        good_cx &= ~nonfinite.grad_cx
        sums = scales(*arrays, dtype=wide).grad_bias
        return LSTMCellGradients(good_gates, good_cx, good_gates.all(axis=0) & (sums <= last))


def exact_column_sums(terms: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sum over the rows, giving a rounded float64 and what rounding cut off.

    Parameters
    ----------
    terms : array_like, shape (N, columns)
        Finite numbers of any type that float64 holds.

    Returns
    -------
    high, low : ndarray of float64, shape (columns,)
        `high + low` is within `N * 2**-104` times the sum of the sizes of the exact sum.

    Notes
    -----
    Neighbours are added with `two_sum`, which loses nothing.
    """
    high = np.asarray(terms).astype(np.float64)
    low = np.zeros_like(high)
    if len(high) == 0:
        return np.zeros(high.shape[1]), np.zeros(high.shape[1])
    while len(high) > 1:
        odd = len(high) % 2
        a, b = high[: len(high) - odd : 2], high[1::2]
        total, cut = two_sum(a, b)
        cut += low[: len(low) - odd : 2] + low[1::2]
        high = np.concatenate([total, high[len(high) - odd :]])
        low = np.concatenate([cut, low[len(low) - odd :]])
    return high[0], low[0]


def bounds(dtype: DTypeLike) -> Units:
    """Return the largest errors that the package allows itself on inputs that are `in_range`.

    Parameters
    ----------
    dtype : dtype

    Returns
    -------
    Units
        For float32 and float64 8 units for grad_gates and grad_cx, and 2 for grad_bias; for float16 and bfloat16 0.51
        (0.5 is perfect rounding), and 1 for grad_bias, whose error is given as a share of its bound there.

    Notes
    -----
    Ordinary data stays below 4 units; tools/search_worst_error.py finds inputs that reach 6.1.
    """
    if np.dtype(dtype).itemsize == 2:
        return Units(0.51, 0.51, 1.0)
    return Units(8.0, 8.0, 2.0)


def distance(result: NDArray[Any], exact: Any, exact_low: Any, wide: DTypeLike) -> NDArray[Any]:
    """Return |result - (exact + exact_low)|; equal infinities are 0 apart."""
    result = np.asarray(result).astype(wide)
    difference = np.where(result == exact, 0, result - exact)
    return np.abs(difference if exact_low is None else difference - exact_low)


def quotient(error: NDArray[Any], unit: NDArray[Any]) -> NDArray[Any]:
    """Divide, where 0 / 0 is 0 and NaN (a result that is NaN and should not be) is Inf."""
    with np.errstate(all="ignore"):
        units = np.where(error == 0, 0, error / unit)
    return np.where(np.isnan(units), np.inf, units)


def errors_in_units(
    gradients: LSTMCellGradients,
    grad_hy: Any,
    grad_cy: Any,
    cx: Any,
    cy: Any,
    gates: Any,
    exact: LSTMCellGradients | None = None,
    exact_low: LSTMCellGradients | None = None,
) -> LSTMCellGradients:
    """Measure the error of every element of a result, in the units in which `bounds` are given.

    Parameters
    ----------
    gradients : LSTMCellGradients
        The result to judge, of the dtype that was computed with.
    grad_hy, grad_cy, cx, cy, gates : array_like
        The inputs of the call.
    exact : LSTMCellGradients, optional
        The true result; by default `lstm_cell_backward` in `wide_dtype`.
    exact_low : LSTMCellGradients, optional
        A second part to add to `exact`, where that was rounded to float64.

    Returns
    -------
    LSTMCellGradients
        For grad_gates and grad_cx: the error over `eps * max(scale, smallest normal)`. For grad_bias of float32 and
        float64: the distance from the exact sum of the given grad_gates over `eps * sum of |grad_gates|`. For grad_bias
        of float16 and bfloat16: the error over `0.51 eps max(|exact|, smallest normal) + 0.002 eps * sum of the terms'
        scales`. None where there is no bias. Elements that are not `in_range` have an error of 0.
    """
    dtype = gradients.grad_cx.dtype
    limit, wide = limits(dtype), wide_dtype(dtype)
    inputs = (grad_hy, grad_cy, cx, cy, gates)
    has_bias = gradients.grad_bias is not None
    good = in_range(*inputs, dtype=dtype)
    scale = scales(*inputs, dtype=wide)
    if exact is None:
        exact = lstm_cell_backward(*inputs, has_bias, dtype=wide)
    low = exact_low if exact_low is not None else LSTMCellGradients(None, None, None)
    with np.errstate(all="ignore"):
        units = [
            quotient(distance(value, truth, rest, wide), limit.eps * np.maximum(size, limit.smallest_normal))
            for value, truth, rest, size in zip(gradients[:2], exact[:2], low[:2], scale[:2], strict=True)
        ]
        if not has_bias:
            units.append(None)
        elif dtype.itemsize == 2:
            unit = 0.51 * np.maximum(np.abs(exact.grad_bias), limit.smallest_normal) + 0.002 * scale.grad_bias
            error = distance(gradients.grad_bias, exact.grad_bias, low.grad_bias, wide)
            units.append(quotient(error, limit.eps * unit))
        else:
            high, rest = exact_column_sums(gradients.grad_gates)
            sizes = np.abs(gradients.grad_gates.astype(wide)).sum(axis=0)
            units.append(quotient(distance(gradients.grad_bias, high, rest, wide), limit.eps * sizes))
    return LSTMCellGradients(
        *(None if u is None else np.where(mask, u, 0).astype(np.float64) for u, mask in zip(units, good, strict=True))
    )


def error_in_units(
    gradients: LSTMCellGradients,
    grad_hy: Any,
    grad_cy: Any,
    cx: Any,
    cy: Any,
    gates: Any,
    exact: LSTMCellGradients | None = None,
    exact_low: LSTMCellGradients | None = None,
) -> Units:
    """Find the largest error of a result, in the units in which `bounds` are given.

    Parameters
    ----------
    gradients, grad_hy, grad_cy, cx, cy, gates, exact, exact_low
        As for `errors_in_units`.

    Returns
    -------
    Units
        The largest element of each array that `errors_in_units` returns; 0 for an empty one, None where
        there is no bias.
    """
    units = errors_in_units(gradients, grad_hy, grad_cy, cx, cy, gates, exact, exact_low)
    largest = [None if u is None else float(u.max(initial=0)) for u in units]
    return Units(*largest)
