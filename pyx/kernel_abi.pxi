# What the kernel stubs and their caller share: the description of one call, and the table of functions that
# each stub publishes in a capsule. Change ABI_VERSION with any change here.

cdef enum:
    ABI_VERSION = 5
    SOURCES = 8        # planes read:    grad_hy, grad_cy, cx, cy and the gates i, f, g, o
    TARGETS = 5        # planes written: the gradients of i, f, g, o and of cx
    # The forward pass: input_gates i, f, g, o, hidden_gates i, f, g, o and cx; the gates i, f, g, o, cy and hy.
    FORWARD_SOURCES = 9
    FORWARD_TARGETS = 6
    GATES = 4
    LEAF_ROWS = 32     # rows of one leaf of the bias tree; part of the result's definition (BIAS_LEAF_ROWS)
    RUN_ROWS = 4       # rows summed in the arithmetic type before they enter the wide sums; likewise
    # How the work is cut has no influence on results.
    TILE = 128         # columns of one tile: all of it stays in the first cache until it is done
    LEAD_PAYS = 256    # columns from which on it pays to begin vectors on a 64-byte line; past the stage, twice as many
    BLOCK_ROWS = 64    # rows read at a time from inputs whose columns are contiguous: one leaf or two
    BLOCK_COLUMNS = 4  # columns read at a time there
    AHEAD_COLUMNS = 16 # how far ahead those are prefetched
    LEAST_STRIP = 64   # columns of one strip, the unit that threads share when rows are few
    MOST_STRIP = 4096

cdef enum Storage:
    STORAGE_FLOAT32 = 0
    STORAGE_FLOAT64 = 1
    STORAGE_FLOAT16 = 2
    STORAGE_BFLOAT16 = 3

# One [batch, hidden] operand as it lies in memory. Strides are in bytes and may have any sign.
ctypedef struct Plane:
    char* data                    # element (0, 0); NULL stands for a gradient that is missing, a plane of zeros
    Py_ssize_t row_stride
    Py_ssize_t column_stride
    bint swapped                  # the elements have the other byte order
    bint blocked                  # rows lie closer than columns (a transposed array): read a column at a time
    bint direct                   # rows can be read or written where they lie: arithmetic type, unit column stride

# A run of complete nodes of the bias tree: level k holds the leaves [index << k, (index + 1) << k).
ctypedef struct Node:
    Py_ssize_t first_leaf
    int level

ctypedef struct Call:
    Plane source[FORWARD_SOURCES] # the first SOURCES of the backward pass; all of the forward pass
    Plane target[FORWARD_TARGETS] # likewise TARGETS
    Plane bias_source[2]          # forward: input_bias and hidden_bias, rows of 4 * hidden; NULL stands for zeros
    char* bias                    # NULL: no bias is rounded (has_bias is off, or a part is computed)
    Py_ssize_t bias_stride
    bint forward                  # the forward pass; otherwise the backward pass
    Storage storage
    Py_ssize_t batch
    Py_ssize_t hidden
    Py_ssize_t first_leaf         # the leaf of the whole batch that row 0 begins
    bint has_bias                 # forward: one of the biases is given
    bint nonfinite_nan            # the operator's rule for Inf and NaN; otherwise plain IEEE arithmetic
    bint in_place                 # an output is also an input: a run leaves its tile only when all of it is done
    bint staged                   # outputs leave through the tile's stage (any output that is not direct, too)
    bint blocked                  # any input is
    bint packed                   # any input is neither direct nor blocked
    bint prefetch                 # inputs of later tiles are prefetched
    Py_ssize_t item_bytes
    bint streaming                # outputs bypass the cache
    int threads
    # How the work is cut; set by plan().
    Py_ssize_t tile               # columns of one tile
    Py_ssize_t strip              # columns of the widest strip, and so of each in the wide sums
    Py_ssize_t strips
    bint joined                   # every output row ends where the next begins, so that they can share lines
    Py_ssize_t pieces
    int piece_level               # no piece holds more than 2^piece_level leaves (forward: runs)
    Py_ssize_t nodes_bytes        # the parts of the scratch memory: nodes (forward: none), blocks of threads
    Py_ssize_t thread_bytes
    Py_ssize_t scratch_bytes
    # Scratch memory, 64-byte aligned, and what run() leaves at its start.
    char* scratch
    Py_ssize_t node_count

ctypedef struct KernelTable:
    int version
    void (*plan)(Call* call) noexcept nogil
    void (*run)(Call* call) noexcept nogil
    void (*plan_forward)(Call* call) noexcept nogil
    void (*run_forward)(Call* call) noexcept nogil
    void (*merge_nodes)(bint pairs, Py_ssize_t count, double* left, const double* right) noexcept nogil
    void (*round_bias)(Storage storage, Py_ssize_t count, const double* root, char* bias,
                       Py_ssize_t stride) noexcept nogil
