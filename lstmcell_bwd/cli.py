"""The command line: demo, run, check, bench, info.

Tables go to the standard output and progress to the standard error; with `--json` the standard output is one JSON
document. Exit codes: 0 good, 1 a check failed or a device could not be used, 2 bad usage.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import re
import statistics
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_info, threadpool_limits

from lstmcell_bwd import __version__, _bench, _check, _demo, choose_device, get_isa, reference, show_config
from lstmcell_bwd._api import lstm_cell_backward
from lstmcell_bwd._expression import numpy_backward
from lstmcell_bwd._types import LSTMCellGradients
from lstmcell_bwd.errors import LSTMCellError, NPURuntimeError, NPUUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lstmcell_bwd._measure import Quote

__all__ = ["cli"]

REQUIRED = ("cx", "cy", "gates")
OPTIONAL = ("grad_hy", "grad_cy")
QUICK = _demo.Settings(hidden=64, batch=32, updates=80, reports=5)
PROMPT = "The "
# Beyond this |cy|, 1 - tanh(cy)**2 computed by subtraction has no digit left in float32.
SATURATED = 9
SHOWN_FAILURES = 10


# ---- shared by all commands ------------------------------------------------------------------------------------------


class Commands(click.Group):
    """Turns the package's exceptions into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (NPUUnavailableError, NPURuntimeError) as error:
            raise click.ClickException(str(error)) from error
        except LSTMCellError as error:
            raise click.UsageError(str(error)) from error


class DeviceType(click.ParamType[str]):
    """A device string of one of some kinds."""

    name = "device"

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the string itself, if it is one."""
        kind = re.sub(r"\Anpu:[0-9]{1,9}\Z", "npu", value)
        if kind not in self.kinds:
            self.fail(f"must be one of {', '.join(self.kinds)} or npu:<index>, got {value!r}", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """For the help text."""
        return f"[{'|'.join((*self.kinds, 'npu:<index>'))}]"


COMPUTING = DeviceType("auto", "cpu", "npu", "prefer-npu")
CHECKED = DeviceType("cpu", "npu")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
plot_option = click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture to this file (PNG, PDF or SVG)."
)


def plain(value: Any) -> Any:
    """Return a value as JSON knows it; what JSON has no number for becomes its name."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON document."""
    click.echo(json.dumps(plain(document), indent=2, allow_nan=False))


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on the standard error, where that is a terminal; the function it gives takes one step."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", table_column=None),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def step(description: str) -> None:
            progress.update(task, advance=1, description=description)

        yield step


def key_values(title: str, entries: Iterable[tuple[str, object]]) -> Table:
    """Return a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in entries:
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        table.add_row(name, Text(text))
    return table


def data_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return an empty table, its first `left` columns flush left and the others flush right."""
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k < left else "right")
    return table


def units_text(value: float | None) -> str:
    """Return an error in units: three digits, or as a power of ten where it is large."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 100 else f"{value:.1e}"


def verdict(good: bool | None, yes: str = "pass", no: str = "FAIL") -> Text:
    """Return a coloured word; a dash where the question does not arise."""
    if good is None:
        return Text("-")
    return Text(yes, "green") if good else Text(no, "bold red")


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def draw(path: Path, width: float, height: float, paint: Callable[[Any], None]) -> None:
    """Write a picture; `paint` gets the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    paint(figure.subplots())
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # a folder that is not there, a format that is not known
        msg = f"cannot write {path}: {error}"
        raise click.BadParameter(msg, param_hint="--plot") from error


def check_plot(path: Path | None) -> None:
    """Refuses a picture that could not be written, before the work begins."""
    if path is None:
        return
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        msg = f"needs the package {error.name}: pip install 'lstmcell_bwd[cli]'"
        raise click.BadParameter(msg, param_hint="--plot") from error
    if not path.absolute().parent.is_dir():
        msg = f"must be in a folder that exists, got {path}"
        raise click.BadParameter(msg, param_hint="--plot")
    formats = ("png", "pdf", "svg")
    if path.suffix.lower().lstrip(".") not in formats:
        msg = f"must end in one of {', '.join(formats)}, got {path}"
        raise click.BadParameter(msg, param_hint="--plot")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lstmcell-bwd")
