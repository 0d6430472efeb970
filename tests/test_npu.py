"""The NPU backend on the simulated CANN. What was never run on a chip is proved here against public facts alone."""

import gc
import itertools
import logging
import sys
import threading

import numpy as np
import pytest
import simulation
from simulation import assert_right, beyond_the_kept, make_inputs, output_shapes, to_host

import lstmcell_bwd
from lstmcell_bwd import lstm_cell_backward
from lstmcell_bwd.npu import NPUArray, runtime

DTYPES = ("float32", "float16")
MISSING = ((), (0,), (1,), (0, 1))


@pytest.fixture(scope="module")
def opened():
    """Open the simulation with two devices for all tests of this file."""
    with simulation.backend(devices=2) as sim:
        yield sim


@pytest.fixture
def sim(opened):
    """Check after every test that nothing forbidden was done, nothing left, and the thread's binding unchanged."""
    gc.collect()
    opened.forget()
    before = opened.thread_state()
    yield opened
    gc.collect()
    report = opened.report()
    assert report["violations"] == []
    assert beyond_the_kept(report, devices=2) == {}
    assert opened.thread_state() == before


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


def placed(array, kind, layout, torch_npu=None, device=0):
    """Put an array somewhere in some layout."""
    if array is None:
        return None
    if kind == "torch":
        if layout == "contiguous":
            return torch_npu.tensor(array)
        rows, columns = array.shape
        return torch_npu.tensor(array, strides=(columns + 3, 1), offset=5, storage_elements=rows * (columns + 3) + 9)
    host = array
    if layout == "strided":
        host = np.full((array.shape[0], 2 * array.shape[1] + 1), np.nan, array.dtype)[:, 1::2]
        host[...] = array
    elif layout == "rows":
        host = np.full((2 * array.shape[0] + 2, array.shape[1]), np.nan, array.dtype)[2::2]
        host[...] = array
    if kind == "host":
        return host
    whole = NPUArray.from_numpy(host.base if host.base is not None else host, device=device)
    return {"contiguous": lambda: whole, "strided": lambda: whole[:, 1::2], "rows": lambda: whole[2::2]}[layout]()


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "npu", "torch"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "rows"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results(sim, request, dtype, has_bias, layout, kind):
    """Every dtype, missing gradient, bias setting, layout and kind of tensor: right, and of the inputs' kind."""
    torch_npu = request.getfixturevalue("torch_npu") if kind == "torch" else None
    for missing in MISSING:
        inputs = make_inputs(5, 7, dtype, missing=missing)
        tensors = [placed(array, kind, layout, torch_npu) for array in inputs]
        results = lstm_cell_backward(*tensors, has_bias, device="npu")
        assert_right(results, inputs, has_bias, torch_npu)
        wanted = {"host": np.ndarray, "npu": NPUArray, "torch": simulation.FakeNpuTensor}[kind]
        assert all(isinstance(result, wanted) for result in results[: 2 + has_bias])
    assert sim.report()["calls"]["kernel"] == len(MISSING)


