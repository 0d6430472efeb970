"""Random calls of every kind (hypothesis): value, bits, untouched inputs, fully written outputs, intact guards."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    LAYOUTS,
    NAMES,
    OUTPUTS,
    Guarded,
    Inputs,
    arrays_of,
    assert_same_bits,
    assert_within_bounds,
    dtype_of,
    guard_inputs,
    guard_outputs,
    input_arrays,
    plain_call,
)

import lstmcell_bwd
from lstmcell_bwd import (
    BIAS_LEAF_ROWS,
    LSTMCellGradients,
    _api,
    _features,
    combine_bias,
    lstm_cell_backward,
    lstm_cell_backward_part,
    reference,
)

USABLE = [isa for isa in _api.built_isas() if isa in _features.runnable_isas()]
layouts = st.sampled_from(list(LAYOUTS))


@pytest.fixture(params=DTYPES)
def dtype(request):
    """Every dtype; the instruction set is drawn."""
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    yield dtype_of(request.param)
    lstmcell_bwd.use_isa("auto")


@hypothesis.given(data=st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_call(dtype, data):
    inputs = data.draw(input_arrays(dtype), label="inputs")
    batch, hidden = inputs.cx.shape
    has_bias = data.draw(st.booleans(), label="has_bias")
    nonfinite = data.draw(st.sampled_from(["nan", "ieee"]), label="nonfinite")
    number = data.draw(st.sampled_from([None, 1, 2, 3, 7]), label="num_threads")
    offset = data.draw(st.integers(0, 8), label="offset")
    isa = data.draw(st.sampled_from(USABLE), label="isa")
    given_inputs = guard_inputs(inputs, [data.draw(layouts, label=name) for name in NAMES], offset)
    given_outputs = guard_outputs(
        batch, hidden, dtype, [data.draw(layouts, label=name) for name in OUTPUTS], has_bias, offset
    )
    # An output may be an input, and some outputs are left to be allocated.
    targets = list(given_outputs)
    in_place = [
        data.draw(st.sampled_from([None, None, "gates"]), label="grad_gates is"),
        data.draw(st.sampled_from([None, None, *NAMES[:4]]), label="grad_cx is"),
    ]
    for k, name in enumerate(in_place):
        if name is not None and getattr(inputs, name) is not None:
            targets[k] = given_inputs[NAMES.index(name)]
    allocated = data.draw(st.lists(st.integers(0, 2)), label="allocated")
    targets = [None if k in allocated else target for k, target in enumerate(targets)]
    out = tuple(arrays_of(targets))

    lstmcell_bwd.use_isa("baseline")
    expected = plain_call(inputs, has_bias, nonfinite=nonfinite)
    lstmcell_bwd.use_isa(isa)
    result = lstm_cell_backward(*arrays_of(given_inputs), has_bias, out=out, num_threads=number, nonfinite=nonfinite)

    for given, got in zip(out, result, strict=True):
        assert given is None or given is got
    assert_same_bits(result, expected)
    if nonfinite == "nan":
        assert_within_bounds(result, inputs)
        for got, bad in zip(result, reference.nonfinite_mask(*inputs), strict=True):
            assert got is None or np.isnan(got[bad]).all()
    for guarded in given_inputs:
        if guarded is not None and all(guarded is not target for target in targets):
            guarded.assert_unchanged()
    for target in targets:
        if target is not None:
            target.assert_guards_intact()


@hypothesis.given(data=st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_cut_into_parts(dtype, data):
    inputs = data.draw(input_arrays(dtype), label="inputs")
    if not len(inputs.cx):
        return
    lstmcell_bwd.use_isa(data.draw(st.sampled_from(USABLE), label="isa"))
    leaves = -(-len(inputs.cx) // BIAS_LEAF_ROWS)
    cuts = sorted(data.draw(st.sets(st.integers(1, leaves - 1)) if leaves > 1 else st.just(set()), label="cuts"))
    edges = [0, *(cut * BIAS_LEAF_ROWS for cut in cuts), len(inputs.cx)]
    parts, rows = [], []
    for first, last in itertools.pairwise(edges):
        part = lstm_cell_backward_part(
            *(None if x is None else x[first:last] for x in inputs),
            first_row=first,
            num_threads=data.draw(st.sampled_from([None, 1, 2, 3]), label="num_threads"),
        )
        rows.append(part)
        parts.extend(part.parts)
    parts = data.draw(st.permutations(parts), label="order")
    bias = combine_bias(parts, dtype) if inputs.cx.shape[1] else np.zeros(0, dtype)
    gates, state = (np.concatenate([part[k] for part in rows]) for k in (0, 1))
    assert_same_bits(LSTMCellGradients(gates, state, bias), plain_call(inputs))


@hypothesis.given(data=st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_overlap(dtype, data):
    """Outputs anywhere in one buffer with the inputs: as if copied, refused where they overlap each other."""
    batch, hidden = data.draw(st.integers(1, 9), label="batch"), data.draw(st.integers(1, 9), label="hidden")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    size = dtype.itemsize
    buffer = np.zeros(batch * hidden * 12 * size, np.uint8)
    buffer.view(dtype)[:] = rng.normal(size=batch * hidden * 12).astype(dtype)

    def place(columns):
        room = buffer.size - batch * columns * size
        start = data.draw(st.one_of(st.integers(0, room), st.integers(0, room // size).map(lambda k: k * size)))
        return np.ndarray((batch, columns), dtype, buffer, start, (columns * size, size))

    inputs = Inputs(*(place(columns) for columns in (hidden,) * 4), place(4 * hidden))
    copies = Inputs(*(x.copy() for x in inputs))
    out = place(4 * hidden), place(hidden)
    overlap = np.shares_memory(*out)
    before = buffer.copy()
    if overlap:
        with pytest.raises(ValueError, match="must not share memory"):
            lstm_cell_backward(*inputs, out=(*out, None))
        np.testing.assert_array_equal(buffer, before)
        return
    result = lstm_cell_backward(*inputs, out=(*out, None))
    assert_same_bits(result, plain_call(copies))
    outside = np.ones(buffer.size, bool)
    for array in out:
        start = array.ctypes.data - buffer.ctypes.data
        outside[start : start + array.nbytes] = False
    np.testing.assert_array_equal(buffer[outside], before[outside])


def test_guarded_outputs_begin_as_nan():
    """An output that was not fully written would be seen."""
    assert np.isnan(Guarded((3, 4), np.float32, "fortran").array).all()
