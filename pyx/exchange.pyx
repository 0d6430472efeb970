# cython: language_level=3
"""NumPy arrays on the memory of another library's CPU tensors, by DLPack's table of C functions.

`numpy()` of a tensor takes half a microsecond, with fourteen tensors a step as long as the kernels of a small cell. The
table, `__dlpack_c_exchange_api__` of a tensor's type, says in a fifth of that where a tensor lies.
"""

import numpy as np

cimport numpy as cnp
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyTypeObject* subtype, cnp.PyArray_Descr* dtype, int nd, const cnp.npy_intp* dims,
                                const cnp.npy_intp* strides, void* data, int flags, PyObject* parent)
    PyTypeObject PyArray_Type
    int NPY_ARRAY_WRITEABLE


# ---- dlpack.h, version 1 ------------------------------------------------------------------------------------------

cdef enum:
    VERSION = 1             # another one may have another layout
    ON_CPU = 1              # kDLCPU
    FLOAT = 2               # kDLFloat
    BFLOAT = 4              # kDLBfloat

cdef struct Device:
    int32_t kind
    int32_t number

cdef struct ElementType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct Tensor:         # DLTensor; what it points to belongs to the tensor that it describes
    void* data
    Device device
    int32_t axes
    ElementType element
    int64_t* shape
    int64_t* strides        # in elements
    uint64_t byte_offset

cdef struct Table:          # DLPackExchangeAPI
    uint32_t version
    uint32_t minor
    Table* older
    void* allocate
    void* export_tensor
    void* import_tensor
    int (*describe)(PyObject* tensor, Tensor* description) except -1    # may be missing
    void* stream


# ---- arrays -------------------------------------------------------------------------------------------------------

cdef enum:
    MOST_AXES = 4

cdef Table* table = NULL
cdef PyObject* tensors = NULL
cdef object by_method = None
cdef object float16 = np.dtype(np.float16)
cdef object float32 = np.dtype(np.float32)
cdef object float64 = np.dtype(np.float64)
cdef object bfloat16 = None         # ml_dtypes', once an array of it was seen


def connect(tensor_type, method):
    """Say what `array_of` is for.

    Parameters
    ----------
    tensor_type : type
        The type of the tensors; it stays alive.
    method : callable
        Makes an array of a tensor's memory, in whatever time. It is asked where there is no table that this module
        understands, and for tensors of another kind than CPU tensors of float16, float32, float64 or bfloat16.

    Returns
    -------
    bool
        Whether there is a table.
    """
    global table, tensors, by_method
    cdef object capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    cdef Table* found = NULL
    if capsule is not None:
        found = <Table*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while found != NULL and found.version != VERSION:
        found = found.older
    Py_INCREF(tensor_type)
    tensors, by_method = <PyObject*>tensor_type, method
    table = found if found != NULL and found.describe != NULL else NULL
    return table != NULL


cdef object dtype_of(const Tensor* description):
    """NumPy's dtype of a tensor's elements; None for one that this module leaves to the tensor's own method."""
    cdef ElementType element = description.element
    if description.device.kind == ON_CPU and element.lanes == 1:
        if element.code == FLOAT:
            return float32 if element.bits == 32 else float64 if element.bits == 64 else (
                float16 if element.bits == 16 else None)
        if element.code == BFLOAT and element.bits == 16:
            return bfloat16
    return None


def array_of(tensor):
    """Return an array that has the memory of a CPU tensor, whatever its strides.

    The table knows no tensors whose numbers are to be read with the other sign (`Tensor.is_neg`): nothing here tells
    them from others.

    Parameters
    ----------
    tensor : instance of what was passed to `connect`
    """
    global bfloat16
    cdef Tensor description
    cdef cnp.npy_intp shape[MOST_AXES]
    cdef cnp.npy_intp strides[MOST_AXES]
    cdef object dtype = None
    cdef cnp.ndarray array
    cdef int k
    if table != NULL and PyObject_TypeCheck(tensor, <PyTypeObject*>tensors):
        table.describe(<PyObject*>tensor, &description)
        if description.axes <= MOST_AXES:
            dtype = dtype_of(&description)
    if dtype is None:
        array = by_method(tensor)
        if array.dtype.name == "bfloat16":
            bfloat16 = array.dtype
        return array
    for k in range(description.axes):
        shape[k] = description.shape[k]
        strides[k] = description.strides[k] * (description.element.bits // 8)
    Py_INCREF(dtype)
    array = PyArray_NewFromDescr(&PyArray_Type, <cnp.PyArray_Descr*>dtype, description.axes, shape, strides,
                                 <char*>description.data + description.byte_offset, NPY_ARRAY_WRITEABLE, NULL)
    cnp.set_array_base(array, tensor)
    return array
