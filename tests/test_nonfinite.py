"""Inf and NaN, element by element, under both settings, and what large finite numbers do."""

import math

import numpy as np
import pytest
from strategies import Inputs, assert_same_bits, assert_within_bounds, bits, make_inputs, plain_call

from lstmcell_bwd import lstm_cell_backward, reference

GATES = ("i", "f", "g", "o")
# The table of operator.md 6.
READS = {
    "d_i": {"grad_hy", "o", "cy", "grad_cy", "g", "i"},
    "d_f": {"grad_hy", "o", "cy", "grad_cy", "cx", "f"},
    "d_g": {"grad_hy", "o", "cy", "grad_cy", "i", "g"},
    "d_o": {"grad_hy", "cy", "o"},
    "grad_cx": {"grad_hy", "o", "cy", "grad_cy", "f"},
}
VALUES = [math.inf, -math.inf, math.nan]
SHAPES = [(1, 1), (7, 19)]


def with_value(inputs, name, row, column, value):
    """Copy the inputs with one element replaced; `name` is an array's or a gate's."""
    changed = Inputs(*(None if x is None else x.copy() for x in inputs))
    hidden = inputs.cx.shape[1]
    if name in GATES:
        changed.gates[row, column + hidden * GATES.index(name)] = value
    else:
        getattr(changed, name)[row, column] = value
    return changed


def planes(result):
    """Split a result into the five [N, H] planes that READS names."""
    return dict(zip(READS, [*np.split(result.grad_gates, 4, axis=1), result.grad_cx], strict=True))


