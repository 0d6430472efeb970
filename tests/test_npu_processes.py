"""The NPU backend in processes of their own: what is missing, who initialised ACL, forks, and the end of a process."""

import json
import re

import cann_sim
import pytest
import simulation

PRELUDE = """
import sys, json
import numpy as np
import lstmcell_bwd
from lstmcell_bwd import lstm_cell_backward
from lstmcell_bwd.npu import NPUArray
assert "acl" not in sys.modules
one, gates = np.ones((1, 8), np.float32), np.ones((1, 32), np.float32)
def right(results):
    to_host = lambda a: a if isinstance(a, np.ndarray) else a.to_numpy()
    return abs(to_host(results.grad_cx)[0, 0] - 1.4199743) < 1e-3
"""

UNAVAILABLE = """
auto = lstm_cell_backward(one, one, one, one, gates)
assert right(auto) and "acl" not in sys.modules
assert lstmcell_bwd.choose_device(one, one, one, one, gates).device == "cpu"
preferred = lstm_cell_backward(one, one, one, one, gates, device="prefer-npu")
assert np.array_equal(preferred.grad_cx, auto.grad_cx)
device, reason = lstmcell_bwd.choose_device(one, one, one, one, gates, device="prefer-npu")
out = np.full((1, 8), 7, np.float32)
try:
    lstm_cell_backward(one, one, one, one, gates, out=(None, out, None), device="npu")
except lstmcell_bwd.NPUUnavailableError as error:
    message = str(error)
assert (out == 7).all() and device == "cpu" and not lstmcell_bwd.npu.is_available()
assert lstmcell_bwd.npu.unavailable_reason() in message and lstmcell_bwd.npu.unavailable_reason() in reason
assert lstmcell_bwd.show_config("dict")["npu"]["available"] is False
try:
    NPUArray.from_numpy(one)
except RuntimeError as error:
    assert lstmcell_bwd.npu.unavailable_reason() in str(error)
print(message)
"""


def report_of(path):
    """Read the report that a simulated process wrote at its end."""
    return json.loads(path.read_text())


def run(code, tmp_path, installed=None, **settings):
    """Run a program with the simulation installed; return what it printed and the report of the whole process."""
    path = tmp_path / "report.json"
    installed = installed or simulation.installation()
    variables = {f"CANN_SIM_{name}": str(value) for name, value in settings.items()}
    environment = installed.environment(CANN_SIM_REPORT=str(path), **variables)
    environment["PYTHONPATH"] = f"{installed.home}/python/site-packages"
    printed = simulation.python(PRELUDE + code, path_first=environment.pop("PYTHONPATH"), **environment)
    report = report_of(path)
    assert report["violations"] == []
    return printed, report


# ---- unavailable ----------------------------------------------------------------------------------------------------


def test_without_pyacl():
    """No CANN at all."""
    printed = simulation.python(PRELUDE + UNAVAILABLE)
    assert "pyACL (`import acl`) cannot be imported: ModuleNotFoundError" in printed
    assert "source its set_env.sh before starting Python" in printed


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("raise OSError('libascendcl.so: cannot open')", "cannot be imported: OSError: libascendcl.so: cannot open"),
        ("", "is not pyACL; put CANN's python/site-packages first"),
    ],
)
def test_with_another_module_called_acl(tmp_path, module, message):
    """What `import acl` finds may be broken, or somebody else's."""
    (tmp_path / "acl.py").write_text(module)
    assert message in simulation.python(PRELUDE + UNAVAILABLE, path_first=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"DEVICES": 0}, "ACL sees no device; check npu-smi info, ASCEND_RT_VISIBLE_DEVICES"),
        ({"SOC": "Ascend910B"}, "the chip Ascend910B does not have the operator; Atlas A2 or A3"),
        ({"SOC": "Ascend310P3"}, "the chip Ascend310P3 does not have the operator"),
        ({"SOC": "Ascend910_9599"}, "the chip Ascend910_9599 does not have the operator"),
        ({"FAULTS": "aclInit:1:500000"}, "acl.init returned 500000 (ACL_ERROR_INTERNAL_ERROR): E500000: simulated"),
        ({"FAULTS": "aclInit:1:100039"}, "stub libraries were loaded, the NPU driver is missing; install it"),
        ({"FAULTS": "aclrtGetDeviceCount:1:507899"}, "acl.rt.get_device_count returned 507899"),
        ({"FAULTS": "aclrtGetSocName:1:1"}, "acl.get_soc_name gave no name"),
    ],
)
def test_unusable(tmp_path, settings, message):
    """Everything that can be wrong with a host: named, with the next step; "auto" and "prefer-npu" compute."""
    printed, report = run(UNAVAILABLE, tmp_path, **settings)
    assert message in printed
    assert simulation.left_over(report) == {}
    assert report["calls"].get("aclFinalize", 0) == 0