def cli() -> None:
    """See the fused backward pass of an LSTM cell at work, run it, check it, time it."""


# ---- demo ------------------------------------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """Largest errors on the caches of a training run, in units of eps * scale.

    Attributes
    ----------
    ours, numpy : Units
        Of this package, and of the NumPy expression.
    calls : int
        Calls that were compared.
    largest_cy : float
        Largest |cy| in them.
    saturated : float
        Share of the cell states beyond `SATURATED`.
    """

    ours: reference.Units
    numpy: reference.Units
    calls: int
    largest_cy: float
    saturated: float


class Judge:
    """Compares results on real caches with the float64 reference."""

    def __init__(self, cell_backward: _demo.CellBackward) -> None:
        self.functions = (cell_backward, numpy_backward)
        self.worst = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        self.calls = 0
        self.largest_cy = 0.0
        self.saturated = 0.0

    def add(self, cell: _demo.CellInputs) -> None:
        """Compare one call of the cell's backward pass."""
        exact = reference.lstm_cell_backward(*cell)
        for worst, function in zip(self.worst, self.functions, strict=True):
            out = (np.empty_like(cell.gates), np.empty_like(cell.cx), np.empty(cell.gates.shape[1], np.float32))
            function(*cell, out)
            units = reference.error_in_units(LSTMCellGradients(*out), *cell, exact)
            worst[:] = [max(a, b) for a, b in zip(worst, units, strict=True)]
        self.calls += 1
        size = np.abs(cell.cy)
        self.largest_cy = max(self.largest_cy, float(size.max()))
        self.saturated += float((size > SATURATED).mean())

    def result(self) -> Accuracy:
        """Return what was found so far."""
        ours, numpy = (reference.Units(*worst) for worst in self.worst)
        return Accuracy(ours, numpy, self.calls, self.largest_cy, self.saturated / max(1, self.calls))


