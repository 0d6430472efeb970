"""The command line, through click's runner, and in processes of its own where that makes a difference."""

import io
import json
import os
import pathlib
import subprocess
import sys

import cann_sim
import numpy as np
import pytest
import simulation
from click.testing import CliRunner

import lstmcell_bwd
from lstmcell_bwd import _bench, _check, _demo, _measure, reference
from lstmcell_bwd import cli as module
from lstmcell_bwd._expression import numpy_backward
from lstmcell_bwd.errors import NPURuntimeError

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
NAMES = ("grad_hy", "grad_cy", "cx", "cy", "gates")


def invoke(*arguments):
    """Run the command line in this process, as a pipe sees it."""
    return CliRunner().invoke(module.cli, [str(argument) for argument in arguments], prog_name="lstmcell-bwd")


def process(*arguments, **environment):
    """Run `python -m lstmcell_bwd` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "lstmcell_bwd", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick_demo(tmp_path_factory):
    """One quick demo with a picture, as JSON."""
    picture = tmp_path_factory.mktemp("demo") / "loss.png"
    result = invoke("demo", "--quick", "--json", "--plot", picture)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), picture


def test_demo_learns(quick_demo):
    document, _ = quick_demo
    bits = [report["bits"] for report in document["reports"]]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 0.8 * document["unigram_bits"] < bits[0]
    assert document["passed"] is True


def test_demo_reports_time_and_accuracy(quick_demo):
    document, _ = quick_demo
    for share in document["cell_backward_share"].values():
        assert 0 < share < 1
    assert document["speedup"] > 1
    assert document["device"] == "cpu"
    assert document["isa"] == lstmcell_bwd.get_isa()
    bounds = reference.bounds(np.float32)._asdict()
    ours, numpy = document["accuracy"]["ours"], document["accuracy"]["numpy"]
    assert all(0 < ours[name] <= bounds[name] for name in bounds)
    assert numpy["grad_gates"] > 100 * ours["grad_gates"]
    assert document["sample"].startswith("The ")


def test_demo_draws_the_loss(quick_demo):
    picture = quick_demo[1].read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_demo_repeats_with_a_seed_and_changes_with_another(quick_demo):
    again = json.loads(invoke("demo", "--quick", "--json").stdout)
    other = json.loads(invoke("demo", "--quick", "--json", "--seed", 2, "--updates", 20).stdout)
    document, _ = quick_demo
    for key in ("reports", "sample", "accuracy"):
        assert again[key] == document[key]
        assert other[key] != document[key]


def test_demo_in_words():
    result = invoke("demo", "--quick", "--updates", 30)
    assert result.exit_code == 0, result.output
    for text in ("held out", "unigram", "What it writes", "Where the time goes", "times as fast", "promised at most"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_demo_fails_when_the_cell_is_inexact(monkeypatch):
    def inexact(*arguments, out, **options):
        lstmcell_bwd.lstm_cell_backward(*arguments, out=out, **options)
        out[0][...] *= np.float32(1 + 2**-18)

    monkeypatch.setattr(module, "lstm_cell_backward", inexact)
    result = invoke("demo", "--quick", "--updates", 10)
    assert result.exit_code == 1
    assert "above the promised bound" in result.stderr


def test_demo_fails_when_nothing_is_learned(monkeypatch):
    monkeypatch.setattr(_demo.Adam, "update", lambda self, gradients, learning_rate: None)
    result = invoke("demo", "--quick", "--updates", 10)
    assert result.exit_code == 1
    assert "the loss did not fall" in result.stderr


def test_demo_gradients_match_finite_differences():
    """The slope of the loss along the gradient, measured, is the gradient's length."""
    rng = np.random.default_rng(5)
    model = _demo.CharacterLSTM(7, 6, rng)
    characters, targets = rng.integers(0, 7, (2, 5, 3))
    state = tuple(rng.standard_normal((2, 3, 6), np.float32))
    caches, logits = model.forward(characters, state)
    _, grad_logits = _demo.cross_entropy(logits, targets)
    scratch = np.empty_like(caches.gates)
    gradients, _ = model.backward(
        caches, grad_logits, scratch, lambda *inputs: lstmcell_bwd.lstm_cell_backward(*inputs[:5], out=inputs[5])
    )
    for name, gradient in gradients.items():
        length = float(np.linalg.norm(gradient))
        step = 1e-2 * gradient / length
        losses = []
        for sign in (1, -1):
            model.weights[name] += sign * step
            bits, _ = _demo.cross_entropy(model.forward(characters, state)[1], targets)
            losses.append(bits * np.log(2))
            model.weights[name] -= sign * step
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(length, rel=5e-3), name


