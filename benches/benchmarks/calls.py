"""Times of whole calls: the size grid, instruction sets, outputs, layouts, special values, small calls."""

import functools
import itertools
import math

import numpy as np

from lstmcell_bwd import lstm_cell_backward, use_isa

from .common import DTYPES, SIZES, THREADS, SkipNotImplemented, arrays, prepared


class Grid:
    """The size grid with `out=`, for every number type, on one and on two threads."""

    params = (SIZES, DTYPES, THREADS)
    param_names = ("size", "dtype", "threads")
    rounds = 1
    repeat = (3, 10, 0.5)

    def setup(self, size, dtype, threads):
        self.call = prepared(size, dtype, threads)

    def time_backward(self, size, dtype, threads):
        self.call()


class InstructionSets:
    """The same calls with each instruction set, chosen in one process."""

    params = (("32x128", "256x1024", "4096x1024"), ("float32", "float16"), ("baseline", "avx2", "avx512"))
    param_names = ("size", "dtype", "isa")
    rounds = 1
    repeat = (3, 10, 0.5)

    def setup(self, size, dtype, isa):
        try:
            use_isa(isa)
        except ValueError as error:
            raise SkipNotImplemented(str(error)) from None
        self.call = prepared(size, dtype)

    def teardown(self, size, dtype, isa):
        use_isa("auto")

    def time_backward(self, size, dtype, isa):
        self.call()


class Outputs:
    """Results into given arrays, into new ones, and over the inputs."""

    params = (("256x1024", "4096x1024"), ("out", "allocating", "in place", "without bias"))
    param_names = ("size", "outputs")
    number = 1  # a second call in place would see the results of the first
    rounds = 1
    repeat = (3, 10, 1.0)

    def setup(self, size, outputs):
        inputs, out = arrays(size)
        has_bias = outputs != "without bias"
        if outputs == "allocating":
            out = None
        elif outputs == "in place":
            inputs = inputs._replace(cx=inputs.cx.copy(), gates=inputs.gates.copy())
            out = (inputs.gates, inputs.cx, out[2])
        elif outputs == "without bias":
            out = (*out[:2], None)
        self.call = functools.partial(lstm_cell_backward, *inputs, has_bias, out=out, num_threads=1)

    def time_backward(self, size, outputs):
        self.call()


class Layouts:
    """Inputs that are not C-contiguous; outputs that are."""

    params = (("256x1024", "4096x1024"), ("contiguous", "row stride", "transposed", "reversed", "byte-swapped"))
    param_names = ("size", "layout")
    rounds = 1
    repeat = (3, 10, 0.5)

    @staticmethod
    def laid_out(array, layout):
        """Return an equal array of another layout."""
        if layout == "row stride":
            # One time step of a batch-major buffer of two.
            steps = np.empty((array.shape[0], 2, array.shape[1]), array.dtype)
            steps[:, 0] = 0
            steps[:, 1] = array
            return steps[:, 1]
        if layout == "transposed":
            return np.asfortranarray(array)
        if layout == "reversed":
            return np.ascontiguousarray(array[:, ::-1])[:, ::-1]
        if layout == "byte-swapped":
            return array.astype(array.dtype.newbyteorder())
        return array

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def inputs(size, layout):
        """Make the inputs of a size in a layout."""
        return [Layouts.laid_out(array, layout) for array in arrays(size)[0]]

    def setup(self, size, layout):
        inputs, out = self.inputs(size, layout), arrays(size)[1]
        self.call = functools.partial(lstm_cell_backward, *inputs, out=out, num_threads=1)

    def time_backward(self, size, layout):
        self.call()


class Sequence:
    """A sequence of calls on arrays of their own, as in training: none finds its inputs in the second cache."""

    params = (("64x512", "256x1024"), THREADS)
    param_names = ("size", "threads")
    rounds = 1
    repeat = (3, 10, 0.5)
    bytes = 64 * 1024 * 1024  # of all arrays together

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def steps(size):
        """Make the inputs and outputs of all calls."""
        inputs, out = arrays(size)
        steps = math.ceil(Sequence.bytes / sum(array.nbytes for array in (*inputs, *out)))
        return [
            ([array.copy() for array in inputs], tuple(np.empty_like(array) for array in out)) for _ in range(steps)
        ]

    def setup(self, size, threads):
        self.calls = self.steps(size)

    def time_backward(self, size, threads):
        for inputs, out in self.calls:
            lstm_cell_backward(*inputs, out=out, num_threads=threads)


class SpecialValues:
    """NaN in every row, subnormal gradients, cell states beyond the range of the plain exponential."""

    params = (("256x1024",), ("float32", "float64", "float16"), ("ordinary", "nan", "subnormal", "large_cell"))
    param_names = ("size", "dtype", "values")
    rounds = 1
    repeat = (3, 10, 0.5)

    def setup(self, size, dtype, values):
        self.call = prepared(size, dtype, kind=values)

    def time_backward(self, size, dtype, values):
        self.call()


class Overhead:
    """What a call costs when there is nothing to compute: 1x8 elements beside NumPy's own addition of 8."""

    def setup(self):
        self.inputs, self.out = arrays("1x8")
        self.eight = [np.ones(8, np.float32) for _ in range(3)]

    def time_1000_calls(self):
        inputs, out = self.inputs, self.out
        for _ in itertools.repeat(None, 1000):
            lstm_cell_backward(*inputs, out=out)

    def time_1000_calls_allocating(self):
        inputs = self.inputs
        for _ in itertools.repeat(None, 1000):
            lstm_cell_backward(*inputs)

    def time_1000_numpy_additions(self):
        a, b, c = self.eight
        add = np.add
        for _ in itertools.repeat(None, 1000):
            add(a, b, out=c)


class SmallShapes:
    """All 25 shapes of FlagGems' benchmark of this operator, with one thread and with the package's own choice."""

    params = (("one", "default"),)
    param_names = ("threads",)

    def setup(self, threads):
        # `arrays` keeps one size only; these are kept here, and small.
        self.calls = [
            prepared(f"{batch}x{hidden}", threads=1 if threads == "one" else None)
            for batch in (1, 2, 4, 8, 16)
            for hidden in (4, 8, 16, 32, 64)
        ]

    def time_all_20_times(self, threads):
        for call in self.calls * 20:
            call()
