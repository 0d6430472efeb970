"""Sizes past 2^31, memory that runs out, and memory that is not needed."""

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from strategies import Inputs, assert_same_bits, bits, make_inputs, plain_call

from lstmcell_bwd import lstm_cell_backward

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's virtual memory")
MAP_NORESERVE, MAP_FIXED = 0x4000, 0x10


@pytest.fixture
def far_apart():
    """A maker of arrays whose rows lie more than 2^31 bytes apart, in address space that is never touched between."""
    regions = []

    def make(values, distance):
        rows = len(values)
        size = (rows - 1) * abs(distance) + values.shape[1] * values.itemsize + mmap.PAGESIZE
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        regions.append(region)
        start = (rows - 1) * abs(distance) if distance < 0 else 0
        array = np.ndarray(values.shape, values.dtype, region, start, (distance, values.itemsize))
        array[...] = values
        return array

    return make


@linux
@pytest.mark.parametrize("distance", [2**31 + 4096, -(2**31) - 64, 2**32 + 8], ids=["2^31", "-2^31", "2^32"])
def test_row_strides_beyond_2_31_bytes(backend, far_apart, distance):
    inputs = make_inputs(3, 37, backend, seed=1)
    expected = plain_call(inputs)
    far = Inputs(*(far_apart(x, distance) for x in inputs))
    out = far_apart(np.zeros_like(expected.grad_gates), distance), far_apart(np.zeros_like(expected.grad_cx), -distance)
    assert_same_bits(lstm_cell_backward(*far, out=(*out, None), num_threads=2), expected)
    in_place = lstm_cell_backward(*far, out=(far.gates, far.cx, None))
    assert in_place.grad_gates is far.gates
    assert_same_bits(in_place, expected)


@linux
def test_column_strides_beyond_2_31_bytes(isa, far_apart):
    """Fortran order with columns far apart: the transposes of arrays with rows far apart."""
    inputs = make_inputs(5, 2, np.float32, seed=2)
    far = Inputs(*(far_apart(np.ascontiguousarray(x.T), 2**31 + 4096).T for x in inputs))
    out = far_apart(np.zeros((8, 5), np.float32), 2**31 + 4096).T
    result = lstm_cell_backward(*far, out=(out, None, None))
    assert_same_bits(result, plain_call(inputs))


@linux
def test_rows_of_a_sparse_file(isa, tmp_path):
    """A memory map of a file of 20 gigabytes that holds a few pages."""
    inputs = make_inputs(4, 16, np.float32, seed=3)
    rows = 2**29 // 4
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(4 * rows * 64 * 4)
    mapped = np.memmap(tmp_path / "sparse", np.float32, "r+", shape=(4 * rows, 64))
    assert mapped.size > 2**31
    mapped[::rows] = inputs.gates
    assert_same_bits(lstm_cell_backward(*inputs._replace(gates=mapped[::rows])), plain_call(inputs))


