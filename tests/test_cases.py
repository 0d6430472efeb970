"""Public fault reports of people who do this job, by number: `test_cNN_...`.

Whole kinds of fault have test files of their own:

===========  ==========================================================================================
C08          test_reference.py: finite differences through a full forward step
C11          test_layouts.py: test_outputs_are_overwritten
C14, C17     test_arguments.py: every argument and output of every wrong rank, size, dtype and type
C24, C25     test_nonfinite.py
C27          test_fpu.py
C28          test_bits.py: test_bias_from_run_to_run
C30 to C33   test_layouts.py, test_bits.py (byte order), test_arguments.py (outputs)
C35          test_layouts.py: every overlap
C37 to C41   test_processes.py
C42          test_build.py (which instructions are where); `.ci/run` (an emulated CPU without AVX)
C43          tools/check_wheel.sh, part of `.ci/long`: one wheel with the oldest NumPy and the newest
C46 to C48   test_npu.py, against a simulated CANN
===========  ==========================================================================================
"""

import inspect

import numpy as np
import pytest
from strategies import OUTPUTS, Inputs, assert_same_bits, assert_within_bounds, make_inputs, plain_call

from lstmcell_bwd import lstm_cell_backward, reference

GATES = [0.1, 0.2, -0.3, 0.4]
D1 = Inputs(*(np.array([x]) for x in ([1.0], [0.5], [0.3], [0.4], GATES)))
D1_GATES, D1_CX = [-0.0227409, 0.0404283, 0.0766452, 0.0911878], 0.1684511


def close(array, wanted):
    """Compare with numbers that were published with seven decimals."""
    np.testing.assert_allclose(np.ravel(array), wanted, rtol=0, atol=6e-8)


def in_dtype(inputs, dtype):
    """Convert the arrays of a call."""
    return Inputs(*(None if x is None else x.astype(dtype) for x in inputs))


def test_base_data(isa):
    result = lstm_cell_backward(*D1)
    close(result.grad_gates, D1_GATES)
    close(result.grad_cx, D1_CX)
    close(result.grad_bias, D1_GATES)


def test_c01_only_the_cell_state_has_a_gradient(isa):
    result = lstm_cell_backward(*D1._replace(grad_hy=None))
    close(result.grad_gates, [-0.0135, 0.024, 0.0455, 0])
    close(result.grad_cx, 0.1)
    assert result.grad_gates[0, 3] == 0


def test_c01_missing_grad_hy_in_a_batch(backend):
    inputs = make_inputs(4, 2, backend)._replace(grad_hy=None)
    result = lstm_cell_backward(*inputs)
    assert_within_bounds(result, inputs)
    assert not result.grad_gates[:, 6:].any()
    assert result.grad_cx.all()


def test_c02_only_the_hidden_state_has_a_gradient(isa):
    result = lstm_cell_backward(*D1._replace(grad_cy=None))
    close(result.grad_gates, [-0.0092409, 0.0164283, 0.0311452, 0.0911878])
    close(result.grad_cx, 0.0684511)
    other = lstm_cell_backward(*D1._replace(grad_hy=None))
    close(result.grad_gates + other.grad_gates, D1_GATES)
    close(result.grad_cx + other.grad_cx, D1_CX)


@pytest.mark.parametrize("out", [False, True])
def test_c03_both_gradients_missing(backend, out):
    """The rule taken here: zeros of the right shapes, also into outputs that held something else."""
    inputs = make_inputs(3, 5, backend)._replace(grad_hy=None, grad_cy=None)
    shapes = (3, 20), (3, 5), (20,)
    given = tuple(np.full(shape, 7, backend) for shape in shapes) if out else None
    result = lstm_cell_backward(*inputs, out=given)
    for array, shape in zip(result, shapes, strict=True):
        assert array.shape == shape
        assert array.dtype == backend
        assert not array.any()


def test_c05_gates_are_activated(backend):
    """Raw sums are computed with as they stand (no clamp, no refusal), and the documentation says "activated"."""
    rng = np.random.default_rng(5)
    raw = rng.normal(size=(8, 64))
    inputs = make_inputs(8, 16, np.float64)
    _, cy, activated = reference.lstm_cell_forward(raw, np.zeros_like(raw), inputs.cx)
    as_raw = in_dtype(inputs._replace(cy=cy, gates=raw), backend)
    as_activated = in_dtype(inputs._replace(cy=cy, gates=activated), backend)
    for inputs in (as_raw, as_activated):
        assert_within_bounds(lstm_cell_backward(*inputs), inputs)
    assert np.abs(lstm_cell_backward(*as_raw).grad_cx - lstm_cell_backward(*as_activated).grad_cx).max() > 0.1
    assert "activated" in " ".join(inspect.getdoc(lstm_cell_backward).split("\n")[:3])


