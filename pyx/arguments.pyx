# cython: language_level=3
"""The one home of the rules on arguments: presence, dtype, rank, shape, layout, overlap, and the error texts.

Compiled, because a small call is all checks. Everything is checked before anything is written. The order is that of
CANN's operator: null, dtype, shape; then the outputs.
"""

import operator
import sys

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact

from lstmcell_bwd import npu
from lstmcell_bwd.errors import InvalidParameterError, NullPointerError, UnsupportedDtypeError

include "kernel_abi.pxi"

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    int PyArray_CheckExact(object array)

_SUPPORTED = "float32, float64, float16 or bfloat16"
cdef enum:
    FIRST_USER_TYPE = 256     # NPY_USERDEF
    MOST_THREADS = 0x100000

cdef int bfloat16_number = -1      # NumPy's number of ml_dtypes.bfloat16, once one was seen


# ---- error texts ------------------------------------------------------------------------------------------------

def missing(name):
    """The error for a required tensor that is None."""
    return NullPointerError(f"`{name}` must be an array, got None")


def wrong_type(name, wanted, value):
    """The error for a value of a type that cannot serve."""
    return UnsupportedDtypeError(f"`{name}` must be {wanted}, got {type(value).__name__}")


def wrong_value(name, wanted, value):
    """The error for a value of the right type that is not allowed."""
    return bad_argument(name, f"be {wanted}", repr(value))


def bad_argument(name, wanted, got):
    """The error for an argument of the right type that cannot serve, where words say what was given."""
    return InvalidParameterError(f"`{name}` must {wanted}, got {got}")


def wrong_dtype(name, wanted, dtype):
    """The error for an array of the wrong dtype."""
    return UnsupportedDtypeError(f"`{name}` must have dtype {wanted}, got {dtype}")


def wrong_shape(name, symbols, wanted, other, other_shape, shape):
    """The error for an array whose shape does not match the others'."""
    return bad_argument(name, f"have shape {symbols} = {wanted} to match `{other}` of shape {other_shape}", shape)


def wrong_rank(name, shape):
    """The error for the array that sets batch and hidden size, when it has no such axes."""
    return bad_argument(name, "have shape (N, H)", shape)


def bad_output(name, wanted, got):
    """The error for an output that cannot be written to as asked."""
    return bad_argument(f"out: {name}", wanted, got)


# ---- one tensor -------------------------------------------------------------------------------------------------
#
# An optional tensor may be None, which is right in every respect.

cdef object as_tensor(name, value):
    """The ndarray or NPUArray that a value stands for, without a copy where that is possible."""
    if PyArray_CheckExact(value) or value is None:
        return value
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise wrong_type(name, "an array without a mask (its mask would be lost)", value)
    if isinstance(value, np.ndarray):
        return np.ndarray.view(value, np.ndarray)
    from lstmcell_bwd.npu.array import adopt

    on_npu = adopt(name, value)
    if on_npu is not None:
        return on_npu
    if isinstance(value, (str, bytes)):
        raise wrong_type(name, "an array", value)
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__"):
            try:
                return np.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError, ValueError):
                return np.asarray(value)
        return np.asarray(value)
    except Exception as error:
        raise UnsupportedDtypeError(
            f"`{name}` must be an array or something NumPy can view as one, got {type(value).__name__}: {error}"
        ) from error


cdef object as_required(name, value):
    """The same for a tensor that may not be missing."""
    if value is None:
        raise missing(name)
    return as_tensor(name, value)


cdef int storage_of(object tensor):
    """The enum Storage of a tensor's dtype, or -1."""
    global bfloat16_number
    cdef int number = cnp.PyArray_TYPE(tensor) if PyArray_CheckExact(tensor) else tensor.dtype.num
    if number == cnp.NPY_FLOAT32:
        return STORAGE_FLOAT32
    if number == cnp.NPY_FLOAT64:
        return STORAGE_FLOAT64
    if number == cnp.NPY_FLOAT16:
        return STORAGE_FLOAT16
    if number == bfloat16_number:
        return STORAGE_BFLOAT16
    # ml_dtypes registers its type with NumPy under a number that is only known at run time.
    if number >= FIRST_USER_TYPE and tensor.dtype.name == "bfloat16" and tensor.dtype.itemsize == 2:
        bfloat16_number = number
        return STORAGE_BFLOAT16
    return -1


