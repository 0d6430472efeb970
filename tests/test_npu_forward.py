"""The forward operator on the simulated CANN: as tests/test_npu.py does for the backward operator."""

import gc
import itertools
import sys
import threading

import numpy as np
import pytest
import simulation
from simulation import TOLERANCE, beyond_the_kept, to_host

import lstmcell_bwd
from lstmcell_bwd import LSTMCellState, aclnn, lstm_cell_backward, lstm_cell_forward, reference
from lstmcell_bwd.errors import Status
from lstmcell_bwd.npu import NPUArray

DTYPES = ("float32", "float16")
BIASES = ((True, True), (False, False), (True, False), (False, True))


@pytest.fixture(scope="module")
def opened():
    """Open the simulation with two devices for all tests of this file."""
    with simulation.backend(devices=2) as sim:
        yield sim


@pytest.fixture
def sim(opened):
    """Check after every test that nothing forbidden was done and nothing left."""
    gc.collect()
    opened.forget()
    yield opened
    gc.collect()
    report = opened.report()
    assert report["violations"] == []
    assert beyond_the_kept(report, devices=2) == {}


@pytest.fixture
def torch_npu(sim, monkeypatch):
    """Stand in for torch_npu, whose thread is bound to a context of its own on device 0."""
    assert lstmcell_bwd.npu.is_available()
    acl = sys.modules["acl"]
    context, code = acl.rt.create_context(0)
    assert code == 0
    module = simulation.TorchNpu(acl)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    yield module
    gc.collect()
    module.close()
    assert acl.rt.destroy_context(context) == 0


def make_inputs(batch, hidden, dtype="float32", biases=(True, True)):
    """Return the five arrays of a call, None for a bias that is missing."""
    rng = np.random.default_rng(batch)
    shapes = (batch, 4 * hidden), (batch, 4 * hidden), (batch, hidden), (4 * hidden,), (4 * hidden,)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return [array if there else None for array, there in zip(arrays, (True, True, True, *biases), strict=True)]


def output_shapes(batch, hidden):
    """Return the shapes of hy, cy and gates."""
    return (batch, hidden), (batch, hidden), (batch, 4 * hidden)


def on_device(arrays):
    """Copy the arrays of a call to device 0."""
    return [None if array is None else NPUArray.from_numpy(array) for array in arrays]


def assert_right(results, inputs, torch_npu=None):
    """Compare with the reference under CANN's tolerance."""
    relative, absolute = TOLERANCE[inputs[2].dtype.name]
    for result, wanted in zip(results, reference.lstm_cell_forward(*inputs), strict=True):
        result = to_host(result, torch_npu)
        assert result.dtype == inputs[2].dtype
        assert np.all(np.abs(result - wanted) <= absolute + relative * np.abs(wanted))


@pytest.mark.parametrize("biases", BIASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["host", "npu", "torch"])
def test_results(sim, request, kind, dtype, biases):
    """Right, of the inputs' kind, and the operator itself gets both biases or neither."""
    inputs = make_inputs(5, 7, dtype, biases)
    torch_npu = request.getfixturevalue("torch_npu") if kind == "torch" else None
    tensors = {
        "host": lambda: inputs,
        "npu": lambda: on_device(inputs),
        "torch": lambda: [None if array is None else torch_npu.tensor(array) for array in inputs],
    }[kind]()
    results = lstm_cell_forward(*tensors, device="npu")
    assert isinstance(results, LSTMCellState)
    wanted = {"host": np.ndarray, "npu": NPUArray, "torch": simulation.FakeNpuTensor}[kind]
    assert all(isinstance(result, wanted) for result in results)
    assert_right(results, inputs, torch_npu)
    calls = sim.report()["calls"]
    assert calls["kernel"] == calls["aclnnThnnFusedLstmCell"] == 1


def test_the_cache_is_what_the_backward_operator_reads(sim):
    """Forward and backward on the device, as on the host with distinct gates."""
    inputs = make_inputs(4, 6)
    tensors = on_device(inputs)
    _, cy, gates = lstm_cell_forward(*tensors)
    ones = np.ones((4, 6), np.float32)
    gradients = lstm_cell_backward(NPUArray.from_numpy(ones), None, tensors[2], cy, gates)
    exact = reference.lstm_cell_forward(*inputs)
    wanted = reference.lstm_cell_backward(ones, None, inputs[2], exact.cy, exact.gates)
    np.testing.assert_allclose(gradients.grad_gates.to_numpy(), wanted.grad_gates, 1e-3, 1e-5)