class Repeated:
    """An address range of any size in which one small piece of memory appears again and again."""

    def __init__(self, size, piece):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.size = -(-size // piece) * piece
        file = os.memfd_create("repeated")
        os.ftruncate(file, piece)
        self.address = self.map(None, self.size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        for start in range(0, self.size, piece):
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self.map(self.address + start, piece, access, mmap.MAP_SHARED | MAP_FIXED, file)
        os.close(file)

    def map(self, *arguments):
        address = self.libc.mmap(*arguments, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        return address

    def array(self, shape, dtype):
        memory = (ctypes.c_ubyte * self.size).from_address(self.address)
        return np.frombuffer(memory, dtype, shape[0] * shape[1]).reshape(shape)

    def close(self):
        self.libc.munmap(self.address, self.size)


@linux
def test_more_than_2_31_elements():
    """grad_gates and gates of 2^31 + 2^17 elements. All rows are alike, so every piece of the output must be, too.

    The bias counts the rows: each adds 2^-8 to the i block, and the rows before the last ones are not enough.
    """
    hidden, batch = 4096, 2**17 + 8
    dtype = np.dtype(np.float16)
    gates = np.repeat(np.array([[0.5, 0.25, 0.5, 0.5]], dtype), hidden, axis=1)
    states = [np.full((1, hidden), value, dtype) for value in (0, 2.0**-5, 0.5, 0)]
    expected = plain_call(Inputs(*states, gates))
    wide = Inputs(*(np.broadcast_to(x, (batch, x.shape[1])) for x in (*states, gates)))
    assert wide.gates.size > 2**31
    regions = Repeated(batch * 4 * hidden * 2, 2**26), Repeated(batch * hidden * 2, 2**26)
    try:
        out = regions[0].array((batch, 4 * hidden), dtype), regions[1].array((batch, hidden), dtype)
        result = lstm_cell_backward(*wide, out=(*out, None))
        for k in (0, 1):
            for row in (*range(0, 2048, 97), batch // 2, batch - 1):
                np.testing.assert_array_equal(bits(result[k][row]), bits(expected[k][0]))
        terms = expected.grad_gates[0].astype(np.float64)
        np.testing.assert_array_equal(result.grad_bias, (terms * batch).astype(dtype))
        del out, result
    finally:
        for region in regions:
            region.close()


# ---- memory that runs out, and memory that is not needed ----------------------------------------------------------


def run(body):
    """Run a script in a process of its own."""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


LIMITED = """
import resource
import numpy as np
import lstmcell_bwd

lstmcell_bwd.lstm_cell_backward(*[np.ones((1, 1), np.float32)] * 4, np.ones((1, 4), np.float32))

def limit(spare):
    with open("/proc/self/statm") as numbers:
        used = int(numbers.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))

def no_limit():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def must_run_out(arrays, out, **options):
    limit(4 << 20)
    try:
        lstmcell_bwd.lstm_cell_backward(*arrays, out=out, num_threads=1, **options)
    except MemoryError as error:
        print("MemoryError")
    finally:
        no_limit()
    for array in out or ():
        assert array is None or (array == 7).all()
    result = lstmcell_bwd.lstm_cell_backward(*arrays, out=out, num_threads=1, **options)
    assert np.isfinite(result.grad_cx).all() and (result.grad_cx != 7).all()
"""


@linux
def test_no_memory_for_an_output():
    """The first output is given, the second cannot be allocated: nothing was written."""
    body = """
one = np.ones((1, 1), np.float32)
arrays = [np.broadcast_to(one, (8192, 1024))] * 4 + [np.broadcast_to(one / 2, (8192, 4096))]
must_run_out(arrays, (np.full((8192, 4096), 7, np.float32), None, None))
must_run_out(arrays, None)
"""
    assert run(LIMITED + body) == ["MemoryError"] * 2


@linux
def test_no_memory_for_scratch():
    """All outputs are given; three leaves of wide rows need more scratch for their bias than there is."""
    body = """
one, rows, width = np.ones((1, 1), np.float32), 65, 1 << 17
arrays = [np.broadcast_to(one, (rows, width))] * 4 + [np.broadcast_to(one / 2, (rows, 4 * width))]
out = tuple(np.full(shape, 7, np.float32) for shape in ((rows, 4 * width), (rows, width), (4 * width,)))
must_run_out(arrays, out)
"""
    assert run(LIMITED + body) == ["MemoryError"]


@linux
def test_no_memory_for_a_copy_of_an_overlapping_input():
    body = """
one = np.ones((1, 1), np.float32)
buffer = np.full((8193, 1024), 7, np.float32)
arrays = [np.broadcast_to(one, (8192, 1024))] * 3 + [buffer[1:], np.broadcast_to(one / 2, (8192, 4096))]
gates = np.full((8192, 4096), 7, np.float32)
must_run_out(arrays, (gates, buffer[:-1], None))
"""
    assert run(LIMITED + body) == ["MemoryError"]


PEAK = """
import numpy as np
import lstmcell_bwd

batch, hidden = 65536, 256
arrays = [np.zeros((batch, hidden), np.float32) for _ in range(4)] + [np.zeros((batch, 4 * hidden), np.float32)]
out = [np.ones(shape, np.float32) for shape in ((batch, 4 * hidden), (batch, hidden), (4 * hidden,))]
for array in arrays:
    array.sum()
lstmcell_bwd.lstm_cell_backward(*[x[:2000] for x in arrays], num_threads={threads})

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak()
lstmcell_bwd.lstm_cell_backward(*arrays, out=out{inplace}, num_threads={threads})
print(peak() - before)
"""


@linux
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_peak_memory(threads):
    """65536 x 256 float32 with outputs given needs less than 8 megabytes beside its arrays."""
    (kilobytes,) = run(PEAK.format(threads=threads, inplace=""))
    assert int(kilobytes) < 8 * 1024


@linux
def test_peak_memory_in_place():
    """In place nothing is copied."""
    body = PEAK.replace("out=out{inplace}", "out=(arrays[4], arrays[2], None)")
    body = body.replace("array.sum()", "array.fill(0.5)").replace("{threads}", "2")
    (kilobytes,) = run(body)
    assert int(kilobytes) < 8 * 1024
