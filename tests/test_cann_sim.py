"""The simulated CANN itself, driven by raw pyACL and ctypes calls, both careful and careless ones."""

import ctypes
import json
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import cann_sim
import simulation
from cann_sim.fake_torch import FakeTorchNpu

INT64S, HANDLE = ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p
H2D, D2H = 1, 2
NULLPTR, INVALID, RUNTIME_ERROR, INNER, INNER_NULLPTR = 161001, 161002, 361001, 561000, 561103
LIBRARY_BYTES = 16 << 20


@pytest.fixture(scope="session")
def install():
    return simulation.installation()


@pytest.fixture
def sim(install):
    with install.active() as simulation:
        yield simulation


@pytest.fixture
def user(sim, install):
    return User(install.home / "lib64")


class User:
    """What a program that calls the operator by hand does: initialise, allocate, copy, call, synchronise."""

    def __init__(self, lib64, operators="libopapi_nn.so"):
        import acl

        self.acl, self.rt = acl, acl.rt
        assert acl.init() == 0 and acl.rt.set_device(0) == 0
        self.stream, code = acl.rt.create_stream()
        assert code == 0
        self.base, self.ops = ctypes.CDLL(str(lib64 / "libnnopbase.so")), ctypes.CDLL(str(lib64 / operators))
        create = self.base.aclCreateTensor
        create.restype = HANDLE
        create.argtypes = [INT64S, ctypes.c_uint64, ctypes.c_int32, INT64S, ctypes.c_int64, ctypes.c_int32]
        create.argtypes += [INT64S, ctypes.c_uint64, HANDLE]
        self.base.aclDestroyTensor.argtypes = [HANDLE]
        if hasattr(self.base, "aclDestroyAclOpExecutor"):
            self.base.aclDestroyAclOpExecutor.argtypes = [HANDLE]
        results = [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(HANDLE)]
        for name, arguments in (
            ("aclnnThnnFusedLstmCellBackward", [HANDLE] * 5 + [ctypes.c_bool] + [HANDLE] * 3),
            ("aclnnThnnFusedLstmCell", [HANDLE] * 8),
        ):
            getattr(self.ops, f"{name}GetWorkspaceSize").argtypes = arguments + results
            getattr(self.ops, name).argtypes = [HANDLE, ctypes.c_uint64, HANDLE, HANDLE]

    def put(self, array):
        """Copy an array to fresh device memory."""
        address, code = self.rt.malloc(array.nbytes, 0)
        assert code == 0
        assert self.rt.memcpy(address, array.nbytes, array.ctypes.data, array.nbytes, H2D) == 0
        return address

    def get(self, address, shape, dtype):
        """Copy device memory back, without waiting for any stream."""
        array = np.empty(shape, dtype)
        assert self.rt.memcpy(array.ctypes.data, array.nbytes, address, array.nbytes, D2H) == 0
        return array

    def tensor(self, address, shape, dtype, *, strides=None, offset=0, storage=None, form=2):
        """Create an aclTensor; dtype is CANN's number or a NumPy type."""
        number = dtype if isinstance(dtype, int) else {"float32": 0, "float16": 1}[np.dtype(dtype).name]
        dims = (ctypes.c_int64 * len(shape))(*shape)
        steps = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        extent = (ctypes.c_int64 * 1)(storage or int(np.prod(shape)))
        return self.base.aclCreateTensor(dims, len(shape), number, steps, offset, form, extent, 1, address)

    def phase_one(self, tensors, has_bias=True, name="aclnnThnnFusedLstmCellBackward"):
        size, executor = ctypes.c_uint64(77), HANDLE(77)
        flag = [has_bias] if "Backward" in name else []
        function = getattr(self.ops, f"{name}GetWorkspaceSize")
        code = function(*tensors[:5], *flag, *tensors[5:], ctypes.byref(size), ctypes.byref(executor))
        return code, size.value, executor.value

    def phase_two(self, size, executor, stream=None, name="aclnnThnnFusedLstmCellBackward"):
        workspace, code = self.rt.malloc(size, 0)
        assert code == 0
        code = getattr(self.ops, name)(workspace, size, executor, self.stream if stream is None else stream)
        return code, workspace

    def arguments(self, batch, hidden, dtype=np.float32, seed=0):
        """Return inputs, the eight device addresses, and the eight aclTensors of a good call."""
        inputs = make_inputs(batch, hidden, dtype, seed)
        outputs = [np.zeros(s, dtype) for s in ((batch, 4 * hidden), (batch, hidden), (4 * hidden,))]
        arrays = [*inputs, *outputs]
        addresses = [self.put(a) for a in arrays]
        return (
            inputs,
            addresses,
            [self.tensor(p, a.shape, dtype) for p, a in zip(addresses, arrays, strict=True)],
        )

    def backward(self, batch, hidden, dtype=np.float32, has_bias=True, seed=0):
        """Run one correct call from beginning to end; return inputs and results."""
        inputs, addresses, tensors = self.arguments(batch, hidden, dtype, seed)
        code, size, executor = self.phase_one(tensors, has_bias)
        assert code == 0
        code, workspace = self.phase_two(size, executor)
        assert code == 0 and self.rt.synchronize_stream(self.stream) == 0
        shapes = (batch, 4 * hidden), (batch, hidden), (4 * hidden,)
        results = [self.get(p, s, dtype) for p, s in zip(addresses[5:], shapes, strict=True)]
        for tensor in tensors:
            assert self.base.aclDestroyTensor(tensor) == 0
        for address in (*addresses, workspace):
            assert self.rt.free(address) == 0
        return inputs, results


