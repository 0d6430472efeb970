# cython: language_level=3
"""The public functions on arrays, and the CPU backend: arrays to planes, threads, scratch memory, the call."""

import os

import numpy as np

cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, getenv, malloc
from libc.string cimport memcpy

from lstmcell_bwd._arguments cimport (
    Arguments, ForwardArguments, check_arguments, check_forward_arguments, checked_storage, nonfinite_is_nan,
    thread_count,
)

from lstmcell_bwd import _features, dispatch
from lstmcell_bwd._arguments import bad_argument, bad_output, wrong_type, wrong_value
from lstmcell_bwd._types import BiasPart, LSTMCellGradients, LSTMCellPart, LSTMCellState
from lstmcell_bwd.errors import InvalidParameterError

include "kernel_abi.pxi"

cnp.import_array()

cdef extern from *:
    """
    #include <pthread.h>
    static int lstmcell_forked = 0;
    static void lstmcell_in_child(void) { lstmcell_forked = 1; }
    static void lstmcell_watch_fork(void) { pthread_atfork(NULL, NULL, lstmcell_in_child); }
    """
    int lstmcell_forked
    void lstmcell_watch_fork()

cdef extern from "numpy/arrayobject.h":
    int PyArray_CheckExact(object array)
    object PyArray_NewFromDescr(PyTypeObject* subtype, cnp.PyArray_Descr* dtype, int nd, const cnp.npy_intp* dims,
                                const cnp.npy_intp* strides, void* data, int flags, PyObject* parent)
    PyTypeObject PyArray_Type
    int NPY_ARRAY_CARRAY

cdef extern from "simd.h" nogil:
    uint64_t fp_state_enter()
    void fp_state_leave(uint64_t before)

cdef extern from "Python.h":
    ctypedef struct NamedTupleType "PyTypeObject":
        object (*tp_alloc)(type kind, Py_ssize_t items)

lstmcell_watch_fork()

cdef object logs = dispatch.logger.isEnabledFor

BIAS_LEAF_ROWS = LEAF_ROWS

cdef enum:
    LOG_DEBUG = 10      # logging.DEBUG


# ---- instruction sets -------------------------------------------------------------------------------------------

cdef KernelTable* kernel = NULL
cdef str kernel_isa = None


def built_isas():
    """Instruction-set levels that this installation was built with, lowest first.

    Returns
    -------
    tuple of str
    """
    folder = os.path.dirname(__file__)
    names = [name for name in os.listdir(folder) if name.startswith("_kernel_")]
    return tuple(isa for isa in _features.ISAS if any(name.startswith(f"_kernel_{isa}.") for name in names))


def use_isa(name):
    """Chooses the instruction set of the CPU kernel for this process. Results have the same bits with each.

    Parameters
    ----------
    name : {"auto", "baseline", "avx2", "avx512"}
        "auto" is the environment variable LSTMCELL_BWD_ISA where it is set, else the highest level that was built
        and that this CPU runs.

    Raises
    ------
    ValueError
        For an unknown name, for a level that was not built, and for one that this CPU lacks.
    """
    global kernel, kernel_isa
    import importlib

    if not isinstance(name, str):
        raise wrong_type("isa", "a string", name)
    source = "isa"
    built, runnable = built_isas(), _features.runnable_isas()
    if name == "auto":
        name = os.environ.get("LSTMCELL_BWD_ISA") or "auto"
        source = "LSTMCELL_BWD_ISA"
    if name == "auto":
        name = [isa for isa in built if isa in runnable][-1]
    if name not in _features.ISAS:
        raise wrong_value(source, f"one of {('auto', *_features.ISAS)}", name)
    if name not in built:
        raise wrong_value(source, f"an instruction set that this installation was built with, {built}", name)
    if name not in runnable:
        raise wrong_value(source, f"an instruction set that this CPU has, {runnable}", name)
    capsule = importlib.import_module(f"lstmcell_bwd._kernel_{name}").kernel_table
    table = <KernelTable*>PyCapsule_GetPointer(capsule, "lstmcell_bwd.kernel_table")
    if table.version != ABI_VERSION:
        raise ImportError(f"lstmcell_bwd._kernel_{name} is of another build (version {table.version}, "
                          f"wanted {ABI_VERSION}): reinstall lstmcell_bwd")
    kernel = table
    kernel_isa = name


def get_isa():
    """The instruction set in use.

    Returns
    -------
    str
    """
    if kernel == NULL:
        use_isa("auto")
    return kernel_isa


# ---- threads ------------------------------------------------------------------------------------------------------

cdef enum:
    # Elements (N * H) that one thread should have before a second one pays; measured, see benches/README.md.
    ELEMENTS_PER_THREAD = 16384
    FORWARD_ELEMENTS_PER_THREAD = 8192      # of which each takes twice as long

cdef Py_ssize_t threads_set = 0


