"""What the compiled modules are made of: their symbols, their instructions, and what importing them loads."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lstmcell_bwd
from lstmcell_bwd import _features

MODULES = sorted(Path(lstmcell_bwd.__file__).parent.glob("_*.so"))
NO_BINUTILS = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")


def listing(command, module):
    return subprocess.run([*command, module], capture_output=True, text=True, check=True, timeout=60).stdout


def test_there_are_modules():
    assert {path.name.split(".")[0] for path in MODULES} >= {"_api", "_arguments", "_features", "_kernel_baseline"}


@NO_BINUTILS
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name.split(".")[0])
def test_a_module_exports_its_entry_alone(module):
    exported = re.findall(r"^\S+ [TDBRW] (\w+)$", listing(["nm", "-D", "--defined-only"], module), re.MULTILINE)
    assert exported == [f"PyInit_{module.name.split('.')[0]}"]


@NO_BINUTILS
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name.split(".")[0])
def test_wide_instructions_stay_in_their_stubs(module):
    code = listing(["objdump", "-d", "--no-show-raw-insn"], module)
    wide = {name for name in ("xmm", "ymm", "zmm") if f"%{name}" in code}
    if "avx512" in module.name:
        assert "zmm" in wide
    elif "avx2" in module.name:
        assert "ymm" in wide
        assert "zmm" not in wide
        assert not re.search(r"\bvfn?m(add|sub)", code)
    else:
        assert wide <= {"xmm"}
        assert not re.search(r"^\s+\S+:\s+v(mov|add|mul)", code, re.MULTILINE)


def test_openmp_was_not_lost():
    assert _features.build_info()["openmp"] > 0


def test_import_loads_nothing_heavy():
    code = (
        "import sys, numpy; before = set(sys.modules); import lstmcell_bwd; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"acl", "torch", "torch_npu", "dask", "click", "rich", "matplotlib", "ml_dtypes", "threadpoolctl"}
    assert not heavy & set(loaded.split())