cdef int check_dtype(name, object tensor, int wanted, object wanted_dtype) except -2:
    """The tensor's storage type; `wanted` is the first tensor's, or -1 for the first tensor itself."""
    cdef int storage
    if tensor is None:
        return wanted
    storage = storage_of(tensor)
    if storage < 0:
        raise wrong_dtype(name, _SUPPORTED, tensor.dtype)
    if wanted >= 0 and storage != wanted:
        raise wrong_dtype(name, f"{wanted_dtype} like `cx`", tensor.dtype)
    return storage


cdef int checked_storage(object name, object tensor) except -1:
    """The enum Storage of a tensor of a supported dtype."""
    return check_dtype(name, tensor, -1, None)


cdef inline object native_dtype(object tensor):
    """The tensor's dtype in native byte order, which results have."""
    if not PyArray_CheckExact(tensor):
        return tensor.dtype
    if cnp.PyArray_ISNOTSWAPPED(tensor):
        return <object>cnp.PyArray_DESCR(tensor)
    return (<object>cnp.PyArray_DESCR(tensor)).newbyteorder("=")


cdef inline int check_state(object cx, Py_ssize_t* batch, Py_ssize_t* hidden) except -1:
    """Batch and hidden size, which `cx` sets."""
    if (cnp.PyArray_NDIM(cx) if PyArray_CheckExact(cx) else len(cx.shape)) != 2:
        raise wrong_rank("cx", shape_of(cx))
    if PyArray_CheckExact(cx):
        batch[0], hidden[0] = cnp.PyArray_DIM(cx, 0), cnp.PyArray_DIM(cx, 1)
    else:
        batch[0], hidden[0] = cx.shape
    return 0


cdef object shape_of(object tensor):
    return tuple(tensor.shape)


cdef inline bint has_shape(object tensor, Py_ssize_t rows, Py_ssize_t columns):
    """Whether a tensor is [rows, columns], or [columns] where rows is -1."""
    if PyArray_CheckExact(tensor):
        if rows < 0:
            return cnp.PyArray_NDIM(tensor) == 1 and cnp.PyArray_DIM(tensor, 0) == columns
        return (cnp.PyArray_NDIM(tensor) == 2 and cnp.PyArray_DIM(tensor, 0) == rows
                and cnp.PyArray_DIM(tensor, 1) == columns)
    return shape_of(tensor) == wanted_shape(rows, columns)


cdef object wanted_shape(object rows, object columns):
    return (columns,) if rows < 0 else (rows, columns)


cdef int check_shape(name, object tensor, Py_ssize_t rows, Py_ssize_t columns, symbols, object cx) except -1:
    if tensor is not None and not has_shape(tensor, rows, columns):
        raise wrong_shape(name, symbols, wanted_shape(rows, columns), "cx", shape_of(cx), shape_of(tensor))
    return 0


# ---- outputs and overlap ------------------------------------------------------------------------------------------

cdef bint overlaps_itself(cnp.ndarray array) noexcept:
    """Whether two elements of a one- or two-dimensional array share a byte."""
    cdef Py_ssize_t size = cnp.PyArray_ITEMSIZE(array)
    cdef Py_ssize_t count, count_far, stride, stride_far, step, away, nearest
    if cnp.PyArray_SIZE(array) < 2:
        return False
    stride = abs(cnp.PyArray_STRIDE(array, cnp.PyArray_NDIM(array) - 1))
    count = cnp.PyArray_DIM(array, cnp.PyArray_NDIM(array) - 1)
    stride_far, count_far = 0, 1
    if cnp.PyArray_NDIM(array) == 2:
        stride_far, count_far = abs(cnp.PyArray_STRIDE(array, 0)), cnp.PyArray_DIM(array, 0)
    if count == 1 or (count_far > 1 and stride_far < stride):
        stride, count, stride_far, count_far = stride_far, count_far, stride, count
    if count > 1 and stride < size:
        return True
    if count_far == 1 or count == 1:
        return False
    if stride_far >= stride * (count - 1) + size:
        return False
    for step in range(1, count_far):
        away = step * stride_far
        if away >= stride * (count - 1) + size:
            return False
        nearest = away // stride
        if away - nearest * stride < size or (nearest + 1 < count and (nearest + 1) * stride - away < size):
            return True
    return False


cdef struct Extent:
    char* first
    char* end


