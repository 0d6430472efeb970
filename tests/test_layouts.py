"""Memory: every argument in every layout, every overlap of outputs, and not a byte written beside an output."""

import itertools
import mmap

import numpy as np
import pytest
from strategies import (
    LAYOUTS,
    NAMES,
    OUTPUTS,
    Guarded,
    Inputs,
    arrays_of,
    assert_same_bits,
    bits,
    guard_inputs,
    guard_outputs,
    make_inputs,
    plain_call,
)

from lstmcell_bwd import (
    InvalidParameterError,
    LSTMCellGradients,
    combine_bias,
    lstm_cell_backward,
    lstm_cell_backward_part,
    reference,
)

OFFSETS = [0, 1, 4]


def check(inputs_guarded, outputs_guarded, expected, has_bias=True, **options):
    """Call, then compare the bits and look at every byte that no output owns."""
    out = tuple(arrays_of(outputs_guarded))
    result = lstm_cell_backward(*arrays_of(inputs_guarded), has_bias, out=out, **options)
    for name, given in zip(OUTPUTS, out, strict=True):
        assert getattr(result, name) is given
    assert_same_bits(result, expected)
    for guarded in inputs_guarded:
        if guarded is not None:
            guarded.assert_unchanged()
    for guarded in outputs_guarded:
        if guarded is not None:
            guarded.assert_guards_intact()