def set_num_threads(num_threads):
    """Sets the default number of threads for this process.

    Parameters
    ----------
    num_threads : int or None
        At least 1; None restores the rule described under `get_num_threads`.
    """
    global threads_set
    threads_set = thread_count(num_threads)


cpdef Py_ssize_t get_num_threads() except -1:
    """The number of threads that a large call uses by default.

    `set_num_threads`, else the environment variable LSTMCELL_BWD_NUM_THREADS, else the OpenMP runtime's limit
    (OMP_NUM_THREADS, threadpoolctl) or the CPUs that the process may use by affinity and control group, whichever is
    less. A process that was forked uses one thread: the OpenMP runtime of its parent cannot serve it.

    Returns
    -------
    int
    """
    cdef const char* text
    if lstmcell_forked:
        return 1
    if threads_set > 0:
        return threads_set
    text = getenv("LSTMCELL_BWD_NUM_THREADS")
    if text != NULL and text[0] != 0:
        try:
            number = int(text)
        except ValueError:
            raise wrong_value("LSTMCELL_BWD_NUM_THREADS", "an integer of at least 1", text.decode()) from None
        if number < 1:
            raise wrong_value("LSTMCELL_BWD_NUM_THREADS", "an integer of at least 1", number)
        return number
    return min(_features.openmp_threads(), _features.usable_cpus())


def forked():
    """Whether this process was forked after this package had been imported, and so computes on one thread.

    Returns
    -------
    bool
    """
    return bool(lstmcell_forked)


cpdef int choose_threads(Py_ssize_t wanted, Py_ssize_t batch, Py_ssize_t hidden, Py_ssize_t limit=0,
                         bint forward=False) except -1:
    """Threads for a call: as many as wanted, or if that is 0 as many as pay, up to a limit or the default."""
    cdef Py_ssize_t number
    if wanted > 0:
        return 1 if lstmcell_forked else <int>wanted
    number = batch * hidden // (FORWARD_ELEMENTS_PER_THREAD if forward else ELEMENTS_PER_THREAD)
    if number <= 1:
        return 1
    return <int>min(number, limit if limit > 0 else get_num_threads())


# ---- the CPU backend ----------------------------------------------------------------------------------------------

cdef enum:
    ALIGNMENT = 64
    # Bytes that a call moves from which on outputs bypass the cache; measured, see benches/README.md.
    STREAMING_BYTES = 0x2000000     # 32 MiB; a product would stop Cython where its overflow checks are on
    # Bytes from which on inputs are prefetched: more than a core's second cache holds. What a training step reads was
    # written many steps before.
    PREFETCH_BYTES = 0x200000       # 2 MiB
    # Elements (N * H) below which other Python threads wait, because letting them run is a part of so short a call that
    # counts; NumPy's functions have this number.
    KEEP_GIL = 500


cdef object allocate(int axes, Py_ssize_t rows, Py_ssize_t columns, object dtype):
    """A new array, whose data begins on a 64-byte boundary unless it is small."""
    cdef cnp.npy_intp dims[2]
    cdef cnp.npy_intp size
    cdef cnp.ndarray block, array
    cdef char* data
    dims[0], dims[1] = rows, columns
    if axes == 1:
        dims[0] = columns
    size = rows * columns * cnp.PyDataType_ELSIZE(dtype)
    Py_INCREF(dtype)
    if size < 4096:
        return PyArray_NewFromDescr(&PyArray_Type, <cnp.PyArray_Descr*>dtype, axes, dims, NULL, NULL, 0, NULL)
    size += ALIGNMENT
    block = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT8, 0)
    data = <char*>((<uintptr_t>cnp.PyArray_DATA(block) + ALIGNMENT - 1) & ~<uintptr_t>(ALIGNMENT - 1))
    array = PyArray_NewFromDescr(&PyArray_Type, <cnp.PyArray_Descr*>dtype, axes, dims, NULL, data, NPY_ARRAY_CARRAY,
                                 NULL)
    cnp.set_array_base(array, block)
    return array


cdef void set_plane(Plane* plane, object tensor, int block, Storage storage, Py_ssize_t hidden) noexcept:
    """Describes an [N, H] operand, or one of the four blocks of an [N, 4H] one."""
    cdef cnp.ndarray array
    cdef Py_ssize_t size
    if tensor is None:
        plane.data = NULL
        plane.blocked = False
        return
    array = <cnp.ndarray>tensor
    size = cnp.PyArray_ITEMSIZE(array)
    plane.row_stride = cnp.PyArray_STRIDE(array, 0)
    plane.column_stride = cnp.PyArray_STRIDE(array, 1)
    plane.data = <char*>cnp.PyArray_DATA(array) + block * hidden * plane.column_stride
    plane.swapped = not cnp.PyArray_ISNOTSWAPPED(array)
    if hidden == 1:
        plane.column_stride = size
    plane.direct = storage <= STORAGE_FLOAT64 and not plane.swapped and plane.column_stride == size
    plane.blocked = not plane.direct and abs(plane.row_stride) < abs(plane.column_stride)