def test_c05_gates_of_the_published_test(backend):
    """Normal numbers as gates, (40, 32)."""
    inputs = make_inputs(40, 8, backend, kind="raw")
    assert inputs.gates.shape == (40, 32)
    assert_within_bounds(lstm_cell_backward(*inputs), inputs)


@pytest.mark.parametrize("order", ["ifog", "igfo", "iofg", "figo", "icfo", "iofc", "ifco", "ifgo"])
def test_c07_order_of_the_gates(isa, order):
    """Only i, f, g, o gives the published numbers; g is also called c."""
    places = ["ifgo".index(gate) for gate in order.replace("c", "g")]
    result = lstm_cell_backward(*D1._replace(gates=D1.gates[:, places]))
    same = np.allclose(result.grad_gates[0], np.array(D1_GATES), atol=1e-6)
    assert same == (places == [0, 1, 2, 3])
    assert "i, f, g, o" in lstm_cell_backward.__doc__
    assert "ONNX" in lstm_cell_backward.__doc__


def test_c09_published_smoke_test(backend):
    """All ones: it cannot catch a wrong gate formula, and it is not meant to."""
    ones = np.ones((1, 8), backend)
    result = lstm_cell_backward(ones, ones, ones, ones, np.ones((1, 32), backend))
    assert not result.grad_gates.any()
    assert not result.grad_bias.any()
    eps = reference.limits(backend).eps
    np.testing.assert_allclose(result.grad_cx.astype(np.float64), 1.4199743, rtol=max(2 * eps, 5e-8))


@pytest.mark.parametrize("out", [False, True])
def test_c12_no_bias_wanted(backend, out):
    inputs = make_inputs(2, 3, backend)
    given = (np.empty((2, 12), backend), np.empty((2, 3), backend), None) if out else None
    result = lstm_cell_backward(*inputs, has_bias=False, out=given)
    assert result.grad_bias is None
    assert_same_bits(result, lstm_cell_backward(*inputs), OUTPUTS[:2])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("missing", [(), ("grad_hy",), ("grad_hy", "grad_cy")], ids=len)
def test_c16_empty(backend, shape, has_bias, out, missing):
    batch, hidden = shape
    inputs = make_inputs(batch, hidden, backend)._replace(**dict.fromkeys(missing))
    shapes = (batch, 4 * hidden), (batch, hidden), (4 * hidden,)
    given = tuple(np.full(s, 7, backend) if has_bias or len(s) == 2 else None for s in shapes) if out else None
    result = lstm_cell_backward(*inputs, has_bias, out=given, num_threads=4)
    for name, array, wanted in zip(OUTPUTS, result, shapes, strict=True):
        if name == "grad_bias" and not has_bias:
            assert array is None
        else:
            assert array.shape == wanted
            assert array.dtype == backend
            assert not array.any()


