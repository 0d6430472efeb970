"""The reference is the first link of the chain of trust: against finite differences, exact decimals, known faults."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from strategies import Inputs, dtype_of, make_inputs

from lstmcell_bwd import InvalidParameterError, LSTMCellGradients, NullPointerError, reference

BLOCKS = ("i", "f", "g", "o")


@pytest.fixture
def step():
    """A forward step of 3 rows and 2 columns, and gradients of its outputs; all gates distinct."""
    rng = np.random.default_rng(8)
    values = {name: rng.normal(size=(3, 8)) for name in ("input_gates", "hidden_gates")}
    values["cx"] = rng.normal(size=(3, 2))
    values |= {name: rng.normal(size=8) for name in ("input_bias", "hidden_bias")}
    return values, rng.normal(size=(3, 2)), rng.normal(size=(3, 2))


def loss(step, **changed):
    """The scalar whose gradient with respect to hy and cy is grad_hy and grad_cy."""
    values, grad_hy, grad_cy = step
    hy, cy, _ = reference.lstm_cell_forward(**(values | changed))
    total = 0.0
    if grad_hy is not None:
        total += (hy * grad_hy).sum()
    if grad_cy is not None:
        total += (cy * grad_cy).sum()
    return total


STENCILS = {
    "second order": (1e-6, {1: 1 / 2, -1: -1 / 2}, 1e-7),
    "fourth order": (1e-3, {1: 2 / 3, -1: -2 / 3, 2: -1 / 12, -2: 1 / 12}, 1e-10),
}


def finite_differences(step, name, stencil):
    """The gradient of `loss` with respect to one argument of the forward step."""
    h, weights, _ = STENCILS[stencil]
    array = step[0][name]
    gradient = np.empty_like(array)
    for place in np.ndindex(array.shape):
        gradient[place] = 0
        for distance, weight in weights.items():
            moved = array.copy()
            moved[place] += distance * h
            gradient[place] += weight * loss(step, **{name: moved}) / h
    return gradient


def backward(step):
    """The reference's backward pass of a forward step."""
    values, grad_hy, grad_cy = step
    _, cy, gates = reference.lstm_cell_forward(**values)
    return reference.lstm_cell_backward(grad_hy, grad_cy, values["cx"], cy, gates)


def relative(a, b):
    """The largest difference over the largest number."""
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("missing", [(), ("grad_hy",), ("grad_cy",)], ids=["both", "grad_cy only", "grad_hy only"])
@pytest.mark.parametrize("stencil", STENCILS)
class TestFiniteDifferences:
    """C08: every output against differences through a full forward step, each gate block by itself."""

    @pytest.fixture
    def step(self, step, missing):
        values, grad_hy, grad_cy = step
        return values, None if "grad_hy" in missing else grad_hy, None if "grad_cy" in missing else grad_cy

    @pytest.mark.parametrize("name", ["input_gates", "hidden_gates"])
    def test_grad_gates(self, step, stencil, missing, name):
        wanted = np.split(finite_differences(step, name, stencil), 4, axis=1)
        got = np.split(backward(step).grad_gates, 4, axis=1)
        for block, a, b in zip(BLOCKS, got, wanted, strict=True):
            if block == "o" and "grad_hy" in missing:
                assert not a.any()
                assert np.abs(b).max() < 1e-9
            else:
                assert relative(a, b) < STENCILS[stencil][2], block

    def test_grad_cx(self, step, stencil, missing):
        assert relative(backward(step).grad_cx, finite_differences(step, "cx", stencil)) < STENCILS[stencil][2]

    @pytest.mark.parametrize("name", ["input_bias", "hidden_bias"])
    def test_grad_bias(self, step, stencil, missing, name):
        assert relative(backward(step).grad_bias, finite_differences(step, name, stencil)) < STENCILS[stencil][2]


def test_derivative_of_the_cell_gate():
    """C08: the factor of g is 1 - g^2 = 0.36, not 1 + g^2 = 1.64."""
    one = np.ones((1, 1))
    gates = np.array([[1.0, 0.5, 0.8, 0.5]])
    assert reference.lstm_cell_backward(None, one, one, one, gates).grad_gates[0, 2] == pytest.approx(0.36, rel=1e-15)


def test_published_example():
    """operator.md 11: four distinct gates."""
    one = np.ones((1, 1))
    result = reference.lstm_cell_backward(one, one * 0.5, one * 0.3, one * 0.4, np.array([[0.1, 0.2, -0.3, 0.4]]))
    np.testing.assert_allclose(result.grad_gates[0], [-0.0227409, 0.0404283, 0.0766452, 0.0911878], atol=5e-8)
    np.testing.assert_allclose(result.grad_cx, [[0.1684511]], atol=5e-8)
    np.testing.assert_array_equal(result.grad_bias, result.grad_gates[0])


