"""Processes, threads and signals: fork, spawn, concurrent calls, exits and interrupts, limits on threads."""

import contextlib
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from strategies import assert_same_bits, make_inputs, plain_call

import lstmcell_bwd
from lstmcell_bwd import lstm_cell_backward

LIMIT = 30

# What every script begins with: a call large enough for threads, its fingerprint, a count of the process's threads.
PRELUDE = """
import ctypes, hashlib, multiprocessing, os, signal, sys, threading, time, warnings
import numpy as np

# A process ends with its parent, also where that is killed before it can end its children.
def end_with(parent):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)    # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
def remember():
    global self
    self = os.getpid()
end_with(os.getppid())
os.register_at_fork(before=remember, after_in_child=lambda: end_with(self))

def tasks():
    return len(os.listdir("/proc/self/task"))

started = tasks()
import lstmcell_bwd

def inputs(seed=0, rows=2000, width=64):
    rng = np.random.default_rng(seed)
    arrays = [rng.random((rows, width), np.float32) for _ in range(4)]
    return *arrays, rng.random((rows, 4 * width), np.float32)

def digest(result):
    return hashlib.sha256(b"".join(x.tobytes() for x in result)).hexdigest()

def call(seed=0, num_threads=None):
    return digest(lstmcell_bwd.lstm_cell_backward(*inputs(seed), num_threads=num_threads))
"""


def run(tmp_path, body, before="", **environment):
    """Run a script in a process of its own, which must end well within the limit; returns its lines of output.

    It runs in a session of its own, and whatever of it is left at the end, forked children above all, is killed.
    """
    script = tmp_path / "script.py"
    script.write_text(before + PRELUDE + body)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LSTMCELL_BWD_", "OMP_"))}
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, script], env=variables | environment, stdout=out, stderr=err, start_new_session=True
        )
        try:
            for _ in range(2 * LIMIT):  # by halves of seconds: a machine that stands still makes no test fail
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                    break
            else:
                pytest.fail(f"the script has not ended after {LIMIT} seconds")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (out, err):
            file.seek(0)
        lines, errors = out.read(), err.read()
    assert process.returncode == 0, errors
    assert not errors, errors
    return lines.split("\n")[:-1]


def digests(seeds):
    """The fingerprints that scripts must print, computed here on one thread."""
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        arrays = [rng.random((2000, 64), np.float32) for _ in range(4)]
        result = plain_call([*arrays, rng.random((2000, 256), np.float32)])
        found.append(hashlib.sha256(b"".join(x.tobytes() for x in result)).hexdigest())
    return found


linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")


def test_a_script_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 1)
    with pytest.raises(pytest.fail.Exception, match="has not ended after 1 seconds"):
        run(tmp_path, "time.sleep(100)")


@linux
def test_nothing_is_left_of_a_killed_script(tmp_path):
    """The scripts of this file leave no orphans behind, whatever ends them."""
    body = f"""
child = os.fork()
if child == 0:
    os.setsid()    # out of reach of a signal to the group
    time.sleep(120)
with open({str(tmp_path / "child")!r}, "w") as file:
    file.write(str(child))
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(AssertionError):
        run(tmp_path, body)
    status = Path("/proc", (tmp_path / "child").read_text(), "status")
    deadline = time.monotonic() + LIMIT
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the child is alive"
        time.sleep(0.05)


# ---- fork and its relatives -----------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("parent", ["call(9, 2)", "pass", "call(9, 1)"], ids=["threaded", "import only", "one thread"])
def test_fork_pool(tmp_path, parent):
    """C37: a Pool after the parent ran threads; the child neither hangs nor starts a team, and has the same bits."""
    body = f"""
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork beside threads
def work(seed):
    got = call(seed), call(seed, 4)
    return got[0] if got[0] == got[1] else "differs"
{parent}
with multiprocessing.get_context("fork").Pool(2) as pool:
    for line in pool.map(work, range(4)):
        print(line)
print(call(9, 2))
"""
    assert run(tmp_path, body) == digests([0, 1, 2, 3, 9])


@linux
def test_raw_fork_again_and_again(tmp_path):
    """Ten children one after another, and a grandchild each; every child keeps to one thread."""
    body = """