cdef void set_bias(Plane* plane, object tensor) noexcept:
    """Describes a [4H] operand as one row."""
    cdef cnp.ndarray array
    plane.data = NULL
    if tensor is not None:
        array = <cnp.ndarray>tensor
        plane.data = <char*>cnp.PyArray_DATA(array)
        plane.row_stride = 0
        plane.column_stride = cnp.PyArray_STRIDE(array, 0)
        plane.swapped = not cnp.PyArray_ISNOTSWAPPED(array)


cdef void set_passage(Call* call, int sources, int targets, cnp.ndarray cx) noexcept:
    """How inputs and outputs pass through the cache."""
    cdef Py_ssize_t moved
    cdef int k
    call.item_bytes = cnp.PyArray_ITEMSIZE(cx)
    moved = (sources + targets) * call.batch * call.hidden * call.item_bytes
    call.prefetch = moved >= PREFETCH_BYTES
    call.blocked = call.packed = False
    for k in range(sources):
        call.blocked |= call.source[k].blocked
        call.packed |= call.source[k].data != NULL and not call.source[k].direct and not call.source[k].blocked
    call.streaming = moved >= STREAMING_BYTES and not call.in_place
    call.staged = call.in_place
    for k in range(targets):
        call.streaming = call.streaming and call.target[k].column_stride == call.item_bytes
        call.staged |= not call.target[k].direct
    call.staged |= call.streaming


cdef int describe(Call* call, Arguments arguments, object grad_gates, object grad_cx, object grad_bias,
                  bint nonfinite_nan, Py_ssize_t threads, Py_ssize_t first_leaf) except -1:
    """Puts checked arguments and allocated outputs down for the kernel, and has it plan the call.

    `grad_bias` is None without bias, and for a part, whose bias stays in the form of tree nodes.
    """
    cdef Storage storage = <Storage>arguments.storage
    cdef int k
    if kernel == NULL:
        use_isa("auto")
    call.forward = False
    call.storage = storage
    call.batch = arguments.batch
    call.hidden = arguments.hidden
    call.first_leaf = first_leaf
    call.has_bias = arguments.has_bias
    call.nonfinite_nan = nonfinite_nan
    call.in_place = arguments.in_place
    set_plane(&call.source[0], arguments.grad_hy, 0, storage, call.hidden)
    set_plane(&call.source[1], arguments.grad_cy, 0, storage, call.hidden)
    set_plane(&call.source[2], arguments.cx, 0, storage, call.hidden)
    set_plane(&call.source[3], arguments.cy, 0, storage, call.hidden)
    for k in range(GATES):
        set_plane(&call.source[4 + k], arguments.gates, k, storage, call.hidden)
        set_plane(&call.target[k], grad_gates, k, storage, call.hidden)
    set_plane(&call.target[4], grad_cx, 0, storage, call.hidden)
    call.bias = NULL
    if grad_bias is not None:
        call.bias = <char*>cnp.PyArray_DATA(grad_bias)
        call.bias_stride = cnp.PyArray_STRIDE(grad_bias, 0)
    set_passage(call, SOURCES, TARGETS, <cnp.ndarray>arguments.cx)
    call.threads = choose_threads(threads, call.batch, call.hidden)
    kernel.plan(call)
    return 0


cdef int describe_forward(Call* call, ForwardArguments arguments, object hy, object cy, object gates,
                          Py_ssize_t threads) except -1:
    """The same for a forward call."""
    cdef Storage storage = <Storage>arguments.storage
    cdef int k
    if kernel == NULL:
        use_isa("auto")
    call.forward = True
    call.storage = storage
    call.batch = arguments.batch
    call.hidden = arguments.hidden
    call.first_leaf = 0
    call.has_bias = arguments.input_bias is not None or arguments.hidden_bias is not None
    call.in_place = arguments.in_place
    for k in range(GATES):
        set_plane(&call.source[k], arguments.input_gates, k, storage, call.hidden)
        set_plane(&call.source[GATES + k], arguments.hidden_gates, k, storage, call.hidden)
        set_plane(&call.target[k], gates, k, storage, call.hidden)
    set_plane(&call.source[2 * GATES], arguments.cx, 0, storage, call.hidden)
    set_plane(&call.target[4], cy, 0, storage, call.hidden)
    set_plane(&call.target[5], hy, 0, storage, call.hidden)
    set_bias(&call.bias_source[0], arguments.input_bias)
    set_bias(&call.bias_source[1], arguments.hidden_bias)
    set_passage(call, FORWARD_SOURCES, FORWARD_TARGETS, <cnp.ndarray>arguments.cx)
    call.threads = choose_threads(threads, call.batch, call.hidden, forward=True)
    kernel.plan_forward(call)
    return 0