cdef inline Extent extent_of(cnp.ndarray array) noexcept:
    """The bytes between an array's lowest and highest element."""
    cdef Extent extent
    cdef int axis
    cdef Py_ssize_t reach
    extent.first = <char*>cnp.PyArray_DATA(array)
    extent.end = extent.first + cnp.PyArray_ITEMSIZE(array)
    for axis in range(cnp.PyArray_NDIM(array)):
        if cnp.PyArray_DIM(array, axis) == 0:
            extent.end = extent.first
            return extent
        reach = (cnp.PyArray_DIM(array, axis) - 1) * cnp.PyArray_STRIDE(array, axis)
        if reach < 0:
            extent.first += reach
        else:
            extent.end += reach
    return extent


cdef inline bint extents_meet(Extent a, Extent b) noexcept:
    return a.first < b.end and b.first < a.end and a.first != a.end and b.first != b.end


cdef bint share_memory(a, b):
    """Exactly, or True where the answer would take too long to find."""
    try:
        return np.shares_memory(a, b, max_work=10_000_000)
    except Exception:  # numpy.exceptions.TooHardError, whose home differs between NumPy versions
        return True


cdef inline bint same_layout(cnp.ndarray a, cnp.ndarray b):
    """Whether two overlapping arrays of one shape and dtype have every element at the same place."""
    return (cnp.PyArray_DATA(a) == cnp.PyArray_DATA(b)
            and (cnp.PyArray_DIM(a, 0) == 1 or cnp.PyArray_STRIDE(a, 0) == cnp.PyArray_STRIDE(b, 0))
            and (cnp.PyArray_DIM(a, 1) == 1 or cnp.PyArray_STRIDE(a, 1) == cnp.PyArray_STRIDE(b, 1)))


# ---- all arguments of one call --------------------------------------------------------------------------------------

# They hold arrays and never become part of a cycle, so the garbage collector need not see them.
@cython.freelist(8)
@cython.no_gc
cdef class Arguments:
    """The checked arguments of one backward call, the same for every backend."""

    @property
    def operator(self):
        """CANN's operator for the call."""
        return npu.BACKWARD

    @property
    def tensors(self):
        """All tensors of the call by name, None for what is missing."""
        return {"cx": self.cx, "cy": self.cy, "gates": self.gates, "grad_hy": self.grad_hy, "grad_cy": self.grad_cy,
                "grad_gates": self.grad_gates, "grad_cx": self.grad_cx, "grad_bias": self.grad_bias}


@cython.freelist(8)
@cython.no_gc
cdef class ForwardArguments:
    """The checked arguments of one forward call, likewise."""

    @property
    def operator(self):
        """CANN's operator for the call."""
        return npu.FORWARD

    @property
    def tensors(self):
        """All tensors of the call by name, None for what is missing."""
        return {"cx": self.cx, "input_gates": self.input_gates, "hidden_gates": self.hidden_gates,
                "input_bias": self.input_bias, "hidden_bias": self.hidden_bias,
                "hy": self.hy, "cy": self.cy, "gates": self.gates}


cdef object as_output(name, value):
    """The array behind an output; never a copy."""
    if PyArray_CheckExact(value) or value is None:
        return value
    tensor = as_tensor(f"out: {name}", value)
    if isinstance(tensor, np.ndarray) and not isinstance(value, np.ndarray):
        raise wrong_type(f"out: {name}", "a NumPy array, an NPUArray or an NPU tensor", value)
    return tensor


cdef tuple unpack_out(object out, names):
    if not isinstance(out, (tuple, list)):
        raise wrong_type("out", f"a triple ({names})", out)
    if len(out) != 3:
        raise bad_argument("out", f"be a triple ({names})", f"{len(out)} entries")
    return tuple(out)


cdef int check_output(name, object tensor, Py_ssize_t rows, Py_ssize_t columns, symbols, object cx) except -1:
    """What an output must be beyond its dtype."""
    if tensor is not None and not has_shape(tensor, rows, columns):
        check_shape(f"out: {name}", tensor, rows, columns, symbols, cx)
    if not PyArray_CheckExact(tensor):
        return 0
    if not cnp.PyArray_ISWRITEABLE(tensor):
        raise bad_output(name, "be writeable", "a read-only array")
    if not cnp.PyArray_ISNOTSWAPPED(tensor):
        raise bad_output(name, "have native byte order", str(tensor.dtype))
    if overlaps_itself(tensor):
        raise bad_output(name, "have no two elements that share memory",
                         f"strides {tensor.strides} for shape {tensor.shape}")
    return 0


