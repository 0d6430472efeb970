"""Benchmarks of lstmcell_bwd. Not part of the installed package: importable where the repository's root is on sys.path.

`benches.limit` moves the operator's bytes, `benches.measure` is the measuring rule, `benches.data` makes the arrays.
"""

import importlib.util
import sys
from pathlib import Path

__all__ = ["ROOT", "read"]

ROOT = Path(__file__).resolve().parents[1]

# `python -m benches...` looks in the current folder first: the package under test is the installed one, where there is
# one, not the sources beside this folder.
if not sys.flags.safe_path and sys.path and Path(sys.path[0]).resolve() == ROOT:
    sys.path.append(sys.path.pop(0))


def read(name):
    """Load one of the package's plain modules from this repository, whatever version of it is installed, if any."""
    alias = f"benches.{name}"
    if alias not in sys.modules:
        path = ROOT / "lstmcell_bwd" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(alias, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module
        spec.loader.exec_module(module)
    return sys.modules[alias]
