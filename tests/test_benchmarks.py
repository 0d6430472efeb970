"""The benchmarks: each runs and does what its name says; the limit moves all bytes; the measuring rule is kept."""

import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import simulation

import lstmcell_bwd
from lstmcell_bwd import reference

ROOT = pathlib.Path(__file__).resolve().parents[1]
# At the end: the package under test is the installed one.
sys.path.append(str(ROOT))

from benches import dashboard, data, facts, instructions, limit, measure  # noqa: E402
from benches.benchmarks import calls, common, imports, memory, npu, quality  # noqa: E402
from benches.peers import run as peers_run  # noqa: E402
from benches.peers import table as peers_table  # noqa: E402
from benches.peers import worker as peers_worker  # noqa: E402

MODULES = (calls, imports, memory, npu, quality)
KINDS_OF_BENCHMARK = ("time_", "timeraw_", "track_", "peakmem_")
# What a size of the suite is replaced by here.
SMALL = "9x40"


# ---- the limit -----------------------------------------------------------------------------------------------------


def misaligned(shape, dtype, offset):
    """Allocate an array that begins `offset` bytes behind a 64-byte line, between guard bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = np.full(size + 256, 0xA5, np.uint8)
    start = -block.ctypes.data % 64 + 64 + offset
    inside = block[start : start + size]
    return inside.view(dtype).reshape(shape), lambda: (np.delete(block, slice(start, start + size)) == 0xA5).all()


def random_bytes(rng, shape, dtype, offset):
    array, _ = misaligned(shape, dtype, offset)
    array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
    return array


@pytest.mark.parametrize("name", limit.VARIANTS)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 32), (2, 1000), (3, 2100), (64, 16)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_limit_moves_every_byte_once(name, dtype, shape, num_threads):
    rng = np.random.default_rng(5)
    rows, hidden = shape
    for offset in (0, 16, np.dtype(dtype).itemsize):
        planes = [random_bytes(rng, shape, dtype, 16 * k) for k in range(4)]
        gates = random_bytes(rng, (rows, 4 * hidden), dtype, offset)
        before = [array.copy() for array in (*planes, gates)]
        grad_gates, gates_guard = misaligned((rows, 4 * hidden), dtype, offset)
        grad_cx, cx_guard = misaligned(shape, dtype, 48 - offset)
        runs = limit.contenders(*planes, gates, grad_gates, grad_cx, num_threads=num_threads)
        runs[name](1)
        np.testing.assert_array_equal(grad_gates, gates)
        np.testing.assert_array_equal(grad_cx, planes[0] ^ planes[1] ^ planes[2] ^ planes[3])
        assert gates_guard() and cx_guard()
        for array, copy in zip((*planes, gates), before, strict=True):
            np.testing.assert_array_equal(array, copy)
        # Every input bit reaches one output bit, so the checksums of what is read and written agree.
        checksum = np.bitwise_xor.reduce([np.bitwise_xor.reduce(array, axis=None) for array in before])
        written = np.bitwise_xor.reduce(grad_gates, axis=None) ^ np.bitwise_xor.reduce(grad_cx, axis=None)
        assert checksum == written


def test_limit_moves_as_often_as_told():
    inputs, out = data.inputs(4, 16), data.outputs(4, 16)
    runs = limit.contenders(*inputs, *out[:2])
    for run in runs.values():
        out[0][...] = 0
        run(0)
        assert not out[0].any()
        run(3)
        np.testing.assert_array_equal(out[0], inputs.gates)


def test_limit_takes_the_best_instruction_set_of_this_cpu():
    assert limit.instruction_set() in lstmcell_bwd._features.runnable_isas()


@pytest.mark.parametrize(
    ("position", "bad"), [(0, np.ones((4, 8), np.float64)), (4, np.ones((4, 8), np.float32)), (6, np.ones((8, 4)).T)]
)
def test_limit_refuses_other_arrays(position, bad):
    arrays = [*data.inputs(4, 8), *data.outputs(4, 8)[:2]]
    arrays[position] = bad
    with pytest.raises(ValueError, match=r"`\w+` must be a C-contiguous array of shape .*, got"):
        limit.contenders(*arrays)


def test_limit_says_why_it_cannot_be_built(monkeypatch, tmp_path):
    source = tmp_path / "benches" / "limit.c"
    source.parent.mkdir()
    source.write_text("this is not C")
    monkeypatch.setattr(limit, "SOURCE", source)
    with pytest.raises(limit.LimitUnavailableError, match=r"limit\.c does not compile"):
        limit._compiled([])


# ---- the measuring rule --------------------------------------------------------------------------------------------


class FakeClock:
    """A clock that only the contenders move."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def contender(self, name, *costs):
        """Make a contender whose calls take the given times in turn."""
        costs = itertools.cycle(costs)

        def run(number):
            self.log.append((name, number))
            for _ in range(number):
                self.now += next(costs)

        return run