cdef int refuse_common_memory(tuple names, tuple outputs) except -1:
    """Refuses outputs that overlap each other."""
    cdef int k, other
    for k in range(1, len(outputs)):
        for other in range(k):
            if outputs[k] is not None and outputs[other] is not None and share_memory(outputs[k], outputs[other]):
                raise bad_output(names[k], f"not share memory with `out: {names[other]}`",
                                 "overlapping outputs")
    return 0


cdef bint separate(list inputs, tuple outputs) except -1:
    """Copies the inputs that an output partly overlaps; whether an output is an input, in place."""
    cdef bint in_place = False
    cdef int k
    for k in range(len(inputs)):
        for output in outputs:
            if inputs[k] is None or output is None:
                continue
            if cnp.PyArray_NDIM(inputs[k]) == 2 and has_shape(
                    output, cnp.PyArray_DIM(inputs[k], 0), cnp.PyArray_DIM(inputs[k], 1)) and same_layout(
                    output, inputs[k]):
                in_place = True
            elif share_memory(output, inputs[k]):
                inputs[k] = inputs[k].copy()
    return in_place


cdef int resolve_overlap(Arguments checked) except -1:
    """Refuses outputs that overlap each other; finds in-place use; copies inputs that an output partly overlaps."""
    refuse_common_memory(("grad_gates", "grad_cx", "grad_bias"),
                         (checked.grad_gates, checked.grad_cx, checked.grad_bias))
    inputs = [checked.grad_hy, checked.grad_cy, checked.cx, checked.cy, checked.gates]
    checked.in_place = separate(inputs, (checked.grad_gates, checked.grad_cx, checked.grad_bias))
    checked.grad_hy, checked.grad_cy, checked.cx, checked.cy, checked.gates = inputs
    return 0


cdef int resolve_forward_overlap(ForwardArguments checked) except -1:
    """As `resolve_overlap`."""
    outputs = checked.hy, checked.cy, checked.gates
    refuse_common_memory(("hy", "cy", "gates"), outputs)
    inputs = [checked.input_gates, checked.hidden_gates, checked.cx, checked.input_bias, checked.hidden_bias]
    checked.in_place = separate(inputs, outputs)
    checked.input_gates, checked.hidden_gates, checked.cx, checked.input_bias, checked.hidden_bias = inputs
    return 0


cdef int check_overlap(Arguments checked) except -1:
    """The common case, no two extents that meet, without a look at Python objects."""
    cdef Extent none, gates, state, bias
    none.first = none.end = NULL
    gates = extent_of(checked.grad_gates) if checked.grad_gates is not None else none
    state = extent_of(checked.grad_cx) if checked.grad_cx is not None else none
    bias = extent_of(checked.grad_bias) if checked.grad_bias is not None else none
    if (extents_meet(gates, state) or extents_meet(gates, bias) or extents_meet(state, bias)
            or meets_outputs(checked.grad_hy, gates, state, bias)
            or meets_outputs(checked.grad_cy, gates, state, bias)
            or meets_outputs(checked.cx, gates, state, bias) or meets_outputs(checked.cy, gates, state, bias)
            or meets_outputs(checked.gates, gates, state, bias)):
        resolve_overlap(checked)
    return 0


cdef int check_forward_overlap(ForwardArguments checked) except -1:
    """As `check_overlap`."""
    cdef Extent none, hidden, cell, gates
    none.first = none.end = NULL
    hidden = extent_of(checked.hy) if checked.hy is not None else none
    cell = extent_of(checked.cy) if checked.cy is not None else none
    gates = extent_of(checked.gates) if checked.gates is not None else none
    if (extents_meet(hidden, cell) or extents_meet(hidden, gates) or extents_meet(cell, gates)
            or meets_outputs(checked.input_gates, hidden, cell, gates)
            or meets_outputs(checked.hidden_gates, hidden, cell, gates)
            or meets_outputs(checked.cx, hidden, cell, gates)
            or meets_outputs(checked.input_bias, hidden, cell, gates)
            or meets_outputs(checked.hidden_bias, hidden, cell, gates)):
        resolve_forward_overlap(checked)
    return 0