warnings.simplefilter("ignore", DeprecationWarning)
wanted = call(0, 3)
for _ in range(10):
    child = os.fork()
    if child == 0:
        good = call(0, 3) == wanted and lstmcell_bwd.get_num_threads() == 1 and tasks() == 1
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if call(0, 3) == wanted else 1)
        _, status = os.waitpid(grandchild, 0)
        os._exit(0 if good and status == 0 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert call(0, 3) == wanted
print(wanted)
"""
    assert run(tmp_path, body) == digests([0])


@linux
def test_fork_during_a_call_of_another_thread(tmp_path):
    """The child's memory is a copy taken while the kernel was running in another thread."""
    body = """
warnings.simplefilter("ignore", DeprecationWarning)
wanted = call(0, 2)
stop = threading.Event()
def busy():
    while not stop.is_set():
        call(1, 2)
thread = threading.Thread(target=busy)
thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if call(0, 2) == wanted else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
stop.set()
thread.join()
print(wanted)
"""
    assert run(tmp_path, body) == digests([0])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(tmp_path, method):
    body = f"""
if __name__ == "__main__":
    call(9, 2)
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        for line in pool.starmap(call, [(0, 2), (1, 2), (2, 2)]):
            print(line)
"""
    assert run(tmp_path, body) == digests([0, 1, 2])


# ---- Python threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared inputs", "separate inputs"])
@pytest.mark.parametrize("number", [1, 2])
def test_eight_python_threads(isa, shared, number):
    """C41: concurrent calls, with results allocated and in separate outputs; nothing is shared behind the scenes."""
    calls = [make_inputs(300, 65, np.float32, 0 if shared else seed) for seed in range(8)]
    if shared:
        calls = calls[:1] * 8
    expected = [plain_call(inputs) for inputs in calls]
    barrier = threading.Barrier(8)

    def work(k):
        barrier.wait()
        out = tuple(np.empty_like(x) for x in expected[k])
        for turn in range(6):
            result = lstm_cell_backward(*calls[k], num_threads=number, out=out if turn % 2 else None)
            assert_same_bits(result, expected[k])

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, k) for k in range(8)]:
            future.result()


def test_mixed_dtypes_and_instruction_sets_at_once():
    """Threads that switch the instruction set while others compute: every call has the same bits."""
    calls = [make_inputs(100, 33, np.dtype(name), 5) for name in ("float32", "float64", "float16")]
    expected = [plain_call(inputs) for inputs in calls]
    stop = threading.Event()

    def switch():
        while not stop.is_set():
            for isa in ("baseline", "auto"):
                lstmcell_bwd.use_isa(isa)

    switcher = threading.Thread(target=switch)
    switcher.start()
    try:
        for _ in range(100):
            for inputs, wanted in zip(calls, expected, strict=True):
                assert_same_bits(lstm_cell_backward(*inputs, num_threads=2), wanted)
    finally:
        stop.set()
        switcher.join()
        lstmcell_bwd.use_isa("auto")


@linux
def test_calls_from_threads_that_end(tmp_path):
    """Each OpenMP team belongs to the thread that called; forty of them do not pile up."""
    body = """
wanted = call(0, 2)
results = []
before = tasks()
for _ in range(40):
    thread = threading.Thread(target=lambda: results.append(call(0, 2)))
    thread.start()
    thread.join()
assert set(results) == {wanted}, len(results)
for _ in range(100):
    if tasks() <= before + 2:
        break
    time.sleep(0.05)
assert tasks() <= before + 2, tasks()
print(wanted)
"""
    assert run(tmp_path, body) == digests([0])


# ---- exits and signals ----------------------------------------------------------------------------------------------


def test_interpreter_exit_during_a_call(tmp_path):
    """A daemon thread is inside the kernel when the interpreter goes away."""
    body = """
arrays = inputs(0, 20000, 256)
inside = threading.Event()
def busy():
    while True:
        inside.set()
        lstmcell_bwd.lstm_cell_backward(*arrays, num_threads=2)
threading.Thread(target=busy, daemon=True).start()
inside.wait()
time.sleep(0.05)
print("leaving", flush=True)
"""
    assert run(tmp_path, body) == ["leaving"]