cdef void execute(Call* call, char* workspace) noexcept:
    """Runs a described call in scratch memory of any alignment, which must exceed what was planned by ALIGNMENT."""
    cdef void (*run)(Call*) noexcept nogil
    run = kernel.run_forward if call.forward else kernel.run
    call.scratch = <char*>((<uintptr_t>workspace + ALIGNMENT - 1) & ~<uintptr_t>(ALIGNMENT - 1))
    if call.batch * call.hidden < KEEP_GIL:
        run(call)
    else:
        with nogil:
            run(call)


cdef object run_on_host(Call* call):
    """Runs a described call in scratch memory of its own; returns the nodes of a part's bias."""
    cdef char* workspace = <char*>malloc(call.scratch_bytes + ALIGNMENT)
    if workspace == NULL:
        raise MemoryError(f"no memory for {call.scratch_bytes + ALIGNMENT} bytes of scratch")
    try:
        execute(call, workspace)
        if not call.forward and call.has_bias and call.bias == NULL:
            return nodes_of(call)
    finally:
        free(workspace)


cdef class CPUExecutor:
    """One prepared call on the CPU. Internal interface of a backend: `workspace_size`, then `run`, once."""

    cdef Call call
    cdef object arguments         # keep the arrays behind the planes alive
    cdef object outputs
    cdef bint done

    @property
    def workspace_size(self):
        """Bytes of scratch memory that `run` needs, of any alignment."""
        return self.call.scratch_bytes + ALIGNMENT

    @property
    def threads(self):
        """Threads that the call uses."""
        return self.call.threads

    def run(self, workspace, stream=None):
        """Computes the call in a writable buffer of at least `workspace_size` bytes."""
        cdef unsigned char[::1] buffer = workspace
        if self.done:
            raise InvalidParameterError("`executor` must be unused, got one that has run")
        if buffer.shape[0] < self.call.scratch_bytes + ALIGNMENT:
            raise wrong_value("workspace", f"a buffer of at least {self.workspace_size} bytes", buffer.shape[0])
        self.done = True
        execute(&self.call, <char*>&buffer[0])


def prepare(arguments, outputs):
    """Turns checked arguments and allocated outputs into an executor.

    Parameters
    ----------
    arguments : Arguments or ForwardArguments
    outputs : tuple of (grad_gates, grad_cx, grad_bias) or (hy, cy, gates)
        The arrays to write; grad_bias is None without bias.
    """
    cdef CPUExecutor executor = CPUExecutor.__new__(CPUExecutor)
    first, second, third = outputs
    executor.arguments = arguments
    executor.outputs = outputs
    executor.done = False
    if isinstance(arguments, ForwardArguments):
        describe_forward(&executor.call, arguments, first, second, third, 0)
    else:
        describe(&executor.call, arguments, first, second, third, True, 0, 0)
    return executor


cdef list nodes_of(const Call* call):
    """Copies the tree nodes that a part's run left in its scratch memory."""
    cdef const Node* pieces = <const Node*>call.scratch
    cdef Py_ssize_t lanes = 2 if call.storage == STORAGE_FLOAT64 else 1
    cdef Py_ssize_t size = lanes * GATES * call.hidden
    cdef const double* nodes = <const double*>(call.scratch + ((call.pieces * sizeof(Node) + 63) & ~<Py_ssize_t>63))
    cdef Py_ssize_t k, first_row, rows
    cdef cnp.ndarray sums
    parts = []
    for k in range(call.node_count):
        sums = np.empty((lanes, GATES * call.hidden))
        memcpy(cnp.PyArray_DATA(sums), nodes + k * size, size * sizeof(double))
        first_row = (pieces[k].first_leaf - call.first_leaf) * LEAF_ROWS
        rows = min(call.batch - first_row, <Py_ssize_t>LEAF_ROWS << pieces[k].level)
        parts.append(BiasPart(pieces[k].first_leaf, pieces[k].level, rows, sums))
    return parts


cdef object named(type kind, a, b, c):
    """A named tuple without the detour through its Python constructor."""
    cdef object triple = (<NamedTupleType*>kind).tp_alloc(kind, 3)
    Py_INCREF(a)
    PyTuple_SET_ITEM(triple, 0, a)
    Py_INCREF(b)
    PyTuple_SET_ITEM(triple, 1, b)
    Py_INCREF(c)
    PyTuple_SET_ITEM(triple, 2, c)
    return triple