cdef int check_npu_outputs(tuple names, tuple outputs) except -1:
    """The rules on overlap for outputs on an NPU, asked of arrays over the device addresses that nobody reads."""
    earlier = []
    for name, tensor in zip(names, outputs):
        if tensor is None or isinstance(tensor, np.ndarray):
            continue
        addresses = tensor.addresses
        if overlaps_itself(addresses):
            raise bad_output(name, "have no two elements that share memory",
                             f"strides {tensor.strides} for shape {tensor.shape}")
        for other, other_addresses in earlier:
            if share_memory(addresses, other_addresses):
                raise bad_output(name, f"not share memory with `out: {other}`", "overlapping outputs")
        earlier.append((name, addresses))
    return 0


cdef inline bint meets_outputs(object tensor, Extent first, Extent second, Extent third) noexcept:
    cdef Extent extent
    if tensor is None:
        return False
    extent = extent_of(tensor)
    return extents_meet(extent, first) or extents_meet(extent, second) or extents_meet(extent, third)


cpdef Arguments check_arguments(object grad_hy, object grad_cy, object cx, object cy, object gates, object has_bias,
                               object out):
    """Checks all tensors of a call.

    Raises `NullPointerError`, `UnsupportedDtypeError` or `InvalidParameterError`. Outputs are looked at, not touched.
    """
    cdef Arguments checked = Arguments.__new__(Arguments)
    cdef Py_ssize_t batch, hidden
    cdef int storage
    if has_bias is not True and has_bias is not False:
        if not isinstance(has_bias, np.bool_):
            raise wrong_type("has_bias", "a bool", has_bias)
        has_bias = bool(has_bias)
    checked.has_bias = has_bias
    checked.in_place = False

    checked.cx = as_required("cx", cx)
    checked.cy = as_required("cy", cy)
    checked.gates = as_required("gates", gates)
    checked.grad_hy = as_tensor("grad_hy", grad_hy)
    checked.grad_cy = as_tensor("grad_cy", grad_cy)
    if out is not None:
        grad_gates, grad_cx, grad_bias = unpack_out(out, "grad_gates, grad_cx, grad_bias")
        checked.grad_gates = as_output("grad_gates", grad_gates)
        checked.grad_cx = as_output("grad_cx", grad_cx)
        if grad_bias is not None and not checked.has_bias:
            raise bad_output("grad_bias", "be None when `has_bias` is False", type(grad_bias).__name__)
        checked.grad_bias = as_output("grad_bias", grad_bias)

    storage = check_dtype("cx", checked.cx, -1, None)
    checked.storage = storage
    checked.dtype = native_dtype(checked.cx)
    check_dtype("cy", checked.cy, storage, checked.dtype)
    check_dtype("gates", checked.gates, storage, checked.dtype)
    check_dtype("grad_hy", checked.grad_hy, storage, checked.dtype)
    check_dtype("grad_cy", checked.grad_cy, storage, checked.dtype)
    check_dtype("out: grad_gates", checked.grad_gates, storage, checked.dtype)
    check_dtype("out: grad_cx", checked.grad_cx, storage, checked.dtype)
    check_dtype("out: grad_bias", checked.grad_bias, storage, checked.dtype)

    check_state(checked.cx, &batch, &hidden)
    checked.batch = batch
    checked.hidden = hidden
    check_shape("cy", checked.cy, batch, hidden, "(N, H)", checked.cx)
    check_shape("gates", checked.gates, batch, 4 * hidden, "(N, 4*H)", checked.cx)
    check_shape("grad_hy", checked.grad_hy, batch, hidden, "(N, H)", checked.cx)
    check_shape("grad_cy", checked.grad_cy, batch, hidden, "(N, H)", checked.cx)
    check_output("grad_gates", checked.grad_gates, batch, 4 * hidden, "(N, 4*H)", checked.cx)
    check_output("grad_cx", checked.grad_cx, batch, hidden, "(N, H)", checked.cx)
    check_output("grad_bias", checked.grad_bias, -1, 4 * hidden, "(4*H,)", checked.cx)

    checked.on_host = (on_host(checked.cx) and on_host(checked.cy) and on_host(checked.gates)
                       and on_host(checked.grad_hy) and on_host(checked.grad_cy) and on_host(checked.grad_gates)
                       and on_host(checked.grad_cx) and on_host(checked.grad_bias))
    if out is not None:
        if checked.on_host:
            check_overlap(checked)
        else:
            check_npu_outputs(("grad_gates", "grad_cx", "grad_bias"),
                              (checked.grad_gates, checked.grad_cx, checked.grad_bias))
    return checked