class Subclass(np.ndarray):
    """A plain subclass of ndarray."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_byte_order_and_subclasses(sim, dtype):
    """Swapped bytes and views of subclasses are copied to the device as values."""
    inputs = make_inputs(3, 4, dtype)
    swapped = [array.astype(array.dtype.newbyteorder()) for array in inputs]
    assert_right(lstm_cell_backward(*swapped, device="npu"), inputs)
    assert_right(lstm_cell_backward(*(array.view(Subclass) for array in inputs), device="npu"), inputs)


@pytest.mark.parametrize("kind", ["host", "npu"])
@pytest.mark.parametrize("hidden", [8, 64])
@pytest.mark.parametrize("batch", [4094, 4095, 4096, 6105, 20000])
def test_bias_is_right_where_the_operator_is_wrong(sim, batch, hidden, kind):
    """The known defect never shows, in either kind of tensor."""
    inputs = make_inputs(batch, hidden)
    results = lstm_cell_backward(*(placed(array, kind, "contiguous") for array in inputs), device="npu")
    assert_right(results, inputs)
    assert sim.report()["calls"]["kernel"] == (1 if batch < 4095 else -(-batch // 4088))


@pytest.mark.parametrize(
    ("batch", "hidden", "dtype", "has_bias"),
    [(4095, 136, "float32", True), (4095, 8, "float16", True), (4095, 8, "float32", False)],
)
def test_no_more_parts_than_needed(sim, batch, hidden, dtype, has_bias):
    """Calls that the defect cannot hit are one launch."""
    inputs = make_inputs(batch, hidden, dtype)
    assert_right(lstm_cell_backward(*inputs, has_bias, device="npu"), inputs, has_bias)
    assert sim.report()["calls"]["kernel"] == 1


def test_parts_of_strided_and_missing_tensors(sim):
    """Splitting works on views, on a width that is no multiple of 8, into a strided bias."""
    inputs = make_inputs(4100, 3, missing=(1,))
    bias = NPUArray.from_numpy(np.full(24, 7, np.float32))
    tensors = [placed(array, "npu", "rows") for array in inputs]
    results = lstm_cell_backward(*tensors, out=(None, None, bias[::2]))
    assert_right((*results[:2], results[2]), inputs)
    assert np.all(bias.to_numpy()[1::2] == 7)


@pytest.mark.parametrize("kind", ["host", "npu"])
@pytest.mark.parametrize(("batch", "hidden"), [(0, 3), (2, 0), (0, 0)])
def test_empty(sim, batch, hidden, kind):
    """Empty inputs never reach the operator, which refuses them; the bias is zeros."""
    inputs = make_inputs(batch, hidden)
    results = lstm_cell_backward(*(placed(array, kind, "contiguous") for array in inputs), device="npu")
    assert "aclnnThnnFusedLstmCellBackward" not in sim.report()["calls"]
    assert [result.shape for result in results] == list(output_shapes(batch, hidden))
    assert np.all(to_host(results[2]) == 0)


def test_not_finite(sim):
    """Inf and NaN are the operator's own affair: plain arithmetic with a clipped tanh."""
    inputs = make_inputs(2, 3)
    inputs[2][0, 0], inputs[3][1, 1] = np.nan, np.inf
    grad_gates, grad_cx, grad_bias = lstm_cell_backward(*inputs, device="npu")
    assert np.argwhere(np.isnan(grad_gates)).tolist() == [[0, 3]]
    assert np.argwhere(np.isnan(grad_bias)).tolist() == [[3]]
    assert np.isfinite(grad_cx).all()


# ---- outputs --------------------------------------------------------------------------------------------------------


