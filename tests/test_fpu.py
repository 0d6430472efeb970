"""The floating-point state: never changed by import or call, never an influence on a result."""

import ctypes
import ctypes.util
import platform
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from strategies import Inputs, assert_same_bits, bits, make_inputs, plain_call

from lstmcell_bwd import _features, lstm_cell_backward

# fenv.h: the environment as the C library keeps it, and where flush-to-zero is in it.
MACHINES = {
    # mxcsr is the last word of 32 bytes; flush-to-zero 0x8000, denormals-are-zero 0x40.
    "x86_64": {
        "words": 8,
        "word": 7,
        "sticky": 0x3F,
        "flush": 0x8040,
        "rounding": {"down": 0x2000, "up": 0x4000, "zero": 0x6000},
    },
    # fpcr, fpsr; FZ is bit 24, FZ16 bit 19.
    "aarch64": {
        "words": 2,
        "word": 0,
        "sticky": 0,
        "flush": 1 << 24,
        "rounding": {"up": 0x400000, "down": 0x800000, "zero": 0xC00000},
    },
}
MACHINE = MACHINES.get(platform.machine())
pytestmark = pytest.mark.skipif(MACHINE is None, reason="no knowledge of this processor's floating-point state")
FOREIGN = ["flush", "down", "up", "zero", "flush and up"]


class ForeignState:
    """Sets the calling thread's flush-to-zero flags or rounding mode, as code built with -ffast-math would."""

    def __init__(self, state):
        self.libm = ctypes.CDLL(ctypes.util.find_library("m"))
        self.before = (ctypes.c_uint32 * MACHINE["words"])()
        self.changed = (ctypes.c_uint32 * MACHINE["words"])()
        for environment in (self.before, self.changed):
            assert self.libm.fegetenv(environment) == 0
        if "flush" in state:
            self.changed[MACHINE["word"]] |= MACHINE["flush"]
        for name, flag in MACHINE["rounding"].items():
            if name in state:
                self.changed[MACHINE["word"]] |= flag

    def __enter__(self):
        assert self.libm.fesetenv(self.changed) == 0

    def __exit__(self, *error):
        assert self.libm.fesetenv(self.before) == 0


def tiny(dtype):
    """Inputs among which many numbers, products and sums are subnormal, and many roundings are close."""
    inputs = make_inputs(70, 40, dtype, seed=1, kind="saturated")
    limit = np.finfo(np.float32 if np.dtype(dtype).itemsize == 4 else dtype)
    inputs.grad_hy[::2] *= dtype.type(limit.smallest_normal)
    inputs.grad_cy[::2] = limit.smallest_subnormal * np.arange(40)
    inputs.cx[1::4] = limit.smallest_subnormal * np.arange(40)
    return inputs


def in_a_new_thread(function):
    """Run a function in a fresh thread, whose OpenMP team is fresh too, and return its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert results, "the thread raised"
    return results[0]


@pytest.mark.parametrize("state", FOREIGN)
def test_the_foreign_state_is_foreign(state):
    """The test's own tool works: it changes the state, and with flush-to-zero a subnormal vanishes."""

    def run():
        ordinary = _features.fp_state()
        with ForeignState(state):
            foreign = _features.fp_state()
            product = np.full(8, 1e-40, np.float32) * np.float32(1)
        return ordinary, foreign, product, _features.fp_state()

    ordinary, foreign, product, after = in_a_new_thread(run)
    assert foreign != ordinary
    assert after == ordinary
    if "flush" in state:
        assert not product.any()


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("state", FOREIGN)
@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_a_foreign_state_changes_no_bit(isa, name, state, number):
    """C27: the team's threads are created under the foreign state and inherit it."""
    inputs = tiny(np.dtype(name))
    expected = plain_call(inputs)

    def run():
        with ForeignState(state):
            before = _features.fp_state()
            result = lstm_cell_backward(*inputs, num_threads=number)
            after = _features.fp_state()
        return before, result, after

    before, result, after = in_a_new_thread(run)
    assert before == after
    assert before != _features.fp_state()
    assert_same_bits(result, expected)


