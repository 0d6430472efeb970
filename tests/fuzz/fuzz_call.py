"""Coverage-guided fuzzing of the argument checks and the kernel (run by tools/fuzz.sh).

Each input of the fuzzer is read as one call of the backward or the forward pass: shapes, layouts, dtypes, arrays left
out, special values, outputs and their overlap with inputs, threads and instruction set, sometimes with an argument
spoilt. Then

- a call either succeeds or raises an error of the package's own family, and a good one succeeds;
- the bits are those of the contiguous call on one thread with the baseline kernel;
- the values are within the promised bounds of the reference, NaN where its rule says so;
- no byte outside the outputs is written, none of the inputs' either, and where a call is refused none at all.

With modules that are built with AddressSanitizer and UndefinedBehaviorSanitizer their findings end the run, too. The
calls of each operator are counted and printed: libFuzzer ends the process without Python's handlers, so now and then.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import atheris
import ml_dtypes
import numpy as np

import lstmcell_bwd
from lstmcell_bwd import _api, _features, reference

DTYPES = [np.dtype(kind) for kind in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
WRONG_DTYPES = [np.dtype(kind) for kind in ("int32", "complex64", "bool", "O", "S3", "longdouble", "M8[s]", "V4")]
ISAS = [isa for isa in _api.built_isas() if isa in _features.runnable_isas()]
SIZES = [0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 520]
LAYOUTS = ("plain", "fortran", "rows back", "columns back", "wide rows", "every third column", "odd stride", "records")
MOST_ELEMENTS = 9000  # of one state: enough for several tiles, leaves and threads, and hundreds of calls a second
GUARD = 0xA5
CALLS = Counter()


class Reader:
    """The fuzzer's bytes as choices; past the end it chooses the first."""

    def __init__(self, data):
        self.data, self.place = data, 0

    def byte(self):
        self.place += 1
        return self.data[self.place - 1] if self.place <= len(self.data) else 0

    def choose(self, choices):
        return choices[self.byte() % len(choices)]

    def seldom(self):
        return self.byte() >= 0xF0


def strides_of(layout, rows, columns, size):
    """Return the row and column stride in bytes."""
    return {
        "plain": (columns * size, size),
        "fortran": (size, rows * size),
        "rows back": (-columns * size, size),
        "columns back": (columns * size, -size),
        "wide rows": ((columns + 7) * size, size),
        "every third column": (3 * columns * size, 3 * size),
        "odd stride": (columns * size + 1, size),
        "records": (columns * (size + 3), size + 3),
    }[layout]


class Guarded:
    """An array of some layout in a buffer whose other bytes are watched."""

    def __init__(self, reader, shape, dtype, values=None):
        rows, columns = shape if len(shape) == 2 else (1, *shape)
        strides = strides_of(reader.choose(LAYOUTS), rows, columns, dtype.itemsize)
        reaches = [max(0, count - 1) * stride for count, stride in zip((rows, columns), strides, strict=True)]
        start = 64 + reader.byte() % 64 - sum(min(0, reach) for reach in reaches)
        size = start + sum(max(0, reach) for reach in reaches) + dtype.itemsize + 64
        self.buffer = np.full(size, GUARD, np.uint8)
        self.array = np.ndarray(shape, dtype, self.buffer, start, strides[2 - len(shape) :])
        elements = np.zeros(size, bool)
        np.ndarray((*shape, dtype.itemsize), bool, elements, start, (*strides[2 - len(shape) :], 1))[...] = True
        self.outside = ~elements
        if values is not None:
            self.array[...] = values
        self.before = self.buffer.copy()

    def guards_intact(self):
        return bool((self.buffer[self.outside] == GUARD).all())

    def unchanged(self):
        return np.array_equal(self.buffer, self.before)


def values_of(reader, shape, dtype):
    """Make values in the ordinary range, a few of them special: any pattern of bits."""
    random = np.random.Generator(np.random.PCG64(reader.byte()))
    values = (random.random(shape) * reader.choose([1, 2, 60, 800]) - reader.choose([0, 0.5, 1, 30])).astype(dtype)
    for _ in range(reader.byte() % 4 if values.size else 0):
        pattern = bytes(reader.byte() for _ in range(dtype.itemsize))
        values.flat[(reader.byte() * 257 + reader.byte()) % values.size] = np.frombuffer(pattern, dtype)[0]
    return values