def spaced(shape, dtype):
    """Make an output whose columns are three apart."""
    return np.full((*shape[:-1], 3 * shape[-1]), np.nan, dtype)[..., ::3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_on_the_host(sim, dtype):
    """Given arrays of any layout are filled and returned themselves; None entries are made."""
    inputs = make_inputs(4, 5, dtype)
    out = [spaced(shape, dtype) for shape in output_shapes(4, 5)]
    results = lstm_cell_backward(*inputs, out=out, device="npu")
    assert all(result is given for result, given in zip(results, out, strict=True))
    assert_right(results, inputs)
    results = lstm_cell_backward(*inputs, out=(None, out[1], None), device="npu")
    assert results.grad_cx is out[1]
    assert_right(results, inputs)


def test_host_output_that_is_an_input(sim):
    """In place on the host: the inputs were copied before."""
    inputs = make_inputs(4, 5)
    tensors = [array.copy() for array in inputs]
    results = lstm_cell_backward(*tensors, out=(tensors[4], tensors[2], None), device="npu")
    assert results.grad_gates is tensors[4]
    assert_right(results, inputs)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_device_output_over_an_input(sim, shift):
    """In place and partly overlapping on a device: as if the inputs had been copied before, without CANN knowing."""
    inputs = make_inputs(6, 4)
    tensors = [NPUArray.from_numpy(array) for array in inputs]
    gates = NPUArray.from_numpy(np.concatenate([inputs[4], np.zeros((2, 16), np.float32)]))
    tensors[4] = gates[:6]
    results = lstm_cell_backward(*tensors, out=(gates[shift : shift + 6], tensors[2], None))
    assert results.grad_cx is tensors[2]
    assert_right(results, inputs)


def test_outputs_side_by_side_in_one_buffer(sim):
    """Outputs may interleave; sharing an element is refused before anything is launched."""
    inputs = make_inputs(6, 4)
    tensors = [NPUArray.from_numpy(array) for array in inputs]
    buffer = NPUArray.from_numpy(np.full((6, 20), np.nan, np.float32))
    assert_right(lstm_cell_backward(*tensors, out=(buffer[:, :16], buffer[:, 16:], None)), inputs)
    with pytest.raises(ValueError, match=r"`out: grad_cx` must not share memory with `out: grad_gates`"):
        lstm_cell_backward(*tensors, out=(buffer[:, :16], buffer[:, 15:19], None))
    assert sim.report()["calls"]["kernel"] == 1


@pytest.mark.parametrize("name", ["grad_hy", "cx", "out"])
def test_bad_tensors(sim, name):
    """The rules on shape and dtype are those of the host, and nothing is launched."""
    tensors = dict(zip(("grad_hy", "grad_cy", "cx", "cy", "gates"), make_inputs(3, 4), strict=True))
    tensors = {key: NPUArray.from_numpy(array) for key, array in tensors.items()}
    wrong = NPUArray.empty((3, 5), np.float32)
    if name == "out":
        tensors["out"] = (None, wrong, None)
    else:
        tensors[name] = wrong
    with pytest.raises(ValueError, match="must have shape"):
        lstm_cell_backward(**tensors)
    tensors = {**tensors, "out": None, name: NPUArray.empty((3, 4), np.uint8)}
    if name == "out":
        tensors["out"] = (None, NPUArray.empty((3, 4), np.float16), None)
    with pytest.raises(TypeError, match="must have dtype"):
        lstm_cell_backward(**tensors)
    assert "kernel" not in sim.report()["calls"]


# ---- devices and the dispatcher -------------------------------------------------------------------------------------


def test_second_device(sim):
    """Tensors on device 1 are computed there; host tensors go where they were sent."""
    inputs = make_inputs(3, 4)
    tensors = [NPUArray.from_numpy(array, device=1) for array in inputs]
    for device in ("auto", "npu", "npu:1", "prefer-npu"):
        results = lstm_cell_backward(*tensors, device=device)
        assert results.grad_gates.device == 1
        assert_right(results, inputs)
    assert_right(lstm_cell_backward(*inputs, device="npu:1"), inputs)


@pytest.mark.parametrize(
    ("home", "device", "chosen", "reason"),
    [
        ("host", "auto", "cpu", "on the host"),
        ("host", "cpu", "cpu", "asked for"),
        ("host", "npu", "npu:0", "asked for"),
        ("host", "npu:1", "npu:1", "asked for"),
        ("host", "prefer-npu", "npu:0", "preferred"),
        (1, "auto", "npu:1", "are there"),
        (1, "npu", "npu:1", "are there"),
        (1, "npu:1", "npu:1", "are there"),
        (1, "prefer-npu", "npu:1", "are there"),
    ],
)
def test_dispatch(sim, caplog, home, device, chosen, reason):
    """The table of devices and locations, each decision with its reason, on the log too."""
    inputs = make_inputs(2, 3)
    if home != "host":
        inputs = [NPUArray.from_numpy(array, device=home) for array in inputs]
    with caplog.at_level(logging.DEBUG, "lstmcell_bwd"):
        decision = lstmcell_bwd.choose_device(*inputs, device=device)
    assert decision.device == chosen
    assert reason in decision.reason
    assert caplog.messages == [f"{chosen}: {decision.reason}"]
    assert "kernel" not in sim.report()["calls"]


@pytest.mark.parametrize(
    ("homes", "device", "message"),
    [
        (
            (0, 0, 0),
            "cpu",
            r"`device` must be the NPU where the tensors are, npu:0 \(to use the CPU, copy them first\)",
        ),
        ((0, 0, 0), "npu:1", r"`device` must be the NPU where the tensors are, npu:0, got 'npu:1'"),
        (("host", 0, 0), "auto", r"all tensors must be on the host or on one NPU, got `cx` on the host, `cy` on npu:0"),
        ((0, 1, 1), "npu", r"on one NPU, got `cx` on npu:0, `cy` on npu:1"),
        (("host", "host", 1), "prefer-npu", r"got `cx` on the host, `gates` on npu:1"),
    ],
)
def test_dispatch_errors(sim, homes, device, message):
    """Tensors in several places, or a device that is not where they are."""
    _, _, *inputs = make_inputs(2, 3)
    tensors = [
        array if home == "host" else NPUArray.from_numpy(array, device=home)
        for array, home in zip(inputs, homes, strict=True)
    ]
    for function in (lstm_cell_backward, lstmcell_bwd.choose_device):
        with pytest.raises(ValueError, match=message):
            function(None, None, *tensors, device=device)


def test_output_elsewhere(sim):
    """Outputs count like inputs."""
    inputs = make_inputs(2, 3)
    with pytest.raises(ValueError, match="`cx` on the host, `grad_cx` on npu:0"):
        lstm_cell_backward(*inputs, out=(None, NPUArray.empty((2, 3), np.float32), None))


def test_dtypes_that_the_operator_does_not_have(sim):
    """float64 is refused where the NPU is forced, and goes to the CPU where it is preferred."""
    inputs = make_inputs(2, 3, "float64")
    with pytest.raises(TypeError, match="`cx` must have dtype float32 or float16 on an NPU, got float64"):
        lstm_cell_backward(*inputs, device="npu")
    assert lstmcell_bwd.choose_device(*inputs, device="prefer-npu") == ("cpu", "the NPU's operator has no float64")
    assert lstmcell_bwd.choose_device(*make_inputs(0, 3), device="prefer-npu") == ("cpu", "the tensors are empty")


def test_environment_variable_replaces_auto_only(sim, monkeypatch):
    """LSTMCELL_BWD_DEVICE decides what "auto" means, and nothing else."""
    inputs = make_inputs(2, 3)
    monkeypatch.setenv("LSTMCELL_BWD_DEVICE", "npu:1")
    assert lstmcell_bwd.choose_device(*inputs).device == "npu:1"
    assert lstmcell_bwd.choose_device(*inputs, device="cpu").device == "cpu"
    assert_right(lstm_cell_backward(*inputs), inputs)
    assert sim.report()["calls"]["kernel"] == 1


def test_missing_device(sim):
    """An index that does not exist is unavailable, with what to use instead."""
    with pytest.raises(lstmcell_bwd.NPUUnavailableError, match="there is no device 2; use one of npu:0 to npu:1"):
        lstm_cell_backward(*make_inputs(2, 3), device="npu:2")
    with pytest.raises(lstmcell_bwd.NPUUnavailableError, match="no device 7"):
        NPUArray.empty(3, np.float32, device=7)


# ---- streams, threads, contexts -------------------------------------------------------------------------------------


def test_callers_binding(sim):
    """The caller's own context, on another device, survives calls, and so does its being bound to nothing."""
    inputs = make_inputs(3, 4)
    assert sim.thread_state() == (None, None)
    lstm_cell_backward(*inputs, device="npu")
    assert sim.thread_state() == (None, None)
    rt = sys.modules["acl"].rt
    context, _ = rt.create_context(1)
    before = sim.thread_state()
    tensors = [NPUArray.from_numpy(array) for array in inputs]
    assert_right(lstm_cell_backward(*tensors), inputs)
    del tensors
    assert sim.thread_state() == before == (1, context)
    assert rt.destroy_context(context) == 0


@pytest.mark.parametrize("device", [0, 1])
def test_given_stream(sim, device):
    """A stream of the caller's own context is used, synchronised, and no other one made."""
    inputs = make_inputs(3, 4)
    rt = sys.modules["acl"].rt
    context, _ = rt.create_context(device)
    stream, _ = rt.create_stream()
    sim.forget()
    assert_right(lstm_cell_backward(*inputs, device=f"npu:{device}", stream=stream), inputs)
    tensors = [NPUArray.from_numpy(array, device=device) for array in inputs]
    results = lstm_cell_backward(*tensors, stream=stream)
    assert sim.report()["leaks"]["waiting_tasks"] == 0
    assert_right(results, inputs)
    assert "aclrtCreateStream" not in sim.report()["calls"]
    assert rt.destroy_stream(stream) == rt.destroy_context(context) == 0


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (-1, ValueError, "`stream` must be an integer handle"),
        (True, TypeError, "`stream` must be an integer handle"),
        ("0", TypeError, "`stream` must be an integer handle, a torch_npu stream or None, got str"),
    ],
)
def test_bad_stream(sim, stream, error, message):
    """What cannot be a stream is refused before anything runs."""
    with pytest.raises(error, match=message):
        lstm_cell_backward(*make_inputs(2, 3), device="npu", stream=stream)
    with pytest.raises(ValueError, match="`stream` must be None where the CPU computes, got 5"):
        lstm_cell_backward(*make_inputs(2, 3), stream=5)


