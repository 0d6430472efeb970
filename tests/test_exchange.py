"""Arrays on the memory of tensors, from a tensor library's table of C functions. The library here is a stand-in."""

import ctypes
import gc
import weakref

import numpy as np
import pytest

from lstmcell_bwd._exchange import Exchange

CPU, ELSEWHERE = 1, 2
CODES = {"float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16), "int32": (0, 32)}


class Description(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Description))


class Table(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h."""


Table._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("older", ctypes.POINTER(Table)),
    *((name, ctypes.c_void_p) for name in ("allocate", "export", "import")),
    ("describe", Describe),
    ("stream", ctypes.c_void_p),
]


class FakeTensor:
    """A view of a NumPy array that describes itself."""

    def __init__(self, array, device=CPU, lanes=1, byte_offset=0):
        self.array, self.device, self.lanes, self.byte_offset = array, device, lanes, byte_offset
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))


@Describe
def describe(tensor, description):
    array, found = tensor.array, description[0]
    found.data, found.byte_offset = array.ctypes.data - tensor.byte_offset, tensor.byte_offset
    found.device_type, found.device_id, found.ndim = tensor.device, 0, array.ndim
    (found.code, found.bits), found.lanes = CODES[array.dtype.name], tensor.lanes
    found.shape, found.strides = tensor.shape, tensor.strides
    return 0


def table(major=1, older=None, function=describe):
    return Table(major, 3, ctypes.pointer(older) if older is not None else None, None, None, None, function, None)


make_capsule = ctypes.pythonapi.PyCapsule_New
make_capsule.restype = ctypes.py_object
make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor_type(found=None):
    """A type of its own with a table, or without one."""
    kind = type("Tensor", (FakeTensor,), {})
    if found is not None:
        kind.__dlpack_c_exchange_api__ = make_capsule(ctypes.addressof(found), b"dlpack_exchange_api", None)
    return kind


class Asked:
    """A method that makes arrays, and remembers of what."""

    def __init__(self):
        self.tensors = []

    def __call__(self, tensor):
        self.tensors.append(tensor)
        return tensor.array


TABLE = table()


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def kind():
    return tensor_type(TABLE)


@pytest.fixture
def array_of(kind, asked):
    return Exchange(kind, asked).array_of


def dtype_of(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def arrays(name):
    """Arrays of one dtype in many layouts."""
    dtype = dtype_of(name)
    whole = np.arange(60).astype(dtype)
    yield from (
        whole,
        whole.reshape(6, 10),
        whole.reshape(6, 10).T,
        whole.reshape(3, 4, 5),
        whole.reshape(6, 10)[::2, 3:],
    )
    yield np.broadcast_to(whole[:10], (4, 10))
    yield whole[:0].reshape(0, 4)
    yield np.lib.stride_tricks.as_strided(whole[:7], (2, 2), (4 * dtype.itemsize, dtype.itemsize))


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16"])
def test_an_array_lies_where_its_tensor_does(array_of, kind, asked, name):
    array_of(kind(np.zeros(1, dtype_of(name))))  # the method says which dtype bfloat16 is
    asked.tensors.clear()
    for array in arrays(name):
        for byte_offset in (0, 64):
            result = array_of(kind(array, byte_offset=byte_offset))
            assert result.dtype == array.dtype
            assert (result.shape, result.strides, result.ctypes.data) == (array.shape, array.strides, array.ctypes.data)
            assert result.flags.writeable
            assert result.flags.c_contiguous == array.flags.c_contiguous
            assert result.flags.f_contiguous == array.flags.f_contiguous
    assert not asked.tensors


def test_an_array_is_aligned_as_its_memory_is(array_of, kind):
    odd = np.zeros(41, np.uint8)[1:].view(np.float32)
    assert not array_of(kind(odd)).flags.aligned
    assert array_of(kind(np.zeros(3, np.float32))).flags.aligned


def test_an_array_keeps_its_tensor_alive(array_of, kind):
    tensor = kind(np.arange(3.0))
    seen = weakref.ref(tensor)
    array = array_of(tensor)
    del tensor
    gc.collect()
    assert seen() is array.base
    np.testing.assert_array_equal(array, [0, 1, 2])
    del array
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (np.zeros(3), {"device": ELSEWHERE}),
        (np.zeros(3), {"lanes": 2}),
        (np.zeros(3, np.int32), {}),
        (np.zeros((1, 1, 1, 1, 1)), {}),
    ],
    ids=["elsewhere", "vectors", "integers", "five axes"],
)
def test_what_is_unusual_is_left_to_the_method(array_of, kind, asked, array, options):
    tensor = kind(array, **options)
    assert array_of(tensor) is array
    assert asked.tensors == [tensor]


def test_other_objects_are_left_to_the_method(array_of, asked):
    with pytest.raises(AttributeError):
        array_of(1)
    assert asked.tensors == [1]


def test_an_error_of_the_table_is_raised(asked):
    """As of a tensor without memory; here a C function of the same signature that fails for every such object."""
    found = table(function=ctypes.cast(ctypes.pythonapi.PySequence_DelItem, Describe))
    kind = tensor_type(found)
    with pytest.raises(TypeError, match="doesn't support item deletion"):
        Exchange(kind, asked).array_of(kind(np.zeros(3)))


@pytest.mark.parametrize(
    ("found", "there"),
    [
        (table(), True),
        (table(2, table()), True),
        (table(3, table(2, table())), True),
        (table(2), False),
        (table(0), False),
        (table(function=Describe()), False),
        (None, False),
    ],
    ids=["1", "2 and 1", "3, 2 and 1", "2", "0", "without a function", "none"],
)
def test_tables(asked, found, there):
    """Only version 1 is understood; a newer table may point to an older one."""
    kind = tensor_type(found)
    exchange = Exchange(kind, asked)
    assert exchange.has_table is there
    tensor = kind(np.zeros((2, 3)))
    np.testing.assert_array_equal(exchange.array_of(tensor), tensor.array)
    assert asked.tensors == ([] if there else [tensor])


def test_a_capsule_of_something_else_is_refused(asked):
    kind = tensor_type()
    kind.__dlpack_c_exchange_api__ = make_capsule(ctypes.addressof(TABLE), b"other", None)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        Exchange(kind, asked)