@cli.command()
@click.option("--updates", type=click.IntRange(10), default=None, help="Number of updates; default 1500.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the weights and the sample.")
@click.option("--quick", is_flag=True, help="A tiny network for a few seconds; it learns less.")
@click.option("--device", type=COMPUTING, default="auto", show_default=True, help="Where the cell's backward runs.")
@plot_option
@json_option
def demo(updates: int | None, seed: int, quick: bool, device: str, plot: Path | None, as_json: bool) -> None:
    """Train an LSTM on real text, with this package in the backward pass.

    The network learns to write like the Python language reference, character by character. NumPy does the matrix
    products on one thread; this package does the cell's backward pass. In every tenth update the NumPy expression does
    it as well, for comparison. About a minute; the loss is the same for the same seed.
    """
    check_plot(plot)
    settings = (QUICK if quick else _demo.Settings())._replace(seed=seed)
    if updates is not None:
        settings = settings._replace(updates=updates)
    corpus = _demo.read_corpus()
    rng = np.random.default_rng(seed)
    model = _demo.CharacterLSTM(len(corpus.alphabet), settings.hidden, rng)

    def cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, gates: Any, out: Any) -> object:
        return lstm_cell_backward(grad_hy, grad_cy, cx, cy, gates, out=out, device=device)

    state = np.zeros((settings.batch, settings.hidden), np.float32)
    where, why = choose_device(state, state, state, state, np.tile(state, 4), device=device)
    console = Console(quiet=as_json)
    characters = len(corpus.training) + len(corpus.held_out)
    introduction = {
        "text": f"the Python language reference as `help()` shows it: {characters:,} characters, "
        f"{len(corpus.alphabet)} different; the last {_demo.HELD_OUT:.0%} are held out",
        "network": f"one LSTM layer, hidden size {settings.hidden}, {settings.batch} sequences of {settings.steps} "
        "characters per update, float32, Adam",
        "cell backward": f"lstmcell_bwd {__version__} on {where}" + (f" ({get_isa()})" if where == "cpu" else ""),
        "why there": why,
    }
    console.print(key_values("A character LSTM learns to write", introduction.items()))
    console.print()

    judge = Judge(cell_backward)
    curve: list[_demo.Progress] = []
    reports: list[_demo.Progress] = []
    begin = perf_counter()
    with threadpool_limits(limits=1, user_api="blas"), progress_bar(settings.updates) as step:
        for state_now in _demo.train(model, corpus, settings, cell_backward, numpy_backward):
            curve.append(state_now._replace(cells=[]))
            if state_now.update:
                step(f"{state_now.training_bits:.2f} bits")
            if state_now.held_out_bits is not None:
                reports.append(curve[-1])
                print_report(console, reports, corpus.unigram)
                for cell in state_now.cells[::4]:
                    judge.add(cell)
        seconds = perf_counter() - begin
        prompt = [corpus.alphabet.index(character) for character in PROMPT]
        sample = "".join(corpus.alphabet[k] for k in model.sample(prompt, 400, 0.6, rng))

    timings = [entry.timing for entry in curve if entry.timing is not None]
    shares = {
        "lstmcell_bwd": statistics.median(t.cell / (t.cell + t.rest) for t in timings),
        "numpy": statistics.median(t.peer / (t.peer + t.rest) for t in timings),
    }
    per_call = {
        "lstmcell_bwd": statistics.median(t.cell for t in timings) / settings.steps,
        "numpy": statistics.median(t.peer for t in timings) / settings.steps,
    }
    speedup = statistics.median(t.peer / t.cell for t in timings)
    accuracy = judge.result()
    bounds = reference.bounds(np.float32)
    exact_enough = all(worst <= bound for worst, bound in zip(judge.worst[0], bounds, strict=True) if bound)
    first, last = (reports[k].held_out_bits or math.nan for k in (0, -1))
    learned = last < first
    document = {
        "device": where,
        "reason": why,
        "isa": get_isa() if where == "cpu" else None,
        "settings": settings,
        "seconds": seconds,
        "unigram_bits": corpus.unigram,
        "reports": [
            {"update": r.update, "characters": r.characters, "training_bits": r.training_bits, "bits": r.held_out_bits}
            for r in reports
        ],
        "bits": last,
        "cell_backward_share": shares,
        "cell_backward_seconds_per_call": per_call,
        "speedup": speedup,
        "accuracy": accuracy,
        "bounds": bounds,
        "sample": sample,
        "passed": learned and exact_enough,
    }
    if plot is not None:
        draw(plot, 8, 4.5, lambda axes: paint_loss(axes, curve, corpus.unigram))
    if as_json:
        print_json(document)
    else:
        console.print()
        shown = sample.encode(console.encoding, "replace").decode(console.encoding)
        console.print(Panel(Text(shown), title=f"What it writes after {PROMPT!r}", title_align="left"))
        table = data_table("Where the time goes", "Cell backward pass by", "Per call", "Share of an update")
        for name, label in (("lstmcell_bwd", "lstmcell_bwd"), ("numpy", "the NumPy expression")):
            table.add_row(label, duration(per_call[name]), f"{shares[name]:.1%}")
        console.print(table)
        console.print(
            f"{speedup:.1f} times as fast as the NumPy expression, on the same caches in the same run "
            f"(medians of {len(timings)} updates).\n",
            highlight=False,
        )
        table = data_table("Largest error on the training's own caches", "", "grad_gates", "grad_cx", "grad_bias")
        for label, units in (
            ("lstmcell_bwd", accuracy.ours),
            ("promised at most", bounds),
            ("the NumPy expression", accuracy.numpy),
        ):
            table.add_row(label, *map(units_text, units))
        console.print(table)
        console.print(
            "In units of eps * scale against the float64 reference (0.5 is perfect rounding; grad_bias: of eps times "
            f"the sum of sizes), over {accuracy.calls} calls. {accuracy.saturated:.1%} of the cell states were beyond "
            f"{SATURATED} (the largest: {accuracy.largest_cy:.0f}), where 1 - tanh(cy)**2 by subtraction has no digit "
            "left.\n",
            highlight=False,
        )
        end = Text(f"{first:.2f} -> {last:.2f} bits per character", "bold")
        end.append(f" on the held-out text, which takes {corpus.unigram:.2f} bits if only the frequencies of the "
                   f"characters are known. {seconds:.1f} s.", "not bold")  # fmt: skip
        console.print(end)
        if plot is not None:
            console.print(f"Picture of the loss: {plot}", highlight=False)
    if not learned:
        msg = "the loss did not fall"
        raise click.ClickException(msg)
    if not exact_enough:
        msg = "an error is above the promised bound"
        raise click.ClickException(msg)