def test_a_turn_is_one_untimed_call_and_the_median_of_three():
    clock = FakeClock()
    take = measure.turn(clock.contender("a", 100.0, 1.0, 9.0, 2.0), clock=clock)
    assert take() == 2.0
    assert clock.log == [("a", 1)] * 4
    assert take() == 2.0
    assert clock.log == [("a", 1)] * 8


def test_short_calls_are_repeated_between_two_readings_of_the_clock():
    clock = FakeClock()
    take = measure.turn(clock.contender("a", 2.0**-20), least_seconds=2.0**-10, clock=clock)
    assert take() == 2.0**-20
    numbers = [number for _, number in clock.log]
    assert numbers[-3:] == [numbers[-1]] * 3
    assert numbers[-1] * 2.0**-20 >= 2.0**-10
    seen = len(numbers)
    take()
    assert len(clock.log) == seen + 4  # how often is known by now


def test_a_clock_that_stands_still_is_no_endless_loop():
    clock = FakeClock()
    clock.contender("a", 0.0)
    take = measure.turn(clock.contender("a", 0.0, 0.0, 0.0, 1.0), clock=clock)
    assert take() > 0


@pytest.mark.parametrize("timed", [0, 1, 2])
def test_fewer_than_three_timed_calls_are_refused(timed):
    with pytest.raises(ValueError, match=f"`timed` must be at least 3, got {timed}"):
        measure.turn(print, timed=timed)


def test_contenders_take_turns_in_rotating_order():
    order = []
    turns = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    measured = measure.take_turns(turns)
    assert "".join(order) == "abcbcacababcbca"
    assert measured.seconds["a"] == [1.0, 6.0, 8.0, 10.0, 15.0]


def test_ratios_are_formed_within_a_round():
    measured = measure.Measured({"a": [2, 4, 6, 8, 30], "b": [1, 4, 2, 2, 3], "c": [9] * 5})
    assert measured.ratio("a", "b") == (1, 3)
    assert measured.ratio("a", "c", "b") == (1, 3)
    assert measured.fastest("abc") == "b"
    assert measured.time("a") == (2, 6)


def test_repeat_calls_as_often_as_told():
    seen = []
    measure.repeat(lambda *a, **k: seen.append((a, k)), 1, 2, x=3)(4)
    assert seen == [((1, 2), {"x": 3})] * 4


# ---- the data ------------------------------------------------------------------------------------------------------


def test_data_is_the_published_one():
    """Published figures depend on it: kinds may be added, never changed."""
    inputs = data.inputs(2, 3)
    sums = [float(array.astype(np.float64).sum()) for array in inputs]
    assert sums == pytest.approx([-2.377199, -0.550121, 2.466645, 0.293990, 9.157173], abs=2e-6)
    assert len({array.ctypes.data for array in inputs}) == 5


@pytest.mark.parametrize("dtype", data.DTYPES[:3])
def test_kinds_of_data(dtype):
    assert all(np.isfinite(array).all() for array in data.inputs(20, 30, dtype))
    assert (np.isnan(data.inputs(20, 30, dtype, "nan").grad_hy).sum(axis=1) == 1).all()
    subnormal = data.inputs(20, 30, dtype, "subnormal")
    for gradient in (subnormal.grad_hy, subnormal.grad_cy):
        assert (np.abs(gradient) < reference.limits(dtype).smallest_normal).all()
        assert np.count_nonzero(gradient) > 500
    assert (np.abs(data.inputs(20, 30, dtype, "large_cell").cy) == 50).all()
    saturated = np.abs(data.inputs(20, 30, dtype, "saturated").cy)
    assert (saturated >= 9).all() and (saturated <= 20).all()
    assert all(array.dtype == dtype for array in (*subnormal, *data.outputs(2, 3, dtype)))


@pytest.mark.parametrize(("name", "arguments"), [("dtype", ("int8",)), ("kind", ("float32", "odd"))])
def test_unknown_data_is_refused(name, arguments):
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*, got"):
        data.inputs(2, 3, *arguments)


# ---- the asv suite -------------------------------------------------------------------------------------------------


