# The C-level face of pyx/arguments.pyx for api.pyx.

cdef class Arguments:
    cdef readonly object grad_hy, grad_cy, cx, cy, gates        # as given, or what NumPy sees of them; None: missing
    cdef readonly object grad_gates, grad_cx, grad_bias         # outputs as given; None: to be allocated, or no bias
    cdef readonly object dtype
    cdef readonly Py_ssize_t batch, hidden
    cdef readonly bint has_bias
    cdef readonly bint on_host                                  # every tensor is a NumPy array
    cdef readonly bint in_place                                 # an output is one of the inputs
    cdef readonly int storage                                   # an enum Storage of kernel_abi.pxi

cdef class ForwardArguments:
    cdef readonly object input_gates, hidden_gates, cx, input_bias, hidden_bias     # as above; a bias may be missing
    cdef readonly object hy, cy, gates                                              # outputs
    cdef readonly object dtype
    cdef readonly Py_ssize_t batch, hidden
    cdef readonly bint on_host
    cdef readonly bint in_place
    cdef readonly int storage

cpdef Arguments check_arguments(object grad_hy, object grad_cy, object cx, object cy, object gates, object has_bias,
                               object out)
cpdef ForwardArguments check_forward_arguments(object input_gates, object hidden_gates, object cx, object input_bias,
                                               object hidden_bias, object out)
cdef int checked_storage(object name, object tensor) except -1
cdef bint nonfinite_is_nan(object nonfinite) except -1
cdef Py_ssize_t thread_count(object num_threads) except -1
