"""Bad arguments: the right exception, a message that names, wants and quotes, and outputs that were not touched."""

import re

import numpy as np
import pytest
from strategies import NAMES, OUTPUTS, Guarded, assert_same_bits, guard_outputs, make_inputs, plain_call

import lstmcell_bwd
from lstmcell_bwd import (
    InvalidParameterError,
    LSTMCellError,
    NullPointerError,
    UnsupportedDtypeError,
    choose_device,
    combine_bias,
    lstm_cell_backward,
    lstm_cell_backward_part,
)
from lstmcell_bwd.errors import Status

N, H = 3, 4
SHAPES = {"gates": (N, 4 * H), "grad_gates": (N, 4 * H), "grad_bias": (4 * H,)}


def shape_of(name):
    """Return the right shape of an argument or output."""
    return SHAPES.get(name, (N, H))


def refuse(error, name, wanted, got, inputs=None, **options):
    """Call with good outputs unless told otherwise; the call must raise and leave every byte of them alone."""
    outputs = guard_outputs(N, H, np.float32)
    inputs = make_inputs(N, H) if inputs is None else inputs
    options.setdefault("out", tuple(guarded.array for guarded in outputs))
    with pytest.raises(error) as raised:
        lstm_cell_backward(*inputs, **options)
    message = str(raised.value)
    assert f"`{name}`" in message
    assert wanted in message
    assert re.search(rf"got .*{got}", message), message
    for guarded in outputs:
        guarded.assert_unchanged()
    return raised.value


# ---- inputs ---------------------------------------------------------------------------------------------------------

WRONG_SHAPES = [(), (3,), (N,), (1, 2, 3), (1, 1, 1, 1, 1), (N + 1, H), (N, H + 1), (H, N), (0, H), (N, 4 * H + 1)]
WRONG_DTYPES = [
    "int32",
    "int8",
    "uint16",
    "bool",
    "complex64",
    "complex128",
    "object",
    "longdouble",
    "M8[s]",
    "V4",
    "U1",
]


@pytest.mark.parametrize("name", ["cx", "cy", "gates"])
def test_missing(name):
    error = refuse(NullPointerError, name, "an array", "None", make_inputs(N, H)._replace(**{name: None}))
    assert isinstance(error, TypeError)
    assert error.status == Status.ACLNN_ERR_PARAM_NULLPTR


