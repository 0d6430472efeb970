"""The operator on an Ascend NPU: on tensors that are there already, and with the copies there and back.

Skipped where there is none. `lstm_cell_backward` waits for the stream before it returns, so a time is that of the
finished work.
"""

import functools
import math

import lstmcell_bwd
from benches import measure
from lstmcell_bwd import lstm_cell_backward

from .common import SIZES, SkipNotImplemented, arrays, shape


def need_npu():
    """Skip, with the package's own reason, unless an NPU can be used."""
    npu = getattr(lstmcell_bwd, "npu", None)
    if npu is None:
        msg = "this version has no NPU backend"
        raise SkipNotImplemented(msg)
    if not npu.is_available():
        raise SkipNotImplemented(str(npu.unavailable_reason()))
    return npu


def with_copies(size, dtype):
    """Make a call on host arrays that runs on the NPU."""
    inputs, out = arrays(size, dtype)
    return functools.partial(lstm_cell_backward, *inputs, out=out, device="npu")


class NPU:
    """Times on the device; the first call, which sets the device up, is made in `setup`."""

    params = (SIZES, ("float32", "float16"))
    param_names = ("size", "dtype")
    rounds = 1
    repeat = (3, 10, 0.5)

    def setup(self, size, dtype):
        npu = need_npu()
        inputs, out = arrays(size, dtype)
        device_inputs = [npu.NPUArray.from_numpy(array) for array in inputs]
        device_out = tuple(npu.NPUArray.empty(array.shape, array.dtype) for array in out)
        self.resident = functools.partial(lstm_cell_backward, *device_inputs, out=device_out)
        self.copying = with_copies(size, dtype)
        self.resident()

    def time_resident(self, size, dtype):
        self.resident()

    def time_with_copies(self, size, dtype):
        self.copying()

    def track_copies_over_cpu(self, size, dtype):
        return copies_over_cpu(size, dtype)

    track_copies_over_cpu.unit = "times"


class NPUCrossover:
    """The smallest size of the grid, in elements, at which copy-in, run and copy-out beats the CPU; NaN for none."""

    params = (("float32", "float16"),)
    param_names = ("dtype",)
    unit = "elements"

    def setup(self, dtype):
        need_npu()

    def track_crossover(self, dtype):
        for size in sorted(SIZES, key=lambda size: math.prod(shape(size))):
            if copies_over_cpu(size, dtype) < 1:
                return math.prod(shape(size))
        return math.nan


def copies_over_cpu(size, dtype):
    """Measure the NPU with copies against the CPU on the same host arrays; the smallest of five ratios."""
    inputs, out = arrays(size, dtype)
    turns = {
        "npu": measure.turn(measure.repeat(with_copies(size, dtype))),
        "cpu": measure.turn(measure.repeat(lstm_cell_backward, *inputs, out=out, device="cpu")),
    }
    return measure.take_turns(turns).ratio("npu", "cpu").smallest