cdef object compute_on_host(type kind, Arguments arguments, object out, bint nonfinite_nan, Py_ssize_t threads,
                            Py_ssize_t first_leaf, bint partial):
    """A checked call on the CPU; allocates the outputs that were not given."""
    cdef Call call
    cdef object last = arguments.grad_bias
    grad_gates = arguments.grad_gates
    grad_cx = arguments.grad_cx
    if grad_gates is None:
        grad_gates = allocate(2, arguments.batch, 4 * arguments.hidden, arguments.dtype)
    if grad_cx is None:
        grad_cx = allocate(2, arguments.batch, arguments.hidden, arguments.dtype)
    if last is None and arguments.has_bias and not partial:
        last = allocate(1, 1, 4 * arguments.hidden, arguments.dtype)
    if arguments.batch > 0 and arguments.hidden > 0:
        describe(&call, arguments, grad_gates, grad_cx, last, nonfinite_nan, threads, first_leaf)
        parts = run_on_host(&call)
    else:
        parts = None
        if last is not None:
            last.fill(0)
    if partial:
        last = parts or []
    if out is not None:
        # An ndarray subclass was computed through its plain view; the caller gets back what was given.
        grad_gates = grad_gates if out[0] is None else out[0]
        grad_cx = grad_cx if out[1] is None else out[1]
        last = last if out[2] is None else out[2]
    return named(kind, grad_gates, grad_cx, last)


cdef object compute_forward_on_host(ForwardArguments arguments, object out, Py_ssize_t threads):
    """A checked forward call on the CPU; allocates the outputs that were not given."""
    cdef Call call
    hy, cy, gates = arguments.hy, arguments.cy, arguments.gates
    if hy is None:
        hy = allocate(2, arguments.batch, arguments.hidden, arguments.dtype)
    if cy is None:
        cy = allocate(2, arguments.batch, arguments.hidden, arguments.dtype)
    if gates is None:
        gates = allocate(2, arguments.batch, 4 * arguments.hidden, arguments.dtype)
    if arguments.batch > 0 and arguments.hidden > 0:
        describe_forward(&call, arguments, hy, cy, gates, threads)
        run_on_host(&call)
    if out is not None:
        hy = hy if out[0] is None else out[0]
        cy = cy if out[1] is None else out[1]
        gates = gates if out[2] is None else out[2]
    return named(LSTMCellState, hy, cy, gates)


cdef object chosen_npu(object arguments, bint on_host, object device, object stream):
    """The NPU that the dispatcher chose, or None for the CPU; the common cases without a look at Python code."""
    cdef const char* forced
    if on_host and isinstance(device, str) and not logs(LOG_DEBUG):
        forced = getenv("LSTMCELL_BWD_DEVICE")
        if device == "auto" and (forced == NULL or forced[0] == 0) or device == "cpu":
            if stream is not None:
                raise wrong_value("stream", "None where the CPU computes", stream)
            return None
    chosen = dispatch.choose(arguments, device, stream).device
    return None if chosen == "cpu" else chosen


# ---- public functions -----------------------------------------------------------------------------------------------

