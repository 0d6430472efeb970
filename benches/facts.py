"""What every published figure carries: machine, instruction set, compiler, versions, commit.

`python -m benches.facts` prints it. `python -m benches.facts --asv` also describes the machine to asv, so that the
results and the dashboard name instruction set and compiler beside the CPU; run it once before `asv run`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

import lstmcell_bwd
from benches import ROOT
from lstmcell_bwd import _features

__all__ = ["PACKAGE", "commit", "cpu_name", "facts"]

# What a commit must touch to change a figure.
PACKAGE = ("pyx", "setup.py", "lstmcell_bwd")


def cpu_name() -> str:
    """Return the CPU's name as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Return the newest commit that changed the package, with "+" where it was changed since; "unknown" without git."""
    git = ["git", "-C", str(ROOT)]
    try:
        newest = [*git, "log", "--max-count=1", "--abbrev=10", "--format=%h", "--", *PACKAGE]
        name = subprocess.run(newest, capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no", "--", *PACKAGE]
        changed = subprocess.run(status, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (name.stdout.strip() or "unknown") + ("+" if changed.stdout else "")


def facts() -> dict[str, object]:
    """Collect what a figure measured here and now must carry."""
    build = _features.build_info()
    return {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "instruction_set": lstmcell_bwd.get_isa(),
        "compiler": build["compiler"],
        "cython": build["cython"],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "lstmcell_bwd": lstmcell_bwd.__version__,
        "commit": commit(),
    }


def describe_to_asv() -> int:
    """Write asv's description of this machine; return asv's exit status."""
    known = facts()
    compiler = str(known["compiler"]).split("(")[0].strip()
    cpu = f"{known['cpu']}, {known['instruction_set']}, {compiler}"
    asv = [sys.executable, "-m", "asv", "machine", "--config", str(Path(__file__).with_name("asv.conf.json"))]
    # asv takes single fields only for a machine that it knows.
    first = subprocess.run([*asv, "--yes"], capture_output=True)
    return first.returncode or subprocess.run([*asv, "--cpu", cpu, "--os", platform.system()]).returncode


def main() -> int:
    """Print the facts, and describe the machine to asv where asked to."""
    parser = argparse.ArgumentParser(description="machine, instruction set, compiler, versions, commit")
    parser.add_argument("--asv", action="store_true", help="also describe the machine to asv")
    print(json.dumps(facts(), indent=2))
    return describe_to_asv() if parser.parse_args().asv else 0


if __name__ == "__main__":
    sys.exit(main())