@pytest.mark.parametrize(
    ("built", "message"),
    [
        ({"operators": None}, "the operator aclnnThnnFusedLstmCellBackward was not found (no such library in"),
        ({"missing": "phase one"}, "has no aclnnThnnFusedLstmCellBackwardGetWorkspaceSize"),
        ({"missing": "phase two"}, "has no aclnnThnnFusedLstmCellBackward)"),
    ],
)
def test_without_the_operator(tmp_path, built, message):
    """An installation that lacks the operator or one of its phases."""
    installed = cann_sim.build(tmp_path / "home", **built)
    printed, _ = run(UNAVAILABLE, tmp_path, installed)
    assert message in printed
    assert "install CANN 9.0 or later" in printed


FORWARD = """
from lstmcell_bwd import lstm_cell_forward
call = gates, gates, one
on_cpu = lstm_cell_forward(*call, device="cpu")
assert np.array_equal(lstm_cell_forward(*call).hy, on_cpu.hy)
assert np.array_equal(lstm_cell_forward(*call, device="prefer-npu").hy, on_cpu.hy)
device, reason = lstmcell_bwd.choose_forward_device(*call, device="prefer-npu")
assert device == "cpu"
out = np.full((1, 8), 7, np.float32)
for arrays in (call, [NPUArray.from_numpy(array) for array in call]):
    try:
        lstm_cell_forward(*arrays, out=(out, None, None) if arrays is call else None, device="npu")
    except lstmcell_bwd.NPUUnavailableError as error:
        assert lstmcell_bwd.npu.unavailable_reason(0, lstmcell_bwd.npu.FORWARD) in str(error)
        print(error)
assert lstmcell_bwd.npu.unavailable_reason(0, lstmcell_bwd.npu.FORWARD) in reason and (out == 7).all()
assert lstmcell_bwd.npu.is_available()
assert right(lstm_cell_backward(one, one, one, one, gates, device="npu"))
assert "has no aclnnThnnFusedLstmCell" in lstmcell_bwd.show_config("dict")["npu"]["forward operator"]
"""


def test_without_the_forward_operator(tmp_path):
    """The first beta of CANN 9 has the backward operator alone: that is used, and the forward pass says what it lacks.

    Host arrays stay on the CPU under "auto" and "prefer-npu".
    """
    printed, report = run(FORWARD, tmp_path, cann_sim.build(tmp_path / "home", missing="forward"))
    on_host, on_device = printed.splitlines()
    lacks = "has no aclnnThnnFusedLstmCellGetWorkspaceSize and no aclnnThnnFusedLstmCell); install CANN 9.0 or later"
    assert on_host.startswith(
        "`device` is an NPU, which cannot be used: the operator aclnnThnnFusedLstmCell was not found"
    )
    assert on_device.startswith(
        "the tensors are on npu:0, which cannot be used: the operator aclnnThnnFusedLstmCell was"
    )
    assert lacks in on_host
    assert lacks in on_device
    assert simulation.left_over(report) == {}


def test_forward_operator_in_another_library(tmp_path):
    """A custom package that lacks it is passed over, for the forward operator alone."""
    installed = cann_sim.build(tmp_path / "home", custom="default")
    package = installed.home / "opp/vendors/simulated/op_api/lib/libcust_opapi.so"
    backward_alone = cann_sim.build(tmp_path / "other", missing="forward", share=simulation.installation())
    package.unlink()
    package.write_bytes((backward_alone.home / "lib64/libopapi_nn.so").read_bytes())
    code = """
report = lstmcell_bwd.show_config("dict")["npu"]
print(report["operator library"], report["forward operator"])
"""
    printed, _ = run(code, tmp_path, installed)
    backward, forward = printed.split()
    assert backward.endswith("libcust_opapi.so")
    assert forward.endswith("libopapi_nn.so")