def exact(inputs):
    """The operator in decimal arithmetic of 360 digits (1e-300 leaves 60 of them); inputs of one element."""
    with localcontext() as context:
        context.prec = 360
        grad_hy, grad_cy, cx, cy, i, f, g, o = (Decimal(float(x)) for x in np.concatenate(inputs, axis=1)[0])
        up, down = cy.exp(), (-cy).exp()
        t, s = (up - down) / (up + down), 4 / ((up + down) * (up + down))
        total = grad_hy * o * s + grad_cy
        gates = total * g * i * (1 - i), total * cx * f * (1 - f), total * i * (1 - g * g), grad_hy * t * o * (1 - o)
        return (*gates, total * f)


@pytest.mark.parametrize("cy", [0.0, 1e-300, -1e-8, 0.3, -0.9, 2.5, -9.1, 12.0, 50.0, -300.0])
@pytest.mark.parametrize("dtype", [np.float64, np.longdouble], ids=["float64", "longdouble"])
def test_accuracy_against_decimal_arithmetic(cy, dtype):
    """Every digit, at every cy: nothing cancels but the two terms of total."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        inputs = Inputs(*(rng.normal(size=(1, n)) for n in (1, 1, 1, 1, 4)))._replace(cy=np.array([[cy]]))
        result = reference.lstm_cell_backward(*inputs, dtype=dtype)
        scale = reference.scales(*inputs)
        got = [*result.grad_gates[0], *result.grad_cx[0]]
        for value, true, size in zip(got, exact(inputs), [*scale.grad_gates[0], *scale.grad_cx[0]], strict=True):
            assert abs(value - np.dtype(dtype).type(str(true))) <= 4 * np.finfo(dtype).eps * size


def test_forward_gates_are_accurate_at_both_ends():
    """No overflow, and small gates keep their digits."""
    a = np.array([[-800.0, -40.0, -1e-9, 800.0]])
    _, _, gates = reference.lstm_cell_forward(a, np.zeros((1, 4)), np.zeros((1, 1)))
    np.testing.assert_array_equal(gates[0, [0, 3]], [math.exp(-800), 1])
    np.testing.assert_allclose(gates[0, 1], math.exp(-40), rtol=1e-15)
    np.testing.assert_array_equal(gates[0, 2], np.tanh(-1e-9))


def test_forward_values_and_biases():
    """Against the formulas written out for one element, with and without the two biases."""
    a, b = np.array([[0.1, 0.2, 0.3, 0.4]]), np.array([[1.0, -1.0, 0.5, -0.5]])
    cx = np.array([[0.7]])
    bias = np.array([0.05, 0.06, 0.07, 0.08])
    for input_bias, hidden_bias, total in (
        (None, None, a + b),
        (bias, None, a + b + bias),
        (bias, bias, a + b + 2 * bias),
    ):
        hy, cy, gates = reference.lstm_cell_forward(a, b, cx, input_bias, hidden_bias)
        i, f, o = (1 / (1 + math.exp(-total[0, k])) for k in (0, 1, 3))
        g = math.tanh(total[0, 2])
        np.testing.assert_allclose(gates, [[i, f, g, o]], rtol=1e-15)
        np.testing.assert_allclose(cy, [[f * 0.7 + i * g]], rtol=1e-15)
        np.testing.assert_allclose(hy, [[o * math.tanh(f * 0.7 + i * g)]], rtol=1e-15)


@pytest.mark.parametrize("name", ["input_gates", "hidden_gates"])
def test_forward_refuses_other_shapes(step, name):
    with pytest.raises(InvalidParameterError, match=rf"`{name}` must have shape .* got \(1, 8\)"):
        reference.lstm_cell_forward(**(step[0] | {name: np.zeros((1, 8))}))


@pytest.mark.parametrize("name", ["cx", "cy", "gates"])
def test_backward_refuses_a_missing_array(name):
    with pytest.raises(NullPointerError, match=f"`{name}`"):
        reference.lstm_cell_backward(*make_inputs(2, 3)._replace(**{name: None}))


@pytest.mark.parametrize("name", Inputs._fields)
def test_backward_refuses_other_shapes(name):
    inputs = make_inputs(2, 3, np.float64)
    with pytest.raises(InvalidParameterError, match=rf"`{name if name != 'cx' else 'cy'}` must have shape"):
        reference.lstm_cell_backward(*inputs._replace(**{name: getattr(inputs, name)[:1]}))
    with pytest.raises(InvalidParameterError, match="`cx` must have shape"):
        reference.lstm_cell_backward(*inputs._replace(cx=inputs.cx[0]))


def test_without_bias_and_empty():
    inputs = make_inputs(2, 3, np.float64)
    assert reference.lstm_cell_backward(*inputs, has_bias=False).grad_bias is None
    empty = reference.lstm_cell_backward(*make_inputs(0, 3))
    assert [x.shape for x in empty] == [(0, 12), (0, 3), (12,)]
    assert not empty.grad_bias.any()
    assert reference.error_in_units(empty, *make_inputs(0, 3, np.float64)) == (0, 0, 0)


# ---- Inf and NaN ----------------------------------------------------------------------------------------------------

# The table of operator.md 6, as printed there.
TABLE = {
    "grad_cx": {"grad_hy", "o", "cy", "grad_cy", "f"},
    "d_i": {"grad_hy", "o", "cy", "grad_cy", "g", "i"},
    "d_f": {"grad_hy", "o", "cy", "grad_cy", "cx", "f"},
    "d_g": {"grad_hy", "o", "cy", "grad_cy", "i", "g"},
    "d_o": {"grad_hy", "cy", "o"},
}


def test_table_of_reads():
    assert {output: set(names) for output, names in reference.READS.items()} == TABLE


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["grad_hy", "grad_cy", "cx", "cy", *BLOCKS])
def test_nonfinite_rule(name, value):
    """One bad element: exactly the outputs that read it are NaN, in its row and column, and in its bias column."""
    inputs = make_inputs(3, 4, np.float64)
    array, column = (inputs.gates, 2 + 4 * BLOCKS.index(name)) if name in BLOCKS else (getattr(inputs, name), 2)
    array[1, column] = value
    result = reference.lstm_cell_backward(*inputs)
    mask = reference.nonfinite_mask(*inputs)
    for k, block in enumerate(BLOCKS):
        expected = np.zeros((3, 4), bool)
        expected[1, 2] = name in TABLE[f"d_{block}"]
        np.testing.assert_array_equal(np.isnan(result.grad_gates[:, 4 * k : 4 * k + 4]), expected)
        np.testing.assert_array_equal(np.isnan(result.grad_bias[4 * k : 4 * k + 4]), expected[1])
    expected = np.zeros((3, 4), bool)
    expected[1, 2] = name in TABLE["grad_cx"]
    np.testing.assert_array_equal(np.isnan(result.grad_cx), expected)
    for marked, values in zip(mask, result, strict=True):
        np.testing.assert_array_equal(marked, np.isnan(values))


def test_plain_arithmetic_keeps_what_is_finite():
    """An infinite cy saturates: t = 1 and s = 0."""
    inputs = make_inputs(1, 1, np.float64)._replace(cy=np.array([[math.inf]]))
    result = reference.lstm_cell_backward(*inputs, nonfinite="ieee")
    o = inputs.gates[0, 3]
    np.testing.assert_allclose(result.grad_gates[0, 3], inputs.grad_hy[0, 0] * o * (1 - o), rtol=1e-15)
    np.testing.assert_allclose(result.grad_cx, inputs.grad_cy * inputs.gates[:, 1:2], rtol=1e-15)


# ---- scales, range, errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_limits(name):
    info = np.finfo(name)
    assert reference.limits(name) == (info.eps, info.smallest_normal, info.smallest_subnormal, info.max)


def test_limits_of_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    info = ml_dtypes.finfo(ml_dtypes.bfloat16)
    assert reference.limits(ml_dtypes.bfloat16) == tuple(
        float(x) for x in (info.eps, info.smallest_normal, info.smallest_subnormal, info.max)
    )


def test_scales_do_not_count_cancellation():
    one = np.ones((1, 1))
    gates = np.full((1, 4), 0.5)
    scale = reference.scales(-one, 0.5 * one, 2 * one, 0 * one, gates)
    np.testing.assert_array_equal(scale.grad_gates, [[0.125, 0.5, 0.375, 0]])
    np.testing.assert_array_equal(scale.grad_cx, [[0.5]])
    assert reference.lstm_cell_backward(-one, 0.5 * one, 2 * one, 0 * one, gates).grad_cx == 0


def test_scales_are_the_exact_sizes_without_cancellation():
    inputs = Inputs(*(np.abs(x) for x in make_inputs(5, 7, np.float64)))
    for size, value in zip(reference.scales(*inputs), reference.lstm_cell_backward(*inputs), strict=True):
        np.testing.assert_allclose(size, np.abs(value), rtol=1e-14)


# What leaves the range (as a change to ones), and which of d_i, d_f, d_g, d_o, grad_cx it leaves in range.
OUT_OF_RANGE = {
    "nothing": ({}, "ifgoc"),
    "E": ({"cy": 45}, "o"),
    "grad_hy * o": ({"grad_hy": 1e-30, "o": 1e-10}, ""),
    "overflow of grad_hy * o": ({"grad_hy": 1e30, "o": 1e10}, ""),
    "total": ({"grad_hy": 0, "grad_cy": 1e-40}, "o"),
    "total * f": ({"f": 1e-38, "grad_cy": 1e-3}, "igo"),
    "total * cx": ({"cx": 1e-39}, "igoc"),
    "overflow of total * cx": ({"cx": 1e30, "grad_cy": 1e20, "f": 1e-20}, "igoc"),
    "total * g": ({"g": 1e-38, "grad_cy": 1e-3, "grad_hy": 0}, "fgoc"),
    "Inf": ({"grad_cy": np.inf}, "o"),
    "Inf as state": ({"cy": np.inf}, ""),
    "NaN": ({"cx": np.nan}, "igoc"),
}


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_in_range(case):
    changes, wanted = OUT_OF_RANGE[case]
    ordinary = {"grad_hy": 1, "grad_cy": 0.25, "cx": 0.5, "cy": 0.5, "i": 0.5, "f": 0.5, "g": 0.5, "o": 0.5}
    values = [np.full((1, 1), x, np.float32) for x in (ordinary | changes).values()]
    good = reference.in_range(*values[:4], np.concatenate(values[4:], axis=1))
    got = "".join(np.array([*BLOCKS, "c"])[np.concatenate([good.grad_gates, good.grad_cx], axis=1)[0]])
    assert got == wanted
    np.testing.assert_array_equal(good.grad_bias, good.grad_gates[0])


def test_range_of_the_output_type():
    """float16 is computed in float32, so only the output's largest number limits it."""
    one = np.ones((1, 1), np.float16)
    gates = np.array([[0.5, 0.001, 0.5, 0.5]], np.float16)
    assert reference.in_range(None, np.float16(300) * one, np.float16(300) * one, one, gates).grad_gates[0, 1]
    large, wide = np.float16(600) * one, np.float16(500) * gates
    assert not reference.in_range(None, large, large, one, wide).grad_gates[0, 1]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 1001])
