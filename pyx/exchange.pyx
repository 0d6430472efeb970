# cython: language_level=3
"""NumPy arrays on the memory of another library's CPU tensors, by DLPack's table of C functions.

`numpy()` of a tensor takes half a microsecond, with fourteen tensors a step as long as the kernels of a small cell. The
table, `__dlpack_c_exchange_api__` of a tensor's type, says in a fifth of that where a tensor lies.
"""

cimport numpy as cnp
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cnp.import_array()


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


cdef class Exchange:
    """Makes arrays of one library's tensors.

    Parameters
    ----------
    tensor_type : type
        The type of the tensors.
    by_method : callable
        Makes an array of a tensor's memory, in whatever time. It is asked where the type has no table that this module
        understands, and for anything but CPU tensors of float16, float32, float64 or bfloat16.

    Attributes
    ----------
    has_table : bool
    """

    cdef Table* table
    cdef object tensor_type
    cdef object by_method
    cdef int bfloat16       # NumPy's number of ml_dtypes' type, once an array of it was seen

    def __init__(self, tensor_type, by_method):
        cdef object capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
        self.table = NULL
        if capsule is not None:
            self.table = <Table*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        while self.table != NULL and self.table.version != VERSION:
            self.table = self.table.older
        if self.table != NULL and self.table.describe == NULL:
            self.table = NULL
        self.tensor_type = tensor_type
        self.by_method = by_method
        self.bfloat16 = cnp.NPY_NOTYPE

    @property
    def has_table(self):
        """Whether the type has a table that this module understands."""
        return self.table != NULL

    cdef int number_of(self, const Tensor* description) noexcept:
        """NumPy's number of the elements' type; NPY_NOTYPE for what is left to the tensor's own method."""
        cdef ElementType element = description.element
        if description.device.kind != ON_CPU or element.lanes != 1 or description.axes > MOST_AXES:
            return cnp.NPY_NOTYPE
        if element.code == FLOAT:
            if element.bits == 32:
                return cnp.NPY_FLOAT32
            if element.bits == 64:
                return cnp.NPY_FLOAT64
            if element.bits == 16:
                return cnp.NPY_FLOAT16
        return self.bfloat16 if element.code == BFLOAT and element.bits == 16 else cnp.NPY_NOTYPE

    def array_of(self, tensor):
        """Return an array that has the memory of a CPU tensor, whatever its strides.

        The table does not tell of numbers that are to be read with the other sign (`Tensor.is_neg`): such tensors are
        not for this.

        Parameters
        ----------
        tensor : instance of `tensor_type`
        """
        cdef Tensor description
        cdef cnp.npy_intp shape[MOST_AXES]
        cdef cnp.npy_intp strides[MOST_AXES]
        cdef int number = cnp.NPY_NOTYPE
        cdef cnp.ndarray array
        cdef int k
        if self.table != NULL and PyObject_TypeCheck(tensor, <PyTypeObject*>self.tensor_type):
            self.table.describe(<PyObject*>tensor, &description)
            number = self.number_of(&description)
        if number == cnp.NPY_NOTYPE:
            array = self.by_method(tensor)
            if array.dtype.name == "bfloat16":
                self.bfloat16 = cnp.PyArray_TYPE(array)
            return array
        for k in range(description.axes):
            shape[k] = description.shape[k]
            strides[k] = description.strides[k] * (description.element.bits // 8)
        array = cnp.PyArray_New(cnp.ndarray, description.axes, shape, number, strides,
                                <char*>description.data + description.byte_offset, 0, cnp.NPY_ARRAY_WRITEABLE, None)
        cnp.set_array_base(array, tensor)
        return array