# ---- run -------------------------------------------------------------------------------------------------------------


def make_arrays(dtype, shape=(5, 7)):
    inputs = _check.Backward.make_inputs(_check.Case(dtype, shape, "ordinary"))
    return inputs._asdict()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("missing", [(), ("grad_hy",), ("grad_hy", "grad_cy")])
def test_run_gives_the_bits_of_the_function(tmp_path, dtype, missing):
    arrays = {name: array for name, array in make_arrays(dtype).items() if name not in missing}
    source, target = tmp_path / "in.npz", tmp_path / "out"
    np.savez(source, unrelated=np.zeros(3), **arrays)
    result = invoke("run", source, "-o", target, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["missing"] == list(missing)
    assert document["ignored"] == ["unrelated"]
    wanted = lstmcell_bwd.lstm_cell_backward(*(arrays.get(name) for name in NAMES))
    with np.load(target) as results:
        assert set(results.files) == set(wanted._fields)
        for name in wanted._fields:
            np.testing.assert_array_equal(results[name], getattr(wanted, name), strict=True)


def test_run_options(tmp_path):
    arrays = make_arrays("float32")
    arrays["cy"][0, 0] = np.inf
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, **arrays)
    options = ("--no-bias", "--nonfinite", "ieee", "--threads", 2, "--device", "cpu")
    assert invoke("run", source, "-o", target, *options).exit_code == 0
    wanted = lstmcell_bwd.lstm_cell_backward(*arrays.values(), False, nonfinite="ieee")
    with np.load(target) as results:
        assert results.files == ["grad_gates", "grad_cx"]
        np.testing.assert_array_equal(results["grad_gates"], wanted.grad_gates)
    assert invoke("run", source, "-o", target).exit_code == 0
    with np.load(target) as results:
        assert np.isnan(results["grad_bias"]).any()


def test_run_bfloat16(tmp_path):
    pytest.importorskip("ml_dtypes")
    arrays = make_arrays("bfloat16")
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, **arrays)
    assert invoke("run", source, "-o", target).exit_code == 0
    wanted = lstmcell_bwd.lstm_cell_backward(*arrays.values())
    with np.load(target) as results:
        assert results["grad_gates"].view(np.uint16).tolist() == wanted.grad_gates.view(np.uint16).tolist()


def test_run_in_words(tmp_path):
    arrays = make_arrays("float32")
    del arrays["grad_cy"]
    np.savez(tmp_path / "in.npz", **arrays, spare=np.ones(1))
    result = invoke("run", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    for text in ("grad_gates", "5 x 28", "missing", "zeros", "Not used: spare", "Computed on cpu"):
        assert text in result.stdout


def test_run_empty_batch(tmp_path):
    np.savez(tmp_path / "in.npz", **make_arrays("float32", (0, 3)))
    assert invoke("run", tmp_path / "in.npz", "-o", tmp_path / "out.npz").exit_code == 0
    with np.load(tmp_path / "out.npz") as results:
        assert results["grad_bias"].tolist() == [0] * 12


def archive(**changes):
    arrays = make_arrays("float32") | changes
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in arrays.items() if array is not None})
    return buffer.getvalue()