def benchmarks():
    """Find every benchmark as asv does: methods of classes, by the beginning of their names."""
    for module in MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                for name in vars(kind):
                    if name.startswith(KINDS_OF_BENCHMARK):
                        yield kind, name


def identity(benchmark):
    kind, name = benchmark
    return f"{kind.__module__.rsplit('.', 1)[1]}.{kind.__name__}.{name}"


def combinations(kind):
    """Return the combinations of a benchmark's parameters."""
    return list(itertools.product(*getattr(kind, "params", ())))


@pytest.fixture
def small(monkeypatch):
    """Let every size of the suite stand for a small one, and measure briefly."""
    real = common.shape

    def shape(size):
        return real(size if size == "1x8" else SMALL)

    for module in (common, quality):
        monkeypatch.setattr(module, "shape", shape)
    monkeypatch.setattr(quality.measure, "turn", lambda run, real=measure.turn: real(run, least_seconds=1e-6))
    monkeypatch.setattr(calls.Sequence, "bytes", 1 << 16)
    caches = common._arrays, calls.Layouts.inputs, calls.Sequence.steps
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def run_benchmark(kind, name, parameters):
    """Run one benchmark as asv does; return its value."""
    instance = kind()
    if hasattr(instance, "setup"):
        instance.setup(*parameters)
    try:
        return getattr(instance, name)(*parameters)
    finally:
        if hasattr(instance, "teardown"):
            instance.teardown(*parameters)


@pytest.mark.parametrize("benchmark", list(benchmarks()), ids=identity)
def test_each_benchmark_runs(benchmark, small):
    kind, name = benchmark
    skipped = []
    for parameters in combinations(kind):
        try:
            value = run_benchmark(kind, name, parameters)
        except common.SkipNotImplemented as reason:
            skipped.append(str(reason))
            continue
        if name.startswith("track_"):
            assert isinstance(value, float) and np.isfinite(value) and value >= 0
        elif name.startswith("timeraw_"):
            subprocess.run([sys.executable, "-c", value], check=True)
    assert all(skipped)
    if kind.__module__ != npu.__name__:
        runs = len(combinations(kind)) - len(skipped)
        assert runs > 0, skipped


def test_suite_is_complete():
    names = [identity(benchmark) for benchmark in benchmarks()]
    assert len(set(names)) == len(names) >= 15
    assert not any("-" in name for name in names)
    for kind, _ in benchmarks():
        assert len(getattr(kind, "params", ())) == len(getattr(kind, "param_names", ()))
        assert all(isinstance(value, str | int) for values in getattr(kind, "params", ()) for value in values)


def test_every_track_has_a_unit():
    for kind, name in benchmarks():
        if name.startswith("track_"):
            assert getattr(getattr(kind, name), "unit", getattr(kind, "unit", ""))


@pytest.mark.parametrize("layout", calls.Layouts.params[1])
def test_layouts_are_what_their_names_say(layout):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    other = calls.Layouts.laid_out(array, layout)
    np.testing.assert_array_equal(other, array)
    found = {
        "contiguous": other.flags.c_contiguous and other.dtype.isnative,
        "row stride": other.strides == (48, 4),
        "transposed": other.flags.f_contiguous,
        "reversed": other.strides == (24, -4),
        "byte-swapped": not other.dtype.isnative,
    }
    assert found[layout]


def test_a_sequence_has_arrays_of_its_own(small):
    steps = calls.Sequence.steps("64x512")
    used = [array for inputs, out in steps for array in (*inputs, *out)]
    assert sum(array.nbytes for array in used) >= calls.Sequence.bytes
    assert len({array.ctypes.data for array in used}) == len(used)


def test_outputs_are_what_their_names_say(small):
    calls_of = {}
    for outputs in calls.Outputs.params[1]:
        instance = calls.Outputs()
        instance.setup("256x1024", outputs)
        calls_of[outputs] = instance.call
    exact = reference.lstm_cell_backward(*calls_of["out"].args[:5])
    results = {name: call() for name, call in calls_of.items()}
    for result in results.values():
        np.testing.assert_allclose(result.grad_gates, exact.grad_gates, rtol=1e-4, atol=1e-6)
    assert results["out"].grad_gates is calls_of["out"].keywords["out"][0]
    assert calls_of["allocating"].keywords["out"] is None
    assert results["in place"].grad_gates is calls_of["in place"].args[4]
    assert results["in place"].grad_cx is calls_of["in place"].args[2]
    assert results["without bias"].grad_bias is None
    # One sample must not see the results of the one before it.
    assert calls.Outputs.number == 1
    np.testing.assert_array_equal(common.arrays("256x1024")[0].gates, calls_of["out"].args[4])