def print_report(console: Console, reports: list[_demo.Progress], unigram: float) -> None:
    """Print the latest line of the loss, with a bar; before the first one the header."""
    last = reports[-1]
    mark = "#" if console.options.ascii_only else "\u2588"
    if len(reports) == 1:
        console.print(Text(f"{'update':>7} {'characters':>11} {'bits per character, held out'}", "bold"))
    bits = last.held_out_bits or 0.0
    room = max(0, min(40, console.width - 28))
    line = Text(f"{last.update:7} {last.characters:11,} {bits:6.2f} ")
    line.append(mark * round(bits / max(8.0, bits) * room), "green" if bits < unigram else "yellow")
    if len(reports) == 1:
        line = (
            Text(f"{'unigram':>19} {unigram:6.2f} ", "dim").append(mark * round(unigram / 8 * room)).append("\n") + line
        )
    console.print(line, no_wrap=True, crop=True, overflow="crop")


def paint_loss(axes: Any, curve: list[_demo.Progress], unigram: float) -> None:
    """Draws the loss over the characters read."""
    training = curve[1:]
    axes.plot(
        [entry.characters for entry in training],
        [entry.training_bits for entry in training],
        color="0.75",
        linewidth=0.8,
        label="training window",
    )
    held_out = [entry for entry in curve if entry.held_out_bits is not None]
    axes.plot(
        [entry.characters for entry in held_out],
        [entry.held_out_bits for entry in held_out],
        "o-",
        color="C0",
        label="held-out text",
    )
    axes.axhline(unigram, color="C1", linestyle="--", label="unigram baseline")
    axes.set(xlabel="characters read", ylabel="bits per character", ylim=(0, None), xlim=(0, None))
    axes.set_title("A character LSTM on the Python language reference", loc="left")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M" if x else "0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


# ---- run -------------------------------------------------------------------------------------------------------------