def test_threads(sim):
    """Threads compute at once, each with a stream and a workspace of its own that end with it."""
    failures = []

    def work(number):
        try:
            for k in range(12):
                dtype, device = DTYPES[k % 2], (number + k) % 2
                inputs = make_inputs(2 + number, 3 + k, dtype, seed=k)
                if k % 3:
                    tensors = [NPUArray.from_numpy(array, device=device) for array in inputs]
                    assert_right(lstm_cell_backward(*tensors), inputs)
                else:
                    assert_right(lstm_cell_backward(*inputs, device=f"npu:{device}"), inputs)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    report = sim.report()
    assert report["calls"]["aclrtCreateStream"] == report["calls"]["aclrtDestroyStream"] == 8
    assert beyond_the_kept(report, devices=2) == {}


def test_a_thousand_mixed_calls(sim):
    """Nothing grows: one workspace and one stream per device stay, whatever was called."""
    shapes = list(itertools.product((1, 3, 9), (2, 8), DTYPES))
    for k in range(1000):
        batch, hidden, dtype = shapes[k % len(shapes)]
        inputs = make_inputs(batch, hidden, dtype, seed=k % 7, missing=MISSING[k % 4])
        tensors = inputs if k % 2 else [x if x is None else NPUArray.from_numpy(x, device=k % 4 // 2) for x in inputs]
        results = lstm_cell_backward(*tensors, k % 3 > 0, device="npu")
    assert_right(results, inputs, k % 3 > 0)
    report = sim.report()
    assert report["calls"]["kernel"] == 1000
    assert report["counters"]["cache_hits"] > 500
    del results, tensors
    assert beyond_the_kept(sim.report(), devices=2) == {}


# ---- failures -------------------------------------------------------------------------------------------------------

SCENARIO_CALLS = [
    "aclrtSetCurrentContext",
    "aclrtMalloc",
    "aclrtMemcpy",
    "aclrtMemset",
    "aclrtMemcpyAsync",
    "aclrtFree",
    "aclrtCreateStream",
    "aclrtDestroyStream",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeDevice",
    "aclrtGetCurrentContext",
    "aclrtGetDevice",
    "aclCreateTensor",
    "aclDestroyTensor",
    "aclnnThnnFusedLstmCellBackwardGetWorkspaceSize",
    "aclnnThnnFusedLstmCellBackward",
    "aclDestroyAclOpExecutor",
    "aclGetRecentErrMsg",
    "kernel",
]

# Never reached, or met where nothing is computed: the release of arrays and of a thread's stream.
NOT_RAISED = {
    ("aclrtMemset", 3),
    ("aclrtCreateStream", 3),
    ("aclrtDestroyStream", 1),
    ("aclrtDestroyStream", 3),
    ("aclrtSynchronizeDevice", 1),
    ("aclrtSynchronizeDevice", 3),
    ("aclDestroyAclOpExecutor", 1),
    ("aclDestroyAclOpExecutor", 3),
    ("aclGetRecentErrMsg", 1),
    ("aclGetRecentErrMsg", 3),
}


def scenario(outcomes):
    """Make calls of every kind in a thread of their own, and note how each of them ended.

    The calls: host tensors with given outputs and a missing gradient; in parts; tensors on the device, in place, on a
    stream of the caller. An executor is left unused by a workspace that cannot be had.
    """
    rt = sys.modules["acl"].rt

    def attempt(function, inputs, untouched=()):
        before = [array.copy() for array in untouched]
        try:
            results = function()
            assert_right(results, inputs)
            outcomes.append("right")
        except lstmcell_bwd.NPURuntimeError as error:
            outcomes.append(error)
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(untouched, before, strict=True))
            del error

    for k in range(2):
        inputs = make_inputs(3, 4, missing=(1,))
        out = [np.full(shape, np.nan, np.float32) for shape in output_shapes(3, 4)]
        attempt(lambda inputs=inputs, out=out: lstm_cell_backward(*inputs, out=out, device="npu"), inputs, out)
        inputs = make_inputs(4100, 2, seed=k)
        attempt(lambda inputs=inputs: lstm_cell_backward(*inputs, device="npu"), inputs)
    inputs = make_inputs(3, 4)

    def in_place():
        tensors = [NPUArray.from_numpy(array) for array in inputs]
        return lstm_cell_backward(*tensors, out=(tensors[4], tensors[0], None), stream=stream)

    rt.set_device(0)
    stream, _ = rt.create_stream()
    for _ in range(4):
        attempt(in_place, inputs)
    rt.synchronize_stream(stream)
    while rt.destroy_stream(stream):
        pass
    rt.reset_device(0)


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("function", SCENARIO_CALLS)
def test_injected_failures(sim, function, nth):
    """Whatever fails, at its first or third use: an exception, host outputs untouched, nothing left, all well after."""
    lstm_cell_backward(*make_inputs(3, 4), device="npu")
    code = 507015 if function == "kernel" else 500001
    outcomes = []
    sim.fault(function, nth, code)
    thread = threading.Thread(target=scenario, args=(outcomes,))
    thread.start()
    thread.join()
    errors = [outcome for outcome in outcomes if outcome != "right"]
    sim.fault(function, 0)
    assert len(errors) == ((function, nth) not in NOT_RAISED)
    assert len(outcomes) == 8
    assert sim.report()["violations"] == []
    assert all(error.status in (code, 561000) for error in errors)
    del errors, outcomes
    gc.collect()
    inputs = make_inputs(3, 4)
    assert_right(lstm_cell_backward(*inputs, device="npu"), inputs)


def test_every_allocation_failing(sim):
    """Out of memory at any allocation of a call: nothing is left, not even the executor that found no workspace."""
    inputs = make_inputs(4100, 2, missing=(0,))
    told = []

    def work():
        for nth in itertools.count(1):
            sim.fault("aclrtMalloc", nth, 207001)
            try:
                results = lstm_cell_backward(*inputs, device="npu")
            except lstmcell_bwd.NPURuntimeError as error:
                told.append((error.status, error.name, error.detail))
            else:
                sim.fault("aclrtMalloc", 0)
                assert_right(results, inputs)
                return

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    name, detail = "ACL_ERROR_RT_MEMORY_ALLOCATION, out of device memory", "E207001: simulated failure of aclrtMalloc"
    assert told == [(207001, name, detail)] * (
        4 + 1 + 3 + 1 + 1
    )  # inputs, zeros, outputs, sums of the parts, workspace
    assert sim.report()["calls"]["aclDestroyAclOpExecutor"] == 1


def test_everything_failing(sim):
    """A runtime that refuses to wait or to free for good: exceptions; what it kept back is freed once it relents."""
    inputs = make_inputs(3, 4)
    refusing = ("aclrtFree", "aclrtSynchronizeStream", "aclrtSynchronizeDevice")
    for function in refusing:
        sim.fault(function, -1, 507899)
    with pytest.raises(lstmcell_bwd.NPURuntimeError, match="507899"):
        lstm_cell_backward(*inputs, device="npu")
    for function in refusing:
        sim.fault(function, 0)
    assert_right(lstm_cell_backward(*inputs, device="npu"), inputs)


def test_failed_launch_of_another_thread(sim):
    """The runtime tells whoever asks first of a failed kernel; the thread whose kernel it was raises all the same."""
    inputs = make_inputs(3, 4)
    tensors = [NPUArray.from_numpy(array) for array in inputs]
    device = runtime.get_device(0)
    waiting, told = threading.Event(), threading.Event()
    synchronise, outcome = device.synchronise, []

    def late(stream=None):
        waiting.set()
        told.wait()
        synchronise(stream)

    def victim():
        try:
            outcome.append(lstm_cell_backward(*tensors))
        except lstmcell_bwd.NPURuntimeError as error:
            outcome.append(error.status)

    device.synchronise = late
    thread = threading.Thread(target=victim)
    sim.fault("kernel", 1, 507015)
    thread.start()
    waiting.wait()
    del device.synchronise
    with pytest.raises(lstmcell_bwd.NPURuntimeError, match="507015"):
        NPUArray.empty(3, np.float32).to_numpy()
    told.set()
    thread.join()
    assert outcome == [507015]


# ---- NPUArray -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0), (2, 3, 4)])
def test_array_round_trip(sim, shape, dtype):
    """Values, shape and dtype survive both copies; strides are those of NumPy."""
    values = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    array = NPUArray.from_numpy(values, device=1)
    assert (array.shape, array.dtype, array.device, array.ndim) == (shape, np.dtype(dtype), 1, len(shape))
    assert (array.size, array.nbytes) == (values.size, values.nbytes)
    assert values.size == 0 or array.strides == values.strides
    np.testing.assert_array_equal(array.to_numpy(), values)


def test_array_from_any_layout(sim):
    """Byte order and strides of the host array do not matter."""
    values = np.arange(12, dtype=">f4").reshape(3, 4)[::-1, ::2]
    array = NPUArray.from_numpy(values)
    assert array.dtype == np.dtype("=f4")
    np.testing.assert_array_equal(array.to_numpy(), values)


@pytest.mark.parametrize("key", [np.s_[1:4], np.s_[::2], np.s_[5:], np.s_[2:1], np.s_[1:, 2:7:3], np.s_[:, :0]])
def test_array_views(sim, key):
    """Slices are views of the same memory with NumPy's shape, strides and values."""
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    array = NPUArray.from_numpy(values)
    view = array[key]
    assert view.memory is array.memory
    assert view.shape == values[key].shape
    np.testing.assert_array_equal(view.to_numpy(), values[key])
    assert len(view) == len(values[key])
    assert view.nbytes == 0 or view.pointer - array.pointer == values[key].ctypes.data - values.ctypes.data


@pytest.mark.parametrize("key", [3, np.s_[::-1], np.s_[:, :, :], "row", np.s_[..., 1:]])
def test_array_bad_keys(sim, key):
    """Only slices with positive steps make views."""
    array = NPUArray.empty((6, 8), np.float32)
    with pytest.raises((TypeError, ValueError), match="`key` must be"):
        array[key]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, np.float64), TypeError, "`dtype` must have dtype float32, float16 or uint8, got float64"),
        (((2, -1), np.float32), ValueError, "`shape` must be a tuple of non-negative integers"),
        ((3, np.float32, True), TypeError, "`device` must be the index of an NPU, got bool"),
        ((3, np.float32, -1), ValueError, "`device` must be the index of an NPU, got -1"),
    ],
)
def test_array_bad_arguments(sim, arguments, error, message):
    """Wrong arguments are named."""
    with pytest.raises(error, match=message):
        NPUArray.empty(*arguments)


