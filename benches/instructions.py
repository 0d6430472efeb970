"""Guards the kernel against regressions by counting instructions, which does not depend on the machine's speed.

    python -m benches.instructions              compare with benches/instructions.json
    python -m benches.instructions --record     write the counts of this compiler, Cython and NumPy there

valgrind's callgrind counts what the kernel's extension executes from the entry of its `run` function to its end, for
one call of each size on one thread, with each instruction set that valgrind can run (AVX-512 is not among them).

Exit status: 0 all counts within 3 % of the recorded ones, or below; 1 slower, more instructions than that; 2 bad usage;
3 could not measure: nothing recorded for these versions (or not of every case), or no valgrind; 4 counts are recorded
for these versions, but valgrind ran and counted nothing: the guard itself is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benches import ROOT

__all__ = [
    "BROKEN",
    "COULD_NOT_MEASURE",
    "SLOWER",
    "WITHIN",
    "CountingError",
    "compare",
    "count",
    "instructions_of",
    "key",
]

RECORDED = ROOT / "benches" / "instructions.json"
TOLERANCE = 0.03
SIZES = ("32x128", "64x512", "37x1000")
ISAS = ("baseline", "avx2")
WITHIN, SLOWER, COULD_NOT_MEASURE, BROKEN = 0, 1, 3, 4

# Runs under valgrind: one call for each size, in that order, on arrays that begin on 64-byte lines.
PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import numpy as np
import lstmcell_bwd
from benches import data
def aligned(array):
    block = np.empty(array.nbytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    copy = block[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
lstmcell_bwd.use_isa(sys.argv[2])
for size in sys.argv[3].split(","):
    shape = data.shape(size)
    inputs, out = map(aligned, data.inputs(*shape)), tuple(map(aligned, data.outputs(*shape)))
    lstmcell_bwd.lstm_cell_backward(*inputs, out=out, num_threads=1)
"""


class CountingError(RuntimeError):
    """valgrind ran and the instructions were not counted; the message says why."""


def key() -> str:
    """Return what counts are recorded under: everything that the kernel's machine code depends on."""
    import numpy

    from lstmcell_bwd import _features

    build = _features.build_info()
    return f"{platform.machine()}, {build['compiler']}, Cython {build['cython']}, NumPy {numpy.__version__}"


def instructions_of(profile: str, library: str) -> int:
    """Sum the instructions that one shared library executed itself, from a profile in callgrind's format.

    Parameters
    ----------
    profile : str
        The text of a callgrind.out file with one cost, the instructions (format version 1).
    library : str
        Part of the library's file name.

    Returns
    -------
    int
    """
    names: dict[str, str] = {}
    inside, called, total = False, False, 0
    for line in profile.splitlines():
        if line.startswith("ob="):
            number, name = re.fullmatch(r"ob=(\(\d+\))(?: (.*))?", line).groups()
            names[number] = name or names[number]
            inside = library in names[number]
        elif line.startswith("cob="):
            number, name = re.fullmatch(r"cob=(\(\d+\))(?: (.*))?", line).groups()
            names[number] = name or names[number]
        elif line.startswith("calls="):
            called = True  # the next line is the cost of the callee, which has lines of its own
        elif line[:1] in "0123456789+-*" and line:
            if inside and not called:
                total += int(line.split()[1])
            called = False
    return total


def profile(isa: str) -> list[int]:
    """Count one call of each size with one instruction set, in a process of its own.

    callgrind 3.19 collects nothing when it is given two functions to toggle at, hence not all sets in one process.
    """
    import lstmcell_bwd

    # Cython's name of the kernel's entry in the extension, and the package as this process has it.
    entry = f"__pyx_f_12lstmcell_bwd_{len(f'_kernel_{isa}')}_kernel_{isa}_run"
    place = str(Path(lstmcell_bwd.__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "profile")
        command = [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={output}", "--collect-atstart=no",
            f"--toggle-collect={entry}", f"--dump-after={entry}",
            sys.executable, "-P", "-c", PROGRAM, str(ROOT), isa, ",".join(SIZES),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": place, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            msg = f"valgrind failed: {(done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]}"
            raise CountingError(msg)
        dumps = [Path(f"{output}.{number}") for number in range(1, len(SIZES) + 1)]
        if not all(dump.exists() for dump in dumps):
            msg = f"callgrind saw {sum(dump.exists() for dump in dumps)} calls of `{entry}`, not {len(SIZES)}"
            raise CountingError(msg)
        counts = [instructions_of(dump.read_text(), f"_kernel_{isa}.") for dump in dumps]
    if not all(counts):
        msg = f"callgrind saw no instruction of `{entry}`"
        raise CountingError(msg)
    return counts


def count() -> dict[str, int]:
    """Count the instructions of one call for every instruction set and size.

    Returns
    -------
    dict of str to int
        Keys as "avx2 64x512".

    Raises
    ------
    CountingError
        If valgrind fails, or does not see the kernel.
    """
    from lstmcell_bwd import _features

    counts = {}
    for isa in ISAS:
        if isa in _features.runnable_isas():
            counts |= zip((f"{isa} {size}" for size in SIZES), profile(isa), strict=True)
    return counts


def compare(counts: dict[str, int], recorded: dict[str, int]) -> tuple[int, list[str]]:
    """Compare counts with those recorded for the same versions.

    Returns
    -------
    status : int
        `WITHIN`, `SLOWER` or `COULD_NOT_MEASURE`; slower in one case outweighs another that was not recorded.
    lines : list of str
    """
    status, lines = WITHIN, []
    for name in sorted(counts.keys() ^ recorded.keys()):
        status = COULD_NOT_MEASURE
        reason = "this CPU does not run it" if name in recorded else "it is not recorded for these versions"
        lines.append(f"could not measure {name}: {reason}")
    for name in sorted(counts.keys() & recorded.keys()):
        number = counts[name]
        change = number / recorded[name] - 1
        text = f"{name}: {number} instructions, {change:+.1%} against the recorded {recorded[name]}"
        if number > recorded[name] * (1 + TOLERANCE):
            status = SLOWER
            text = f"SLOWER {text}"
        elif number < recorded[name] * (1 - TOLERANCE):
            text = f"{text}; record the better count"
        lines.append(text)
    return status, lines


def main() -> int:
    """Count, then compare or record; see the module's documentation for the exit status."""
    parser = argparse.ArgumentParser(description="compare the kernel's instruction counts with the recorded ones")
    parser.add_argument("--record", action="store_true", help="write the counts instead")
    options = parser.parse_args()
    recorded = json.loads(RECORDED.read_text())
    print(key())
    if not options.record and key() not in recorded:
        print("could not measure: no counts are recorded for these versions; see --record")
        return COULD_NOT_MEASURE
    if shutil.which("valgrind") is None:
        print("could not measure: valgrind is not installed")
        return COULD_NOT_MEASURE
    try:
        counts = count()
    except CountingError as error:
        print(f"BROKEN: {error}")
        return BROKEN
    if options.record:
        recorded[key()] = counts
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        print(*(f"{name}: {number} instructions, recorded" for name, number in counts.items()), sep="\n")
        return WITHIN
    status, lines = compare(counts, recorded[key()])
    print(*lines, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