def spoil(reader, array):
    """Return something that may not be an argument."""
    return reader.choose(
        [
            lambda: None,
            lambda: "text",
            lambda: object(),
            lambda: np.ma.masked_array(array),
            lambda: array[..., :-1],
            lambda: array[None],
            lambda: array[0] if len(array) else array,
            lambda: array.T,
            lambda: np.zeros(array.shape, reader.choose(WRONG_DTYPES)),
            lambda: np.zeros(array.shape, reader.choose(DTYPES)),
            lambda: np.broadcast_to(array[:1], array.shape) if len(array) else array,
            lambda: array.view(array.dtype.newbyteorder()) if array.dtype in DTYPES[:3] else array,
            lambda: read_only(array),
        ]
    )()


def read_only(array):
    """Return a view that may not be written to."""
    view = array[...]
    view.flags.writeable = False
    return view


def may_be_written(out):
    """Tell whether these are outputs that no rule forbids: writeable, of native byte order, with no byte in common."""
    given = [x for x in out or () if x is not None]
    apart = not any(np.shares_memory(given[a], given[b]) for a in range(len(given)) for b in range(a))
    return apart and all(x.flags.writeable and x.dtype.isnative for x in given)


def bits(array):
    """Return the bits of an array; every NaN is the same."""
    array = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="))
    unsigned = array.view(f"u{array.dtype.itemsize}").copy()
    unsigned[np.isnan(array)] = np.iinfo(unsigned.dtype).max
    return unsigned


def check_backward(result, arrays, options):
    """Compare a backward pass with the reference."""
    if options["nonfinite"] == "nan":
        errors = reference.error_in_units(result, *arrays)
        for error, bound in zip(errors, reference.bounds(arrays[2].dtype), strict=True):
            assert error is None or error <= bound, f"{error} units, allowed are {bound}"
        for got, bad in zip(result, reference.nonfinite_mask(*arrays), strict=True):
            assert got is None or np.isnan(got[bad]).all(), "no NaN for an input that is Inf or NaN"


def check_forward(result, arrays, options):
    """Compare a forward pass with the reference."""
    for shares in reference.forward_errors(result, *arrays):
        assert shares.max(initial=0) <= 1, f"{shares.max()} of the error that is allowed"


class Operator(NamedTuple):
    """An operator: columns of its inputs and outputs as multiples of the hidden size (negative: one row), and more."""

    call: Callable
    inputs: tuple[int, ...]
    optional: tuple[int, ...]  # inputs that may be None
    outputs: tuple[int, ...]
    check: Callable


BACKWARD = Operator(lstmcell_bwd.lstm_cell_backward, (1, 1, 1, 1, 4), (0, 1), (4, 1, -4), check_backward)
FORWARD = Operator(lstmcell_bwd.lstm_cell_forward, (4, 4, 1, -4, -4), (3, 4), (1, 1, 4), check_forward)


def shape_of(columns, batch, hidden):
    """Return the shape of an array of an operator."""
    return (-columns * hidden,) if columns < 0 else (batch, columns * hidden)


def count(operator, outcome):
    """Count a call; print the counts at every hundredth."""
    CALLS[f"{operator.call.__name__} {outcome}"] += 1
    if CALLS.total() % 100 == 0:
        print("calls::", ", ".join(f"{name} {CALLS[name]}" for name in sorted(CALLS)), file=sys.stderr, flush=True)