def test_grid_calls_are_what_their_names_say(small):
    for size, dtype, threads in combinations(calls.Grid):
        instance = calls.Grid()
        instance.setup(size, dtype, threads)
        assert instance.call.keywords["num_threads"] == threads
        assert instance.call.args[0].dtype.name == dtype
    assert common.shape("256x1024") == (9, 40)  # the fixture's; the real one below


def test_sizes_are_what_their_names_say():
    assert [common.shape(size) for size in ("32x128", "1x65536")] == [(32, 128), (1, 65536)]
    assert common.arrays("3x7")[0].gates.shape == (3, 28)
    assert common.arrays("3x7") is common.arrays("3x7", "float32", "ordinary")


def test_instruction_sets_are_those_asked_for(small):
    for parameters in combinations(calls.InstructionSets):
        instance = calls.InstructionSets()
        try:
            instance.setup(*parameters)
        except common.SkipNotImplemented:
            continue
        assert lstmcell_bwd.get_isa() == parameters[2]
        instance.teardown(*parameters)
    assert lstmcell_bwd.get_isa() != "baseline" or lstmcell_bwd._features.runnable_isas() == ("baseline",)


def test_special_values_reach_the_call(small):
    instance = calls.SpecialValues()
    instance.setup("256x1024", "float32", "nan")
    assert np.isnan(instance.call.args[0]).any(axis=1).all()
    assert np.isnan(instance.call().grad_cx).any()


def test_small_shapes_are_those_of_flaggems():
    instance = calls.SmallShapes()
    instance.setup("default")
    shapes = {call.args[2].shape for call in instance.calls}
    assert len(shapes) == len(instance.calls) == 25
    assert (16, 64) in shapes and (1, 4) in shapes
    assert {call.keywords["num_threads"] for call in instance.calls} == {None}


def test_import_time_is_that_of_the_statement():
    assert imports.seconds_after("pass", "time.sleep(0.05)") >= 0.05
    assert imports.seconds_after("import numpy", "import numpy") < 0.05


def test_tracked_errors_are_within_the_bounds():
    for dtype, values, output in combinations(quality.Error):
        if dtype != "bfloat16":
            error = run_benchmark(quality.Error, "track_largest_error", (dtype, values, output))
            assert 0 < error <= 2 * getattr(reference.bounds(dtype), output)


def test_tracked_ratios(monkeypatch):
    """Fractions and gains come out of the right quotients."""

    def fake(turns, rounds=5):
        seconds = {"ours": 4.0, "numpy": 12.0, "1 ours": 4.0, "2 ours": 2.5, "1024": 6.0, "1000": 5.0}
        seconds |= dict.fromkeys(limit.VARIANTS, 3.0) | {"limit: flat": 2.0}
        seconds |= {f"1 {name}": 3.0 for name in limit.VARIANTS} | {f"2 {name}": 2.5 for name in limit.VARIANTS}
        seconds |= {"1 limit: rows": 2.0, "2 limit: flat": 1.25}
        return measure.Measured({name: [seconds[name]] * rounds for name in turns})

    monkeypatch.setattr(quality.measure, "take_turns", fake)
    monkeypatch.setattr(quality, "shape", lambda size: (2, 3))
    monkeypatch.setattr(common, "shape", lambda size: (2, 3))
    common._arrays.cache_clear()
    assert quality.Limit().track_fraction_of_limit("32x128", 1) == 0.5
    assert quality.NumPyExpression().track_speedup("32x128", 1) == 3
    assert quality.SecondThread().track_gain("1x65536") == pytest.approx((4 / 2.5) / (2 / 1.25))
    assert quality.Neighbours().track_1024_over_neighbour("1000") == pytest.approx(6 / 5 * 1000 / 1024)
    common._arrays.cache_clear()


def test_npu_benchmarks_are_skipped_with_the_reason():
    if lstmcell_bwd.npu.is_available():
        pytest.skip("there is an NPU")
    for kind in (npu.NPU, npu.NPUCrossover):
        with pytest.raises(common.SkipNotImplemented, match="acl"):
            kind().setup(*combinations(kind)[0])