def lstm_cell_backward(grad_hy, grad_cy, cx, cy, gates, has_bias=True, *, out=None, device="auto", num_threads=None,
                       nonfinite="nan", stream=None):
    """Gradients of an LSTM cell from its **activated** gates, in one fused and deterministic pass.

    Back-propagates through everything of the cell that follows the two matrix products. With t = tanh(cy)::

        total   = grad_hy * o * (1 - t**2) + grad_cy
        grad_cx = total * f
        d_i = total * g  * i * (1 - i)        d_g = total * i * (1 - g**2)
        d_f = total * cx * f * (1 - f)        d_o = grad_hy * t * o * (1 - o)
        grad_gates = [d_i, d_f, d_g, d_o]     grad_bias = sum of grad_gates over the batch

    Parameters
    ----------
    grad_hy, grad_cy : array_like of shape (N, H), or None
        Gradients of the cell's outputs hy and cy; None stands for zeros.
    cx, cy : array_like, shape (N, H)
        Cell state that entered the cell and cell state that left it.
    gates : array_like, shape (N, 4*H)
        Gates after their activation, four blocks of H columns in the order i, f, g, o (input, forget, cell, output;
        the order of PyTorch, cuDNN, oneDNN and CANN. TensorFlow's block operators have i, c, f, o, ONNX i, o, f, c).
        Any values are legal; nothing is clamped.
    has_bias : bool, default True
        Whether to compute the gradient of the bias.
    out : tuple of (grad_gates, grad_cx, grad_bias), optional
        Arrays to write the results to, any of them None to have it allocated. They may have any layout in which no two
        elements share memory, and may be inputs (in place); where an output overlaps an input only partly, the result
        is as if the inputs had been copied first. They are overwritten, never added to.
    device : str, default "auto"
        "auto" (where the tensors are), "cpu", "npu", "npu:<index>", or "prefer-npu" (the NPU where it can serve this
        call, else the CPU). The environment variable LSTMCELL_BWD_DEVICE replaces "auto".
    num_threads : int, optional
        Threads on the CPU. By default as many as the work pays for, up to `get_num_threads()`.
    nonfinite : {"nan", "ieee"}
        "nan", the operator's rule: an output element is NaN if an input element that its formula reads is Inf or NaN.
        "ieee": plain IEEE arithmetic. For finite inputs both give the same bits. On an NPU the operator's own
        arithmetic decides.
    stream : int or torch_npu stream, optional
        NPU only: the stream to run on. It is awaited before the function returns.

    Returns
    -------
    LSTMCellGradients
        Named tuple (grad_gates, grad_cx, grad_bias) of the shapes (N, 4*H), (N, H) and (4*H,), of the inputs' dtype;
        grad_bias is None without bias.

    Raises
    ------
    NullPointerError
        If `cx`, `cy` or `gates` is None (also a TypeError).
    UnsupportedDtypeError
        If a dtype is not float32, float64, float16 or bfloat16, or not that of the other arrays; if an argument has a
        type that cannot serve (also a TypeError).
    InvalidParameterError
        If a rank, shape, output or option is wrong (also a ValueError).
    NPUUnavailableError, NPURuntimeError
        If an NPU was asked for and cannot be used, or failed (also RuntimeErrors).
    MemoryError
        If outputs or scratch memory cannot be allocated.

    Notes
    -----
    All arrays have one dtype. float16 and bfloat16 are computed in float32 and rounded once; their bias is summed from
    the unrounded gate gradients. The result has the same bits for every number of threads, instruction set, processor
    family and memory layout, in place or not. Each element of grad_gates and grad_cx is within 8 units of
    ``eps * scale`` in float32 and float64, also where `cy` is saturated; `lstmcell_bwd.reference` says what the
    scale is.

    Nothing is written before all checks have passed. Inputs are never modified unless given as `out`.

    References
    ----------
    The operator `aclnnThnnFusedLstmCellBackward` of Ascend CANN, and PyTorch's `_thnn_fused_lstm_cell_backward_impl`.

    Examples
    --------
    >>> import numpy as np
    >>> from lstmcell_bwd import lstm_cell_backward
    >>> one = np.ones((1, 8), np.float32)
    >>> lstm_cell_backward(one, one, one, one, np.ones((1, 32), np.float32)).grad_cx[0, 0].round(4)
    np.float32(1.42)
    """
    cdef Arguments arguments = check_arguments(grad_hy, grad_cy, cx, cy, gates, has_bias, out)
    cdef bint nonfinite_nan = nonfinite_is_nan(nonfinite)
    cdef Py_ssize_t threads = thread_count(num_threads)
    npu = chosen_npu(arguments, arguments.on_host, device, stream)
    if npu is None:
        return compute_on_host(LSTMCellGradients, arguments, out, nonfinite_nan, threads, 0, False)
    from lstmcell_bwd.npu import op

    return op.lstm_cell_backward(arguments, out, npu, stream)