def assert_same_kind(got, wanted):
    """Compare NaN with NaN, Inf with the Inf of its sign, and finite numbers roughly."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    infinite = np.isinf(wanted) | np.isinf(got)
    np.testing.assert_array_equal(got[infinite], wanted[infinite])
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["grad_hy", "grad_cy", "cx", "cy", *GATES])
class TestOneBadElement:
    """Each input plane in turn, at the first and last column and in between."""

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_the_operators_rule(self, backend, name, value, shape):
        inputs = make_inputs(*shape, backend, seed=1)
        clean = planes(plain_call(inputs))
        for row, column in {(0, 0), (shape[0] // 2, shape[1] // 2), (shape[0] - 1, shape[1] - 1)}:
            result = lstm_cell_backward(*with_value(inputs, name, row, column, value))
            for output, plane in planes(result).items():
                expected = bits(clean[output])
                if name in READS[output]:
                    expected[row, column] = np.iinfo(expected.dtype).max
                np.testing.assert_array_equal(bits(plane), expected, err_msg=output)
            columns = np.zeros((4, shape[1]), bool)
            columns[:, column] = [name in READS[f"d_{gate}"] for gate in GATES]
            np.testing.assert_array_equal(np.isnan(result.grad_bias), columns.ravel())

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_plain_arithmetic(self, backend, name, value, shape):
        inputs = make_inputs(*shape, backend, seed=2)
        for row, column in {(0, 0), (shape[0] // 2, shape[1] // 2), (shape[0] - 1, shape[1] - 1)}:
            changed = with_value(inputs, name, row, column, value)
            result = lstm_cell_backward(*changed, nonfinite="ieee")
            for got, wanted in zip(result, reference.lstm_cell_backward(*changed, nonfinite="ieee"), strict=True):
                assert_same_kind(got, wanted)

    @pytest.mark.parametrize("missing", [("grad_hy",), ("grad_cy",), ("grad_hy", "grad_cy")], ids=" ".join)
    @pytest.mark.parametrize("nonfinite", ["nan", "ieee"])
    def test_a_missing_gradient_is_zeros(self, backend, name, value, missing, nonfinite):
        if name in missing:
            name = "cy"
        inputs = with_value(make_inputs(5, 9, backend, seed=3), name, 2, 4, value)
        zeros = inputs._replace(**{field: np.zeros_like(inputs.cx) for field in missing})
        absent = lstm_cell_backward(*inputs._replace(**dict.fromkeys(missing)), nonfinite=nonfinite)
        assert_same_bits(absent, lstm_cell_backward(*zeros, nonfinite=nonfinite))
        if nonfinite == "nan":
            for output, plane in planes(absent).items():
                assert np.isnan(plane[2, 4]) == (name in READS[output])


def test_missing_grad_hy_and_nan_state(backend):
    """operator.md 6: with grad_hy missing and cy NaN the results are NaN."""
    inputs = make_inputs(1, 1, backend)._replace(grad_hy=None, cy=np.full((1, 1), np.nan, backend))
    for nonfinite in ("nan", "ieee"):
        assert all(np.isnan(x).all() for x in lstm_cell_backward(*inputs, nonfinite=nonfinite))


@pytest.mark.parametrize("nonfinite", ["nan", "ieee"])
def test_everything_bad(backend, nonfinite):
    """Random Inf, NaN and zeros in every place, against the reference."""
    rng = np.random.default_rng(5)
    inputs = make_inputs(40, 33, backend, seed=5)
    for array in inputs:
        places = rng.random(array.shape) < 0.1
        array[places] = rng.choice([*VALUES, 0.0, -0.0], places.sum())
    result = lstm_cell_backward(*inputs, nonfinite=nonfinite)
    for got, wanted in zip(result[:2], reference.lstm_cell_backward(*inputs, nonfinite=nonfinite)[:2], strict=True):
        assert_same_kind(got, wanted)


def test_special_values_of_c24(isa):
    """C24 (FlagGems' special values): plain arithmetic, signs of zeros included."""
    inf, nan = np.inf, np.nan
    grad_hy, grad_cy, cx, cy, gates = (
        np.array([x], np.float32)
        for x in (
            [inf, -inf, 0, -0.0],
            [1, -1, nan, 0],
            [inf, -inf, 0, -0.0],
            [1, -1, nan, 0],
            [nan, inf, -inf, 0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 0.25, 0.75, 0, 1, -1],
        )
    )
    result = lstm_cell_backward(grad_hy, grad_cy, cx, cy, gates, nonfinite="ieee")
    wanted = [nan, nan, nan, 0, nan, nan, nan, -0.0, nan, nan, nan, 0, inf, nan, nan, 0]
    np.testing.assert_array_equal(bits(result.grad_gates), bits(np.array([wanted], np.float32)))
    np.testing.assert_array_equal(bits(result.grad_cx), bits(np.array([[nan, nan, nan, 0]], np.float32)))


def test_infinite_gradient_of_c24(backend):
    """C24: under plain arithmetic grad_cy = Inf keeps d_o finite, i = 1 gives NaN in its block only."""
    half = np.full((1, 1), 0.5, backend)
    inf = np.full((1, 1), np.inf, backend)
    gates = np.full((1, 4), 0.5, backend)
    result = lstm_cell_backward(half, inf, half, half, gates, nonfinite="ieee")
    assert np.isposinf(result.grad_gates[0, :3]).all()
    assert np.isfinite(result.grad_gates[0, 3])
    assert np.isposinf(result.grad_cx).all()
    gates[0, 0] = 1
    result = lstm_cell_backward(half, inf, half, half, gates, nonfinite="ieee")
    np.testing.assert_array_equal(np.isnan(result.grad_gates[0]), [True, False, False, False])
    saturated = lstm_cell_backward(half, half, half, inf, gates, nonfinite="ieee")
    assert all(np.isfinite(x).all() for x in saturated)


@pytest.mark.parametrize("cy", [0, 1e-8, 0.5, 9, 12, 50, 89, 1000, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_state_of_c25(isa, cy, sign):
    """C25: no NaN for any finite cy, and every digit of 1 - t^2 as far as it is a normal number."""
    for hidden in range(1, 18):
        shape = 1, hidden
        ones = np.ones(shape, np.float32)
        inputs = Inputs(
            ones, None, ones, np.full(shape, sign * cy, np.float32), np.full((1, 4 * hidden), 0.5, np.float32)
        )
        result = lstm_cell_backward(*inputs)
        assert all(np.isfinite(x).all() for x in result)
        assert_within_bounds(result, inputs)
        assert (np.sign(result.grad_gates[:, 3 * hidden :]) == np.sign(sign * cy)).all()


def test_overflow_of_finite_numbers_is_inf(backend):
    """Overflow is not an Inf input: Inf as in IEEE arithmetic, and Inf * 0 is NaN."""
    big = np.full((1, 1), reference.limits(backend).largest, backend)
    gates = np.array([[0.5, 4, 0.5, 0.5]], backend)
    result = lstm_cell_backward(None, big, big, big * 0, gates)
    if backend.itemsize > 2 or backend.name == "bfloat16":
        assert np.isneginf(result.grad_gates[0, 1])  # grad_cy * cx is past the range
    assert np.isposinf(result.grad_cx).all()
    gates[0, 1] = 0
    undefined = lstm_cell_backward(None, big, big, big * 0, gates).grad_gates[0, 1]
    # Inf * 0; the product of two float16 is finite in float32.
    assert undefined == 0 if backend.name == "float16" else np.isnan(undefined)


def test_overflow_does_not_spread(backend):
    """One overflow in a batch leaves every other element as it was, and makes its bias column Inf."""
    inputs = make_inputs(9, 21, backend, seed=6)
    clean = plain_call(inputs)
    inputs.grad_cy[4, 7] = reference.limits(backend).largest
    inputs.gates[4, 21 + 7] = 4
    result = lstm_cell_backward(*inputs)
    assert np.isposinf(result.grad_cx[4, 7])
    same = np.ones(result.grad_cx.shape, bool)
    same[4, 7] = False
    np.testing.assert_array_equal(bits(result.grad_cx)[same], bits(clean.grad_cx)[same])


def test_bias_of_opposite_infinities(backend):
    """Terms that overflow to Inf and -Inf add up to NaN, and only in their column."""
    ones = np.ones((2, 3), backend)
    grad_cy = np.full((2, 3), 0.5, backend)
    grad_cy[:, 1] = [reference.limits(backend).largest, -reference.limits(backend).largest]
    gates = np.full((2, 12), 0.5, backend)
    gates[:, 1] = -64
    gates[:, 7] = 0.5
    result = lstm_cell_backward(None, grad_cy, ones, ones, gates)
    assert np.isinf(result.grad_gates[:, 1]).all() or backend.itemsize == 2
    if backend.itemsize > 2:
        assert np.isnan(result.grad_bias[1])
    assert np.isfinite(result.grad_bias[[0, 2]]).all()
