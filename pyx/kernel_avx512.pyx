# cython: language_level=3
# The kernel of kernel.pxi under the instruction-set flags that setup.py gives this module alone (see ISA_LEVELS).
include "kernel.pxi"
include "forward.pxi"