@pytest.mark.parametrize("width", [256, 272, 400, 528])
@pytest.mark.parametrize("offset", [8, 16, 40, 56])
def test_rows_that_begin_off_a_line(backend, width, offset):
    """Loops begin on a line then; the ends of a row are done apart, with whatever they hold."""
    inputs = make_inputs(9, width, backend, seed=2)
    inputs.grad_hy[2, 0] = inputs.cx[3, -1] = np.nan
    inputs.cy[4, 1] = inputs.cy[5, -2] = 60
    inputs.grad_hy[6, :2] = inputs.grad_cy[6, :2] = reference.limits(inputs.cx.dtype).smallest_subnormal
    inputs.grad_hy[7, -2:] = inputs.grad_cy[7, -2:] = reference.limits(inputs.cx.dtype).smallest_normal
    expected = plain_call(inputs)
    for of_inputs, of_outputs in ((offset, offset), (0, offset), (offset, 0)):
        given = guard_inputs(inputs, "contiguous", of_inputs)
        check(given, guard_outputs(9, width, backend, offset=of_outputs), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", OFFSETS)
class TestEveryLayout:
    """C32: each argument alone, then all at once, misaligned by 0, 1 and 4 bytes."""

    @pytest.mark.parametrize("name", NAMES)
    def test_one_input(self, dtype, layout, offset, name):
        inputs = make_inputs(5, 19, dtype, seed=1)
        layouts = [layout if field == name else "contiguous" for field in NAMES]
        check(guard_inputs(inputs, layouts, offset), guard_outputs(5, 19, dtype), plain_call(inputs))

    @pytest.mark.parametrize("name", OUTPUTS)
    def test_one_output(self, dtype, layout, offset, name):
        inputs = make_inputs(5, 19, dtype, seed=2)
        layouts = [layout if field == name else "contiguous" for field in OUTPUTS]
        check(
            guard_inputs(inputs, "contiguous"), guard_outputs(5, 19, dtype, layouts, offset=offset), plain_call(inputs)
        )

    @pytest.mark.parametrize("has_bias", [True, False])
    def test_all_at_once(self, backend, layout, offset, has_bias):
        for shape in ((5, 19), (1, 33), (37, 1)):
            inputs = make_inputs(*shape, backend, seed=3)
            outputs = guard_outputs(*shape, backend, layout, has_bias, offset)
            check(guard_inputs(inputs, layout, offset), outputs, plain_call(inputs, has_bias), has_bias, num_threads=2)

    def test_missing_gradients(self, dtype, layout, offset):
        inputs = make_inputs(5, 19, dtype, seed=4)
        for name in ("grad_hy", "grad_cy"):
            partial = inputs._replace(**{name: None})
            check(guard_inputs(partial, layout, offset), guard_outputs(5, 19, dtype, layout), plain_call(partial))


def test_mixed_layouts(backend):
    """Every argument in another layout than its neighbour, over all rotations."""
    inputs = make_inputs(23, 37, backend, seed=5)
    expected = plain_call(inputs)
    names = list(LAYOUTS)
    for k in range(len(names)):
        turned = names[k:] + names[:k]
        outputs = guard_outputs(23, 37, backend, turned[5:8])
        check(guard_inputs(inputs, turned[:5], offset=k % 3), outputs, expected, num_threads=3)


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_byte_swapped_in_odd_layouts(isa, name):
    inputs = make_inputs(11, 21, np.dtype(name), seed=6)
    swapped = Inputs(*(x.astype(x.dtype.newbyteorder()) for x in inputs))
    for layout in LAYOUTS:
        check(guard_inputs(swapped, layout, 1), guard_outputs(11, 21, name, layout), plain_call(inputs))


def test_time_major_slice(backend):
    """C32: gates as a slice of a wider time-major buffer."""
    inputs = make_inputs(5, 19, backend, seed=7)
    buffer = np.zeros((3, 5, 16 + 4 * 19), backend)
    gates = buffer[1, :, 8 : 8 + 4 * 19]
    gates[...] = inputs.gates
    assert_same_bits(lstm_cell_backward(*inputs._replace(gates=gates)), plain_call(inputs))
    states = np.zeros((5, 3, 2 * 19), backend)
    states[:, 1, 1::2] = inputs.cy
    assert_same_bits(lstm_cell_backward(*inputs._replace(cy=states[:, 1, 1::2])), plain_call(inputs))


@pytest.mark.parametrize("name", NAMES)
def test_zero_strides(backend, name):
    """C33: one value for all, one row for all rows, one column for all columns."""
    inputs = make_inputs(13, 21, backend, seed=8)
    shape = getattr(inputs, name).shape
    for part in (np.s_[:1, :1], np.s_[:1, :], np.s_[:, :1]):
        view = np.broadcast_to(getattr(inputs, name)[part], shape)
        changed = inputs._replace(**{name: view})
        assert_same_bits(lstm_cell_backward(*changed, num_threads=2), plain_call(changed))


def test_overlapping_input_elements(backend):
    """A sliding window as input: elements that share memory are fine to read."""
    base = make_inputs(1, 60, backend, seed=9).cx[0]
    window = np.lib.stride_tricks.as_strided(base, (20, 21), (base.itemsize, base.itemsize), writeable=False)
    inputs = make_inputs(20, 21, backend, seed=9)._replace(cx=window, grad_hy=window)
    assert_same_bits(lstm_cell_backward(*inputs), plain_call(inputs))


@pytest.mark.parametrize("name", NAMES)
def test_read_only_inputs(backend, name):
    """C30: the flag, a view of bytes, a memory map."""
    inputs = make_inputs(5, 19, backend, seed=10)
    expected = plain_call(inputs)
    frozen = getattr(inputs, name).copy()
    frozen.flags.writeable = False
    assert_same_bits(lstm_cell_backward(*inputs._replace(**{name: frozen})), expected)
    raw = np.frombuffer(frozen.tobytes(), backend).reshape(frozen.shape)
    assert_same_bits(lstm_cell_backward(*inputs._replace(**{name: raw})), expected)


@pytest.mark.parametrize("name", NAMES)
def test_memory_maps(isa, tmp_path, name):
    inputs = make_inputs(5, 19, np.float32, seed=11)
    array = getattr(inputs, name)
    array.tofile(tmp_path / "array")
    mapped = np.memmap(tmp_path / "array", np.float32, "r", shape=array.shape)
    result = lstm_cell_backward(*inputs._replace(**{name: mapped}))
    assert_same_bits(result, plain_call(inputs))
    assert all(type(x) is np.ndarray for x in result)


def test_memory_map_as_output(isa, tmp_path):
    inputs = make_inputs(5, 19, np.float32, seed=12)
    out = np.memmap(tmp_path / "state", np.float32, "w+", shape=(5, 19))
    result = lstm_cell_backward(*inputs, out=(None, out, None))
    assert result.grad_cx is out
    assert_same_bits(result, plain_call(inputs))
    out.flush()
    np.testing.assert_array_equal(np.fromfile(tmp_path / "state", np.float32), np.asarray(out).ravel())


def test_inputs_at_the_end_of_a_page(backend):
    """Not a byte is read past an input: each ends where its mapping does, before a page that nobody may touch."""
    import ctypes

    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    inputs = make_inputs(3, 21, backend, seed=13)
    placed, maps = [], []
    for array in inputs:
        region = mmap.mmap(-1, 3 * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        start = 2 * page - array.nbytes
        view = np.frombuffer(region, backend, array.size, start).reshape(array.shape)
        view[...] = array
        assert libc.mprotect(ctypes.c_void_p(address + 2 * page), page, 0) == 0
        placed.append(view)
        maps.append((address, region))
    try:
        result = lstm_cell_backward(*placed)
    finally:
        for address, _ in maps:
            libc.mprotect(ctypes.c_void_p(address + 2 * page), page, 3)
    assert_same_bits(result, plain_call(inputs))


# ---- overlap --------------------------------------------------------------------------------------------------------


def snapshot_call(arrays, out):
    """The result of having copied the inputs first."""
    return plain_call(Inputs(*(x.copy() for x in arrays)), has_bias=out[2] is not None)


def assert_as_if_copied(arrays, out, **options):
    """Call with outputs that overlap inputs; compare with a call on copies made before."""
    expected = snapshot_call(arrays, (None, None, 0))
    result = lstm_cell_backward(*arrays, out=out, **options)
    for given, got in zip(out, result, strict=True):
        assert given is None or given is got
    assert_same_bits(result, expected)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["grad_hy", "grad_cy", "cx", "cy"])
class TestStateOutputOverInput:
    """C35: grad_cx is an input, or lies across one, shifted by rows, columns and single bytes."""

    def test_same_array(self, backend, name, number):
        inputs = make_inputs(40, 21, backend, seed=14)
        assert_as_if_copied(inputs, (None, getattr(inputs, name), None), num_threads=number)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_same_array_in_every_layout(self, dtype, name, number, layout):
        inputs = make_inputs(40, 21, dtype, seed=15)
        guarded = guard_inputs(inputs, layout, 1)
        target = guarded[NAMES.index(name)]
        assert_as_if_copied(Inputs(*arrays_of(guarded)), (None, target.array, None), num_threads=number)
        target.assert_guards_intact()
        for other in guarded:
            if other is not target:
                other.assert_unchanged()

    @pytest.mark.parametrize("shift", [1, 21, -1, -21, 20, 22, 21 * 20])
    def test_shifted_by_elements(self, dtype, name, number, shift):
        inputs = make_inputs(40, 21, dtype, seed=16)
        buffer = np.zeros(40 * 21 * 3, dtype)
        first = 40 * 21
        view = buffer[first : 2 * first].reshape(40, 21)
        view[...] = getattr(inputs, name)
        out = buffer[first + shift : 2 * first + shift].reshape(40, 21)
        assert_as_if_copied(inputs._replace(**{name: view}), (None, out, None), num_threads=number)

    def test_shifted_by_a_byte(self, dtype, name, number):
        inputs = make_inputs(40, 21, dtype, seed=17)
        size = inputs.cx.nbytes
        buffer = np.zeros(size + 8, np.uint8)
        view = buffer[:size].view(dtype).reshape(40, 21)
        view[...] = getattr(inputs, name)
        out = buffer[1 : size + 1].view(dtype).reshape(40, 21)
        assert_as_if_copied(inputs._replace(**{name: view}), (None, out, None), num_threads=number)

    @pytest.mark.parametrize("turn", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-1, ::-1]], ids=["rows", "columns", "both"])
    def test_reversed(self, dtype, name, number, turn):
        inputs = make_inputs(40, 21, dtype, seed=18)
        assert_as_if_copied(inputs, (None, getattr(inputs, name)[turn], None), num_threads=number)

    def test_transposed(self, dtype, name, number):
        inputs = make_inputs(33, 33, dtype, seed=19)
        assert_as_if_copied(inputs, (None, getattr(inputs, name).T, None), num_threads=number)

    @pytest.mark.parametrize("shape", [(40, 21), (5, 1500)], ids=str)
    @pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
    @pytest.mark.parametrize("wide", ["input", "output"])
    def test_same_start_other_strides(self, dtype, name, number, shape, axis, wide):
        """The first elements coincide; of one of the two arrays the rows or the columns lie twice as far apart."""
        inputs = make_inputs(*shape, dtype, seed=35)
        buffer = np.zeros((2 * shape[0], 2 * shape[1]), dtype)
        dense = buffer[: shape[0], : shape[1]]
        spread = buffer[::2, : shape[1]] if axis == 0 else buffer[: shape[0], ::2]
        view, out = (spread, dense) if wide == "input" else (dense, spread)
        view[...] = getattr(inputs, name)
        assert_as_if_copied(inputs._replace(**{name: view}), (None, out, None), num_threads=number)

    def test_every_other_of_one_buffer(self, dtype, name, number):
        """Interleaved columns share no byte, though their extents meet."""
        inputs = make_inputs(40, 21, dtype, seed=20)
        buffer = np.zeros((40, 42), dtype)
        buffer[:, ::2] = getattr(inputs, name)
        assert_as_if_copied(
            inputs._replace(**{name: buffer[:, ::2]}), (None, buffer[:, 1::2], None), num_threads=number
        )


