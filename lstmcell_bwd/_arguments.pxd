# The C-level face of pyx/arguments.pyx for api.pyx.

cdef class Arguments:
    cdef readonly object grad_hy, grad_cy, cx, cy, gates        # as given, or what NumPy sees of them; None: missing
    cdef readonly object grad_gates, grad_cx, grad_bias         # outputs as given; None: to be allocated, or no bias
    cdef readonly object dtype
    cdef readonly Py_ssize_t batch, hidden
    cdef readonly bint has_bias
    cdef readonly bint on_host                                  # every tensor is a NumPy array
    cdef readonly bint in_place                                 # an output is one of the inputs
    cdef readonly int storage                                        # an enum Storage of kernel_abi.pxi

cpdef Arguments check_arguments(object grad_hy, object grad_cy, object cx, object cy, object gates, object has_bias,
                               object out)
cdef int checked_storage(object name, object tensor) except -1
cdef bint nonfinite_is_nan(object nonfinite) except -1
cdef Py_ssize_t thread_count(object num_threads) except -1