def test_library_that_does_not_load(tmp_path):
    """A file that is no library is named, with the loader's own words."""
    installed = cann_sim.build(tmp_path / "home", operators=None)
    (installed.home / "lib64" / "libopapi_nn.so").write_text("no library")
    printed, _ = run(UNAVAILABLE, tmp_path, installed)
    assert re.search(r"libopapi_nn\.so does not load: .*(invalid ELF header|file too short)", printed)


# ---- layouts of installations -------------------------------------------------------------------------------------

LIBRARY = """
assert right(lstm_cell_backward(one, None, one, one, gates, device="npu")) is not None
assert right(lstm_cell_backward(one, one, one, one, gates, device="npu"))
print(lstmcell_bwd.show_config("dict")["npu"]["operator library"])
"""


@pytest.mark.parametrize(
    ("built", "library"),
    [
        ({}, "lib64/libopapi_nn.so"),
        ({"operators": "libopapi.so", "old_release": True}, "lib64/libopapi.so"),
        ({"custom": "default"}, "opp/vendors/simulated/op_api/lib/libcust_opapi.so"),
        ({"custom": "environment"}, "custom/vendors/simulated/op_api/lib/libcust_opapi.so"),
    ],
)
def test_installations(tmp_path, built, library):
    """Split libraries, an older release without the newer names, and custom packages, which come first."""
    installed = cann_sim.build(tmp_path / "home", **built) if built else simulation.installation()
    printed, report = run(LIBRARY, tmp_path, installed)
    assert printed.strip().endswith(library)
    assert simulation.left_over(report) == {}


def test_unused_executor_of_an_older_release(tmp_path):
    """It cannot be destroyed there: it leaks, and nothing else does."""
    code = """
lstm_cell_backward(one, one, one, one, gates, device="npu")
import ctypes, os
runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
tensors = [NPUArray.from_numpy(a) for a in (one, one, one, one, gates, gates, one, gates[0])]
from lstmcell_bwd import aclnn
print(aclnn.aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(*tensors[:5], True, *tensors[5:])[0])
"""
    installed = cann_sim.build(tmp_path / "home", old_release=True)
    printed, report = run(code, tmp_path, installed)
    assert printed.strip() == "0"
    assert simulation.left_over(report) == {"executors": 1}


def test_phases_in_two_libraries(tmp_path):
    """A library that has one phase and finds the other in a dependency is passed over."""
    from lstmcell_bwd.npu import BACKWARD, opapi

    installed = cann_sim.build(
        tmp_path / "home", custom="default", missing="phase one", share=simulation.installation()
    )
    package = installed.home / "opp/vendors/simulated/op_api/lib/libcust_opapi.so"
    library, _ = opapi._first([package], (f"{BACKWARD}GetWorkspaceSize", BACKWARD))
    assert library is not None
    nn = installed.home / "lib64/libopapi_nn.so"
    library, notes = opapi._first([nn], (BACKWARD, "aclCreateTensor"))
    assert library is None
    assert "has only one of aclnnThnnFusedLstmCellBackward and aclCreateTensor itself" in notes


# ---- other users of ACL, forks, and the end -------------------------------------------------------------------------


def test_initialised_by_another_library(tmp_path):
    """100002 is success; ACL stays with who initialised it."""
    code = LIBRARY + 'print(lstmcell_bwd.show_config("dict")["npu"]["initialised by"])'
    printed, report = run(code, tmp_path, INITIALISED=1)
    assert printed.endswith("another library\n")
    assert report["calls"].get("aclFinalize", 0) == 0
    assert report["acl_references"] == 2
    assert simulation.left_over(report) == {}


def test_end_of_a_process(tmp_path):
    """Arrays, streams and executors that are alive at the end are given back by the exit hook, and nothing after it."""
    code = """
import threading, atexit
kept = [NPUArray.from_numpy(a) for a in (one, one, one, one, gates)]
assert right(lstm_cell_backward(*kept))
thread = threading.Thread(target=lambda: lstm_cell_backward(*kept))
thread.start()
stay = threading.Event()
def forever():
    lstm_cell_backward(one, one, one, one, gates, device="npu")
    stay.set()
    threading.Event().wait()
threading.Thread(target=forever, daemon=True).start()
stay.wait()
from lstmcell_bwd import aclnn
outputs = [NPUArray.from_numpy(a) for a in (gates, one, gates[0])]
unused = aclnn.aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(*kept, True, *outputs)
class AtTheEnd:
    def __del__(self):
        self.array = None
late = AtTheEnd()
late.array = kept[0]
cycle = [kept[1]]
cycle.append(cycle)
"""
    _, report = run(code, tmp_path)
    assert simulation.left_over(report) == {}