@pytest.mark.parametrize("shape", WRONG_SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_shape(name, shape):
    """C14: every rank and size that does not fit."""
    inputs = make_inputs(N, H)._replace(**{name: np.zeros(shape, np.float32)})
    if name == "cx" and len(shape) == 2:
        # cx sets the size, so the others are at fault.
        error = refuse(InvalidParameterError, "cy", f"{shape} to match `cx`", re.escape(str((N, H))), inputs)
    else:
        wanted = "(N, 4*H) = (3, 16)" if name == "gates" else "(N, H)"
        error = refuse(InvalidParameterError, name, wanted, re.escape(str(shape)), inputs)
    assert isinstance(error, ValueError)
    assert error.status == Status.ACLNN_ERR_PARAM_INVALID


@pytest.mark.parametrize("wrong", WRONG_DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_dtype(name, wrong):
    """C17: foreign dtypes."""
    array = np.zeros(shape_of(name), wrong)
    got = re.escape(str(array.dtype))
    error = refuse(UnsupportedDtypeError, name, "float32", got, make_inputs(N, H)._replace(**{name: array}))
    assert isinstance(error, TypeError)
    assert error.status == Status.ACLNN_ERR_PARAM_INVALID


@pytest.mark.parametrize("wrong", WRONG_DTYPES)
def test_all_of_one_wrong_dtype(wrong):
    inputs = [np.zeros(shape_of(name), wrong) for name in NAMES]
    refuse(UnsupportedDtypeError, "cx", "float32, float64, float16 or bfloat16", "", inputs)


@pytest.mark.parametrize("other", ["float64", "float16", ">f8"])
@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes(name, other):
    """C17: one tensor of another supported dtype is refused, never promoted."""
    inputs = make_inputs(N, H)
    inputs = inputs._replace(**{name: getattr(inputs, name).astype(other)})
    at_fault = "cy" if name == "cx" else name
    wanted = f"{np.dtype(other).newbyteorder('=') if name == 'cx' else 'float32'} like `cx`"
    refuse(
        UnsupportedDtypeError, at_fault, wanted, "float32" if name == "cx" else re.escape(str(np.dtype(other))), inputs
    )


class Stranger:
    """An object that is no array."""


class Broken:
    """An array interface that does not work."""

    @property
    def __array_interface__(self):
        message = "no memory behind this"
        raise RuntimeError(message)


WRONG_TYPES = {
    "string": "abc",
    "bytes": b"abc",
    "int": 3,
    "bool": True,
    "dict": {},
    "set": {1.0},
    "object": Stranger(),
    "type": int,
    "ragged list": [[1.0], [1.0, 2.0]],
    "list of strings": [["a"]],
    "broken interface": Broken(),
    "masked array": np.ma.masked_array(np.zeros((N, H), np.float32)),
    "masked array with a mask": np.ma.masked_array(np.zeros((N, H), np.float32), np.ones((N, H), bool)),
    "structured": np.zeros((N, H), [("a", "f4")]),
}


@pytest.mark.parametrize("kind", WRONG_TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_type(name, kind):
    inputs = make_inputs(N, H)._replace(**{name: WRONG_TYPES[kind]})
    error = refuse(UnsupportedDtypeError, name, "must", "", inputs)
    assert isinstance(error, TypeError)
    if kind.startswith("masked"):
        assert "mask would be lost" in str(error)


@pytest.mark.parametrize("name", ["grad_hy", "grad_cy"])
def test_none_is_a_missing_gradient_only(name):
    """False, an empty list and NaN are not."""
    for value in (False, [], float("nan")):
        with pytest.raises(LSTMCellError, match=rf"`{name}`"):
            lstm_cell_backward(*make_inputs(N, H)._replace(**{name: value}))


@pytest.mark.parametrize("count", range(5))
def test_too_few_arguments(count):
    with pytest.raises(TypeError):
        lstm_cell_backward(*make_inputs(N, H)[:count])


def test_unknown_and_positional_options():
    inputs = make_inputs(N, H)
    with pytest.raises(TypeError):
        lstm_cell_backward(*inputs, threads=1)
    with pytest.raises(TypeError):
        lstm_cell_backward(*inputs, True, None)


# ---- inputs that are taken ------------------------------------------------------------------------------------------


class ArrayInterface:
    """Memory offered through NumPy's array interface."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class Dlpack:
    """Memory offered through DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldDlpack(Dlpack):
    """DLPack as before version 1: no options are understood."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class ArrayMethod:
    """Memory offered through `__array__`."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Subclass(np.ndarray):
    """An ndarray subclass whose arithmetic must not be used."""

    def __array_finalize__(self, source):
        pass

    def __array_ufunc__(self, *args, **kwargs):
        message = "the operator reads memory, it does not call NumPy's arithmetic"
        raise AssertionError(message)


VIEWS = {
    "array interface": ArrayInterface,
    "DLPack": Dlpack,
    "old DLPack": OldDlpack,
    "__array__": ArrayMethod,
    "memoryview": memoryview,
    "matrix": lambda array: array.view(np.matrix),
    "subclass": lambda array: array.view(Subclass),
    "recarray": lambda array: array.view(np.recarray),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_what_numpy_can_view(isa, kind, name):
    inputs = make_inputs(N, H)
    changed = {field: VIEWS[kind](array) for field, array in inputs._asdict().items() if name in (field, "all")}
    result = lstm_cell_backward(*inputs._replace(**changed))
    assert_same_bits(result, plain_call(inputs))
    assert all(type(x) is np.ndarray for x in result)


def test_lists_become_float64(isa):
    inputs = make_inputs(N, H, np.float64)
    result = lstm_cell_backward(*(array.tolist() for array in inputs))
    assert_same_bits(result, plain_call(inputs))
    assert_same_bits(lstm_cell_backward(*inputs._replace(cx=inputs.cx.tolist())), plain_call(inputs))


def test_memory_is_viewed_not_copied(isa):
    """An output that is the memory behind such an object counts as overlapping it."""
    inputs = make_inputs(N, H)
    for view in (ArrayInterface, Dlpack):
        cx = inputs.cx.copy()
        result = lstm_cell_backward(*inputs._replace(cx=view(cx)), out=(None, cx, None))
        assert result.grad_cx is cx
        assert_same_bits(result, plain_call(inputs))


# ---- outputs --------------------------------------------------------------------------------------------------------

NOT_OUTPUTS = {key: value for key, value in WRONG_TYPES.items() if key != "structured"}
NOT_OUTPUTS |= {
    "list": [[0.0] * H] * N,
    "array interface": ArrayInterface(np.zeros((N, H), np.float32)),
    "DLPack": Dlpack(np.zeros((N, H), np.float32)),
    "NumPy scalar": np.float32(1),
}


@pytest.mark.parametrize("name", OUTPUTS)
class TestOutputs:
    """Each output in turn wrong, the others good and watched."""

    def refuse(self, error, name, wanted, got, value, inputs=None):
        """Put one bad output among good ones."""
        outputs = {field: Guarded(shape_of(field), np.float32) for field in OUTPUTS}
        out = tuple(value if field == name else outputs[field].array for field in OUTPUTS)
        with pytest.raises(error) as raised:
            lstm_cell_backward(*(inputs or make_inputs(N, H)), out=out)
        message = str(raised.value)
        assert f"`out: {name}`" in message
        assert wanted in message
        assert re.search(rf"got .*{got}", message), message
        for guarded in outputs.values():
            guarded.assert_unchanged()

    @pytest.mark.parametrize("kind", NOT_OUTPUTS)
    def test_type(self, name, kind):
        self.refuse(UnsupportedDtypeError, name, "must be", "", NOT_OUTPUTS[kind])

    @pytest.mark.parametrize(
        "shape", [(), (2,), (N,), (N, 4 * H + 1), (1, N, H), (1, 4 * H), (N + 1, H), (4 * H, 1)], ids=str
    )
    def test_shape(self, name, shape):
        self.refuse(InvalidParameterError, name, "must have shape", re.escape(str(shape)), np.zeros(shape, np.float32))

    @pytest.mark.parametrize("wrong", ["float64", "float16", "int32", "complex64", "object", "longdouble", "bool"])
    def test_dtype(self, name, wrong):
        value = np.zeros(shape_of(name), wrong)
        self.refuse(UnsupportedDtypeError, name, "float32", re.escape(str(value.dtype)), value)

    def test_byte_order(self, name):
        """C31: byte-swapped outputs are refused."""
        value = np.full(shape_of(name), 7, np.dtype(np.float32).newbyteorder())
        self.refuse(InvalidParameterError, name, "native byte order", "f4", value)
        assert (value == 7).all()

    def test_read_only(self, name):
        """C30."""
        value = np.full(shape_of(name), 7, np.float32)
        value.flags.writeable = False
        self.refuse(InvalidParameterError, name, "writeable", "read-only", value)
        assert (value == 7).all()

    def test_zero_stride(self, name):
        """C33: several elements in one place."""
        buffer = np.full(100, 7, np.float32)
        value = np.lib.stride_tricks.as_strided(buffer, shape_of(name), (0,) * len(shape_of(name)))
        self.refuse(InvalidParameterError, name, "share memory", "strides", value)
        assert (buffer == 7).all()

    @pytest.mark.parametrize("argument", NAMES)
    def test_untouched_by_a_bad_input(self, name, argument):
        """Nothing is written before every check has passed, whichever argument is the bad one."""
        outputs = guard_outputs(N, H, np.float32)
        inputs = make_inputs(N, H)._replace(**{argument: np.zeros((1, 1), np.float32)})
        out = tuple(guarded.array if field == name else None for field, guarded in zip(OUTPUTS, outputs, strict=True))
        with pytest.raises(LSTMCellError):
            lstm_cell_backward(*inputs, out=out)
        for guarded in outputs:
            guarded.assert_unchanged()

    def test_subclasses_are_filled_and_returned(self, name, isa):
        inputs = make_inputs(N, H)
        for kind in (lambda a: a.view(Subclass), lambda a: a if a.ndim == 1 else a.view(np.matrix)):
            value = kind(np.zeros(shape_of(name), np.float32))
            result = lstm_cell_backward(*inputs, out=tuple(value if field == name else None for field in OUTPUTS))
            assert getattr(result, name) is value
            assert_same_bits(result._replace(**{name: value.view(np.ndarray)}), plain_call(inputs))

    def test_alone(self, name, isa):
        """One output given, the others allocated."""
        inputs = make_inputs(N, H)
        value = np.full(shape_of(name), np.nan, np.float32)
        result = lstm_cell_backward(*inputs, out=[value if field == name else None for field in OUTPUTS])
        assert getattr(result, name) is value
        assert_same_bits(result, plain_call(inputs))


@pytest.mark.parametrize("out", ["abc", 3, {}, np.zeros((3, 3)), iter(()), True], ids=lambda out: type(out).__name__)
def test_out_of_another_type(out):
    refuse(UnsupportedDtypeError, "out", "a triple (grad_gates, grad_cx, grad_bias)", type(out).__name__, out=out)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_out_of_another_length(count):
    error = refuse(InvalidParameterError, "out", "a triple", f"{count} entries", out=(None,) * count)
    assert str(error).endswith(f"got {count} entries")


def test_bias_output_without_bias():
    bias = np.full(4 * H, 7, np.float32)
    with pytest.raises(InvalidParameterError, match="`out: grad_bias` must be None when `has_bias` is False, got"):
        lstm_cell_backward(*make_inputs(N, H), False, out=(None, None, bias))
    assert (bias == 7).all()


# ---- options --------------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "has_bias": [(1, TypeError), (0, TypeError), (None, TypeError), ("yes", TypeError), (np.array(True), TypeError)],
    "num_threads": [
        (0, ValueError),
        (-1, ValueError),
        (-(10**30), ValueError),
        (1.0, TypeError),
        (np.float32(2), TypeError),
        ("2", TypeError),
        (True, TypeError),
        (np.True_, TypeError),
        ([2], TypeError),
    ],
    "nonfinite": [
        ("x", ValueError),
        ("NaN", ValueError),
        ("", ValueError),
        (None, TypeError),
        (1, TypeError),
        (b"nan", TypeError),
    ],
    "device": [
        ("npu:x", ValueError),
        ("npu:", ValueError),
        ("npu:-1", ValueError),
        ("npu:1 ", ValueError),
        ("npu:1\n", ValueError),
        ("gpu", ValueError),
        ("CPU", ValueError),
        ("cpu:0", ValueError),
        ("", ValueError),
        (None, TypeError),
        (0, TypeError),
    ],
    "stream": [(0, ValueError), (1, ValueError), ("main", (TypeError, ValueError))],
}


@pytest.mark.parametrize(
    ("name", "value", "error"), [(name, *case) for name, cases in BAD_OPTIONS.items() for case in cases], ids=repr
)
def test_bad_option(name, value, error):
    raised = refuse(LSTMCellError, name, "must be", "", **{name: value})
    assert isinstance(raised, error)
    shown = type(value).__name__ if error is TypeError else repr(value)
    assert shown in str(raised)


@pytest.mark.parametrize("number", [1, 2, np.int64(3), np.uint8(2), 10**30])
def test_good_thread_numbers(isa, number):
    inputs = make_inputs(70, 20)
    assert_same_bits(lstm_cell_backward(*inputs, num_threads=number), plain_call(inputs))


@pytest.mark.parametrize("flag", [np.True_, np.False_])
def test_numpy_booleans(flag):
    assert (lstm_cell_backward(*make_inputs(N, H), flag).grad_bias is None) == (not flag)


@pytest.mark.parametrize(("number", "error"), BAD_OPTIONS["num_threads"], ids=repr)
def test_set_num_threads(threads, number, error):
    before = lstmcell_bwd.get_num_threads()
    with pytest.raises(error, match=r"`num_threads` must be an integer of at least 1"):
        threads(number)
    assert lstmcell_bwd.get_num_threads() == before
    threads(5)
    assert lstmcell_bwd.get_num_threads() == 5
    threads(None)
    assert lstmcell_bwd.get_num_threads() == before


@pytest.mark.parametrize(("name", "error"), [("sse9", ValueError), ("", ValueError), (None, TypeError), (2, TypeError)])
def test_unknown_instruction_set(name, error):
    before = lstmcell_bwd.get_isa()
    with pytest.raises(error, match=r"`isa` must be .* got"):
        lstmcell_bwd.use_isa(name)
    assert lstmcell_bwd.get_isa() == before


@pytest.mark.parametrize("call", [lstm_cell_backward, choose_device], ids=lambda call: call.__name__)
def test_the_same_checks_everywhere(call):
    """choose_device and lstm_cell_backward_part refuse what lstm_cell_backward refuses, in the same words."""
    bad = make_inputs(N, H)._replace(gates=np.zeros((N, 3 * H), np.float32))
    wanted = r"`gates` must have shape \(N, 4\*H\) = \(3, 16\) to match `cx` of shape \(3, 4\), got \(3, 12\)"
    with pytest.raises(InvalidParameterError, match=wanted):
        call(*bad)
    with pytest.raises(InvalidParameterError, match=wanted):
        lstm_cell_backward_part(*bad, first_row=0)
    for options in ({"num_threads": 0}, {"nonfinite": "x"}):
        with pytest.raises(InvalidParameterError):
            call(*make_inputs(N, H), **options)
        with pytest.raises(InvalidParameterError):
            lstm_cell_backward_part(*make_inputs(N, H), first_row=0, **options)


def test_choose_device():
    device, reason = choose_device(*make_inputs(N, H))
    assert device == "cpu"
    assert len(reason.split()) > 2


@pytest.mark.parametrize("parts", [None, 3, "abc", [1], [None]], ids=repr)
def test_combine_bias_of_other_types(parts):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        combine_bias(parts, np.float32)


def test_many_bad_calls_leak_nothing():
    """Two thousand refused calls leave no object behind."""
    import gc

    inputs = make_inputs(N, H)._replace(gates=np.zeros((N, 3), np.float32))

    def refused(times):
        for _ in range(times):
            with pytest.raises(InvalidParameterError):
                lstm_cell_backward(*inputs)

    refused(100)
    gc.collect()
    before = len(gc.get_objects())
    refused(2000)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
