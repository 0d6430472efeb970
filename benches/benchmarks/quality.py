"""Figures that are not times: errors, and speed against the same-bytes limit and the NumPy expression."""

import lstmcell_bwd
from benches import data, limit, measure
from lstmcell_bwd import lstm_cell_backward

from .common import DTYPES, SIZES, THREADS, SkipNotImplemented, arrays, prepared, shape


class Error:
    """The largest error in units, as lstmcell_bwd.reference measures it; 0.5 is perfect rounding."""

    params = (DTYPES, ("ordinary", "saturated"), ("grad_gates", "grad_cx", "grad_bias"))
    param_names = ("dtype", "values", "output")
    unit = "units"

    def setup(self, dtype, values, output):
        if not hasattr(lstmcell_bwd, "reference"):
            msg = "this version has no lstmcell_bwd.reference"
            raise SkipNotImplemented(msg)
        self.inputs, _ = arrays("512x256", dtype, values)

    def track_largest_error(self, dtype, values, output):
        gradients = lstm_cell_backward(*self.inputs)
        return getattr(lstmcell_bwd.reference.error_in_units(gradients, *self.inputs), output)


def against(size, dtype, threads, contenders):
    """Measure the package and others on the same arrays by the measuring rule."""
    inputs, out = arrays(size, dtype)
    turns = {name: measure.turn(run) for name, run in contenders(inputs, out).items()}
    turns["ours"] = measure.turn(measure.repeat(prepared(size, dtype, threads)))
    return measure.take_turns(turns)


def limit_variants(threads):
    """Prepare the variants of the limit for `against`, or skip where they cannot be built."""
    try:
        limit.instruction_set()
    except limit.LimitUnavailableError as error:
        raise SkipNotImplemented(str(error)) from None
    return lambda inputs, out: limit.contenders(*inputs, *out[:2], num_threads=threads)


class Limit:
    """Share of the speed that moving the same bytes has, the median of five ratios; 1 is the limit."""

    params = (SIZES, THREADS)
    param_names = ("size", "threads")
    unit = "of the limit"

    def track_fraction_of_limit(self, size, threads):
        measured = against(size, "float32", threads, limit_variants(threads))
        return 1 / measured.ratio("ours", *limit.VARIANTS).median


class LimitOfDtypes:
    """As `Limit`, for every number type at a memory size."""

    params = (("4096x1024",), DTYPES)
    param_names = ("size", "dtype")
    unit = "of the limit"

    def track_fraction_of_limit(self, size, dtype):
        measured = against(size, dtype, 1, limit_variants(1))
        return 1 / measured.ratio("ours", *limit.VARIANTS).median


class SecondThread:
    """What a second thread gains, over the limit's gain in the same run, best of five ratios; 1 is all there is."""

    params = (("256x1024", "4096x1024", "16384x256", "1x65536"),)
    param_names = ("size",)
    unit = "of the limit's gain"

    def track_gain(self, size):
        inputs, out = arrays(size)
        turns = {}
        for threads in THREADS:
            for name, run in limit_variants(threads)(inputs, out).items():
                turns[f"{threads} {name}"] = measure.turn(run)
            turns[f"{threads} ours"] = measure.turn(measure.repeat(prepared(size, threads=threads)))
        measured = measure.take_turns(turns)
        one, two = (measured.fastest(f"{threads} {name}" for name in limit.VARIANTS) for threads in THREADS)
        gains = zip(*(measured.seconds[name] for name in ("1 ours", "2 ours", one, two)), strict=True)
        return max((ours_one / ours_two) / (one / two) for ours_one, ours_two, one, two in gains)


class NumPyExpression:
    """Speed-up over the operator as one writes it in NumPy, with `out=` there too; the median of five ratios."""

    params = (SIZES, THREADS)
    param_names = ("size", "threads")
    unit = "times"

    def track_speedup(self, size, threads):
        def expression(inputs, out):
            return {"numpy": measure.repeat(data.numpy_backward, *inputs, out=out)}

        return against(size, "float32", threads, expression).ratio("numpy", "ours").median


class Neighbours:
    """Time per element of a power-of-two hidden size over that of its neighbours; 1 is as it should be."""

    params = (("1000", "1032"),)
    param_names = ("neighbour",)
    unit = "times"

    def track_1024_over_neighbour(self, neighbour):
        turns = {}
        for hidden in ("1024", neighbour):
            inputs, out = data.inputs(*shape(f"2048x{hidden}")), data.outputs(*shape(f"2048x{hidden}"))
            turns[hidden] = measure.turn(measure.repeat(lstm_cell_backward, *inputs, out=out, num_threads=1))
        return measure.take_turns(turns).ratio("1024", neighbour).smallest * int(neighbour) / 1024