def test_after_the_exit_hook(tmp_path):
    """Hooks that run later find the NPU gone, with a reason, and the CPU at work."""
    code = """
import atexit
def late():
    assert lstmcell_bwd.npu.unavailable_reason() == "the interpreter is exiting"
    assert right(lstm_cell_backward(one, one, one, one, gates))
    try:
        kept.to_numpy()
    except lstmcell_bwd.NPUUnavailableError as error:
        print(error)
atexit.register(late)
kept = NPUArray.from_numpy(one)
"""
    printed, report = run(code, tmp_path)
    assert printed == "npu:0 cannot be used: the interpreter is exiting\n"
    assert simulation.left_over(report) == {}


def test_first_use_of_a_thread_in_an_exit_hook(tmp_path):
    """Before the NPU is given back; from Python 3.12 on no thread is started then, and the call says so."""
    code = """
import atexit, threading
thread = threading.Thread(target=lambda: lstm_cell_backward(one, one, one, one, gates, device="npu"))
thread.start()
thread.join()
def early():
    try:
        assert right(lstm_cell_backward(one, one, one, one, gates, device="npu"))
    except lstmcell_bwd.NPUUnavailableError as error:
        assert sys.version_info >= (3, 12) and "the NPU cannot be used: can't create new thread" in str(error)
    print("as it should be")
atexit.register(early)
"""
    printed, report = run(code, tmp_path)
    assert printed == "as it should be\n"
    assert simulation.left_over(report) == {}


@pytest.mark.parametrize("user", ["us", "another library"])
def test_forked_child(tmp_path, user):
    """A child of a process that uses ACL computes on the CPU, says why, and touches nothing of its parent's."""
    code = f"""
import os, gc
if {user == "us"}:
    kept = [NPUArray.from_numpy(a) for a in (one, one, one, one, gates)]
    assert right(lstm_cell_backward(*kept))
else:
    import acl
    acl.init()
child = os.fork()
if child == 0:
    status = 1
    try:
        assert right(lstm_cell_backward(one, one, one, one, gates))
        assert right(lstm_cell_backward(one, one, one, one, gates, device="prefer-npu"))
        assert "was forked from one that uses the NPU" in lstmcell_bwd.npu.unavailable_reason()
        assert "'spawn'" in lstmcell_bwd.npu.unavailable_reason()
        if {user == "us"}:
            try:
                kept[0].to_numpy()
            except lstmcell_bwd.NPUUnavailableError:
                pass
            else:
                raise AssertionError
            kept.clear()
            gc.collect()
        status = 0
    finally:
        if status:
            import traceback; traceback.print_exc()
            os._exit(1)
        sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert right(lstm_cell_backward(one, one, one, one, gates, device="npu"))
"""
    _, report = run(code, tmp_path)
    assert simulation.left_over(report) == {}


def test_fork_before_first_use():
    """A child of a process that never touched ACL may use it."""
    code = """
import os
child = os.fork()
if child == 0:
    print(right(lstm_cell_backward(one, one, one, one, gates, device="npu")), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    installed = simulation.installation()
    path = f"{installed.home}/python/site-packages"
    assert simulation.python(PRELUDE + code, path_first=path, **installed.environment()) == "True\n"


def test_torch_npu_imported_later(tmp_path):
    """A library imported after us registers its exit hook later, which therefore runs first and must not disturb."""
    code = """
kept = [NPUArray.from_numpy(a) for a in (one, one, one, one, gates)]
import acl, atexit
acl.rt.set_device(0)
atexit.register(lambda: acl.rt.reset_device(0))
assert right(lstm_cell_backward(*kept))
"""
    _, report = run(code, tmp_path)
    assert simulation.left_over(report) == {}


def test_import_is_cheap_and_touches_nothing():
    """Importing the package loads neither CANN nor ctypes nor the backend's own modules."""
    simulation.python(
        "import numpy, sys; before = set(sys.modules); import lstmcell_bwd\n"
        "new = set(sys.modules) - before\n"
        "assert not new & {'acl', 'ctypes', 'torch_npu', 'lstmcell_bwd.aclnn', 'lstmcell_bwd.reference'}, new\n"
        "assert not [name for name in new if name.startswith('lstmcell_bwd.npu.')]\n"
        "assert lstmcell_bwd.npu and lstmcell_bwd.aclnn and lstmcell_bwd.reference\n"
    )