def test_array_lifetime(sim):
    """Memory lives as long as the last view; `with` and `close` end it early; a closed array says so."""
    array = NPUArray.from_numpy(np.arange(6, dtype=np.float32))
    view = array[2:4]
    del array
    np.testing.assert_array_equal(view.to_numpy(), [2, 3])
    frees = sim.report()["calls"].get("aclrtFree", 0)
    del view
    assert sim.report()["calls"]["aclrtFree"] == frees + 1
    with NPUArray.empty((2, 3), np.float32) as array:
        assert "closed" not in repr(array)
    array.close()
    assert repr(array) == "NPUArray(shape=(2, 3), dtype=float32, device=0, closed)"
    with pytest.raises(ValueError, match="must be open"):
        array.to_numpy()
    with pytest.raises(ValueError, match="must be open"):
        lstm_cell_backward(*[array] * 5)


def test_array_freed_by_the_collector_anywhere(sim):
    """An array in a reference cycle may be collected in the middle of a companion's work."""
    for _ in range(300):
        cycle = [NPUArray.empty(8, np.uint8)]
        cycle.append(cycle)
        del cycle
        lstm_cell_backward(*make_inputs(1, 2), device="npu")


def test_failing_release(sim, caplog):
    """An explicit release raises; one that nobody asked for can only be logged. Both give the memory back."""
    array = NPUArray.empty(3, np.float32)
    sim.fault("aclrtFree", 1, 507899)
    with pytest.raises(lstmcell_bwd.NPURuntimeError, match=r"acl\.rt\.free returned 507899"):
        array.close()
    array = NPUArray.empty(3, np.float32)
    sim.fault("aclrtFree", 1, 507899)
    del array
    assert "releasing memory of npu:0" in caplog.text