def make_inputs(batch, hidden, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    states = [rng.standard_normal((batch, hidden)).astype(dtype) for _ in range(4)]
    return [*states, rng.uniform(0.1, 0.9, (batch, 4 * hidden)).astype(dtype)]


def model(dh, d_c, cx, cy, gates, rows_at_once):
    """Compute the operator in NumPy float32: its association, tanh and order of sums, without its defect."""
    dh, d_c, cx, cy, gates = (a.astype(np.float32) for a in (dh, d_c, cx, cy, gates))
    one = np.float32(1)
    i, f, g, o = np.split(gates, 4, axis=1)
    e = np.exp(2 * np.clip(cy, np.float32(-8.8), np.float32(8.8)))
    t = (e - one) / (e + one)
    dc = (one + -(t * t)) * (o * dh) + d_c
    d_i, d_f = dc * g * (one - i) * i, dc * cx * (one - f) * f
    d_gates = np.concatenate([d_i, d_f, dc * i * (one + -(g * g)), dh * t * (one - o) * o], axis=1)
    return d_gates, dc * f, column_sums(d_gates, rows_at_once)


def column_sums(rows, rows_at_once):
    """Add rows in the operator's order: neighbour pairs within chunks, then the chunk sums likewise."""

    def pairs(chunk):
        while len(chunk) > 1:
            even, odd = chunk[0::2], chunk[1::2]
            chunk = np.concatenate([even[: len(odd)] + odd, even[len(odd) :]])
        return chunk[0]

    while len(rows) > 1:
        rows = np.stack([pairs(rows[k : k + rows_at_once]) for k in range(0, len(rows), rows_at_once)])
    return rows[0]


def assert_close(actual, expected, dtype=np.float32):
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == np.float32 else {"rtol": 1e-3, "atol": 1e-6}
    np.testing.assert_allclose(actual, expected.astype(dtype), **tolerance)


def no_leaks(report):
    leaks = report["leaks"]
    return not any(leaks[k] for k in ("device_memory", "host_memory", "tensors", "executors", "waiting_tasks"))


def run_script(install, script, **variables):
    """Run Python code in a process of its own and return it, together with its final report."""
    path = install.home / "report.json"
    path.unlink(missing_ok=True)
    environment = install.environment(CANN_SIM_REPORT=str(path), **variables)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    return done, json.loads(path.read_text()) if path.exists() else None


# ---- results ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("batch", "hidden"), [(1, 8), (3, 5), (7, 33), (64, 130)])
def test_good_call(sim, user, batch, hidden, dtype):
    inputs, results = user.backward(batch, hidden, dtype)
    for actual, expected in zip(results, model(*inputs, 6104), strict=True):
        assert_close(actual, expected, dtype)
    if dtype == np.float32:
        assert np.array_equal(results[2], column_sums(results[0], 6104))  # the order, to the last bit
    report = sim.report()
    assert report["violations"] == [] and no_leaks(report)
    assert report["calls"]["kernel"] == 1 and report["calls"]["aclCreateTensor"] == 8


def test_published_example(user):
    """Batch 1, hidden size 8, every element 1: only grad_cx is not 0, and it is 1.4199743."""
    ones = [np.ones((1, 8 * (4 if k == 4 else 1)), np.float32) for k in range(5)]
    outputs = [np.zeros(s, np.float32) for s in ((1, 32), (1, 8), (32,))]
    addresses = [user.put(a) for a in ones + outputs]
    tensors = [user.tensor(p, a.shape, np.float32) for p, a in zip(addresses, ones + outputs, strict=True)]
    _, size, executor = user.phase_one(tensors)
    user.phase_two(size, executor)
    assert user.rt.synchronize_stream(user.stream) == 0
    np.testing.assert_allclose(user.get(addresses[6], (1, 8), np.float32), 1.4199743, rtol=1e-6)
    assert not user.get(addresses[5], (1, 32), np.float32).any()


def test_association_to_the_last_bit(user):
    """With saturated cy no exponential is left in the result: tanh is exactly 1 or -1."""
    inputs = make_inputs(9, 7)
    inputs[3] = np.where(inputs[3] > 0, np.float32(100), np.float32(-8.7))
    outputs = [np.zeros(s, np.float32) for s in ((9, 28), (9, 7), (28,))]
    addresses = [user.put(a) for a in inputs + outputs]
    tensors = [user.tensor(p, a.shape, np.float32) for p, a in zip(addresses, inputs + outputs, strict=True)]
    _, size, executor = user.phase_one(tensors)
    assert user.phase_two(size, executor)[0] == 0 and user.rt.synchronize_stream(user.stream) == 0
    for address, expected in zip(addresses[5:], model(*inputs, 6104), strict=True):
        assert np.array_equal(user.get(address, expected.shape, np.float32), expected)


def test_all_layouts(sim, user):
    """Every operand is a strided view with an offset into a larger storage, outputs included."""
    batch, hidden = 5, 6
    inputs = make_inputs(batch, hidden)
    shapes = [a.shape for a in inputs] + [(batch, 4 * hidden), (batch, hidden), (4 * hidden,)]
    pools, tensors, views = [], [], []
    for k, shape in enumerate(shapes):
        pool = np.full(4000, -7, np.float32)
        strides = [(61, 2), (1, 9), (200, 3)][k % 3] if len(shape) == 2 else (5,)
        view = np.lib.stride_tricks.as_strided(pool[11:], shape, [4 * s for s in strides])
        if k < 5:
            view[...] = inputs[k]
        pools.append(user.put(pool))
        tensors.append(user.tensor(pools[-1], shape, np.float32, strides=strides, offset=11, storage=4000))
        views.append(strides)
    code, size, executor = user.phase_one(tensors)
    assert code == 0 and size > LIBRARY_BYTES + 512  # room for the contiguous copies
    assert user.phase_two(size, executor)[0] == 0 and user.rt.synchronize_stream(user.stream) == 0
    for k, expected in zip((5, 6, 7), model(*inputs, 6104), strict=True):
        pool = user.get(pools[k], (4000,), np.float32)
        view = np.lib.stride_tricks.as_strided(pool[11:], shapes[k], [4 * s for s in views[k]])
        assert_close(view, expected)
        assert np.count_nonzero(pool != -7) == expected.size  # nothing beside the view was written
    assert sim.report()["violations"] == []


def test_no_bias_leaves_the_dummy_alone(sim, user):
    _, addresses, tensors = user.arguments(2, 3)
    dummy = user.put(np.array([42], np.float32))
    tensors[7] = user.tensor(dummy, (1,), np.float32)
    code, size, executor = user.phase_one(tensors, has_bias=False)
    assert code == 0 and user.phase_two(size, executor)[0] == 0
    assert user.rt.synchronize_stream(user.stream) == 0
    assert user.get(dummy, (1,), np.float32) == 42 and user.get(addresses[6], (2, 3), np.float32).any()
    assert sim.report()["violations"] == []


def test_half_conversions(user):
    """Every finite float16 is widened exactly; products round to nearest even, overflow too."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    grad_c = every[np.isfinite(every)].reshape(-1, 8)
    inputs = make_inputs(*grad_c.shape, np.float16)
    inputs[0][...], inputs[1] = 0, grad_c
    inputs[4][:, 8:16] *= np.float16(3)  # the forget gate: grad_cx is grad_c times it
    outputs = [np.zeros(s, np.float16) for s in (inputs[4].shape, grad_c.shape, (32,))]
    addresses = [user.put(a) for a in inputs + outputs]
    tensors = [user.tensor(p, a.shape, np.float16) for p, a in zip(addresses, inputs + outputs, strict=True)]
    _, size, executor = user.phase_one(tensors, has_bias=False)
    assert user.phase_two(size, executor)[0] == 0 and user.rt.synchronize_stream(user.stream) == 0
    with np.errstate(over="ignore"):
        expected = (grad_c.astype(np.float32) * inputs[4][:, 8:16].astype(np.float32)).astype(np.float16)
    assert np.isinf(expected).any()
    assert np.array_equal(user.get(addresses[6], grad_c.shape, np.float16), expected)


def test_half_bias_is_summed_unrounded(user):
    inputs, (gates, _, bias) = user.backward(200, 8, np.float16)
    exact = model(*inputs, 3052)[2]
    assert_close(bias, exact, np.float16)
    assert np.any(bias != gates.astype(np.float32).sum(0).astype(np.float16))


def test_forward_operator(sim, user):
    """Gates come out activated in the order i, f, g, o that the backward operator wants."""
    rng = np.random.default_rng(1)
    batch = 4
    shapes = [(batch, 28), (batch, 28), (batch, 7), (28,), (28,), (batch, 7), (batch, 7), (batch, 28)]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    addresses = [user.put(a) for a in arrays]
    tensors = [user.tensor(p, s, np.float32) for p, s in zip(addresses, shapes, strict=True)]
    name = "aclnnThnnFusedLstmCell"
    for bias in (True, False):
        given = tensors if bias else [*tensors[:3], None, None, *tensors[5:]]
        code, size, executor = user.phase_one(given, name=name)
        assert code == 0 and user.phase_two(size, executor, name=name)[0] == 0
        assert user.rt.synchronize_stream(user.stream) == 0
        a = arrays[0] + arrays[1] + (arrays[3] + arrays[4] if bias else 0)
        i, f, g, o = np.split(a.astype(float), 4, axis=1)
        i, f, g, o = 1 / (1 + np.exp(-i)), 1 / (1 + np.exp(-f)), np.tanh(g), 1 / (1 + np.exp(-o))
        cy = f * arrays[2] + i * g
        for k, expected in ((5, o * np.tanh(cy)), (6, cy), (7, np.concatenate([i, f, g, o], 1))):
            assert_close(user.get(addresses[k], shapes[k], np.float32), expected)
    assert user.phase_one([*tensors[:4], None, *tensors[5:]], name=name)[0] == NULLPTR
    assert user.phase_one([*tensors[:2], tensors[0], *tensors[3:]], name=name)[0] == INVALID
    assert sim.report()["violations"] == []


@pytest.mark.parametrize("batch", [4094, 4095, 4096, 6105])
@pytest.mark.parametrize("defect", [True, False])
def test_known_defect(sim, user, batch, defect):
    """Stale data in the bias sum: from 4095 rows on, in float32, with few columns; gates stay right."""
    sim.configure(defect=defect)
    inputs, (gates, d_cx, bias) = user.backward(batch, 8)
    expected = model(*inputs, 6104)
    assert_close(gates, expected[0])
    assert_close(d_cx, expected[1])
    assert defect or np.array_equal(bias, column_sums(gates, 6104))
    wrong = ~np.isclose(bias, expected[2], rtol=1e-4, atol=1e-3)
    assert wrong.all() if defect and batch > 4094 else not wrong.any()


def test_known_defect_spares_wide_and_half(user):
    rows = 3052  # fit into the local buffer for both
    for hidden, dtype in ((97, np.float32), (8, np.float16)):
        inputs, (_, _, bias) = user.backward(4096, hidden, dtype)
        np.testing.assert_allclose(bias, model(*inputs, rows)[2].astype(dtype), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("soc", "batch", "hidden", "dtype", "has_bias", "extra"),
    [
        ("Ascend910B1", 1, 1, np.float32, True, 0),
        ("Ascend910B1", 6104, 96, np.float32, True, 0),
        ("Ascend910B1", 6105, 96, np.float32, False, 16 * 96 * 2),
        ("Ascend910B4", 6104, 81, np.float32, True, 16 * 81 * 2),
        ("Ascend910_9392", 1018, 512, np.float32, True, 16 * 512 * 2),
        ("Ascend910_9362", 873, 512, np.float32, True, 16 * 512 * 2),
        ("Ascend910B1", 10, 8, np.float16, True, 16 * 8 * 10),
        ("Ascend910B1", 10, 8, np.float16, False, 0),
    ],
)
def test_workspace_size(sim, user, soc, batch, hidden, dtype, has_bias, extra):
    sim.configure(soc=soc)
    shapes = [(batch, hidden)] * 4 + [(batch, 4 * hidden)] * 2 + [(batch, hidden), (4 * hidden,)]
    tensors = [user.tensor(64 * k, s, dtype) for k, s in enumerate(shapes)]
    code, size, _ = user.phase_one(tensors, has_bias)
    assert (code, size) == (0, (LIBRARY_BYTES + extra + 32 + 511) // 512 * 512)


# ---- argument checks ----


def test_every_null_is_refused_first(sim, user):
    _, _, tensors = user.arguments(2, 3)
    wrong_type = user.tensor(0, (2, 3), 11)
    for k in range(8):
        given = [wrong_type if j == (k + 1) % 8 else t for j, t in enumerate(tensors)]
        given[k] = None
        assert user.phase_one(given, has_bias=False) == (NULLPTR, 77, 77)  # and the results stay unwritten
        assert f"E{NULLPTR}" in user.acl.get_recent_err_msg()
        assert user.acl.get_recent_err_msg() is None  # read and cleared
    size = ctypes.c_uint64()
    assert (
        user.ops.aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(*tensors[:5], True, *tensors[5:], size, None) == NULLPTR
    )
    assert sim.report()["leaks"]["executors"] == 0


@pytest.mark.parametrize("k", range(8))
def test_type_shape_and_format_of_each(user, k):
    _, addresses, tensors = user.arguments(2, 3)
    shape = [(2, 3), (2, 3), (2, 3), (2, 3), (2, 12), (2, 12), (2, 3), (12,)][k]
    variants = [(shape, 11, 2), (shape, 27, 2), (shape, 1, 2), (shape, 0, 0)]
    variants += [((1, *shape), 0, 2), (shape[:-1], 0, 2), ((*shape[:-1], shape[-1] + 1), 0, 2)]
    variants += [((*shape[:-1], 0), 0, 2)]
    for dims, dtype, form in variants:
        changed = [*tensors[:k], user.tensor(addresses[k], dims, dtype, form=form), *tensors[k + 1 :]]
        assert user.phase_one(changed)[0] == INVALID
        is_unused_shape = k == 7 and dims != shape
        assert user.phase_one(changed, has_bias=False)[0] == (0 if is_unused_shape else INVALID)


def test_order_of_the_checks(user):
    """Type before shape before format: the message names the first that fails."""
    _, _, tensors = user.arguments(2, 3)
    for dims, dtype, form, word in [((9,), 11, 0, "type"), ((9,), 0, 0, "shape"), ((2, 3), 0, 0, "format")]:
        assert user.phase_one([*tensors[:2], user.tensor(0, dims, dtype, form=form), *tensors[3:]])[0] == INVALID
        assert word in user.acl.get_recent_err_msg()


def test_view_beyond_its_storage(sim, user):
    _, addresses, tensors = user.arguments(4, 3)
    good = user.tensor(addresses[2], (2, 3), np.float32, strides=(6, 1), storage=12)
    assert good and user.phase_one([*tensors[:2], good, *tensors[3:]])[0] == INVALID  # batch 2
    beyond = user.tensor(addresses[2], (4, 3), np.float32, strides=(4, 1), storage=12)
    assert user.phase_one([*tensors[:2], beyond, *tensors[3:]])[0] == INNER_NULLPTR
    tensors = user.arguments(1, 3)[2]
    single = user.tensor(addresses[2], (1, 3), np.float32, strides=(999, 1), storage=3)  # one row: still contiguous
    code, size, _ = user.phase_one([*tensors[:2], single, *tensors[3:]])
    assert (code, size) == (0, LIBRARY_BYTES + 512)
    assert sim.report()["violations"] == []


@pytest.mark.parametrize("soc", ["Ascend910B", "Ascend910A", "Ascend310P3", "Ascend950PR_9599"])
def test_unsupported_chip(sim, user, soc):
    sim.configure(soc=soc)
    assert user.acl.get_soc_name() == soc
    assert user.phase_one(user.arguments(2, 3)[2])[0] == INNER_NULLPTR
    assert "chip" in user.acl.get_recent_err_msg()


def test_create_tensor_refuses_null_dimensions(user):
    dims = (ctypes.c_int64 * 1)(3)
    assert user.base.aclCreateTensor(None, 1, 0, None, 0, 2, dims, 1, 64) is None
    assert user.base.aclCreateTensor(dims, 1, 0, None, 0, 2, None, 1, 64) is None
    assert user.base.aclDestroyTensor(None) == 0


# ---- lifetimes ----


def test_late_stream_shows_a_missing_synchronise(sim, user):
    inputs, _, tensors = user.arguments(2, 3)
    fresh, _ = user.rt.malloc(24, 0)
    tensors[6] = user.tensor(fresh, (2, 3), np.float32)
    _, size, executor = user.phase_one(tensors)
    user.phase_two(size, executor)
    assert np.isnan(user.get(fresh, (2, 3), np.float32)).all()  # what uninitialised memory holds
    assert user.rt.synchronize_stream(user.stream) == 0
    assert_close(user.get(fresh, (2, 3), np.float32), model(*inputs, 6104)[1])
    _, size, executor = user.phase_one(tensors)
    user.phase_two(size, executor)
    assert user.rt.memset(fresh, 24, 0, 24) == 0
    read, overwritten = sim.report()["violations"]
    assert "has to write; synchronise first" in read and "still uses; synchronise first" in overwritten


@pytest.mark.parametrize("victim", ["tensor memory", "workspace", "stream"])
def test_freed_while_a_task_waits(sim, user, victim):
    _, addresses, tensors = user.arguments(2, 3)
    _, size, executor = user.phase_one(tensors)
    _, workspace = user.phase_two(size, executor)
    if victim == "stream":
        assert user.rt.destroy_stream(user.stream) == 0
    else:
        assert user.rt.free(addresses[3] if victim == "tensor memory" else workspace) == 0
        assert user.rt.synchronize_stream(user.stream) == 507015
    assert any("waiting" in v for v in sim.report()["violations"])


def test_use_after_free(sim, user):
    address, _ = user.rt.malloc(64, 0)
    user.rt.free(address)
    host = np.zeros(16, np.float32)
    assert user.rt.memcpy(address, 64, host.ctypes.data, 64, H2D) == 107000
    assert user.rt.free(address) == 107000
    violations = sim.report()["violations"]
    assert "after it was freed" in violations[0] and "freed before" in violations[1]


def test_bounds(sim, user):
    address, _ = user.rt.malloc(33, 0)
    assert address % 64 == 0 and address > 2**32
    host = np.zeros(64, np.uint8)
    assert user.rt.memcpy(address, 33, host.ctypes.data, 33, H2D) == 0
    assert user.rt.memcpy(address, 16, host.ctypes.data, 33, H2D) == 100000
    assert user.rt.memcpy(address, 34, host.ctypes.data, 34, H2D) == 107000
    assert "beyond the end" in sim.report()["violations"][0]


@pytest.mark.parametrize("k", [0, 4, 7])
def test_host_pointer_reaches_the_kernel(sim, user, k):
    _, _, tensors = user.arguments(2, 3)
    host = np.zeros((2, 12), np.float32)
    tensors[k] = user.tensor(host.ctypes.data, [(2, 3), (2, 12), (12,)][[0, 4, 7].index(k)], np.float32)
    _, size, executor = user.phase_one(tensors)
    assert user.phase_two(size, executor)[0] == 0  # the launch itself succeeds
    assert user.rt.synchronize_stream(user.stream) == 507015
    assert user.rt.synchronize_stream(user.stream) == 0  # told once
    assert "host address" in sim.report()["violations"][0]


def test_cut_pointers(sim, user):
    """What ctypes does without argtypes and restype: handles and addresses lose their upper half."""
    user.base.aclDestroyTensor.argtypes = [ctypes.c_uint32]
    _, addresses, tensors = user.arguments(2, 3)
    assert user.base.aclDestroyTensor(tensors[0] & 0xFFFFFFFF) == INNER
    tensors[1] = user.tensor(addresses[1] & 0xFFFFFFFF, (2, 3), np.float32)
    _, size, executor = user.phase_one(tensors)
    user.phase_two(size, executor)
    assert user.rt.synchronize_stream(user.stream) == 507015
    assert all("cut pointer" in v for v in sim.report()["violations"])


def test_executor_is_used_once(sim, user):
    _, _, tensors = user.arguments(2, 3)
    _, size, executor = user.phase_one(tensors)
    assert user.phase_two(size, executor)[0] == 0
    assert user.phase_two(size, executor)[0] == INNER
    assert user.base.aclDestroyAclOpExecutor(executor) == INNER
    assert len([v for v in sim.report()["violations"] if "no longer alive" in v]) == 2
    assert user.base.aclDestroyAclOpExecutor(None) == INNER_NULLPTR


def test_executor_ends_with_a_failed_phase_two(sim, user):
    _, _, tensors = user.arguments(2, 3)
    code, size, executor = user.phase_one(tensors)
    assert code == 0 and sim.report()["leaks"]["executors"] == 1
    assert user.ops.aclnnThnnFusedLstmCellBackward(None, size, executor, user.stream) == NULLPTR
    assert sim.report()["leaks"]["executors"] == 0
    assert user.ops.aclnnThnnFusedLstmCellBackward(None, 0, None, user.stream) == NULLPTR
    _, size, executor = user.phase_one(tensors)
    assert user.base.aclDestroyAclOpExecutor(executor) == 0
    assert sim.report()["leaks"]["executors"] == 0 and sim.report()["violations"] == []


def test_workspace_too_small(sim, user):
    _, size, executor = user.phase_one(user.arguments(2, 3)[2])
    assert user.phase_two(size - 1, executor)[0] == 0
    assert user.rt.synchronize_stream(user.stream) == 507015
    assert "asked for" in sim.report()["violations"][0]


def test_tensor_must_live_until_phase_two_returns(sim, user):
    _, _, tensors = user.arguments(2, 3)
    _, size, executor = user.phase_one(tensors)
    assert user.phase_two(size, executor)[0] == 0
    for tensor in tensors:  # before the stream is synchronised: allowed
        assert user.base.aclDestroyTensor(tensor) == 0
    assert user.rt.synchronize_stream(user.stream) == 0 and sim.report()["violations"] == []
    _, _, tensors = user.arguments(2, 4)
    _, size, executor = user.phase_one(tensors)
    user.base.aclDestroyTensor(tensors[2])
    assert user.phase_two(size, executor)[0] == INNER
    assert "no longer alive" in sim.report()["violations"][0]


def test_in_place_is_reported(sim, user):
    _, addresses, tensors = user.arguments(2, 3)
    tensors[6] = user.tensor(addresses[2], (2, 3), np.float32)
    _, size, executor = user.phase_one(tensors)
    user.phase_two(size, executor)
    user.rt.synchronize_stream(user.stream)
    assert "shares memory" in sim.report()["violations"][0]


def test_two_streams_race(sim, user):
    _, _, tensors = user.arguments(2, 3)
    other, _ = user.rt.create_stream()
    for stream in (user.stream, other):
        _, size, executor = user.phase_one(tensors)
        user.phase_two(size, executor, stream)
    assert "two streams" in sim.report()["violations"][0]


def test_leaks_are_listed(sim, user):
    user.phase_one(user.arguments(2, 3)[2])
    user.rt.malloc_host(10)
    leaks = sim.report()["leaks"]
    assert len(leaks["device_memory"]) == 8 and leaks["host_memory"][0]["bytes"] == 10
    assert (leaks["tensors"], leaks["executors"], leaks["streams"], leaks["set_device"]) == (8, 1, 1, [1])


# ---- the operator cache ----


def test_cache_hit_uses_the_addresses_of_phase_one(sim, user, monkeypatch):
    first = user.arguments(2, 3)
    _, size, executor = user.phase_one(first[2])
    user.phase_two(size, executor)
    again = user.arguments(2, 3, seed=1)
    _, size, executor = user.phase_one(again[2])
    for tensor in again[2]:  # a hit does not look at the tensors again
        user.base.aclDestroyTensor(tensor)
    assert user.phase_two(size, executor)[0] == 0
    assert user.rt.synchronize_stream(user.stream) == 0
    assert_close(user.get(again[1][6], (2, 3), np.float32), model(*again[0], 6104)[1])
    report = sim.report()
    assert report["counters"]["cache_hits"] == 1 and report["violations"] == []
    monkeypatch.setenv("DISABLE_L2_CACHE", "1")
    user.phase_one(first[2])
    assert sim.report()["counters"]["cache_hits"] == 1


def test_address_changed_between_the_phases(sim, user):
    """After a miss phase two finds the new address in the tensor; after a hit the change comes too late."""
    inputs, addresses, tensors = user.arguments(2, 3)
    other = user.put(np.zeros((2, 3), np.float32))
    user.base.aclSetRawTensorAddr.argtypes = [HANDLE, HANDLE]
    for written, untouched in ((other, addresses[6]), (addresses[6], other)):  # the miss, then the hit
        for address in (other, addresses[6]):
            assert user.rt.memset(address, 24, 0, 24) == 0
        assert user.base.aclSetRawTensorAddr(tensors[6], addresses[6]) == 0
        _, size, executor = user.phase_one(tensors)
        assert user.base.aclSetRawTensorAddr(tensors[6], other) == 0
        assert user.phase_two(size, executor)[0] == 0 and user.rt.synchronize_stream(user.stream) == 0
        assert_close(user.get(written, (2, 3), np.float32), model(*inputs, 6104)[1])
        assert not user.get(untouched, (2, 3), np.float32).any()
    assert sim.report()["counters"]["cache_hits"] == 1


def test_repeatable_executor(sim, user):
    user.base.aclSetAclOpExecutorRepeatable.argtypes = [HANDLE]
    tensors = user.arguments(2, 3)[2]
    _, size, executor = user.phase_one(tensors)
    assert user.base.aclSetAclOpExecutorRepeatable(executor) == 0
    assert user.phase_two(size, executor)[0] == user.phase_two(size, executor)[0] == 0
    assert user.base.aclDestroyAclOpExecutor(executor) == 0 and sim.report()["violations"] == []
    tensors = user.arguments(2, 4)[2]
    assert user.phase_two(*user.phase_one(tensors)[1:])[0] == 0
    from_cache = user.phase_one(tensors)[2]
    assert user.base.aclSetAclOpExecutorRepeatable(from_cache) == INNER


@pytest.mark.parametrize("change", ["limit", "abandoned", "thread", "alias", "bias"])
def test_cache_misses(sim, user, monkeypatch, change):
    if change == "limit":
        monkeypatch.setenv("ACLNN_CACHE_LIMIT", "0")
    _, addresses, tensors = user.arguments(2, 3)
    _, size, executor = user.phase_one(tensors)
    if change != "abandoned":  # an executor that never ran keeps its key unusable
        user.phase_two(size, executor)
    if change == "alias":
        tensors[1] = user.tensor(addresses[0], (2, 3), np.float32)
    if change == "thread":
        context, _ = user.rt.get_context()

        def other():
            user.rt.set_context(context)
            user.phase_one(tensors)

        in_thread(other)
    else:
        user.phase_one(tensors, has_bias=change != "bias")
    assert sim.report()["counters"].get("cache_hits", 0) == 0


# ---- threads, contexts, devices ----


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_new_thread_has_no_context(sim, user):
    tensors = user.arguments(2, 3)[2]

    def calls():
        codes = [user.rt.malloc(8, 0)[1], user.rt.create_stream()[1], user.rt.get_device()[1]]
        codes += [
            user.rt.synchronize_stream(user.stream),
            user.rt.get_context()[1],
            user.phase_one(tensors)[0],
        ]
        return codes, sim.thread_state()

    assert in_thread(calls) == ([107002] * 5 + [RUNTIME_ERROR], (None, None))
    assert sim.thread_state() == (0, user.rt.get_context()[0])


def test_default_context_is_shared_and_counted(sim, user):
    mine = user.rt.get_context()[0]

    def other():
        assert user.rt.set_device(0) == 0
        state = sim.thread_state()
        assert user.rt.reset_device(0) == 0
        return state

    assert in_thread(other) == (0, mine)
    assert sim.thread_state() == (0, mine)
    assert user.rt.destroy_context(mine) == 100000  # goes with reset_device only
    assert user.rt.destroy_stream(user.stream) == 0 and user.rt.reset_device(0) == 0
    assert user.rt.get_device()[1] == 107002 and sim.thread_state() == (None, None)
    assert user.rt.reset_device(0) == 107002
    assert ["matching" in v for v in sim.report()["violations"]] == [True]


def test_streams_belong_to_contexts(sim, user):
    before = user.rt.get_context()[0]
    context, code = user.rt.create_context(0)
    assert code == 0 and user.rt.get_context() == (context, 0)  # and current
    assert user.rt.synchronize_stream(user.stream) == 107003
    _, size, executor = user.phase_one(user.arguments(2, 3)[2])
    assert user.phase_two(size, executor)[0] == RUNTIME_ERROR
    assert user.rt.set_context(before) == 0 and user.rt.synchronize_stream(user.stream) == 0
    assert user.rt.destroy_context(context) == 0 and sim.report()["violations"] == []
    assert user.rt.set_context(context) == 100000 and sim.report()["violations"] != []


def test_two_devices(sim, user):
    sim.configure(devices=2)
    assert user.rt.get_device_count() == (2, 0) and user.rt.set_device(2) == 107001
    tensors = user.arguments(2, 3)[2]
    assert user.rt.set_device(1) == 0 and user.rt.get_device() == (1, 0)
    stream, _ = user.rt.create_stream()
    _, size, executor = user.phase_one(tensors)
    user.phase_two(size, executor, stream)
    assert user.rt.synchronize_stream(stream) == 507015
    assert "memory of device 0" in sim.report()["violations"][0]


def test_no_device(sim):
    import acl

    sim.configure(devices=0)
    assert acl.init() == 0 and acl.rt.get_device_count() == (0, 0) and acl.rt.set_device(0) == 207004


def test_stream_limit_and_default_stream(user):
    streams = [user.rt.create_stream() for _ in range(1984)]
    assert streams[-1][1] == 207008 and all(code == 0 for _, code in streams[:-1])
    _, size, executor = user.phase_one(user.arguments(2, 3)[2])
    assert user.phase_two(size, executor, 0)[0] == 0
    assert user.rt.synchronize_stream(0) == 0
    assert user.rt.ctx_get_current_default_stream()[1] == 0


# ---- pyACL ----


def test_argument_parsing(user):
    address, _ = user.rt.malloc(64, 0)
    for bad in (np.int64(64), None, 64.0, "64"):
        with pytest.raises(TypeError):
            user.rt.malloc(bad, 0)
        with pytest.raises(TypeError):
            user.rt.free(bad)
    assert user.rt.malloc(64, np.int32(0))[1] == 0  # format i takes anything with __index__
    with pytest.raises(TypeError):
        user.rt.malloc(64)
    with pytest.raises(OverflowError):
        user.rt.malloc(64, 2**31)
    assert user.rt.malloc(-1, 0)[1] == 207001  # format k wraps
    assert user.rt.free(address + 2**64) == 0


def test_memory_rules(sim, user):
    assert user.rt.malloc(0, 0)[1] == user.rt.malloc_host(0)[1] == user.rt.free(0) == user.rt.free_host(0) == 100000
    sim.configure(memory=1000)
    assert user.rt.get_mem_info(1) == (1000, 1000, 0)
    address, code = user.rt.malloc(935, 0)  # rounded up to 960, and a tail of 32
    assert code == 0 and user.rt.get_mem_info(1)[0] == 8
    assert user.rt.malloc(1, 0)[1] == 207001
    assert "out of device memory" in user.acl.get_recent_err_msg()
    assert user.rt.free(address) == 0 and user.rt.get_mem_info(1)[0] == 1000


def test_copies(sim, user):
    a, _ = user.rt.malloc(32, 0)
    host, back = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    assert user.rt.memcpy(a, 32, host.ctypes.data, 32, 4) == 0  # kind 4: let the runtime tell
    assert user.rt.memcpy(back.ctypes.data, 32, a, 32, D2H) == 0 and np.array_equal(host, back)
    assert user.rt.memset(a, 32, 7, 8) == 0 and user.rt.memset(a, 4, 7, 8) == 100000
    assert user.rt.memcpy(0, 0, 0, 0, H2D) == 0 and user.rt.memcpy(a, 32, host.ctypes.data, 32, 6) == 100000
    assert user.rt.memcpy(0, 32, host.ctypes.data, 32, H2D) == 100000
    assert user.rt.memcpy_async(back.ctypes.data, 32, host.ctypes.data, 32, 0, user.stream) == 207000
    assert sim.report()["violations"] == []
    assert user.rt.memcpy(host.ctypes.data, 32, a, 32, H2D) == 107000
    assert "host address" in sim.report()["violations"][0]


def test_pinned_copies_are_late(sim, user):
    a, _ = user.rt.malloc(32, 0)
    pinned, _ = user.rt.malloc_host(32)
    bytes_ = np.ctypeslib.as_array((ctypes.c_uint8 * 32).from_address(pinned))
    host = np.arange(32, dtype=np.uint8)
    assert user.rt.memcpy_async(a, 32, host.ctypes.data, 32, H2D, user.stream) == 0  # pageable: done on return
    assert user.rt.memcpy_async(pinned, 32, a, 32, D2H, user.stream) == 0
    assert not np.array_equal(bytes_, host)
    assert user.rt.synchronize_device() == 0 and np.array_equal(bytes_, host)
    assert sim.report()["violations"] == []
    user.rt.memcpy_async(pinned, 32, a, 32, D2H, user.stream)
    user.rt.free_host(pinned)
    assert "waiting" in sim.report()["violations"][0]


def test_init_and_finalize(sim):
    import acl

    assert acl.rt.set_device(0) == 100001
    assert [acl.init(), acl.init(), acl.finalize_reference()] == [0, 100002, (1, 0)]
    assert [acl.finalize(), acl.finalize()] == [0, 100037]
    assert sim.report()["violations"] == []
    acl.rt.get_device_count()
    assert sim.report()["violations"] == ["aclrtGetDeviceCount was called after aclFinalize"]
    assert acl.get_version()[-1] == 0 and acl.get_cann_version(0)[0]["major_version"] == 9


def test_initialised_by_somebody_else(sim):
    import acl

    sim.configure(initialised=True)
    assert acl.init() == 100002 and acl.rt.set_device(0) == 0
    assert acl.finalize() == 0
    assert "took ACL away" in sim.report()["violations"][0]


# ---- faults ----


def test_every_pyacl_call_can_fail(sim, user):
    """A call that is told to fail returns the code and has no effect."""
    before = sim.report()["leaks"], sim.thread_state()
    for path, (symbol, parameters) in user.acl._FUNCTIONS.items():
        function = getattr(user.rt, path[3:]) if path.startswith("rt.") else getattr(user.acl, path)
        sim.fault(symbol, code=507899)
        result = function(*(0 for p in parameters if p in "ki"))
        assert (result[-1] if isinstance(result, tuple) else result) == 507899
        assert f"simulated failure of {symbol}" in user.acl.get_recent_err_msg()
    sim.fault("aclInit", code=100039)
    assert user.acl.init() == 100039
    sim.fault("aclrtGetSocName")
    assert user.acl.get_soc_name() is None
    assert (sim.report()["leaks"], sim.thread_state()) == before


def test_every_aclnn_call_can_fail(sim, user):
    tensors = user.arguments(2, 3)[2]
    name = "aclnnThnnFusedLstmCellBackward"
    sim.fault("aclCreateTensor")
    assert user.tensor(64, (1,), np.float32) is None
    sim.fault(f"{name}GetWorkspaceSize", code=INNER_NULLPTR)
    assert user.phase_one(tensors) == (INNER_NULLPTR, 77, 77)
    _, size, executor = user.phase_one(tensors)
    sim.fault(name, code=RUNTIME_ERROR)
    assert user.phase_two(size, executor)[0] == RUNTIME_ERROR
    sim.fault("aclDestroyAclOpExecutor", code=INNER)
    sim.fault("aclDestroyTensor", nth=-1, code=INNER)
    assert [user.base.aclDestroyTensor(t) for t in tensors] == [INNER] * 8
    leaks = sim.report()["leaks"]
    assert leaks["tensors"] == 8 and leaks["waiting_tasks"] == leaks["executors"] == 0
    sim.fault("aclDestroyTensor", nth=0)
    assert [user.base.aclDestroyTensor(t) for t in tensors] == [0] * 8 and sim.report()["violations"] == []


def test_nth_call(sim, user):
    sim.fault("aclrtMalloc", nth=2, code=207001)
    assert [user.rt.malloc(8, 0)[1] for _ in range(3)] == [0, 207001, 0]
    sim.fault("aclrtMalloc", nth=1, code=207001)
    sim.forget()
    assert user.rt.malloc(8, 0)[1] == 0 and sim.report()["calls"] == {"aclrtMalloc": 1}
    with pytest.raises(ValueError, match="unknown setting"):
        sim.configure(colour="red")


@pytest.mark.parametrize("eager", [False, True])
def test_kernel_fault_is_told_later(sim, user, eager):
    sim.configure(eager=eager)
    _, addresses, tensors = user.arguments(2, 3)
    sim.fault("kernel", code=507035)
    _, size, executor = user.phase_one(tensors)
    assert user.phase_two(size, executor)[0] == 0
    host = np.empty((2, 3), np.float32)
    copy = (host.ctypes.data, 24, addresses[6], 24, D2H)
    told = user.rt.memcpy(*copy) if eager else user.rt.synchronize_stream(user.stream)
    assert told == 507035 and user.rt.memcpy(*copy) == 0 and not host.any()


# ---- processes of their own ----

START = "import acl, os, ctypes\nassert acl.init() == 0 and acl.rt.set_device(0) == 0\n"


@pytest.mark.parametrize(
    "access",
    [
        "ctypes.memset(acl.rt.malloc(64, 0)[0], 0, 1)",
        "p = acl.rt.malloc_host(64)[0]; acl.rt.free_host(p); ctypes.memset(p, 0, 1)",
    ],
    ids=["device", "freed host"],
)
def test_memory_the_host_cannot_touch(install, access):
    script = START + access
    assert run_script(install, script)[0].returncode == -signal.SIGSEGV


def test_faults_and_chip_from_the_environment(install):
    script = START + "print(acl.get_soc_name(), [acl.rt.malloc(8, 0)[1] for _ in range(3)])"
    done, _ = run_script(
        install, script, CANN_SIM_SOC="Ascend910B4", CANN_SIM_FAULTS="aclrtMalloc:2:207001,aclrtFree:1:5"
    )
    assert done.stdout.split(" ", 1) == ["Ascend910B4", "[0, 207001, 0]\n"]
    done, _ = run_script(install, "import acl; print(acl.init())", CANN_SIM_FAULTS="aclInit:1:100039")
    assert done.stdout == "100039\n"


def test_final_report(install):
    """Exit hooks are part of the report, and a call after them is a violation."""
    script = START + (
        "import atexit\n"
        "kept, freed = acl.rt.malloc(64, 0)[0], acl.rt.malloc(32, 0)[0]\n"
        "atexit.register(acl.rt.free, freed)\n"
        "class Late:\n    def __del__(self, free=acl.rt.free): free(kept_address)\n"
        "kept_address = kept\nlate = Late()\n"
    )
    done, report = run_script(install, script)
    assert done.returncode == 0
    assert report["calls"]["aclrtFree"] >= 1 and report["leaks"]["set_device"] == [1]
    assert all("after the exit hooks" in v for v in report["violations"]) and report["violations"]


def test_forked_child(install):
    script = START + (
        "if not os.fork():\n    print(acl.rt.malloc(8, 0)[1], flush=True)\n    os._exit(0)\n"
        "os.wait()\nassert acl.rt.malloc(8, 0)[1] == 0\n"
    )
    done, report = run_script(install, script)
    assert done.stdout == "507899\n"
    assert report["violations"] == [
        "aclrtMalloc was called in a forked child, which must not touch its parent's ACL state"
    ]


def test_a_child_may_start_afresh(install):
    """A fork before the first initialisation is harmless."""
    script = "import acl, os\npid = os.fork()\nassert acl.init() == 0\nif pid: os.wait()\nelse: os._exit(0)\n"
    done, report = run_script(install, script)
    assert done.returncode == 0 and report["violations"] == []


# ---- installations ----


@pytest.mark.parametrize("custom", ["default", "environment"])
def test_custom_package(install, tmp_path, custom):
    other = cann_sim.build(tmp_path / "home", operators="libopapi.so", old_release=True, custom=custom, share=install)
    variables = other.variables()
    base = variables.get("ASCEND_CUSTOM_OPP_PATH") or variables["ASCEND_OPP_PATH"] + "/vendors/simulated"
    script = (
        "import acl, ctypes, os\n"
        f"ctypes.CDLL({base!r} + '/op_api/lib/libcust_opapi.so').aclnnThnnFusedLstmCellBackward\n"
        "lib64 = os.environ['ASCEND_HOME_PATH'] + '/lib64/'\n"
        "print(hasattr(ctypes.CDLL(lib64 + 'libnnopbase.so'), 'aclDestroyAclOpExecutor'),\n"
        "      os.listdir(lib64), hasattr(acl, 'finalize_reference'), hasattr(acl.rt, 'malloc_align32'))"
    )
    done, _ = run_script(other, script)
    assert done.stdout.split()[0] == "False" and done.stdout.split()[-2:] == ["False", "False"], done.stderr
    assert "libopapi.so" in done.stdout and "libopapi_nn.so" not in done.stdout


@pytest.mark.parametrize("missing", ["phase one", "phase two", "both"])
def test_missing_symbols(install, tmp_path, missing):
    other = cann_sim.build(tmp_path / "home", missing=missing, share=install)
    library = ctypes.CDLL(str(other.home / "lib64" / "libopapi_nn.so"))
    assert hasattr(library, "aclnnThnnFusedLstmCellBackwardGetWorkspaceSize") == (missing == "phase two")
    assert hasattr(library, "aclnnThnnFusedLstmCellBackward") == (missing == "phase one")
    assert hasattr(library, "aclnnThnnFusedLstmCell")


def test_no_operator_library(install, tmp_path):
    """A second installation in this process works on the first one's runtime."""
    other = cann_sim.build(tmp_path / "home", operators=None, share=install)
    assert not [p for p in (other.home / "lib64").iterdir() if p.name in ("libopapi.so", "libopapi_nn.so")]
    with other.active() as simulation:
        import acl

        assert acl.init() == 0 and acl.__file__.startswith(str(other.home))
        assert cann_sim.Simulation(install).report() == simulation.report()
    assert "acl" not in sys.modules


def test_sources_compile_without_warnings(tmp_path, capfd):
    cann_sim.build(tmp_path / "home")
    assert capfd.readouterr().err == ""


# ---- torch_npu ----


def test_fake_torch_npu(sim, user):
    torch_npu = FakeTorchNpu(user.acl)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch_npu.tensor(array, strides=(1, 3), offset=5, storage_elements=40)
    assert (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.element_size()) == (
        (3, 4),
        (1, 3),
        5,
        4,
    )
    assert (str(tensor.dtype), tensor.device.type, tensor.device.index) == ("torch.float32", "npu", 0)
    assert tensor.data_ptr() == tensor.untyped_storage().data_ptr() + 20
    assert type(tensor).__module__ == "torch" and tensor.untyped_storage().nbytes() == 160
    assert np.isnan(user.get(tensor.data_ptr(), (4,), np.float32)).all()  # still in the host queue
    stream = torch_npu.npu.current_stream().npu_stream
    assert torch_npu.stream_reads == 1 and user.rt.synchronize_stream(stream) == 0
    assert np.array_equal(torch_npu.to_numpy(tensor), array) and torch_npu.stream_reads == 1
    assert torch_npu.get_npu_format(tensor) == 2
    assert torch_npu.npu_format_cast(tensor, 29).npu_format == 29
    torch_npu.close()
    assert no_leaks(sim.report()) and sim.report()["violations"] == []