@pytest.mark.parametrize("kind", ["host", "npu"])
@pytest.mark.parametrize(("batch", "hidden"), [(0, 3), (2, 0), (0, 0)])
def test_empty(sim, batch, hidden, kind):
    """Answered without the operator."""
    inputs = make_inputs(batch, hidden)
    results = lstm_cell_forward(*(inputs if kind == "host" else on_device(inputs)), device="npu")
    assert [result.shape for result in results] == list(output_shapes(batch, hidden))
    assert "aclnnThnnFusedLstmCell" not in sim.report()["calls"]


def test_strided_tensors(sim):
    """Views of wider device arrays, in and out."""
    inputs = make_inputs(5, 7)
    wide = [np.repeat(array, 2, axis=-1) for array in inputs]
    tensors = [whole[::2] if whole.ndim == 1 else whole[:, ::2] for whole in on_device(wide)]
    out = [NPUArray.from_numpy(np.full((rows, 2 * columns), 7, np.float32)) for rows, columns in output_shapes(5, 7)]
    results = lstm_cell_forward(*tensors, out=tuple(array[:, 1::2] for array in out))
    assert_right(results, inputs)
    assert all((array.to_numpy()[:, ::2] == 7).all() for array in out)


def test_out_on_the_host(sim):
    """Given arrays of any layout are filled and returned themselves, also in place; None entries are made."""
    inputs = make_inputs(4, 5)
    out = [np.full((rows, 3 * columns), np.nan, np.float32)[:, ::3] for rows, columns in output_shapes(4, 5)]
    results = lstm_cell_forward(*inputs, out=out, device="npu")
    assert all(result is given for result, given in zip(results, out, strict=True))
    assert_right(results, inputs)
    copies = [array.copy() for array in inputs]
    results = lstm_cell_forward(*copies, out=(copies[2], None, copies[0]), device="npu")
    assert results.hy is copies[2]
    assert results.gates is copies[0]
    assert_right(results, inputs)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_device_output_over_an_input(sim, shift):
    """In place and partly overlapping, the biases included: as if the inputs had been copied before."""
    inputs = make_inputs(6, 4)
    tensors = on_device(inputs)
    gates = NPUArray.from_numpy(np.concatenate([inputs[0], np.zeros((2, 16), np.float32)]))
    tensors[0] = gates[:6]
    flat = NPUArray.from_numpy(np.concatenate([inputs[3], np.zeros(8, np.float32)]))
    tensors[3] = flat[:16]
    hy = NPUArray(flat.memory, (6, 4), np.float32, (16, 4), 0)
    results = lstm_cell_forward(*tensors, out=(hy, tensors[2], gates[shift : shift + 6]))
    assert results.cy is tensors[2]
    assert_right(results, inputs)


def test_outputs_that_overlap(sim):
    """Refused before anything is launched."""
    tensors = on_device(make_inputs(6, 4))
    buffer = NPUArray.from_numpy(np.full((6, 20), np.nan, np.float32))
    with pytest.raises(ValueError, match=r"`out: gates` must not share memory with `out: hy`"):
        lstm_cell_forward(*tensors, out=(buffer[:, :4], None, buffer[:, 3:19]))
    assert "kernel" not in sim.report()["calls"]


def test_dispatch(sim):
    """The same table as for the backward pass; tensors in several places are named."""
    inputs = make_inputs(2, 3)
    choose = lstmcell_bwd.choose_forward_device
    assert choose(*inputs).device == "cpu"
    assert choose(*inputs, device="npu:1").device == "npu:1"
    assert choose(*inputs, device="prefer-npu").device == "npu:0"
    assert choose(*on_device(inputs)) == ("npu:0", "the tensors are there")
    with pytest.raises(ValueError, match="got `cx` on the host, `hidden_bias` on npu:0"):
        choose(*inputs[:4], NPUArray.from_numpy(inputs[4]))
    with pytest.raises(ValueError, match="`cx` on the host, `hy` on npu:0"):
        lstm_cell_forward(*inputs, out=(NPUArray.empty((2, 3), np.float32), None, None))
    with pytest.raises(TypeError, match="`cx` must have dtype float32 or float16 on an NPU, got float64"):
        lstm_cell_forward(*make_inputs(2, 3, "float64"), device="npu")
    assert choose(*make_inputs(2, 3, "float64"), device="prefer-npu").device == "cpu"
    assert "kernel" not in sim.report()["calls"]