# ---- torch_npu ------------------------------------------------------------------------------------------------------


def test_torch_stream_is_read_anew(sim, torch_npu):
    """Work that torch still holds in its queue goes first: the stream's number is read once in every call."""
    inputs = make_inputs(3, 4)
    for call in range(3):
        tensors = [torch_npu.tensor(array) for array in inputs]
        results = lstm_cell_backward(*tensors)
        assert torch_npu.stream_reads == call + 1
        assert sim.report()["leaks"]["waiting_tasks"] == 0
        assert_right(results, inputs, torch_npu=torch_npu)
    assert sim.report()["leaks"]["streams"] - 1 <= 2


@pytest.mark.parametrize("as_object", [True, False])
def test_torch_tensors_on_a_given_stream(sim, torch_npu, as_object):
    """Another stream than torch's current one waits for that first."""
    inputs = make_inputs(3, 4)
    rt = sys.modules["acl"].rt
    stream, _ = rt.create_stream()
    tensors = [torch_npu.tensor(array) for array in inputs]
    given = type("Stream", (), {"npu_stream": stream})() if as_object else stream
    assert_right(lstm_cell_backward(*tensors, stream=given), inputs, torch_npu=torch_npu)
    assert rt.destroy_stream(stream) == 0


def test_torch_out(sim, torch_npu):
    """Given tensors are written and returned themselves, strided and in place."""
    inputs = make_inputs(3, 4)
    tensors = [torch_npu.tensor(array) for array in inputs]
    state = torch_npu.tensor(np.full((3, 4), np.nan, np.float32), strides=(9, 2), offset=1, storage_elements=30)
    results = lstm_cell_backward(*tensors, out=(tensors[4], state, None))
    assert results[0] is tensors[4]
    assert results[1] is state
    assert_right(results, inputs, torch_npu=torch_npu)