def test_keyboard_interrupt_during_a_call(tmp_path):
    """Ctrl-C arrives while the kernel runs: KeyboardInterrupt afterwards, results whole, and the next call works."""
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job inherits that it is ignored
arrays = inputs(0, 8000, 256)
wanted = digest(lstmcell_bwd.lstm_cell_backward(*arrays))
out = tuple(np.full(shape, np.nan, np.float32) for shape in ((8000, 1024), (8000, 256), (1024,)))
main = threading.get_ident()
caught = 0
for _ in range(3):
    timer = threading.Timer(0.005, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        while True:
            lstmcell_bwd.lstm_cell_backward(*arrays, out=out)
    except KeyboardInterrupt:
        caught += 1
    timer.join()
    assert digest(out) == wanted
print(caught)
print(call(0))
"""
    assert run(tmp_path, body) == ["3", *digests([0])]


def test_the_lock_of_the_interpreter_is_released(tmp_path):
    """Another Python thread makes progress while a long call runs."""
    body = """
arrays = inputs(0, 40000, 256)
ticks = 0
done = False
def tick():
    global ticks
    while not done:
        ticks += 1
        time.sleep(0.0005)
thread = threading.Thread(target=tick)
thread.start()
before = ticks
for _ in range(5):
    lstmcell_bwd.lstm_cell_backward(*arrays, num_threads=1)
seen = ticks - before
done = True
thread.join()
assert seen > 5, seen
print("progress")
"""
    assert run(tmp_path, body) == ["progress"]


# ---- how many threads -----------------------------------------------------------------------------------------------

COUNT = """
before = tasks()
got = call(0{argument})
print(tasks() - before + 1)
print(got)
"""
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# Environment, statement before the call, argument of the call, threads that must be seen.
THREAD_RULES = {
    "OMP_NUM_THREADS=1": ({"OMP_NUM_THREADS": "1"}, "", "", 1),
    "OMP_NUM_THREADS=64 does not exceed the CPUs": ({"OMP_NUM_THREADS": "64"}, "", "", min(CPUS, 7)),
    "LSTMCELL_BWD_NUM_THREADS": ({"LSTMCELL_BWD_NUM_THREADS": "3"}, "", "", 3),
    "LSTMCELL_BWD_NUM_THREADS before OMP_NUM_THREADS": (
        {"LSTMCELL_BWD_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"},
        "",
        "",
        3,
    ),
    "set_num_threads before the environment": (
        {"LSTMCELL_BWD_NUM_THREADS": "3"},
        "lstmcell_bwd.set_num_threads(2)",
        "",
        2,
    ),
    "the argument before everything": ({"LSTMCELL_BWD_NUM_THREADS": "1"}, "lstmcell_bwd.set_num_threads(1)", ", 4", 4),
    "one CPU by affinity": ({}, "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "", 1),
    "threadpoolctl": (
        {},
        "import threadpoolctl; limit = threadpoolctl.threadpool_limits(1, user_api='openmp')",
        "",
        1,
    ),
    "by default the CPUs": ({}, "", "", min(CPUS, 7)),
}


@linux
@pytest.mark.parametrize("rule", THREAD_RULES)
def test_thread_limits_are_obeyed(tmp_path, rule):
    """C38: threads counted in the running process; the same bits in each setting."""
    environment, statement, argument, wanted = THREAD_RULES[rule]
    if "threadpoolctl" in rule:
        pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    body = f"{statement}\n" + COUNT.format(argument=argument)
    assert run(tmp_path, body, **environment) == [str(wanted), *digests([0])]


@linux
def test_a_limit_that_ends(tmp_path):
    """Outside the context manager the old number counts again, and threadpoolctl sees one OpenMP runtime of ours."""
    pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    body = """
import threadpoolctl
assert sum(entry["user_api"] == "openmp" for entry in threadpoolctl.threadpool_info()) == 1
free = lstmcell_bwd.get_num_threads()
with threadpoolctl.threadpool_limits(1, user_api="openmp"):
    print(lstmcell_bwd.get_num_threads())
assert lstmcell_bwd.get_num_threads() == free
"""
    assert run(tmp_path, body) == ["1"]


@linux
def test_small_work_stays_on_one_thread(tmp_path):
    body = """
before = tasks()
for _ in range(20):
    lstmcell_bwd.lstm_cell_backward(*inputs(0, 16, 64))
print(tasks() - before)
"""
    assert run(tmp_path, body, LSTMCELL_BWD_NUM_THREADS="4") == ["0"]


# Another /proc/self/cgroup and other files below /sys/fs/cgroup, in place before the package is imported.
OTHER_CONTROL_GROUP = """
import builtins, os
open_really = builtins.open
def open_there(path, *arguments, **options):
    if str(path).startswith(("/proc/self/cgroup", "/sys/fs/cgroup")):
        path = {root!r} + str(path)
    return open_really(path, *arguments, **options)
builtins.open = open_there
"""
HYBRID = "4:memory:/\n3:cpu,cpuacct:/a/b\n1:name=systemd:/\n0::/\n"
# What /proc/self/cgroup says, the files below /sys/fs/cgroup, the quota that these are.
CONTROL_GROUPS = {
    "version 2, half a CPU": ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "version 2, one CPU": ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}, 1),
    "version 2, two CPUs of another period": ("0::/a\n", {"a/cpu.max": "20000 10000\n"}, 2),
    "version 2, no limit": ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
    "version 2, tightest at the parent": (
        "0::/a/b\n",
        {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "100000 100000\n", "cpu.max": "max 100000\n"},
        1,
    ),
    "version 2, path of another namespace": ("0::/elsewhere/x\n", {"cpu.max": "100000 100000\n"}, 1),
    "version 2, name with a colon": ("0::/a:b\n", {"a:b/cpu.max": "100000 100000\n"}, 1),
    "version 1": (
        HYBRID,
        {"cpu/a/b/cpu.cfs_quota_us": "100000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"},
        1,
    ),
    "version 1, no limit": (HYBRID, {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "9\n"}, None),
    "no files": ("0::/a\n", {}, None),
    "no text": ("", {}, None),
    "a file of nonsense": ("0::/\n", {"cpu.max": "many\n"}, None),
    "a period of zero": ("0::/\n", {"cpu.max": "1 0\n"}, None),
}


def in_other_control_group(folder, group, files):
    """Write the files of a control group below a folder; returns what a script must begin with to see them."""
    for path, text in {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return OTHER_CONTROL_GROUP.format(root=str(folder))


@linux
@pytest.mark.parametrize("case", CONTROL_GROUPS)
def test_quota_of_the_control_group(tmp_path, case):
    """C38: the threads of a call are at most the quota, rounded to whole CPUs and at least one."""
    group, files, quota = CONTROL_GROUPS[case]
    before = in_other_control_group(tmp_path, group, files)
    body = "from lstmcell_bwd import _features\nprint(_features.cgroup_cpus())\n" + COUNT.format(argument="")
    found, threads, bits = run(tmp_path, body, before)
    assert found == str(None if quota is None else float(quota))
    usable = CPUS if quota is None else min(CPUS, max(1, int(quota + 0.5)))
    assert threads == str(min(usable, 7))
    assert [bits] == digests([0])


@linux
def test_a_quota_that_changes(tmp_path):
    """The files are read again after a second, and not at every call."""
    before = in_other_control_group(tmp_path, "0::/\n", {"cpu.max": "100000 100000\n"})
    body = """
from lstmcell_bwd import _features
os.sched_getaffinity = lambda process: range(8)
reads = 0
def count(event, arguments):
    global reads
    reads += event == "open" and str(arguments[0]).endswith("/proc/self/cgroup")
sys.addaudithook(count)
for _ in range(1000):
    assert _features.usable_cpus() == 1
assert 1 <= reads <= 100, reads
open("/sys/fs/cgroup/cpu.max", "w").write("300000 100000")
deadline = time.monotonic() + 20
while _features.usable_cpus() != 3:
    assert time.monotonic() < deadline
    time.sleep(0.1)
print("obeyed")
"""
    assert run(tmp_path, body, before) == ["obeyed"]


def test_a_real_control_group(tmp_path):
    """A quota of one CPU, given by the kernel; only root may make such groups, and not in every container."""
    group = Path("/sys/fs/cgroup/cpu") / f"lstmcell_bwd_test_{os.getpid()}"
    limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    if not group.parent.is_dir():
        group = Path("/sys/fs/cgroup") / group.name
        limits = {"cpu.max": "100000 100000"}
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group may be made here")
    try:
        for name, value in limits.items():
            try:
                (group / name).write_text(value)
            except OSError:
                pytest.skip("no control group may be made here")
        before = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
        assert run(tmp_path, COUNT.format(argument=""), before) == ["1", *digests([0])]
    finally:
        for _ in range(100):  # until the kernel has let go of the processes that ended
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


BAD_ENVIRONMENT = {
    "LSTMCELL_BWD_NUM_THREADS": (["x", "0", "-1", "1.5", " "], "an integer of at least 1"),
    "LSTMCELL_BWD_ISA": (["sse9", "AVX2", "baseline,avx2"], "'baseline', 'avx2'"),
    "LSTMCELL_BWD_DEVICE": (["gpu", "npu:x", "CPU"], "'auto', 'cpu', 'npu', 'npu:<index>' or 'prefer-npu'"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in BAD_ENVIRONMENT.items() for value in values]
)
def test_bad_environment(tmp_path, name, value):
    """An unknown value is an error that names the variable and lists what is allowed; import still works."""
    body = """
try:
    call()
except ValueError as error:
    assert isinstance(error, lstmcell_bwd.LSTMCellError)
    print(error)
"""
    (line,) = run(tmp_path, body, **{name: value})
    assert name in line
    assert BAD_ENVIRONMENT[name][1] in line
    assert f"got {value!r}" in line or f"got {value}" in line


@pytest.mark.parametrize("name", list(BAD_ENVIRONMENT))
def test_empty_environment_counts_as_unset(tmp_path, name):
    assert run(tmp_path, "print(call())", **{name: ""}) == digests([0])


@pytest.mark.parametrize("isa", ["baseline", "auto"])
def test_instruction_set_from_the_environment(tmp_path, isa):
    body = "print(lstmcell_bwd.get_isa())\nprint(call(0, 2))"
    chosen, *rest = run(tmp_path, body, LSTMCELL_BWD_ISA=isa)
    assert chosen == (isa if isa == "baseline" else lstmcell_bwd.get_isa())
    assert rest == digests([0])


# Statements that import a package with an OpenMP runtime of its own and run its team; its result is `theirs()`.
OTHER_RUNTIMES = {
    "torch": """
import torch
numbers = torch.arange(1 << 20, dtype=torch.float32)
def theirs():
    return (torch.sin(numbers).sum().item(), torch.get_num_threads())
""",
    "sklearn": """
from sklearn.cluster import KMeans
numbers = np.random.default_rng(0).random((20000, 8))
def theirs():
    return KMeans(4, n_init=1, max_iter=5, random_state=0).fit(numbers).inertia_
""",
}


@linux
@pytest.mark.parametrize("limit", [None, 1], ids=["all CPUs", "OMP_NUM_THREADS=1"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("other", OTHER_RUNTIMES)
def test_beside_another_openmp_runtime(tmp_path, other, order, limit):
    """C38: turn by turn with another runtime's team: same bits and numbers on both sides, one team of ours at most."""
    if importlib.util.find_spec(other) is None:
        pytest.skip(f"{other} is not installed")
    first = "" if order == "before" else "call(0)"
    body = f"""
{first}
{OTHER_RUNTIMES[other]}
wanted = theirs()
before = tasks()
got = {{call(0) for _ in range(5)}}
ours = tasks() - before
for _ in range(5):
    assert theirs() == wanted
    got.add(call(0))
print(ours, tasks() - before)
print(*got)
"""
    threads, bits = run(tmp_path, body, **({} if limit is None else {"OMP_NUM_THREADS": str(limit)}))
    started, in_all = (int(number) for number in threads.split())
    assert started <= (min(CPUS, 7) if limit is None else limit) - 1
    assert in_all == started
    assert [bits] == digests([0])