def lstm_cell_forward(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None, *, out=None, device="auto",
                      num_threads=None):
    """Forward pass of an LSTM cell from its two matrix products, in one fused and deterministic pass.

    Computes everything of the cell that follows the two matrix products, and with it the cache that
    `lstm_cell_backward` reads::

        a_i, a_f, a_g, a_o = blocks of (input_gates + hidden_gates) + (input_bias + hidden_bias)
        i, f, o = sigmoid(a_i), sigmoid(a_f), sigmoid(a_o)      g = tanh(a_g)
        cy = f * cx + i * g         hy = o * tanh(cy)           gates = [i, f, g, o]

    Parameters
    ----------
    input_gates, hidden_gates : array_like, shape (N, 4*H)
        The products of the cell's input and of its hidden state with their weights, four blocks of H columns in the
        order i, f, g, o (input, forget, cell, output).
    cx : array_like, shape (N, H)
        Cell state that enters the cell.
    input_bias, hidden_bias : array_like of shape (4*H,), optional
        Added to the products; either may be given without the other.
    out : tuple of (hy, cy, gates), optional
        Arrays to write the results to, any of them None to have it allocated. They may have any layout in which no two
        elements share memory, and may be inputs (in place: `gates` one of the products, `hy` or `cy` the array `cx`);
        where an output overlaps an input only partly, the result is as if the inputs had been copied first.
    device : str, default "auto"
        As for `lstm_cell_backward`. An NPU needs the operator `aclnnThnnFusedLstmCell`, which CANN has from 9.0.0 on.
    num_threads : int, optional
        Threads on the CPU. By default as many as the work pays for, up to `get_num_threads()`.

    Returns
    -------
    LSTMCellState
        Named tuple (hy, cy, gates) of the shapes (N, H), (N, H) and (N, 4*H), of the inputs' dtype. `gates` are the
        activated gates, in the order i, f, g, o.

    Raises
    ------
    NullPointerError
        If `input_gates`, `hidden_gates` or `cx` is None (also a TypeError).
    UnsupportedDtypeError
        If a dtype is not float32, float64, float16 or bfloat16, or not that of the other arrays; if an argument has a
        type that cannot serve (also a TypeError).
    InvalidParameterError
        If a rank, shape, output or option is wrong (also a ValueError).
    NPUUnavailableError, NPURuntimeError
        If an NPU was asked for and cannot be used, or failed (also RuntimeErrors).
    MemoryError
        If outputs or scratch memory cannot be allocated.

    Notes
    -----
    All arrays have one dtype. float16 and bfloat16 are computed in float32 and rounded once: hy comes from the cell
    state before it is rounded, as in PyTorch and CANN, while the backward pass reads the rounded one. The result has
    the same bits for every number of threads, instruction set, processor family and memory layout, in place or not,
    and for a row whether it is alone or in any batch.

    With S the sum of the sizes of the terms of a gate's sum, gates are within ``4 * eps * |exact| * (1 + S)``: sigmoid
    keeps its digits down to underflow, and terms that cancel do not cost tanh its digits. cy is within the same factor
    of ``|f * cx| + |i * g|``, and hy of ``|o * tanh(cy)|``; `lstmcell_bwd.reference.forward_errors` measures it. Inf
    and NaN follow IEEE arithmetic and the limits of sigmoid and tanh.

    Nothing is written before all checks have passed. Inputs are never modified unless given as `out`.

    References
    ----------
    PyTorch's `_thnn_fused_lstm_cell`, and the operator `aclnnThnnFusedLstmCell` of Ascend CANN. (CANN's documentation
    gives the gate order as i, g, f, o; its code has i, f, g, o.)

    Examples
    --------
    >>> import numpy as np
    >>> from lstmcell_bwd import lstm_cell_forward
    >>> one, products = np.ones((1, 8), np.float32), np.zeros((1, 32), np.float32)
    >>> hy, cy, gates = lstm_cell_forward(products, products, one)
    >>> cy[0, 0], hy[0, 0].round(4)
    (np.float32(0.5), np.float32(0.2311))
    """
    cdef ForwardArguments arguments = check_forward_arguments(input_gates, hidden_gates, cx, input_bias, hidden_bias,
                                                              out)
    cdef Py_ssize_t threads = thread_count(num_threads)
    npu = chosen_npu(arguments, arguments.on_host, device, None)
    if npu is None:
        return compute_forward_on_host(arguments, out, threads)
    from lstmcell_bwd.npu import op

    return op.lstm_cell_forward(arguments, out, npu)