@pytest.mark.parametrize("function", ["aclCreateTensor", "aclnnThnnFusedLstmCell", "aclrtMemcpy", "kernel"])
def test_injected_failures(sim, function):
    """An exception, host outputs untouched, nothing left, and the next call is right."""
    inputs = make_inputs(3, 4, biases=(True, False))
    out = [np.full(shape, 7, np.float32) for shape in output_shapes(3, 4)]
    sim.fault(function, 1, 507015)
    with pytest.raises(lstmcell_bwd.NPURuntimeError):
        lstm_cell_forward(*inputs, out=out, device="npu")
    assert all((array == 7).all() for array in out)
    assert_right(lstm_cell_forward(*inputs, out=out, device="npu"), inputs)


def test_every_allocation_failing(sim):
    """Out of memory at any allocation: inputs, the missing bias, outputs, workspace."""
    inputs = make_inputs(3, 4, biases=(False, True))
    told = []

    def work():
        for nth in itertools.count(1):
            sim.fault("aclrtMalloc", nth, 207001)
            try:
                results = lstm_cell_forward(*inputs, device="npu")
            except lstmcell_bwd.NPURuntimeError as error:
                told.append(error.status)
            else:
                sim.fault("aclrtMalloc", 0)
                assert_right(results, inputs)
                return

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [207001] * (4 + 1 + 3 + 1)


# ---- two phases -----------------------------------------------------------------------------------------------------


def outputs_for(place, batch, hidden, dtype="float32"):
    """Make the three outputs on the host or on the device."""
    arrays = [np.full(shape, np.nan, dtype) for shape in output_shapes(batch, hidden)]
    return arrays if place == "host" else on_device(arrays)


@pytest.mark.parametrize("biases", BIASES[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["host", "npu"])
def test_two_phases(sim, place, dtype, biases):
    inputs = make_inputs(5, 7, dtype, biases)
    tensors = inputs if place == "host" else on_device(inputs)
    outputs = outputs_for(place, 5, 7, dtype)
    status, size, executor = aclnn.aclnnThnnFusedLstmCellGetWorkspaceSize(*tensors, *outputs)
    assert status == Status.ACLNN_SUCCESS
    workspace = bytearray(size) if place == "host" else NPUArray.empty((size,), np.uint8)
    assert aclnn.aclnnThnnFusedLstmCell(workspace, size, executor, None) == Status.ACLNN_SUCCESS
    assert_right(outputs, inputs)
    assert aclnn.aclnnThnnFusedLstmCell(workspace, size, executor, None) == Status.ACLNN_ERR_PARAM_INVALID


@pytest.mark.parametrize("place", ["host", "npu"])
def test_two_phases_refuse(sim, place):
    """A missing tensor, one bias alone, a dtype, an empty batch, and the executor of the other operator."""
    inputs = make_inputs(5, 7)
    tensors = inputs if place == "host" else on_device(inputs)
    given = [*tensors, *outputs_for(place, 5, 7)]
    phase_one = aclnn.aclnnThnnFusedLstmCellGetWorkspaceSize
    for k in range(8):
        assert phase_one(*given[:k], None, *given[k + 1 :]) == (Status.ACLNN_ERR_PARAM_NULLPTR, 0, None)
        assert "must be an array, got None" in aclnn.aclGetRecentErrMsg()
    wrong = make_inputs(5, 8) if place == "host" else on_device(make_inputs(5, 8))
    assert phase_one(*given[:2], wrong[2], *given[3:])[0] == Status.ACLNN_ERR_PARAM_INVALID
    if place == "host":
        double = [*make_inputs(5, 7, "float64"), *outputs_for(place, 5, 7, "float64")]
        assert phase_one(*double)[0] == Status.ACLNN_ERR_PARAM_INVALID
    empty = [*make_inputs(0, 7), *outputs_for("host", 0, 7)]
    assert phase_one(*(empty if place == "host" else on_device(empty)))[0] == Status.ACLNN_ERR_PARAM_INVALID
    status, size, executor = phase_one(*given)
    assert status == 0
    workspace = bytearray(size) if place == "host" else NPUArray.empty((size,), np.uint8)
    wrong_pair = aclnn.aclnnThnnFusedLstmCellBackward(workspace, size, executor, None)
    assert wrong_pair == Status.ACLNN_ERR_PARAM_INVALID
    assert "aclnnThnnFusedLstmCellBackwardGetWorkspaceSize" in aclnn.aclGetRecentErrMsg()
    assert aclnn.aclnnThnnFusedLstmCell(workspace, size, executor, None) == 0