def single_array():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def damaged():
    content = bytearray(archive())
    content[300:400] = bytes(100)
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "must be an .npz archive of named arrays, got another kind of file", id="empty"),
        pytest.param(b"not an archive", "got another kind of file", id="text"),
        pytest.param(single_array(), "got another kind of file", id="npy"),
        pytest.param(archive()[:-30], "got another kind of file", id="cut off"),
        pytest.param(damaged(), "cannot be read", id="damaged"),
        pytest.param(archive(cx=None), "must hold the arrays cx, cy, gates, got grad_hy, grad_cy", id="no cx"),
        pytest.param(archive(cy=np.array([{}])), "`cy` cannot be read", id="objects"),
        pytest.param(archive(cy=np.ones((5, 8), np.float32)), "`cy` must have shape (N, H) = (5, 7)", id="shape"),
        pytest.param(archive(cy=np.ones((5, 7))), "`cy` must have dtype float32", id="dtype"),
        pytest.param(archive(cx=np.ones(7, np.float32)), "`cx` must have shape (N, H)", id="rank"),
    ],
)
def test_run_refuses_bad_files(tmp_path, content, message):
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    source.write_bytes(content)
    result = invoke("run", source, "-o", target)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not target.exists()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--threads", "0"], id="no threads"),
        pytest.param(["--nonfinite", "maybe"], id="nonfinite"),
        pytest.param(["--device", "npu:x"], id="device"),
        pytest.param(["--device", "gpu"], id="unknown device"),
        pytest.param(["--unknown"], id="option"),
        pytest.param(["-o", "no-such-folder/out.npz"], id="folder"),
    ],
)
def test_run_refuses_bad_options(tmp_path, options):
    (tmp_path / "in.npz").write_bytes(archive())
    result = invoke("run", tmp_path / "in.npz", "-o", tmp_path / "out.npz", *options)
    assert result.exit_code == 2
    assert "Error" in result.stderr