def test_exact_column_sums(rows):
    rng = np.random.default_rng(rows)
    terms = rng.normal(size=(rows, 3)) * 10 ** rng.uniform(-12, 12, (rows, 3))
    high, low = reference.exact_column_sums(terms)
    for k in range(3):
        assert high[k] + low[k] == pytest.approx(math.fsum(terms[:, k]), rel=1e-15)
        assert math.fsum([*terms[:, k], -high[k], -low[k]]) == pytest.approx(0, abs=1e-30 * np.abs(terms).sum())


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16"])
def test_errors_see_what_is_wrong(name):
    """A correct result passes; units in the last place, NaN and Inf are counted as what they are."""
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    dtype = dtype_of(name)
    inputs = make_inputs(6, 5, dtype)
    wide = reference.lstm_cell_backward(*inputs, dtype=reference.wide_dtype(dtype))
    right = LSTMCellGradients(*(x.astype(dtype) for x in wide))
    if dtype.itemsize >= 4:
        right = right._replace(grad_bias=reference.exact_column_sums(right.grad_gates)[0].astype(dtype))
    assert all(e <= b for e, b in zip(reference.error_in_units(right, *inputs), (0.5, 0.5, 1), strict=True))
    for k, name in enumerate(right._fields):
        for wrong, least, most in ((1 + 10 * reference.limits(dtype).eps, 4.5, 11), (np.nan, np.inf, np.inf)):
            array = getattr(right, name).copy()
            place = np.unravel_index(np.abs(array.astype(float)).argmax(), array.shape)
            array[place] = array[place] * dtype.type(wrong)
            error = reference.error_in_units(right._replace(**{name: array}), *inputs)[k]
            if name == "grad_bias":
                assert error > reference.bounds(dtype).grad_bias
            else:
                assert least <= error <= most
    assert reference.error_in_units(right._replace(grad_bias=None), *inputs).grad_bias is None


def test_errors_out_of_range_are_not_counted():
    inputs = make_inputs(2, 2)
    inputs.cy[0, 0] = 80
    result = LSTMCellGradients(*(x.astype(np.float32) for x in reference.lstm_cell_backward(*inputs)))
    result.grad_cx[0, 0] = 7
    assert reference.error_in_units(result, *inputs).grad_cx <= 0.5
    result.grad_cx[0, 1] = 7
    assert reference.error_in_units(result, *inputs).grad_cx > 1000