def test_npu_benchmarks_run_on_the_simulation(small):
    with simulation.backend():
        instance = npu.NPU()
        instance.setup("32x128", "float32")
        inputs, out = common.arrays("32x128")
        out[0][...] = 0
        resident = instance.resident()
        simulation.assert_right(resident, inputs)
        assert all(isinstance(array, lstmcell_bwd.npu.NPUArray) for array in resident)
        instance.time_with_copies("32x128", "float32")
        simulation.assert_right(out, inputs)
        assert instance.track_copies_over_cpu("32x128", "float32") > 0
        crossing = run_benchmark(npu.NPUCrossover, "track_crossover", ("float16",))
        assert np.isnan(crossing) or crossing == 9 * 40
        del instance, resident


def test_facts_name_what_a_figure_depends_on():
    known = facts.facts()
    assert all(known.values())
    assert known["instruction_set"] == lstmcell_bwd.get_isa()
    assert known["numpy"] == np.__version__


# ---- other systems -------------------------------------------------------------------------------------------------


@pytest.fixture
def peers():
    """Start the contenders that need nothing but NumPy, and one that is not there."""
    workers = peers_run.start(("limit", "numpy"), peers_run.interpreters([]), 1)
    yield workers
    for worker in workers:
        worker.close()


def test_contenders_take_turns_in_processes_of_their_own(peers, monkeypatch):
    assert len({worker.process.pid for worker in peers}) == 2  # the limit is in this package's
    row, versions, missing = peers_run.measure_size(peers, "8x32")
    assert missing == {}
    assert versions == {"numpy": np.__version__}
    assert {"lstmcell_bwd", "NumPy", "limit", *limit.VARIANTS} == set(row)
    assert row["lstmcell_bwd"]["over_ours"] == [1, 1]
    assert all(smallest > 0 for smallest, _ in (figures["seconds"] for figures in row.values()))


