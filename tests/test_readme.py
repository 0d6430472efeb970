"""The README's examples do what they say."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("ending", ["lstmcell-bwd demo", ".venv/bin/pytest"])
def test_the_two_commands_stand_alone(ending):
    (command,) = [code.strip() for code in examples("console") if code.strip().endswith(ending)]
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert "\n" not in command
