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


AVX2 = [path for path in MODULES if path.name.startswith("_kernel_avx2.")]


@NO_BINUTILS
@pytest.mark.parametrize("module", AVX2, ids=["_kernel_avx2"][: len(AVX2)])
def test_hot_loops_are_vectorised(module):
    """The fast rows divide once for each element, in a loop of any length and in one of constant length."""
    code = listing(["objdump", "-d", "--no-show-raw-insn"], module)
    for operation in ("vdivps", "vdivpd"):
        assert len(re.findall(rf"\s{operation}\s.*%ymm", code)) >= 2, operation


WIDE = {"avx2": "ymm", "avx512": "zmm"}


@NO_BINUTILS
@pytest.mark.parametrize("module", [x for x in MODULES if "kernel_avx" in x.name], ids=lambda x: x.name.split(".")[0])
def test_forward_loops_are_vectorised(module):
    """sigmoid, tanh and tanh of the cell state divide once for each element, in the fast and in the careful rows."""
    register = WIDE[module.name.split(".")[0].removeprefix("_kernel_")]
    code = listing(["objdump", "-d", "--no-show-raw-insn"], module)
    # The compiler decides which of them become part of others.
    forward = "\n".join(re.findall(r"^[0-9a-f]+ <\S*forward_\S*>:\n(.*?)\n\n", code, re.MULTILINE | re.DOTALL))
    for operation in ("vdivps", "vdivpd"):
        assert len(re.findall(rf"\s{operation}\s.*%{register}", forward)) >= 7, operation


@NO_BINUTILS
@pytest.mark.parametrize("module", [x for x in MODULES if "kernel" in x.name], ids=lambda x: x.name.split(".")[0])
def test_kernels_call_no_mathematical_library(module):
    imported = re.findall(r"U (\w+)", listing(["nm", "-D", "--undefined-only"], module))
    assert "memcpy" in imported
    assert not [name for name in imported if re.match(r"_?_?(exp|log|tanh|pow|ldexp|fma|round|rint|sqrt)", name)]


@NO_BINUTILS
@pytest.mark.parametrize("module", AVX2, ids=["_kernel_avx2"][: len(AVX2)])
def test_float32_becomes_float64_in_the_bias_alone(module):
    """Each conversion feeds an addition to the wide sums; only the rounding of the bias converts for other reasons."""
    code, function = [], ""
    for line in listing(["objdump", "-d", "--no-show-raw-insn"], module).splitlines():
        if heading := re.match(r"[0-9a-f]+ <(.+)>:", line):
            function = heading[1]
        elif (parts := re.match(r"\s+[0-9a-f]+:\s+(\S+)\s*(.*)", line)) and not function.endswith("round_sums"):
            code.append((parts[1], parts[2]))
    assert not [operation for operation, _ in code if re.match(r"vcvt(sd2ss|pd2ps)", operation)]
    widened = [k for k, (operation, _) in enumerate(code) if re.match(r"vcvt(ss2sd|ps2pd)", operation)]
    assert widened
    for k in widened:
        register = code[k][1].split(",")[-1].strip()
        users = [operands for operation, operands in code[k + 1 : k + 8] if re.match(r"vadd[sp]d", operation)]
        assert any(register in operands for operands in users), code[k : k + 8]


def test_public_names():
    public = lstmcell_bwd.__all__
    assert public == sorted(set(public))
    assert all(hasattr(lstmcell_bwd, name) for name in public)


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