def test_a_system_that_is_not_installed_is_left_out(peers, monkeypatch, tmp_path):
    (tmp_path / "numexpr.py").write_text("raise ModuleNotFoundError('no numexpr here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = peers_run.Worker(("numexpr",), sys.executable, 1)
    try:
        row, _, missing = peers_run.measure_size([*peers, worker], "4x8")
    finally:
        worker.close()
    assert missing == {"numexpr": "ModuleNotFoundError: no numexpr here"}
    assert "NumPy" in row


def test_a_contender_that_dies_is_told_apart():
    worker = peers_run.Worker(("numpy",), sys.executable, 1)
    try:
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(peers_run.ContenderError, match="the process ended with -9"):
            worker.ask(turn="after the end")
    finally:
        worker.close()


def test_nothing_is_measured_without_this_package(peers):
    with pytest.raises(peers_run.ContenderError, match="not among the contenders"):
        peers_run.measure_size(peers[1:], "4x8")


@pytest.fixture
def peers_command(monkeypatch, tmp_path, capsys):
    """Run the command of the comparison with a results folder of its own; status, results and what it printed."""
    monkeypatch.setattr(peers_run, "RESULTS", tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["run", "here", "--only", "numpy", *words])
        status = peers_run.main()
        file = tmp_path / "here.json"
        return status, json.loads(file.read_text()) if file.exists() else None, capsys.readouterr().out

    return run


def test_comparison_is_resumed_size_by_size(peers_command, monkeypatch, tmp_path):
    brief = ("--threads", "1")
    status, first, _ = peers_command(*brief, "--sizes", "4x8")
    assert status == 0
    assert set(first["rows"][0]["contenders"]) == {"lstmcell_bwd", "NumPy"}
    status, second, printed = peers_command(*brief, "--sizes", "4x8", "2x8", "--resume")
    assert status == 0
    assert [row["size"] for row in second["rows"]] == ["4x8", "2x8"]
    assert second["rows"][0] == first["rows"][0]
    assert "4x8" not in printed
    _, third, _ = peers_command(*brief, "--sizes", "2x8")
    assert [row["size"] for row in third["rows"]] == ["2x8"]
    (tmp_path / "here.json").write_text(json.dumps(third | {"facts": third["facts"] | {"numpy": "1.0"}}))
    with pytest.raises(SystemExit) as stopped:
        peers_command(*brief, "--sizes", "4x8", "--resume")
    assert stopped.value.code == 2


def test_comparison_fails_where_this_package_cannot_run(peers_command, monkeypatch):
    def fail(workers, size):
        raise peers_run.ContenderError(size)

    monkeypatch.setattr(peers_run, "measure_size", fail)
    status, results, printed = peers_command("--threads", "1", "--sizes", "4x8")
    assert status == 1
    assert results is None
    assert "4x8, 1 thread(s): not measured: 4x8" in printed


def test_interpreters_of_other_systems():
    found = peers_run.interpreters(["tensorflow=sh", sys.executable, "numpy=sh"])
    assert found["tensorflow"] == found["numpy"] == "sh"
    assert {found[name] for name in found.keys() - {"tensorflow", "numpy"}} == {sys.executable}
    found = peers_run.interpreters(["sh"])
    assert {name for name, python in found.items() if python == "sh"} == found.keys() - set(peers_run.HERE)
    for bad in ("nobody=sh", "limit=sh", "/no/such/python"):
        with pytest.raises(ValueError, match=f"--python must .*, got {bad}"):
            peers_run.interpreters([bad])


def test_results_are_named_after_the_machine(monkeypatch):
    monkeypatch.setattr(peers_run, "facts", lambda: {"cpu": "Intel(R) Xeon(R) Processor @ 2.60GHz"})
    assert peers_run.machine_name() == "intel-xeon-processor-2-60ghz"


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_wrong_results_of_a_contender_are_refused(wrong):
    inputs, out = data.inputs(6, 8), data.outputs(6, 8)
    data.numpy_backward(*inputs, out)
    peers_worker.check(out, inputs)
    peers_worker.check((*out[:2], None), inputs)
    out[wrong].flat[3] += 0.5 * np.abs(out[wrong]).max()
    with pytest.raises(ValueError, match="must be the operator's within"):
        peers_worker.check(out, inputs)
    out[wrong].flat[3] = np.nan
    with pytest.raises(ValueError, match="must be the operator's within"):
        peers_worker.check(out, inputs)


RESULTS = {
    "facts": facts.facts(),
    "versions": {"numpy": "2.0"},
    "missing": {"jax": "ModuleNotFoundError: No module named 'jax'"},
    "rows": [
        {
            "size": "64x512",
            "threads": 2,
            "contenders": {
                "lstmcell_bwd": {"seconds": [1e-5, 1.25e-5], "over_ours": [1, 1], "over_limit": [1.25, 1.5]},
                "NumPy": {"seconds": [1e-4, 1e-4], "over_ours": [7.5, 8.0]},
                "Other": {"seconds": [1e-5, 1e-5], "over_ours": [0.7, 0.8]},
                "limit": {"seconds": [8e-6, 8e-6], "over_ours": [0.6, 0.6]},
            },
        },
        {
            "size": "32x128",
            "threads": 1,
            "contenders": {
                "lstmcell_bwd": {"seconds": [1e-3, 1e-3], "over_ours": [1, 1]},
                "NumPy": {"seconds": [1e-3, 1.5e-3], "over_ours": [1.0, 1.5]},
            },
        },
    ],
}


def test_table_keeps_lost_cases():
    lines = peers_table.table(RESULTS).splitlines()
    assert lines[0] == "| batch x hidden | threads | lstmcell_bwd | over the limit | NumPy | Other |"
    assert lines[2] == "| 32x128 | 1 | 1 ms | - | 1.5 (1.0) | - |"
    assert lines[3] == "| 64x512 | 2 | 12.5 µs | 1.50 (1.25) | 8.0 (7.5) | **0.8 (0.7)** |"
    assert "jax (ModuleNotFoundError" in lines[-1]
    assert RESULTS["facts"]["commit"] in "".join(lines)


def test_short_table_keeps_lost_cases():
    lines = peers_table.short_table(RESULTS).splitlines()
    assert lines[0] == "| batch x hidden | lstmcell_bwd | over the limit | NumPy | Other |"
    assert lines[2] == "| 64x512 | - / 12.5 µs | - / 1.50 | - / 8.0 | - / **0.8** |"
    assert lines[3] == "| 32x128 | 1 ms / - | - / - | 1.5 / - | - / - |"
    assert "Threads: 1 / 2. " in "".join(lines)
    assert "jax (ModuleNotFoundError" in lines[-1]


def test_table_goes_between_the_markers():
    text = f"before\n<!-- peers:begin old -->\nold\n{peers_table.END}\nafter\n"
    new = peers_table.replaced(text, "new-one", "new")
    assert new == f"before\n<!-- peers:begin new-one -->\nnew\n{peers_table.END}\nafter\n"
    assert peers_table.replaced(new, "new-one", "new") == new
    assert peers_table.named(new) == "new-one"
    for bad in ("nothing", text + text, f"{peers_table.END}<!-- peers:begin old -->"):
        with pytest.raises(ValueError, match="the text must have one line"):
            peers_table.replaced(bad, "new-one", "new")


def test_pages_say_what_their_results_files_do():
    assert peers_table.write(check=True) == []


def test_pages_are_written(monkeypatch, tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps(RESULTS))
    (tmp_path / "benches").mkdir()
    for page in peers_table.PAGES:
        (tmp_path / page).write_text(f"<!-- peers:begin machine -->\n{peers_table.END}\n")
    monkeypatch.setattr(peers_table, "ROOT", tmp_path)
    monkeypatch.setattr(peers_table, "RESULTS", tmp_path)
    assert peers_table.write(check=True) == list(peers_table.PAGES)
    assert peers_table.write("machine") == list(peers_table.PAGES)
    assert peers_table.write(check=True) == []
    for page, make in peers_table.PAGES.items():
        assert make(RESULTS) in (tmp_path / page).read_text()


# ---- instruction counts --------------------------------------------------------------------------------------------

PROFILE = """version: 1
events: Ir
summary: 130

ob=(1) /lib/_kernel_avx2.so
fl=(1) kernel.c
fn=(1) run
10 40
+1 2
cob=(2) /lib/libc.so.6
cfn=(9) memcpy
calls=3 0
+2 60
* 8

ob=(2)
fn=(9)
1 70

ob=(1)
fn=(3) round_bias
20 5
-3 5
"""


def test_instructions_of_the_library_alone_are_summed():
    assert instructions.instructions_of(PROFILE, "_kernel_avx2.") == 40 + 2 + 8 + 5 + 5
    assert instructions.instructions_of(PROFILE, "libc") == 70
    assert instructions.instructions_of(PROFILE, "nothing") == 0


@pytest.mark.parametrize(
    ("counts", "recorded", "status", "words"),
    [
        ({"a": 1030}, {"a": 1000}, instructions.WITHIN, "a: 1030 instructions"),
        ({"a": 1031}, {"a": 1000}, instructions.SLOWER, "SLOWER a"),
        ({"a": 900}, {"a": 1000}, instructions.WITHIN, "record the better count"),
        ({"a": 1000}, {}, instructions.COULD_NOT_MEASURE, "could not measure a: it is not recorded"),
        ({}, {"a": 1000}, instructions.COULD_NOT_MEASURE, "could not measure a: this CPU does not run it"),
        ({"a": 2000, "b": 1}, {"a": 1000}, instructions.SLOWER, "SLOWER a"),
    ],
)
def test_slower_and_not_measured_are_told_apart(counts, recorded, status, words):
    found, lines = instructions.compare(counts, recorded)
    assert found == status
    assert words in "\n".join(lines)
    assert ("SLOWER" in "\n".join(lines)) == (status == instructions.SLOWER)


@pytest.fixture
def guard(monkeypatch, tmp_path, capsys):
    """Run the guard with a stand-in for valgrind (None: there is none) and recorded counts; status and last line."""

    def run(valgrind, recorded):
        (tmp_path / "recorded.json").write_text(json.dumps(recorded))
        if valgrind is not None:
            (tmp_path / "valgrind").write_text(f"#!/bin/sh\n{valgrind}\n")
            (tmp_path / "valgrind").chmod(0o755)
        monkeypatch.setattr(instructions, "RECORDED", tmp_path / "recorded.json")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["instructions"])
        status = instructions.main()
        return status, capsys.readouterr().out.splitlines()[-1]

    return run


