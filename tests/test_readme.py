"""The README's examples do what they say."""

import re
from pathlib import Path

import pytest
import strategies

import lstmcell_bwd

README = Path(__file__).parents[1] / "README.md"


def examples(language):
    """Return the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_ten_line_example_runs():
    example = examples("python")[0]
    assert len(example.splitlines()) <= 10
    names = {}
    exec(example, names)  # its own assertions are part of it
    assert abs(names["grad_bias"] - names["grad_gates"].sum(axis=0)).max() < 1e-4


def test_the_example_in_dask_runs():
    dask = pytest.importorskip("dask", reason="dask is not installed")
    (example,) = [code for code in examples("python") if "dask" in code]
    assert len(example.splitlines()) <= 10
    names = {}
    exec(example, names)
    inputs = dask.compute(*(names[name] for name in strategies.NAMES))
    result = lstmcell_bwd.LSTMCellGradients(*(names[name] for name in strategies.OUTPUTS))
    strategies.assert_same_bits(result, strategies.plain_call(inputs))


def test_the_forward_example_runs():
    (example,) = [code for code in examples("python") if "lstm_cell_forward" in code]
    assert len(example.splitlines()) <= 10
    names = {}
    exec(example, names)  # its own assertions are part of it
    assert names["grad_gates"].shape == names["gates"].shape


@pytest.mark.parametrize("ending", ["lstmcell-bwd demo", ".venv/bin/pytest"])
def test_the_two_commands_stand_alone(ending):
    (command,) = [code.strip() for code in examples("console") if code.strip().endswith(ending)]
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert "\n" not in command
