"""The kernel against golden results of 100 digits and more, on every instruction set.

The files of `../shared/golden` are used where that folder exists, else the copies in tests/golden.
"""

from pathlib import Path

import numpy as np
import pytest
from strategies import DTYPES, Inputs, assert_within_bounds, dtype_of

from lstmcell_bwd import LSTMCellGradients, lstm_cell_backward, reference

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1] / "shared" / "golden"
FILES = {path.stem: path for folder in (HERE / "golden", SHARED) for path in sorted(folder.glob("*.npz"))}
NATIVE = [name for name in FILES if name.endswith(("float16", "float32", "float64"))]


def load(name):
    """Return the inputs of a golden set and its results, high and low parts."""
    with np.load(FILES[name]) as data:
        inputs = Inputs(*(data[field] for field in Inputs._fields))
        high, low = (
            LSTMCellGradients(*(data[f"exact_{field}{part}"] for field in LSTMCellGradients._fields))
            for part in ("", "_lo")
        )
        return inputs, high, low, {key: data[key] for key in ("exact_abs_total", "exact_scale_bias")}


def test_every_dtype_has_golden_sets():
    for name in ("float16", "float32", "float64"):
        assert {f"{kind}_{name}" for kind in ("ones", "saturated", "edge", "scaled")} <= set(FILES)


@pytest.mark.parametrize("name", NATIVE)
def test_golden(isa, name):
    """At most 4 units for float32 and float64, 0.51 for float16, and the bounds of the bias."""
    inputs, high, low, _ = load(name)
    assert_within_bounds(lstm_cell_backward(*inputs), inputs, most=4, exact=high, exact_low=low)


@pytest.mark.parametrize("name", NATIVE)
def test_the_reference_agrees(name):
    """Exact values and scales: the reference, in its working precision, against 100 digits.

    The files hold two float64 for each number, 106 bits; arm64's long double has 113.
    """
    inputs, high, low, sizes = load(name)
    wide = reference.wide_dtype(inputs.cx.dtype)
    result = reference.lstm_cell_backward(*inputs, nonfinite="ieee", dtype=wide)
    scale = reference.scales(*inputs, dtype=wide)
    eps, tiny = max(np.finfo(wide).eps, 2.0**-105), np.finfo(np.float64).smallest_normal * np.finfo(np.float64).eps
    good = reference.in_range(*inputs)
    with np.errstate(all="ignore"):
        for value, a, b, size, mask in zip(result[:2], high[:2], low[:2], scale[:2], good[:2], strict=True):
            error = np.abs((value - a) - b)
            assert (error <= 8 * eps * size + tiny)[mask].all()
        columns = good.grad_bias
        error = np.abs((result.grad_bias - high.grad_bias) - low.grad_bias)
        assert (error <= len(inputs.cx) * 8 * eps * scale.grad_bias)[columns].all()
        np.testing.assert_allclose(
            scale.grad_bias[columns].astype(np.float64), sizes["exact_scale_bias"][columns], rtol=1e-13
        )


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("float32")])
def test_golden_in_bfloat16(isa, name):
    """The float32 sets with their inputs rounded to bfloat16, against the float64 reference."""
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    inputs = Inputs(*(x.astype(dtype_of(DTYPES[3])) for x in load(name)[0]))
    assert_within_bounds(lstm_cell_backward(*inputs), inputs)


def left_to_right(inputs):
    """The operator in its arithmetic type, product by product; 1 - t^2 rounded once, E's power of two applied last."""
    arithmetic = reference.arithmetic_dtype(inputs.cx.dtype)
    wide = reference.wide_dtype(arithmetic)
    grad_hy, grad_cy, cx, cy, gates = (x.astype(arithmetic) for x in inputs)
    i, f, g, o = np.split(gates, 4, axis=1)
    t, s, _ = reference.tanh_and_slope(cy.astype(wide))
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp(s)
        last = np.minimum(exponent + (125 if arithmetic == np.float32 else 1021), 0)
        s = np.ldexp(fraction, exponent - last).astype(arithmetic)
        last = np.ldexp(np.ones_like(fraction), last).astype(arithmetic)
        t = t.astype(arithmetic)
        total = grad_hy * o * s * last + grad_cy
        gates = [total * g * i * (1 - i), total * cx * f * (1 - f), total * i * ((1 - g) * (1 + g))]
        gates.append(grad_hy * t * o * (1 - o))
        return np.concatenate(gates, axis=1).astype(inputs.cx.dtype), (total * f).astype(inputs.cx.dtype)


@pytest.mark.parametrize("name", [name for name in NATIVE if name.startswith("edge")])
def test_out_of_range_elements(isa, name):
    """Outside the promised range the result is what plain arithmetic gives: its Inf and NaN, its 0 up to rounding."""
    inputs, *_ = load(name)
    result = lstm_cell_backward(*inputs)
    limit = reference.limits(inputs.cx.dtype)
    counted = 0
    for got, wanted, good in zip(result[:2], left_to_right(inputs), reference.in_range(*inputs)[:2], strict=True):
        out = ~good
        counted += out.sum()
        got, wanted = got[out], wanted[out]
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        infinite = np.isinf(wanted)
        np.testing.assert_array_equal(got[infinite], wanted[infinite])
        finite = np.isfinite(wanted)
        difference = np.abs(got[finite].astype(np.longdouble) - wanted[finite])
        # A factor below the smallest normal has fewer digits; three of its units are allowed, or 16 of the result's.
        assert (
            difference <= 16 * limit.eps * np.abs(wanted[finite].astype(np.longdouble)) + 3 * limit.smallest_normal
        ).all()
    if inputs.cx.dtype != np.float16:
        assert counted > 100