def lstm_cell_backward_part(grad_hy, grad_cy, cx, cy, gates, has_bias=True, *, first_row, out=None, num_threads=None,
                            nonfinite="nan"):
    """`lstm_cell_backward` for a run of rows of a larger batch, on the CPU.

    The bias gradient is returned as nodes of the whole batch's summation tree; `combine_bias` turns the nodes of all
    workers into the bias gradient with exactly the bits of one call on the whole batch.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy, gates, has_bias, num_threads, nonfinite
        As for `lstm_cell_backward`; N is the number of rows of this run, which ends at a multiple of
        `BIAS_LEAF_ROWS` rows of the whole batch or at its end.
    first_row : int
        Row of the whole batch that this run begins with, a multiple of `BIAS_LEAF_ROWS`.
    out : tuple of (grad_gates, grad_cx, None), optional
        As for `lstm_cell_backward`.

    Returns
    -------
    LSTMCellPart
        Named tuple (grad_gates, grad_cx, parts); `parts` is a list of at most 2 log2(N) `BiasPart`, empty without bias.

    Raises
    ------
    InvalidParameterError
        If `first_row` is negative or not a multiple of `BIAS_LEAF_ROWS`; otherwise as `lstm_cell_backward`.
    """
    cdef Arguments arguments = check_arguments(grad_hy, grad_cy, cx, cy, gates, has_bias, out)
    cdef bint nonfinite_nan = nonfinite_is_nan(nonfinite)
    cdef Py_ssize_t threads = thread_count(num_threads)
    if isinstance(first_row, (bool, np.bool_)) or not isinstance(first_row, (int, np.integer)):
        raise wrong_type("first_row", f"an integer multiple of BIAS_LEAF_ROWS = {LEAF_ROWS}", first_row)
    if first_row < 0 or first_row % LEAF_ROWS:
        raise wrong_value("first_row", f"a multiple of BIAS_LEAF_ROWS = {LEAF_ROWS}", first_row)
    if arguments.grad_bias is not None:
        raise bad_output("grad_bias", "be None for a part of a batch", "an array")
    if not arguments.on_host:
        raise bad_argument("device", "be the CPU for a part of a batch", "tensors on an NPU")
    return compute_on_host(LSTMCellPart, arguments, out, nonfinite_nan, threads, first_row // LEAF_ROWS, True)


def combine_bias(parts, dtype):
    """Adds up the bias parts of all workers, in the order that makes it equal to one call on the whole batch.

    Parameters
    ----------
    parts : iterable of BiasPart
        The parts of all runs that `lstm_cell_backward_part` computed, in any order.
    dtype : dtype
        The dtype of the data: float32, float64, float16 or bfloat16.

    Returns
    -------
    ndarray, shape (4*H,)
        The gradient of the bias.

    Raises
    ------
    InvalidParameterError
        If there are no parts, if they differ in width, or if together they do not cover the rows of a batch from its
        first on, each row once.
    UnsupportedDtypeError
        If the dtype is not supported or not the one that the parts are for.
    """
    # The sums are Python-driven, so the floating-point state is set here, as the kernel does for a whole call.
    cdef uint64_t before = fp_state_enter()
    try:
        return combined_bias(parts, dtype)
    finally:
        fp_state_leave(before)


cdef object combined_bias(object parts, object dtype):
    """`combine_bias` under the default floating-point state."""
    cdef Storage storage
    cdef bint pairs
    cdef Py_ssize_t width, expected
    cdef cnp.ndarray left, right, bias
    dtype = np.dtype(dtype).newbyteorder("=")
    bias = np.empty(0, dtype)
    storage = <Storage>checked_storage("dtype", bias)
    pairs = storage == STORAGE_FLOAT64
    nodes = sorted(parts, key=lambda part: part.first_leaf)
    if not nodes:
        raise wrong_value("parts", "the parts of at least one row", nodes)
    if kernel == NULL:
        use_isa("auto")
    width = nodes[0].sums.shape[-1]
    expected = 0
    stack = []
    for number, part in enumerate(nodes):
        if part.sums.shape != (1 + pairs, width):
            raise wrong_value("parts", f"sums of shape {(1 + pairs, width)} for dtype {dtype}", part.sums.shape)
        if part.first_leaf != expected:
            raise bad_argument("parts", f"be one part that begins at row {expected * LEAF_ROWS}",
                               f"one that begins at row {part.first_leaf * LEAF_ROWS}")
        if number < len(nodes) - 1 and part.rows != LEAF_ROWS << part.level:
            raise bad_argument("parts", f"be runs that end at a multiple of BIAS_LEAF_ROWS = {LEAF_ROWS}",
                               f"{part.rows} rows before the last run")
        expected += <Py_ssize_t>1 << part.level
        level, first_leaf = part.level, part.first_leaf
        sums = np.array(part.sums, np.float64, order="C")
        while stack and stack[-1][0] == level and (stack[-1][1] >> level) & 1 == 0:
            _, first_leaf, left = stack.pop()
            right = sums
            kernel.merge_nodes(pairs, width, <double*>cnp.PyArray_DATA(left), <const double*>cnp.PyArray_DATA(right))
            sums = left
            level += 1
        stack.append((level, first_leaf, sums))
    right = stack.pop()[2]
    while stack:
        left = stack.pop()[2]
        kernel.merge_nodes(pairs, width, <double*>cnp.PyArray_DATA(left), <const double*>cnp.PyArray_DATA(right))
        right = left
    bias = np.empty(width, dtype)
    kernel.round_bias(storage, width, <const double*>cnp.PyArray_DATA(right), <char*>cnp.PyArray_DATA(bias),
                      cnp.PyArray_STRIDE(bias, 0))
    return bias


def choose_device(grad_hy, grad_cy, cx, cy, gates, has_bias=True, *, out=None, device="auto", num_threads=None,
                  nonfinite="nan", stream=None):
    """Where `lstm_cell_backward` would run these arguments, and why, without running anything.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy, gates, has_bias, out, device, num_threads, nonfinite, stream
        The arguments of `lstm_cell_backward`; they are checked in the same way.

    Returns
    -------
    device : str
        "cpu", or "npu:<index>".
    reason : str
        A sentence.
    """
    cdef Arguments arguments = check_arguments(grad_hy, grad_cy, cx, cy, gates, has_bias, out)
    nonfinite_is_nan(nonfinite)
    thread_count(num_threads)
    return dispatch.choose(arguments, device, stream)


def choose_forward_device(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None, *, out=None,
                          device="auto", num_threads=None):
    """Where `lstm_cell_forward` would run these arguments, and why, without running anything.

    Parameters
    ----------
    input_gates, hidden_gates, cx, input_bias, hidden_bias, out, device, num_threads
        The arguments of `lstm_cell_forward`; they are checked in the same way.

    Returns
    -------
    device : str
        "cpu", or "npu:<index>".
    reason : str
        A sentence.
    """
    cdef ForwardArguments arguments = check_forward_arguments(input_gates, hidden_gates, cx, input_bias, hidden_bias,
                                                              out)
    thread_count(num_threads)
    return dispatch.choose(arguments, device, None)