def read_arrays(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the operator's inputs in an archive, None for a missing gradient, and the names of its other arrays."""

    def refuse(what: str) -> click.BadParameter:
        return click.BadParameter(f"{path}: {what}", param_hint="IN.npz")

    try:
        if not zipfile.is_zipfile(path):
            msg = "must be an .npz archive of named arrays, got another kind of file"
            raise refuse(msg)
        archive = np.load(path, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        msg = f"must be an .npz archive of named arrays, got a broken one ({error})"
        raise refuse(msg) from error
    with archive:
        names = archive.files
        absent = [name for name in REQUIRED if name not in names]
        if absent:
            msg = f"must hold the arrays {', '.join(REQUIRED)}, got {', '.join(names) or 'none'}"
            raise refuse(msg)
        arrays: dict[str, Any] = {}
        for name in (*OPTIONAL, *REQUIRED):
            if name not in names:
                arrays[name] = None
                continue
            try:
                array = archive[name]
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                msg = f"`{name}` cannot be read: {error}"
                raise refuse(msg) from error
            if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # what NumPy makes of bfloat16 in a file
                try:
                    array = array.view(importlib.import_module("ml_dtypes").bfloat16)
                except ImportError as error:
                    msg = f"`{name}` is bfloat16, which needs ml_dtypes: pip install 'lstmcell_bwd[bf16]'"
                    raise refuse(msg) from error
            arrays[name] = array
    return arrays, [name for name in names if name not in arrays]


@cli.command()
@click.argument("source", metavar="IN.npz", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    "target",
    metavar="OUT.npz",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File for grad_gates, grad_cx and grad_bias.",
)
@click.option("--has-bias/--no-bias", default=True, show_default=True, help="Whether to compute grad_bias.")
@click.option("--threads", type=click.IntRange(1), default=None, help="Threads on the CPU; default as the work pays.")
@click.option("--nonfinite", type=click.Choice(["nan", "ieee"]), default="nan", show_default=True, help="Inf and NaN.")
@click.option("--device", type=COMPUTING, default="auto", show_default=True, help="Where to compute.")
@json_option
def run(
    source: Path, target: Path, has_bias: bool, threads: int | None, nonfinite: str, device: str, as_json: bool
) -> None:
    """Run the operator on the arrays of a file.

    IN.npz holds cx, cy (N, H) and gates (N, 4*H; activated, in the order i, f, g, o), and grad_hy and grad_cy (N, H),
    of which a missing one stands for zeros. All have one dtype: float32, float64, float16 or bfloat16.
    """
    arrays, others = read_arrays(source)
    inputs = _check.Inputs(**arrays)
    options: dict[str, Any] = {"device": device, "num_threads": threads, "nonfinite": nonfinite}
    where, why = choose_device(*inputs, has_bias, **options)
    begin = perf_counter()
    try:
        gradients = lstm_cell_backward(*inputs, has_bias, **options)
    except MemoryError as error:
        msg = f"not enough memory: {error}"
        raise click.ClickException(msg) from error
    seconds = perf_counter() - begin
    results = {name: array for name, array in gradients._asdict().items() if array is not None}
    try:
        with target.open("wb") as file:  # np.savez would add .npz to a name without it
            np.savez(file, **results)
    except OSError as error:
        msg = f"cannot write {target}: {error}"
        raise click.BadParameter(msg, param_hint="--output") from error
    missing = [name for name in OPTIONAL if arrays[name] is None]
    described = {**{n: a for n, a in arrays.items() if a is not None}, **results}
    if as_json:
        shapes = {name: {"shape": array.shape, "dtype": str(array.dtype)} for name, array in described.items()}
        summary = {"device": where, "reason": why, "isa": get_isa() if where == "cpu" else None, "seconds": seconds}
        print_json({**summary, "arrays": shapes, "missing": missing, "ignored": others, "output": str(target)})
        return
    console = Console()
    table = data_table(f"{source} -> {target}", "Array", "", "Shape", "dtype", "Largest size", left=2)
    for name, array in described.items():
        wide = np.abs(array.astype(np.float64))
        largest = f"{wide.max():.4g}" if array.size else "-"
        role = "result" if name in results else "input"
        table.add_row(name, role, " x ".join(map(str, array.shape)), str(array.dtype), largest)
    for name in missing:
        table.add_row(name, "input", "missing", "-", "zeros")
    console.print(table)
    if others:
        console.print(f"Not used: {', '.join(others)}", style="dim", highlight=False)
    isa = f" ({get_isa()})" if where == "cpu" else ""
    console.print(f"Computed on {where}{isa} in {duration(seconds)}: {why}.", highlight=False)


# ---- check -----------------------------------------------------------------------------------------------------------


def summary_rows(outcomes: list[_check.Outcome]) -> list[dict[str, Any]]:
    """One row for each operator, target and dtype: cases, largest errors and verdicts."""
    groups: dict[tuple[str, str, str], list[_check.Outcome]] = {}
    for outcome in outcomes:
        key = outcome.case.operator, outcome.target.name, outcome.case.dtype
        groups.setdefault(key, []).append(outcome)

    def every(answers: Iterable[bool | None]) -> bool | None:
        asked = [answer for answer in answers if answer is not None]
        return all(asked) if asked else None

    rows = []
    for (name, target, dtype), group in groups.items():
        operator = _check.OPERATORS[name]
        errors: dict[str, float | None] = {}
        for result in operator.results:
            found = [outcome.errors[result] for outcome in group]
            errors[result] = max((error for error in found if error is not None), default=None)
        bounds = dict(zip(operator.results, operator.bounds(dtype), strict=True))
        rows.append(
            {
                "operator": name,
                "target": target,
                "dtype": dtype,
                "cases": len(group),
                "errors": errors,
                "bounds": bounds if target.startswith("cpu") else None,
                "within_bounds": every(o.within_bounds for o in group),
                "same_bits": every(o.same_bits for o in group),
                "within_tolerance": every(o.within_tolerance for o in group),
                "passed": all(o.passed for o in group),
            }
        )
    return rows


@cli.command()
@click.option("--device", type=CHECKED, default="cpu", show_default=True, help="The device to check.")
@json_option
def check(device: str, as_json: bool) -> None:
    """Check a device against the float64 reference.

    Runs the backward and the forward pass over shapes, dtypes, missing arguments, memory layouts and, on the CPU,
    instruction sets and threads. The CPU must keep the package's own bounds and give the same bits in every variant;
    every device must keep CANN's published tolerance. On an NPU the backward operator's own bias is probed as well,
    where a defect is known, and the forward pass is left out where CANN does not have its operator.
    """
    operators, left_out = list(_check.OPERATORS), None
    if device != "cpu":
        npu, index = importlib.import_module("lstmcell_bwd.npu"), int(device.partition(":")[2] or 0)
        reason = npu.unavailable_reason(index)
        if reason is not None:
            if as_json:
                print_json({"device": device, "config": configuration(), "passed": False, "reason": reason})
            msg = f"{device} cannot be checked: {reason}"
            raise click.ClickException(msg)
        left_out = npu.unavailable_reason(index, npu.FORWARD)
        if left_out is not None:
            operators.remove("lstm_cell_forward")
    console = Console(quiet=as_json)
    cases = _check.plan(device, operators)
    outcomes = []
    with progress_bar(len(cases)) as step:
        for outcome in _check.run_cases(cases):
            outcomes.append(outcome)
            step(f"{outcome.target.name} {outcome.case.dtype}")
    rows = summary_rows(outcomes)
    failures = [outcome for outcome in outcomes if not outcome.passed]
    for operator in operators:
        print_check(console, [row for row in rows if row["operator"] == operator], operator, device)
    print_tolerances(console)
    if left_out is not None:
        console.print(f"lstm_cell_forward was not checked: {left_out}\n", style="yellow", highlight=False)
    probes: list[_check.Probe] = []
    probe_failure = ""
    if device != "cpu":
        try:
            probes.extend(_check.probe_bias(device))
        except NPURuntimeError as error:
            probe_failure = str(error)
        print_probes(console, probes)
        print_configuration(console, configuration())
    passed = not failures and not probe_failure and all(probe.right for probe in probes)
    if as_json:
        listed = [{"target": o.target.name, "case": str(o.case), "complaint": o.complaint} for o in failures]
        document = {"device": device, "rows": rows, "failures": listed, "probes": probes, "passed": passed}
        skipped = {} if left_out is None else {"lstm_cell_forward": left_out}
        print_json({**document, "not_checked": skipped, "probe_failure": probe_failure, "config": configuration()})
    for outcome in failures[:SHOWN_FAILURES]:
        console.print(Text(f"{outcome.target.name}: {outcome.case}: {outcome.complaint}", "red"))
    if len(failures) > SHOWN_FAILURES:
        console.print(Text(f"... and {len(failures) - SHOWN_FAILURES} more; --json lists all", "red"))
    if probe_failure:
        console.print(Text(f"the bias probe ended early: {probe_failure}", "red"))
    if not passed:
        what = f"{len(failures)} of {len(outcomes)} cases failed"
        raise click.ClickException(what if failures else "the bias of lstm_cell_backward is wrong on this device")
    console.print(Text(f"All {len(outcomes)} cases passed on {device}.", "bold green"))


def print_check(console: Console, rows: list[dict[str, Any]], operator: str, device: str) -> None:
    """Print the table of an operator's targets and dtypes, and what its columns mean."""
    on_cpu = device == "cpu"
    results = _check.OPERATORS[operator].results
    columns = ["Device", "dtype", "Cases", *(name.removeprefix("grad_") for name in results)]
    columns += [*(["Bound", "Bits"] if on_cpu else []), "CANN", "Verdict"]
    table = data_table(f"{operator} on {device} against the float64 reference: largest error", *columns, left=2)
    for row in rows:
        cells: list[Any] = [row["target"].removeprefix("cpu, "), row["dtype"], str(row["cases"])]
        cells += [units_text(row["errors"][name]) for name in results]
        if on_cpu:
            bounds = "/".join(dict.fromkeys(f"{bound:g}" for bound in row["bounds"].values()))
            cells += [bounds, verdict(row["same_bits"], "same", "OTHER")]
        table.add_row(*cells, verdict(row["within_tolerance"], "within", "OUTSIDE"), verdict(row["passed"]))
    console.print(table)
    notes = f"In {_check.OPERATORS[operator].measure}."
    if on_cpu:
        notes += " Bound: what the package promises. Bits: the same in every variant."
    else:
        notes += " They are for information: the operator's own formulas lose digits, as where cy or g is saturated."
    console.print(notes + "\n", style="dim", highlight=False)


def print_tolerances(console: Console) -> None:
    """Print what CANN allows its operators."""
    notes = "CANN's tolerance"
    for name, tolerance in _check.TOLERANCES.items():
        rtol, atol = (f"2^{math.log2(value):.0f}" for value in (tolerance.rtol, tolerance.atol))
        notes += (
            f"; {name}: rtol {rtol}, atol {atol} for {tolerance.share:.0%} of the elements, largest error below "
            f"{tolerance.largest:g}"
        )
    console.print(notes + ".\n", style="dim", highlight=False)


def print_probes(console: Console, probes: list[_check.Probe]) -> None:
    """Print the table of the bias probe, and what it means."""
    title = f"grad_bias, float32, hidden size {_check.PROBED_HIDDEN}: largest error"
    table = data_table(title, "Rows", "Operator alone", "", "lstm_cell_backward", "")
    for probe in probes:
        raw = probe.message if probe.raw_error is None else f"{probe.raw_error:.2e}"
        found = verdict(probe.raw_right, "right", "WRONG")
        table.add_row(str(probe.rows), raw, found, f"{probe.error:.2e}", verdict(probe.right, "right", "WRONG"))
    console.print(table)
    wrong = [probe.rows for probe in probes if not probe.raw_right]
    if wrong:
        note = (
            f"The operator's own bias is wrong at {', '.join(map(str, wrong))} rows: the known defect from 4095 on "
            "at small hidden sizes. lstm_cell_backward avoids it; lstmcell_bwd.aclnn does not."
        )
    else:
        note = "The operator's own bias is right here: this CANN does not show the known defect."
    console.print(note + "\n", style="dim", highlight=False)


# ---- bench -----------------------------------------------------------------------------------------------------------


class SizeType(click.ParamType[tuple[int, int]]):
    """A size such as 64x512."""

    name = "NxH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the batch and the hidden size."""
        match = re.fullmatch(r"([1-9][0-9]{0,9})x([1-9][0-9]{0,9})", str(value))
        if match is None:
            self.fail(f"must be a batch and a hidden size such as 64x512, got {value!r}", param, ctx)
        return int(match[1]), int(match[2])


@cli.command()
@click.option("--size", "sizes", type=SizeType(), multiple=True, help="A size instead of the usual ones; repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds of the measuring rule.")
@plot_option
@json_option
def bench(sizes: tuple[tuple[int, int], ...], rounds: int, plot: Path | None, as_json: bool) -> None:
    """Time the CPU kernel against NumPy and against memory itself.

    Every contender runs once untimed and then at least three times timed, in rotating order; figures are medians over
    the rounds. The limit is the fastest kernel that moves the same bytes without arithmetic. float32, with `out`.
    """
    check_plot(plot)
    limit, reason = _bench.limit_module()
    chosen = sizes or _bench.SIZES
    rows: list[_bench.Row] = []
    with progress_bar(len(chosen)) as step, threadpool_limits(limits=1, user_api="blas"):
        for found in _bench.measure(chosen, rounds, limit):
            rows += found
            step(f"{found[0].batch}x{found[0].hidden}")
    if plot is not None:
        draw(plot, 9, 4.5, lambda axes: paint_bench(axes, rows, limit is not None))
    if as_json:
        document = {"isa": get_isa(), "rounds": rounds, "rows": rows, "limit": reason or limit.instruction_set()}
        print_json({**document, "config": configuration()})
        return
    console = Console()
    columns = ("Size", "Threads", "Time", "GB/s", "Over the limit", "NumPy", "Times as fast")
    table = data_table(f"lstm_cell_backward, float32, {get_isa()}", *columns)
    for row in rows:
        over = "not built" if row.over_limit is None else quoted(row.over_limit)
        table.add_row(
            f"{row.batch}x{row.hidden}",
            str(row.threads),
            duration(row.seconds),
            f"{row.gigabytes_per_second:.1f}",
            over,
            duration(row.numpy_seconds),
            quoted(row.speedup),
            end_section=row.threads == _bench.THREADS[-1],
        )
    console.print(table)
    console.print(
        f"Median over {rounds} rounds; of ratios the median and, in brackets, the smallest. "
        "Over the limit: time over that of a kernel that moves the same bytes (1 is the best possible). "
        "Threads: the most that a call may use; small calls use fewer.",
        style="dim",
        highlight=False,
    )
    if limit is None:
        console.print(f"The limit is not built: {reason}", style="yellow", highlight=False)
    if plot is not None:
        console.print(f"Picture: {plot}", highlight=False)


def quoted(ratio: Quote) -> str:
    """Return a ratio's median and smallest value."""
    return f"{ratio.median:.2f} ({ratio.smallest:.2f})"


def paint_bench(axes: Any, rows: list[_bench.Row], has_limit: bool) -> None:
    """Draws the bandwidth at every size: NumPy, ours on every number of threads, and how far each is from its limit."""
    from matplotlib.ticker import LogLocator, NullLocator

    sizes = list(dict.fromkeys((row.batch, row.hidden) for row in rows))
    places = np.arange(len(sizes))
    one = [row for row in rows if row.threads == _bench.THREADS[0]]
    numpy_speeds = [row.gigabytes_per_second * row.seconds / row.numpy_seconds for row in one]
    axes.plot(places - 0.25, numpy_speeds, "o", color="0.6", label="NumPy expression")
    for k, (threads, color) in enumerate(zip(_bench.THREADS, ("C0", "C2"), strict=True)):
        chosen = [row for row in rows if row.threads == threads]
        speeds = [row.gigabytes_per_second for row in chosen]
        at = places + 0.25 * k
        axes.plot(at, speeds, "o", color=color, label=f"lstmcell_bwd, {threads} thread{'s' * (threads > 1)}")
        if has_limit:
            limits = [row.gigabytes_per_second * row.over_limit.median for row in chosen if row.over_limit]
            # On a logarithmic axis the length of the line is the ratio to the limit.
            axes.vlines(at, speeds, limits, color=color, linewidth=1)
            last = threads == _bench.THREADS[-1]
            axes.plot(at, limits, "k_", markersize=14, markeredgewidth=2, label="same-bytes limit" if last else None)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.set_xticks(places, [f"{batch}x{hidden}" for batch, hidden in sizes])
    axes.set(ylabel="GB/s of inputs and outputs", xlabel="batch x hidden size", xlim=(-0.5, len(sizes) - 0.5))
    axes.set_title(f"LSTM cell backward, float32, {get_isa()}", loc="left", pad=24)
    axes.spines[["top", "right"]].set_visible(False)
    spacing = {"borderaxespad": 0.2, "borderpad": 0, "columnspacing": 1.2, "handlelength": 1, "handletextpad": 0.5}
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), **spacing)