def one_call(data):
    """Read one call from the fuzzer's bytes, make it, and check what it did."""
    reader = Reader(data)
    operator = FORWARD if reader.byte() >= 0xA0 else BACKWARD
    reader.place = 0
    batch, hidden = reader.choose(SIZES), reader.choose(SIZES)
    if batch * hidden > MOST_ELEMENTS:
        hidden = 17
    dtype = reader.choose(DTYPES)
    has_bias, nonfinite = reader.choose([True, False]), reader.choose(["nan", "ieee"])
    options = {"has_bias": has_bias, "nonfinite": nonfinite} if operator is BACKWARD else {}
    inputs = []
    for index, columns in enumerate(operator.inputs):
        shape = shape_of(columns, batch, hidden)
        stored = dtype.newbyteorder() if reader.seldom() and dtype in DTYPES[:3] else dtype
        values = values_of(reader, shape, dtype)
        missing = reader.seldom() and index in operator.optional
        inputs.append(None if missing else Guarded(reader, shape, stored, values))
    arguments = [None if x is None else x.array for x in inputs]
    before = [None if x is None else x.copy() for x in arguments]

    outputs, out = [], None
    if reader.choose([False, True]):
        shapes = [shape_of(columns, batch, hidden) for columns in operator.outputs]
        outputs = [None if reader.seldom() else Guarded(reader, shape, dtype) for shape in shapes]
        if operator is BACKWARD and not has_bias:
            outputs[2] = None
        out = [None if x is None else x.array for x in outputs]
        for k in range(3):
            shared, place = reader.byte(), reader.choose(range(5))
            if arguments[place] is None or arguments[place].shape != shapes[k] or len(shapes[k]) == 1:
                continue
            if shared >= 0xA0:  # in place
                out[k] = arguments[place]
            elif shared >= 0x80 and batch > 1 and inputs[place] is not None:  # partly over an input
                whole = np.empty((batch + 1, shapes[k][1]), dtype)
                arguments[place], out[k] = whole[:-1], whole[1:]
                arguments[place][...] = before[place]
                inputs[place] = None
        out = tuple(out)

    spoilt = reader.seldom()
    if spoilt:
        place = reader.byte() % 8
        if place < 5:
            arguments[place] = spoil(reader, arguments[place] if arguments[place] is not None else arguments[2])
        elif out is not None:
            wrong = spoil(reader, out[place - 5] if out[place - 5] is not None else arguments[2])
            out = (*out[: place - 5], wrong, *out[place - 4 :])
    # They do not change the result.
    plain = {"num_threads": reader.choose([1, 2, 3, None, 7]), "device": "cpu"}
    if reader.seldom():
        wrong = reader.choose([0, -1, "", "npu:x", 1.5, b"nan"])
        plain[reader.choose(["num_threads", "device"])] = wrong
        spoilt = True
    if options and reader.seldom():
        options[reader.choose(["has_bias", "nonfinite"])] = reader.choose([0, -1, "", "NaN", 1.5, b"nan"])
        spoilt = True

    # Spoilt arguments can still be legal ones (a gradient that became None, say): then they are the call to repeat.
    sources = arguments if spoilt else before
    copies = [x.copy() if type(x) is np.ndarray and x.dtype in DTYPES else x for x in sources]
    lstmcell_bwd.use_isa(reader.choose(ISAS))
    try:
        result = operator.call(*arguments, out=out, **options, **plain)
    except lstmcell_bwd.LSTMCellError as error:
        if not spoilt and may_be_written(out):
            raise AssertionError("a good call was refused") from error
        written = [x for x in (*inputs, *outputs) if x is not None and not x.unchanged()]
        assert not written, "a refused call wrote something"
        count(operator, "refused")
        return
    assert may_be_written(out), "outputs that may not be written were accepted"
    native = [x.dtype.newbyteorder("=") for x in copies if isinstance(x, np.ndarray)]
    assert len(set(native)) == 1, "a call of several dtypes was accepted"
    plainly = [None if x is None else np.array(x, native[0], order="C") for x in copies]
    lstmcell_bwd.use_isa("baseline")
    expected = operator.call(*plainly, **options, num_threads=1)
    for got, wanted in zip(result, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or np.array_equal(bits(got), bits(wanted)), "other bits than the contiguous call"
    operator.check(expected, plainly, options)
    written = () if out is None else out
    for source in inputs:
        if source is not None:
            assert source.guards_intact(), "a byte beside an input was written"
            if not any(x is not None and np.shares_memory(source.array, x) for x in written):
                assert source.unchanged(), "an input was written"
    for target in outputs:
        assert target is None or target.guards_intact(), "a byte beside an output was written"
    count(operator, "taken")


def main():
    """Fuzz until libFuzzer's own options, given on the command line, end it."""
    np.seterr(all="ignore")
    atheris.Setup(sys.argv, one_call)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