@pytest.mark.parametrize("number", [1, 3])
class TestGatesOutputOverInputs:
    """C35: grad_gates is gates, is shifted against it, or covers other inputs."""

    def test_same_array(self, backend, number):
        inputs = make_inputs(40, 21, backend, seed=21)
        assert_as_if_copied(inputs, (inputs.gates, None, None), num_threads=number)

    @pytest.mark.parametrize("shift", [1, 84, -84, -1, 21])
    def test_shifted(self, dtype, number, shift):
        inputs = make_inputs(40, 21, dtype, seed=22)
        size = inputs.gates.size
        buffer = np.zeros(3 * size, dtype)
        view = buffer[size : 2 * size].reshape(40, 84)
        view[...] = inputs.gates
        out = buffer[size + shift : 2 * size + shift].reshape(40, 84)
        assert_as_if_copied(inputs._replace(gates=view), (out, None, None), num_threads=number)

    @pytest.mark.parametrize("name", ["grad_hy", "grad_cy", "cx", "cy"])
    def test_covers_a_state(self, dtype, number, name):
        inputs = make_inputs(40, 21, dtype, seed=23)
        out = np.zeros((40, 84), dtype)
        view = out[:, 21:42]
        view[...] = getattr(inputs, name)
        assert_as_if_copied(inputs._replace(**{name: view}), (out, None, None), num_threads=number)

    def test_state_output_inside_gates(self, dtype, number):
        inputs = make_inputs(40, 21, dtype, seed=24)
        assert_as_if_copied(inputs, (None, inputs.gates[:, 42:63], None), num_threads=number)

    def test_both_at_once(self, backend, number):
        inputs = make_inputs(40, 21, backend, seed=25)
        assert_as_if_copied(inputs, (inputs.gates, inputs.cx, None), num_threads=number)

    def test_one_in_place_the_other_shifted(self, dtype, number):
        inputs = make_inputs(40, 21, dtype, seed=26)
        buffer = np.zeros(41 * 21, dtype)
        view = buffer[: 40 * 21].reshape(40, 21)
        view[...] = inputs.cy
        out = inputs.gates, buffer[21:].reshape(40, 21), None
        assert_as_if_copied(inputs._replace(cy=view), out, num_threads=number)

    def test_one_array_is_several_inputs(self, dtype, number):
        inputs = make_inputs(40, 21, dtype, seed=27)
        inputs = inputs._replace(grad_hy=inputs.cx, grad_cy=inputs.cx)
        assert_as_if_copied(inputs, (None, inputs.cx, None), num_threads=number)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("shape", [(40, 21), (5, 1500), (33, 4500)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bias_output_inside_an_input(dtype, name, shape, number):
    """Also where some columns' sums are ready before all inputs are read."""
    inputs = make_inputs(*shape, dtype, seed=28)
    array = getattr(inputs, name)
    for start in (10, array.size - 4 * shape[1]):
        bias = array.reshape(-1)[start : start + 4 * shape[1]]
        assert_as_if_copied(inputs, (None, None, bias), num_threads=number)


PAIRS = {
    "grad_cx in grad_gates": lambda gates, state, bias: (gates, gates[:, :21], bias),
    "grad_gates over grad_cx by one element": lambda gates, state, bias: (
        gates,
        np.lib.stride_tricks.as_strided(gates.reshape(-1)[-1:], (40, 21), (gates.itemsize * 21, gates.itemsize)),
        bias,
    ),
    "grad_bias in grad_gates": lambda gates, state, bias: (gates, state, gates[3]),
    "grad_bias in grad_cx": lambda gates, state, bias: (gates, state, state.reshape(-1)[5:89]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_outputs_that_overlap_each_other(dtype, pair):
    """C35: always refused, and nothing is written."""
    inputs = make_inputs(40, 21, dtype, seed=29)
    buffer = np.full(40 * 84 + 40 * 21, 7, dtype)
    gates = buffer[: 40 * 84].reshape(40, 84)
    out = PAIRS[pair](gates, np.full((40, 21), 7, dtype), np.full(84, 7, dtype))
    with pytest.raises(InvalidParameterError, match=r"`out: grad_.*` must not share memory with `out: grad_"):
        lstm_cell_backward(*inputs, out=out)
    assert (buffer == 7).all()
    assert all((x == 7).all() for x in out)


def test_interleaved_outputs_are_fine(dtype):
    """Outputs whose extents meet but that share no byte."""
    inputs = make_inputs(40, 21, dtype, seed=30)
    buffer = np.zeros((40, 5 * 21), dtype)
    out = buffer[:, :84], buffer[:, 84:], None
    assert_same_bits(lstm_cell_backward(*inputs, out=out), plain_call(inputs))


SELF_OVERLAPS = {
    "zero row stride": lambda a, size: np.lib.stride_tricks.as_strided(a, (4, 6), (0, size)),
    "zero column stride": lambda a, size: np.lib.stride_tricks.as_strided(a, (4, 6), (6 * size, 0)),
    "sliding window": lambda a, size: np.lib.stride_tricks.as_strided(a, (4, 6), (size, size)),
    "rows that meet": lambda a, size: np.lib.stride_tricks.as_strided(a, (4, 6), (5 * size, size)),
    "rows that meet between columns": lambda a, size: np.lib.stride_tricks.as_strided(a, (4, 6), (4 * size, 2 * size)),
    "columns that meet": lambda a, size: np.lib.stride_tricks.as_strided(a, (4, 6), (64 * size, size - 1)),
}


@pytest.mark.parametrize("case", SELF_OVERLAPS)
def test_outputs_that_overlap_themselves(dtype, case):
    """C33: refused as output."""
    inputs = make_inputs(4, 6, dtype, seed=31)
    buffer = np.full(1000, 7, dtype)
    out = SELF_OVERLAPS[case](buffer, dtype.itemsize)
    with pytest.raises(InvalidParameterError, match="`out: grad_cx` must have no two elements that share memory"):
        lstm_cell_backward(*inputs, out=(None, out, None))
    assert (buffer == 7).all()


def test_self_overlap_is_found_exactly():
    """Against the sorted offsets, over every small pair of strides: neither too strict nor too lax."""
    inputs = make_inputs(3, 4, np.float32, seed=32)
    expected = bits(plain_call(inputs).grad_cx)
    for row in range(-40, 41):
        for column in range(-24, 25):
            buffer = np.zeros(400, np.uint8)
            view = np.ndarray((3, 4), np.float32, buffer, 180, (row, column))
            offsets = sorted(row * a + column * b for a in range(3) for b in range(4))
            overlap = any(b - a < 4 for a, b in itertools.pairwise(offsets))
            if overlap:
                with pytest.raises(InvalidParameterError, match="share memory"):
                    lstm_cell_backward(*inputs, out=(None, view, None))
            else:
                result = lstm_cell_backward(*inputs, out=(None, view, None))
                np.testing.assert_array_equal(bits(result.grad_cx), expected)


def test_outputs_are_overwritten(backend):
    """C11: never added to."""
    inputs = make_inputs(4, 3, backend, seed=33)
    out = LSTMCellGradients(*arrays_of(guard_outputs(4, 3, backend)))
    first = LSTMCellGradients(*(x.copy() for x in lstm_cell_backward(*inputs, out=out)))
    assert_same_bits(lstm_cell_backward(*inputs, out=out), first)
    assert_same_bits(first, plain_call(inputs))


def test_new_outputs_begin_on_64_bytes():
    """Fresh outputs of more than a page are aligned for stores that bypass the cache."""
    inputs = make_inputs(70, 70, np.float32)
    for _ in range(5):
        result = lstm_cell_backward(*inputs)
        assert result.grad_gates.ctypes.data % 64 == 0
        assert result.grad_cx.ctypes.data % 64 == 0
        assert all(x.flags.c_contiguous and x.flags.writeable for x in result)


def in_small_parts(inputs):
    """The result in parts of 32 rows, each small enough to stay in the cache."""
    parts = [
        lstm_cell_backward_part(*(x[row : row + 32] for x in inputs), first_row=row, num_threads=1)
        for row in range(0, len(inputs.cx), 32)
    ]
    bias = combine_bias([node for part in parts for node in part.parts], inputs.cx.dtype)
    return LSTMCellGradients(*(np.concatenate([part[k] for part in parts]) for k in (0, 1)), bias)


def check_past_the_cache(name, width, layout, offset, order="C"):
    """Large outputs have the bits of small ones, and nothing beside them is written."""
    inputs = make_inputs(3, width, np.dtype(name), seed=34)
    rows = 36 * 1024 * 1024 // (13 * inputs.cx.itemsize * width) + 1
    inputs = Inputs(*(np.resize(x, (rows, x.shape[1])) for x in inputs))
    expected = in_small_parts(inputs)
    inputs = Inputs(*(np.asarray(x, order=order) for x in inputs))
    for number in (1, 2):
        outputs = guard_outputs(rows, width, name, layout, offset=offset)
        result = lstm_cell_backward(*inputs, out=tuple(arrays_of(outputs)), num_threads=number)
        for a, b in zip(result, expected, strict=True):
            assert np.ascontiguousarray(a).tobytes() == b.tobytes()
        for guarded in outputs:
            guarded.assert_guards_intact()


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("width", [333, 512, 4100, 70_001])
@pytest.mark.parametrize(
    ("layout", "offset"), [("contiguous", 0), ("contiguous", 1), ("slice_of_wider", 4), ("fortran", 0)]
)
def test_large_outputs_that_bypass_the_cache(isa, name, width, layout, offset):
    """Whole lines are written past the cache; their ragged ends must be right and nothing beside them written."""
    check_past_the_cache(name, width, layout, offset)


@pytest.mark.parametrize(
    ("name", "width", "offset"),
    [
        *itertools.product(["float32"], [31, 32, 144, 145, 256], [4, 60]),
        ("float64", 16, 8),
        ("float64", 137, 40),
        ("float16", 64, 2),
        ("float16", 200, 62),
        *itertools.product(["float16"], [145, 281], [2, 34, 60]),  # the last tile is shorter than a line
    ],
)
def test_rows_that_share_lines(isa, name, width, offset):
    """The end of one output row and the beginning of the next fill a line together, in one tile and in several."""
    check_past_the_cache(name, width, "contiguous", offset)


@pytest.mark.parametrize(("name", "width"), [("float32", 145), ("float32", 1024), ("float64", 72), ("float16", 300)])
def test_transposed_inputs_and_outputs_past_the_cache(name, width):
    """Inputs that are read in blocks of columns leave output rows in pieces."""
    check_past_the_cache(name, width, "contiguous", 16, order="F")


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("number", [2, 3, 7])
@pytest.mark.parametrize("shape", [(5, 1024), (33, 512), (70, 384), (2, 9000)], ids=str)
def test_columns_that_threads_share(dtype, shape, number, offset):
    """Shares begin on a line of the outputs, wherever those begin; the widest of them has room."""
    batch, hidden = shape
    inputs = make_inputs(batch, hidden, dtype, seed=36)
    expected = plain_call(inputs)
    shapes = (batch, 4 * hidden), (batch, hidden), (4 * hidden,)
    guarded = [Guarded(shape, dtype, "contiguous", None, offset * dtype.itemsize) for shape in shapes]
    assert_same_bits(lstm_cell_backward(*inputs, out=arrays_of(guarded), num_threads=number), expected)
    for output in guarded:
        output.assert_guards_intact()
    part = lstm_cell_backward_part(*inputs, first_row=0, num_threads=number)
    np.testing.assert_array_equal(bits(combine_bias(part.parts, dtype)), bits(expected.grad_bias))


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("rows", [31, 32, 33, 63, 64, 65, 96, 97, 160, 199])
@pytest.mark.parametrize("threads", [1, 3])
def test_transposed_inputs_over_several_leaves(name, rows, threads):
    """Inputs read in blocks of two leaves, in whole batches and in parts that begin with an odd leaf."""
    inputs = make_inputs(rows, 137, np.dtype(name), seed=rows)
    turned = Inputs(*map(np.asfortranarray, inputs))
    expected = plain_call(inputs)
    assert_same_bits(lstm_cell_backward(*turned, num_threads=threads), expected)
    parts = []
    for first, end in ((0, 32), (32, rows)):
        if first < rows:
            part = lstm_cell_backward_part(*(x[first:end] for x in turned), first_row=first, num_threads=threads)
            np.testing.assert_array_equal(bits(part.grad_gates), bits(expected.grad_gates[first:end]))
            parts += part.parts
    np.testing.assert_array_equal(bits(combine_bias(parts, name)), bits(expected.grad_bias))


def test_guards_see_a_stray_write():
    """The guard itself can fail."""
    guarded = Guarded((2, 3), np.float32, "every_other_column")
    guarded.assert_guards_intact()
    guarded.array[...] = 1
    guarded.assert_guards_intact()
    with pytest.raises(AssertionError):
        guarded.assert_unchanged()
    guarded.buffer[guarded.outside[150]] ^= 1
    with pytest.raises(AssertionError):
        guarded.assert_guards_intact()