cpdef ForwardArguments check_forward_arguments(object input_gates, object hidden_gates, object cx, object input_bias,
                                               object hidden_bias, object out):
    """Checks all tensors of a forward call, in the same way."""
    cdef ForwardArguments checked = ForwardArguments.__new__(ForwardArguments)
    cdef Py_ssize_t batch, hidden
    cdef int storage
    checked.in_place = False

    checked.input_gates = as_required("input_gates", input_gates)
    checked.hidden_gates = as_required("hidden_gates", hidden_gates)
    checked.cx = as_required("cx", cx)
    checked.input_bias = as_tensor("input_bias", input_bias)
    checked.hidden_bias = as_tensor("hidden_bias", hidden_bias)
    if out is not None:
        hy, cy, gates = unpack_out(out, "hy, cy, gates")
        checked.hy = as_output("hy", hy)
        checked.cy = as_output("cy", cy)
        checked.gates = as_output("gates", gates)

    storage = check_dtype("cx", checked.cx, -1, None)
    checked.storage = storage
    checked.dtype = native_dtype(checked.cx)
    check_dtype("input_gates", checked.input_gates, storage, checked.dtype)
    check_dtype("hidden_gates", checked.hidden_gates, storage, checked.dtype)
    check_dtype("input_bias", checked.input_bias, storage, checked.dtype)
    check_dtype("hidden_bias", checked.hidden_bias, storage, checked.dtype)
    check_dtype("out: hy", checked.hy, storage, checked.dtype)
    check_dtype("out: cy", checked.cy, storage, checked.dtype)
    check_dtype("out: gates", checked.gates, storage, checked.dtype)

    check_state(checked.cx, &batch, &hidden)
    checked.batch = batch
    checked.hidden = hidden
    check_shape("input_gates", checked.input_gates, batch, 4 * hidden, "(N, 4*H)", checked.cx)
    check_shape("hidden_gates", checked.hidden_gates, batch, 4 * hidden, "(N, 4*H)", checked.cx)
    check_shape("input_bias", checked.input_bias, -1, 4 * hidden, "(4*H,)", checked.cx)
    check_shape("hidden_bias", checked.hidden_bias, -1, 4 * hidden, "(4*H,)", checked.cx)
    check_output("hy", checked.hy, batch, hidden, "(N, H)", checked.cx)
    check_output("cy", checked.cy, batch, hidden, "(N, H)", checked.cx)
    check_output("gates", checked.gates, batch, 4 * hidden, "(N, 4*H)", checked.cx)

    checked.on_host = (on_host(checked.input_gates) and on_host(checked.hidden_gates) and on_host(checked.cx)
                       and on_host(checked.input_bias) and on_host(checked.hidden_bias) and on_host(checked.hy)
                       and on_host(checked.cy) and on_host(checked.gates))
    if out is not None:
        if checked.on_host:
            check_forward_overlap(checked)
        else:
            check_npu_outputs(("hy", "cy", "gates"), (checked.hy, checked.cy, checked.gates))
    return checked


cdef inline bint on_host(object tensor) noexcept:
    return tensor is None or PyArray_CheckExact(tensor)


cdef bint nonfinite_is_nan(object nonfinite) except -1:
    """Whether the operator's rule for Inf and NaN holds, from the argument `nonfinite`."""
    if not isinstance(nonfinite, str):
        raise wrong_type("nonfinite", "'nan' or 'ieee'", nonfinite)
    if nonfinite == "nan":
        return True
    if nonfinite == "ieee":
        return False
    raise wrong_value("nonfinite", "'nan' or 'ieee'", nonfinite)


cdef Py_ssize_t thread_count(object num_threads) except -1:
    """A number of threads given by the user; 0 for None."""
    cdef int overflow
    cdef long number
    if num_threads is None:
        return 0
    index = num_threads
    if not PyLong_CheckExact(num_threads):
        if isinstance(num_threads, (bool, np.bool_)):
            raise wrong_type("num_threads", "an integer of at least 1, or None", num_threads)
        try:
            index = operator.index(num_threads)
        except TypeError:
            raise wrong_type("num_threads", "an integer of at least 1, or None", num_threads) from None
    number = PyLong_AsLongAndOverflow(index, &overflow)
    if overflow < 0 or (overflow == 0 and number < 1):
        raise wrong_value("num_threads", "an integer of at least 1, or None", num_threads)
    return MOST_THREADS if overflow > 0 else min(number, <long>MOST_THREADS)