def test_torch_with_npu_arrays(sim, torch_npu):
    """Kinds may be mixed on one device; results are of the kind of `cx`."""
    inputs = make_inputs(3, 4)
    tensors = [torch_npu.tensor(inputs[0]), None, NPUArray.from_numpy(inputs[2]), torch_npu.tensor(inputs[3])]
    results = lstm_cell_backward(*tensors, NPUArray.from_numpy(inputs[4]))
    assert isinstance(results.grad_cx, NPUArray)
    inputs[1] = None
    assert_right(results, inputs)


def test_torch_private_layout(sim, torch_npu):
    """A private layout is converted for an input and refused for an output."""
    inputs = make_inputs(3, 4)
    tensors = [torch_npu.tensor(array, npu_format=29) for array in inputs]
    assert_right(lstm_cell_backward(*tensors), inputs, torch_npu=torch_npu)
    with pytest.raises(ValueError, match="`out: grad_cx` must have the layout ND, got 29"):
        lstm_cell_backward(*tensors, out=(None, tensors[2], None))


def test_torch_dtype(sim, torch_npu):
    """Dtypes that the operator lacks are refused before CANN is called."""
    tensors = [torch_npu.tensor(array) for array in make_inputs(2, 3, "float64")]
    with pytest.raises(TypeError, match=r"`cx` must have dtype float32 or float16 on an NPU, got torch\.float64"):
        lstm_cell_backward(*tensors)
    assert "kernel" not in sim.report()["calls"]


def test_torch_failure(sim, torch_npu):
    """A failed kernel raises, and torch's memory stays torch's."""
    tensors = [torch_npu.tensor(array) for array in make_inputs(2, 3)]
    sim.fault("kernel", 1, 507015)
    with pytest.raises(lstmcell_bwd.NPURuntimeError, match="507015"):
        lstm_cell_backward(*tensors)