# ---- info ------------------------------------------------------------------------------------------------------------


def configuration() -> dict[str, dict[str, Any]]:
    """`show_config`, the packages of the extras, and the thread pools of this process."""
    config: dict[str, dict[str, Any]] = dict(show_config(mode="dict") or {})
    extras: dict[str, Any] = {}
    for name in ("ml_dtypes", "click", "rich", "matplotlib", "threadpoolctl"):
        try:
            extras[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            extras[name] = "not installed"
    config["extras"] = extras
    relevant = ("LSTMCELL_BWD_", "ASCEND_", "ACL", "OMP_", "GOMP_", "OPENBLAS_", "MKL_")
    config["environment"] = {name: value for name, value in os.environ.items() if name.startswith(relevant)}
    config["thread pools"] = {
        f"{pool['user_api']} ({pool['internal_api']})": f"{pool['num_threads']} threads, {pool['filepath']}"
        for pool in threadpool_info()
    }
    return config


def print_configuration(console: Console, config: dict[str, dict[str, Any]]) -> None:
    """Print what `configuration` found, without the sections that are empty."""
    for title, entries in config.items():
        if entries:
            console.print(key_values(title, entries.items()))
            console.print()


@cli.command()
@json_option
def info(as_json: bool) -> None:
    """Show versions, instruction sets, threads and the NPU's state."""
    config = configuration()
    if as_json:
        print_json(config)
        return
    print_configuration(Console(), config)