def test_c18_bfloat16(isa):
    """Supported, through the dtype of an optional package."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    inputs = make_inputs(2, 4, np.dtype(ml_dtypes.bfloat16))
    result = lstm_cell_backward(*inputs)
    assert all(x.dtype == ml_dtypes.bfloat16 for x in result)
    assert_within_bounds(result, inputs)
    with pytest.raises(TypeError, match="`cy` must have dtype bfloat16 like `cx`, got float16"):
        lstm_cell_backward(*inputs._replace(cy=inputs.cy.astype(np.float16)))
    with pytest.raises(TypeError, match="float32, float64, float16 or bfloat16, got float8_e5m2"):
        lstm_cell_backward(*(x.astype(ml_dtypes.float8_e5m2) for x in inputs))


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "read-only"])
def test_c19_float16(isa, layout):
    inputs = make_inputs(3, 5, np.float16)
    expected = plain_call(inputs)
    if layout == "sliced":
        inputs = Inputs(*(np.repeat(x, 2, axis=1)[:, ::2] for x in inputs))
    elif layout == "read-only":
        for array in inputs:
            array.flags.writeable = False
    assert_same_bits(lstm_cell_backward(*inputs), expected)


ROUNDINGS = {
    "65519 to 65504": (15, 65504, 1, 65504),
    "65520 to Inf": (16, 65504, 1, np.inf),
    "2^-25 to 0": (0, 2.0**-12, 2.0**-13, 0),
    "just above 2^-25 to the smallest": (0, 2.0**-12 * (1 + 2**-10), 2.0**-13, 2.0**-24),
    "3 * 2^-26 to the smallest": (0, 3 * 2.0**-13, 2.0**-13, 2.0**-24),
    "tie down to even": (0, 1 + 2.0**-9, 1 + 2.0**-2, 1.25 + 2.0**-9),
    "tie up to even": (2.0**-11, 1 + 2.0**-10, 1, 1 + 2.0**-9),
    "tie at 2049": (1, 2048, 1, 2048),
    "tie at 2051": (1, 2050, 1, 2052),
    "negative tie": (-1, -2050, 1, -2052),
}


@pytest.mark.parametrize("case", ROUNDINGS)
@pytest.mark.parametrize("width", [1, 8, 11])
def test_c19_rounding_to_float16(isa, case, width):
    """grad_cx = (grad_hy + grad_cy) * f at cy = 0 and o = 1, rounded once, to nearest even."""
    grad_hy, grad_cy, f, wanted = ROUNDINGS[case]
    full = [np.full((1, width), x, np.float16) for x in (grad_hy, grad_cy, 0, 0)]
    gates = np.repeat(np.array([[0, f, 0, 1]], np.float16), width, axis=1)
    exact = (np.float64(grad_hy) + np.float64(np.float16(grad_cy))) * np.float64(np.float16(f))
    with np.errstate(over="ignore"):
        assert np.float16(exact) == wanted  # the case says what it means
    np.testing.assert_array_equal(lstm_cell_backward(*full, gates).grad_cx, np.float16(wanted))


def counted(batch, dtype):
    """Inputs whose every row adds exactly 1 to the g block of the bias: grad_cy * i * (1 - g^2) = 2 * 0.5 * 1."""
    shape = batch, 2
    gates = np.repeat(np.array([[0.5, 0.5, 0, 0.5]], dtype), 2, axis=1)
    zeros = np.broadcast_to(dtype.type(0), shape)
    return Inputs(None, np.broadcast_to(dtype.type(2), shape), zeros, zeros, np.broadcast_to(gates, (batch, 8)))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_c20_half_precision_sum_does_not_stick(isa, name):
    from strategies import dtype_of

    if name == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    result = lstm_cell_backward(*counted(4096, dtype_of(name)))
    np.testing.assert_array_equal(result.grad_bias.astype(np.float64), [0, 0, 0, 0, 4096, 4096, 0, 0])


def test_c21_half_precision_sum_leaves_the_range(isa):
    """Inf in the g block, no exception, no NaN elsewhere."""
    result = lstm_cell_backward(*counted(70000, np.dtype(np.float16)))
    np.testing.assert_array_equal(result.grad_bias, np.array([0, 0, 0, 0, np.inf, np.inf, 0, 0], np.float16))
    np.testing.assert_array_equal(lstm_cell_backward(*counted(65504, np.dtype(np.float16))).grad_bias[4:6], 65504)


def test_c20_long_sums_in_float32(isa):
    """A running float32 sum of ones sticks at 2^24; this one does not."""
    count = 2**24 + 8
    result = lstm_cell_backward(*counted(count, np.dtype(np.float32)))
    np.testing.assert_array_equal(result.grad_bias[4:6], count)


def test_c23_overflow_inside_the_formula(isa):
    """float16: 300 * 300 exceeds its range, the answer does not."""
    full = [np.full((1, 1), x, np.float16) for x in (300, 300, 0)]
    gates = np.array([[0.5, 0.001, 0.5, 0.5]], np.float16)
    result = lstm_cell_backward(None, *full, gates)
    np.testing.assert_allclose(result.grad_gates[0, 1], 89.94, rtol=1e-3)
    # float32 has the same trap elsewhere, and the rule is plain left-to-right arithmetic.
    full = [np.full((1, 1), x, np.float32) for x in (1e30, 1e10, 0)]
    gates = np.array([[0.5, 1e-10, 0.5, 0.5]], np.float32)
    assert np.isposinf(lstm_cell_backward(None, *full, gates).grad_gates[0, 1])


def test_every_case_has_a_place():
    """The numbers in this file and in its table are all that the processor side has."""
    text = inspect.getsource(inspect.getmodule(test_every_case_has_a_place)).lower()
    here = {1, 2, 3, 5, 7, 9, 12, 16, 18, 19, 20, 21, 23}
    assert all(f"def test_c{number:02}_" in text for number in here)