def test_run_without_an_npu(tmp_path):
    (tmp_path / "in.npz").write_bytes(archive())
    result = process("run", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--device", "npu")
    assert result.returncode == 1
    assert "pyACL" in result.stderr


# ---- check -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_shapes(monkeypatch):
    """Leave enough of the cases for every variant."""
    monkeypatch.setattr(_check, "SHAPES", ((1, 8), (5, 33)))


@pytest.mark.usefixtures("few_shapes")
def test_check_passes():
    result = invoke("check")
    assert result.exit_code == 0, result.output
    assert "cases passed on cpu" in result.stdout
    assert "FAIL" not in result.stdout
    for name in [*_check.OPERATORS, *(target.isa for target in _check.targets("cpu"))]:
        assert name in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.usefixtures("few_shapes")
def test_check_as_json():
    document = json.loads(invoke("check", "--json").stdout)
    assert document["passed"] is True
    assert document["not_checked"] == {}
    for name, operator in _check.OPERATORS.items():
        rows = [row for row in document["rows"] if row["operator"] == name]
        assert {row["dtype"] for row in rows} == set(_check.data_types("cpu"))
        assert all(tuple(row["errors"]) == operator.results for row in rows)
    for row in document["rows"]:
        assert all(0 < row["errors"][name] <= row["bounds"][name] for name in row["errors"])
        assert row["same_bits"] is True
        assert row["within_tolerance"] is (True if row["dtype"] in _check.TOLERANCES else None)


@pytest.mark.parametrize("operator", _check.OPERATORS)
def test_plan_covers_everything(operator):
    cases = [case for _, case in _check.plan("cpu", [operator])]
    assert {case.operator for case in cases} == {operator}
    left_out = {"without bias"} if operator == "lstm_cell_forward" else set()  # there biases are arguments
    assert {case.variant for case in cases} == {"plain", *_check.CPU_VARIANTS} - left_out
    assert {case.data for case in cases} == set(_check.DATA)
    assert {case.missing for case in cases} == set(_check.OPERATORS[operator].missing)
    assert {case.shape for case in cases} == set(_check.SHAPES)


def wrong(name, change, when=lambda options: True):
    """Make an operator with a change of its results for some calls."""
    right = getattr(lstmcell_bwd, name)

    def operator(*arguments, **options):
        result = right(*arguments, **options)
        return result._make(map(change, result)) if when(options) else result

    return operator


def scaled(factor):
    return lambda array: None if array is None else (array * array.dtype.type(factor)).astype(array.dtype)


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("operator", _check.OPERATORS)
@pytest.mark.parametrize(
    ("change", "when", "message"),
    [
        pytest.param(scaled(1.02), lambda options: True, "outside CANN's tolerance", id="far off"),
        pytest.param(scaled(1 + 2**-16), lambda options: True, "error above the promised bound", id="a little off"),
        pytest.param(
            scaled(1 + 2**-22), lambda options: options["num_threads"] == 2, "other bits", id="bits with threads"
        ),
    ],
)
def test_check_fails_when_the_device_is_wrong(monkeypatch, operator, change, when, message):
    monkeypatch.setattr(_check, operator, wrong(operator, change, when))
    monkeypatch.setattr(_check, "data_types", lambda device: ["float32"])
    result = invoke("check")
    assert result.exit_code == 1
    assert "cases failed" in result.stderr
    document = json.loads(invoke("check", "--json").stdout)
    assert document["passed"] is False
    assert {row["operator"] for row in document["rows"] if not row["passed"]} == {operator}
    assert any(message in failure["complaint"] for failure in document["failures"])


@pytest.mark.usefixtures("few_shapes")
def test_check_goes_on_after_an_error(monkeypatch):
    failure = NPURuntimeError("acl.rt.malloc", 207001, "out of device memory")

    def broken(*arguments, **options):
        if options["num_threads"] == 3:
            raise failure
        return lstmcell_bwd.lstm_cell_backward(*arguments, **options)

    monkeypatch.setattr(_check, "lstm_cell_backward", broken)
    result = invoke("check")
    assert result.exit_code == 1
    assert "acl.rt.malloc returned 207001" in " ".join(result.stdout.split())
    assert "--json lists all" in result.stdout


@pytest.mark.parametrize(
    ("errors", "within"),
    [
        pytest.param([0.0] * 200, True, id="exact"),
        pytest.param([9e-4] * 200, True, id="all just within"),
        pytest.param([5e-3, *[0.0] * 199], True, id="one outside"),
        pytest.param([5e-3] * 3 + [0.0] * 197, False, id="too many outside"),
        pytest.param([2e-2, *[0.0] * 199], False, id="one too far"),
        pytest.param([np.nan, *[0.0] * 199], False, id="one NaN"),
    ],
)
def test_tolerance(errors, within):
    exact = np.ones(200)
    result = (exact + errors).astype(np.float32)
    assert _check.within_tolerance(result, exact, _check.TOLERANCES["float32"]) is within


@pytest.mark.parametrize("value", ["gpu", "npu:", "npu:-1", "auto"])
def test_check_refuses_bad_devices(value):
    result = invoke("check", "--device", value)
    assert result.exit_code == 2
    assert "must be one of cpu, npu or npu:<index>" in " ".join(result.stderr.split())


def test_check_without_an_npu():
    result = process("check", "--device", "npu", "--json")
    assert result.returncode == 1
    assert "cannot be checked" in result.stderr
    document = json.loads(result.stdout)
    assert document["passed"] is False
    assert "pyACL" in document["reason"]


# ---- check and info on the simulated CANN ----------------------------------------------------------------------------


def on_simulation(tmp_path, *arguments, installed=None, **settings):
    """Run a command where the simulated CANN is installed; return the process and what the simulation saw."""
    report = tmp_path / "report.json"
    variables = {f"CANN_SIM_{name}": str(value) for name, value in settings.items()}
    installed = installed or simulation.installation()
    environment = installed.environment(CANN_SIM_REPORT=str(report), **variables)
    done = process(*arguments, **environment)
    return done, json.loads(report.read_text())


def test_check_npu(tmp_path):
    done, report = on_simulation(tmp_path, "check", "--device", "npu")
    assert done.returncode == 0, done.stderr
    assert report["violations"] == []
    assert simulation.left_over(report) == {}
    assert "WRONG" in done.stdout
    for text in ("wrong at 4095, 4096, 6105 rows", "Ascend910B1", "libopapi_nn.so", "cann version", "ASCEND_HOME_PATH"):
        assert text in " ".join(done.stdout.split())
    assert report["calls"]["aclnnThnnFusedLstmCell"] > 100


def test_check_npu_without_the_forward_operator(tmp_path):
    """CANN 9.0.0's first beta: the backward pass is checked alone, and the command says so."""
    installation = cann_sim.build(tmp_path / "home", missing="forward")
    done, _ = on_simulation(tmp_path, "check", "--device", "npu", installed=installation)
    assert done.returncode == 0, done.stderr
    assert "lstm_cell_forward on npu" not in done.stdout
    assert "lstm_cell_forward was not checked: " in " ".join(done.stdout.split())
    done, _ = on_simulation(tmp_path, "check", "--device", "npu", "--json", installed=installation)
    document = json.loads(done.stdout)
    assert list(document["not_checked"]) == ["lstm_cell_forward"]
    assert {row["operator"] for row in document["rows"]} == {"lstm_cell_backward"}


@pytest.mark.parametrize("defect", [0, 1])
def test_check_npu_as_json(tmp_path, defect):
    done, _ = on_simulation(tmp_path, "check", "--device", "npu:1", "--json", DEFECT=defect, DEVICES=2)
    document = json.loads(done.stdout)
    assert document["passed"] is True
    assert [probe["rows"] for probe in document["probes"]] == [4094, 4095, 4096, 6105]
    assert [probe["raw_right"] for probe in document["probes"]] == [True] + [not defect] * 3
    assert all(probe["right"] for probe in document["probes"])
    assert document["config"]["npu"]["available"] is True


def test_check_npu_reports_a_failing_runtime(tmp_path):
    done, report = on_simulation(tmp_path, "check", "--device", "npu", FAULTS="aclrtMalloc:20:207001")
    assert done.returncode == 1
    assert "207001" in done.stdout
    assert report["violations"] == []


def test_info_npu(tmp_path):
    done, _ = on_simulation(tmp_path, "info", "--json", SOC="Ascend910B4")
    assert json.loads(done.stdout)["npu"]["chip"] == "Ascend910B4"


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_bench(tmp_path):
    picture = tmp_path / "speed.svg"
    sizes = ("--size", "4x8", "--size", "16x32")
    result = invoke("bench", *sizes, "--rounds", 2, "--json", "--plot", picture)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = [(row["batch"], row["hidden"], row["threads"]) for row in document["rows"]]
    assert rows == [(4, 8, 1), (4, 8, 2), (16, 32, 1), (16, 32, 2)]
    for row in document["rows"]:
        assert row["speedup"]["smallest"] <= row["speedup"]["median"]
        assert row["gigabytes_per_second"] == pytest.approx(
            52e-9 * row["batch"] * row["hidden"] / row["seconds"], rel=1e-6
        )
    assert picture.read_text().startswith("<?xml")


def test_bench_says_why_there_is_no_limit(monkeypatch):
    monkeypatch.setitem(sys.modules, "benches.limit", None)
    result = invoke("bench", "--size", "4x8", "--rounds", 1)
    assert result.exit_code == 0, result.output
    assert "not built" in result.stdout
    assert "in a clone" in " ".join(result.stdout.split())


def test_bench_compares_with_the_limit(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    limit, reason = _bench.limit_module()
    assert limit is not None, reason
    rows = next(_bench.measure([(64, 256)], 1, limit))
    assert all(row.over_limit.median > 0 for row in rows)


@pytest.mark.parametrize("size", ["4", "0x8", "4x", "4x8x2", "-1x8"])
def test_bench_refuses_bad_sizes(size):
    result = invoke("bench", "--size", size)
    assert result.exit_code == 2
    assert "such as 64x512" in " ".join(result.stderr.split())


def test_benchmarks_use_the_same_rule_and_expression(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    from benches import data, measure

    for there, here in ((measure.turn, _measure.turn), (data.numpy_backward, numpy_backward)):
        assert (
            pathlib.Path(there.__code__.co_filename).read_text() == pathlib.Path(here.__code__.co_filename).read_text()
        )


def test_numpy_expression_is_the_operator():
    inputs = _check.Backward.make_inputs(_check.Case("float64", (6, 5), "ordinary"))
    out = np.empty((6, 20)), np.empty((6, 5)), np.empty(20)
    numpy_backward(*inputs, out)
    for value, exact in zip(out, reference.lstm_cell_backward(*inputs), strict=True):
        np.testing.assert_allclose(value, exact, rtol=1e-12, atol=1e-14)


# ---- info and the program itself -------------------------------------------------------------------------------------


def test_info():
    result = invoke("info")
    assert result.exit_code == 0
    for text in ("instruction sets", "runnable", "usable cpus", "npu", "openmp", "matplotlib"):
        assert text in result.stdout
    document = json.loads(invoke("info", "--json").stdout)
    assert document["versions"]["lstmcell_bwd"] == lstmcell_bwd.__version__
    assert document["instruction sets"]["used"] == lstmcell_bwd.get_isa()
    assert document["extras"]["click"][0].isdigit()


@pytest.mark.parametrize("plot", ["no-such-folder/loss.png", "loss.gif", "loss"])
@pytest.mark.parametrize("command", ["demo", "bench"])
def test_pictures_are_refused_before_the_work(command, plot):
    result = invoke(command, "--plot", plot)
    assert result.exit_code == 2
    assert "--plot" in result.stderr


def test_json_has_no_foreign_numbers():
    document = module.plain({"a": (np.float32(1.5), float("nan"), [np.inf]), "b": _demo.Timing(1.0, 2.0, 3.0)})
    assert document == {"a": [1.5, "nan", ["inf"]], "b": {"cell": 1.0, "peer": 2.0, "rest": 3.0}}


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["run", "--help"], ["check", "-h"]])
def test_help(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage: lstmcell-bwd" in result.stdout


def test_program():
    result = process("--version")
    assert result.returncode == 0
    assert lstmcell_bwd.__version__ in result.stdout
    assert process("no-such-command").returncode == 2


def test_output_without_unicode():
    result = process("demo", "--quick", "--updates", "10", PYTHONIOENCODING="ascii", COLUMNS="50")
    assert result.returncode == 0, result.stderr
    assert "####" in result.stdout
    assert result.stdout.isascii()
    assert max(map(len, result.stdout.splitlines())) <= 50


def test_bad_environment_is_bad_usage():
    result = process("info", LSTMCELL_BWD_ISA="mmx")
    assert result.returncode == 2
    assert "LSTMCELL_BWD_ISA" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("package", ["click", "rich", "threadpoolctl"])
def test_missing_extra(package):
    code = f"import sys; sys.modules[{package!r}] = None; from lstmcell_bwd.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"Error: the command line needs the package {package}: pip install 'lstmcell_bwd[cli]'\n"


def test_missing_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("demo", "--quick", "--plot", tmp_path / "loss.png")
    assert result.exit_code == 2
    assert "pip install 'lstmcell_bwd[cli]'" in result.stderr