def test_what_cannot_be_measured_is_said(guard):
    assert guard(None, {instructions.key(): {}}) == (
        instructions.COULD_NOT_MEASURE,
        "could not measure: valgrind is not installed",
    )
    status, line = guard("exit 9", {"other versions": {"baseline 32x128": 1}})
    assert status == instructions.COULD_NOT_MEASURE
    assert line.startswith("could not measure: no counts are recorded for these versions")


@pytest.mark.parametrize(
    ("valgrind", "words"),
    [("echo not here >&2; exit 9", "valgrind failed: not here"), ("exit 0", "callgrind saw 0 calls of")],
)
def test_a_guard_that_counts_nothing_is_broken(guard, valgrind, words):
    status, line = guard(valgrind, {instructions.key(): {"baseline 32x128": 1}})
    assert status == instructions.BROKEN
    assert line.startswith(f"BROKEN: {words}")


def test_the_installed_package_comes_before_the_sources(tmp_path):
    (tmp_path / "lstmcell_bwd").mkdir()
    (tmp_path / "lstmcell_bwd" / "__init__.py").touch()
    command = [sys.executable, "-c", "import benches, lstmcell_bwd; print(lstmcell_bwd.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "lstmcell_bwd" / "__init__.py")


def test_recorded_counts_are_of_every_size():
    recorded = json.loads((ROOT / "benches" / "instructions.json").read_text())
    for counts in recorded.values():
        assert {name.split()[1] for name in counts} == set(instructions.SIZES)
        assert all(count > 0 for count in counts.values())


# ---- the dashboard -------------------------------------------------------------------------------------------------

PAGE = """<script src="https://cdn/x/flot.min.js" integrity="sha256-a" crossorigin="anonymous" onerror="f()"></script>
<link rel="stylesheet" href="https://cdn/style.css" integrity="sha256-b" crossorigin="anonymous">
<script src="asv.js"></script><a href="https://example.org/">text</a>"""


def test_page_takes_its_scripts_from_files():
    files = {"flot.min.js": "vendor/flot.min.js", "style.css": "vendor/style.css"}
    assert dashboard.localised(PAGE, files).splitlines() == [
        '<script src="vendor/flot.min.js" onerror="f()"></script>',
        '<link rel="stylesheet" href="vendor/style.css">',
        '<script src="asv.js"></script><a href="https://example.org/">text</a>',
    ]
    with pytest.raises(dashboard.DashboardError, match=r"asks for style\.css"):
        dashboard.localised(PAGE, {"flot.min.js": "flot.js"})


def test_a_picture_without_curves_is_told_from_one_with():
    empty = np.full((300, 1150, 3), 0.9)
    empty[50:60, 100:112] = (0.9, 0.2, 0.1)  # a legend's square
    assert dashboard.columns_with_curves(empty) < dashboard.LEAST_COLUMNS
    empty[200, 50:1100] = (0.1, 0.4, 0.7)
    assert dashboard.columns_with_curves(empty) > dashboard.LEAST_COLUMNS


def test_labels_of_a_plot_are_counted():
    page = '<div class="flot-tick-label tickLabel" style="a">0.5</div><div class="flot-tick-label tickLabel">1.0</div>'
    assert dashboard.labels_in(page) == 2
    assert dashboard.labels_in("<canvas></canvas><div>0.5</div>") == 0


def test_dashboard_needs_three_commits(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dashboard", "--commits", "2"])
    with pytest.raises(SystemExit) as stopped:
        dashboard.main()
    assert stopped.value.code == 2


def results_file(folder, commit, columns, of="a"):
    """Write a results file of one benchmark as asv does."""
    (folder / "machine").mkdir(exist_ok=True)
    document = {"result_columns": ["result", "params"], "results": {of: columns}}
    (folder / "machine" / f"{commit[:8]}-environment.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("columns", "data"),
    [([[0.0, None], []], True), ([[None, float("nan")], []], False), ([None, []], False), (None, False)],
)
def test_failed_and_skipped_is_no_data(tmp_path, columns, data):
    commit = "0123456789abcdef"
    assert not dashboard.has_data(commit, ("a",), tmp_path)
    results_file(tmp_path, commit, columns)
    assert dashboard.has_data(commit, ("a",), tmp_path) == data
    assert not dashboard.has_data(commit, ("a", "b"), tmp_path)
    assert not dashboard.has_data("fedcba9876543210", ("a",), tmp_path)


def test_commits_without_data_are_replaced_by_older_ones(monkeypatch, tmp_path, capsys):
    commits = [digit * 40 for digit in "0123456789"]
    run = []

    def asv(words, **options):
        commit = words[-1].removesuffix("^!")
        run.append(commit[0])
        results_file(tmp_path, commit, None if commit[0] in broken else [[1.0], []])

    monkeypatch.setattr(dashboard, "newest_commits", lambda: commits)
    monkeypatch.setattr(dashboard, "RESULTS", tmp_path)
    monkeypatch.setattr(dashboard.subprocess, "run", asv)
    broken = "02"
    dashboard.run_suite(3, "", ("a",))
    assert run == ["0", "1", "2", "3", "4"]
    assert "no data of commit 22222222; an older one is taken" in capsys.readouterr().out
    broken = "0123"
    with pytest.raises(dashboard.DashboardError, match=r"1 more commit\(s\) with data are needed"):
        dashboard.run_suite(3, "", ("a",))


def test_asv_configuration():
    lines = (ROOT / "benches" / "asv.conf.json").read_text().splitlines()
    config = json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))
    assert (ROOT / "benches" / config["repo"]).resolve() == ROOT
    assert importlib.import_module(f"benches.{config['benchmark_dir']}")