def on_every_thread_of_the_team(function, argument, number):
    """Call a C function of one pointer on each thread of the team that the calling thread's next region will use."""
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    paths = sorted({line.split()[-1] for line in maps.splitlines() if "libgomp" in line})
    if not paths:
        pytest.skip("the OpenMP runtime is not libgomp")
    ctypes.CDLL(paths[0]).GOMP_parallel(function, argument, number, 0)


@pytest.mark.parametrize("state", FOREIGN)
@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_a_team_in_a_foreign_state(isa, name, state):
    """Workers that other code has left in a foreign state: they compute in ours, and get theirs back."""
    inputs = tiny(np.dtype(name))
    expected = plain_call(inputs)

    def run():
        foreign = ForeignState(state)
        with foreign:
            on_every_thread_of_the_team(foreign.libm.fesetenv, foreign.changed, 3)
            before = _features.fp_state()
            result = lstm_cell_backward(*inputs, num_threads=3)
            seen = []
            for _ in range(50):  # each thread writes what it has to one place; the last one stays
                found = (ctypes.c_uint32 * MACHINE["words"])()
                on_every_thread_of_the_team(foreign.libm.fegetenv, found, 3)
                seen.append(found[MACHINE["word"]])
        return result, before, seen

    result, before, seen = in_a_new_thread(run)
    assert_same_bits(result, expected)
    assert before != _features.fp_state()
    assert {word & ~MACHINE["sticky"] for word in seen} == {before}


@pytest.mark.parametrize("state", FOREIGN)
def test_special_paths_under_a_foreign_state(isa, state):
    """Inf, NaN, |cy| past the plain range, parts and their combination."""
    from lstmcell_bwd import combine_bias, lstm_cell_backward_part

    inputs = tiny(np.dtype(np.float32))
    inputs.cy[3, 3], inputs.cx[4, 4], inputs.cy[5, 5] = 55, np.inf, np.nan
    expected = plain_call(inputs)

    def run():
        with ForeignState(state):
            whole = lstm_cell_backward(*inputs, num_threads=2)
            parts = [
                node
                for first in (0, 32, 64)
                for node in lstm_cell_backward_part(*(x[first : first + 32] for x in inputs), first_row=first).parts
            ]
            return whole, combine_bias(parts, np.float32)

    whole, bias = in_a_new_thread(run)
    assert_same_bits(whole, expected)
    np.testing.assert_array_equal(bits(bias), bits(expected.grad_bias))


def test_state_after_errors():
    """A refused call leaves the state alone as well."""

    def run():
        with ForeignState("flush and up"):
            before = _features.fp_state()
            with pytest.raises(ValueError, match="gates"):
                lstm_cell_backward(*make_inputs(2, 2)._replace(gates=np.zeros((2, 2), np.float32)))
            return before, _features.fp_state()

    before, after = in_a_new_thread(run)
    assert before == after


def test_import_leaves_the_state_alone():
    """C27: no flush-to-zero after import, and no warning from numpy.finfo."""
    code = """
import warnings
warnings.simplefilter("error")
import numpy as np
from lstmcell_bwd._features import fp_state
before = fp_state()
import lstmcell_bwd, lstmcell_bwd.reference
for isa in lstmcell_bwd._api.built_isas():
    if isa in lstmcell_bwd._features.runnable_isas():
        lstmcell_bwd.use_isa(isa)
assert fp_state() == before
assert np.float32(1e-45) / np.float32(1) != 0
np.finfo(np.float32), np.finfo(np.float64)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_subnormal_results_are_kept(isa):
    """C27: grad_cy = 1e-40, i = 0.5, g = 0 gives 5e-41 in every row, whichever thread computes it."""
    shape = 200, 3
    zeros = np.zeros(shape, np.float32)
    gates = np.repeat(np.array([[0.5, 0.5, 0, 0.5]], np.float32), 3, axis=1)
    inputs = Inputs(None, np.full(shape, 1e-40, np.float32), zeros, zeros, np.broadcast_to(gates, (200, 12)))
    for number in (1, 2, 3):
        result = lstm_cell_backward(*inputs, num_threads=number)
        np.testing.assert_array_equal(result.grad_gates[:, 6:9], np.float32(5e-41))
        np.testing.assert_array_equal(result.grad_cx, np.float32(5e-41))
