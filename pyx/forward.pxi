# The fused forward pass of an LSTM cell: what follows its two matrix products, and the cache for the backward pass.
#
# Notation (batch N, hidden size H)
#     input_gates, hidden_gates   the two matrix products, blocks i, f, g, o             [N, 4H]
#     input_bias, hidden_bias     each may be missing                                    [4H]
#     a                           (input_gates + hidden_gates) + (input_bias + hidden_bias)
#     i, f, o and g               sigmoid(a) and tanh(a): `gates`                        [N, 4H]
#     cx, cy, hy                  the cell state that enters; f * cx + i * g; o * tanh(cy)   [N, H]
#
# Design notes a), b), c) and e) of kernel.pxi hold here too, with these differences.
# f) With a bias, a is a sum of three or four terms, which can cancel until nothing but rounding errors are left, and
#    tanh hands a relative error on. So rounding errors are carried along (Knuth's two-sum): the sum of the two biases
#    is kept as a pair of numbers, made once per call, and a is rounded once at its end.
# g) The fast rows do not treat sigmoid past 87 on either side (708 in float64), where the exponential nears the end of
#    the normal numbers, nor tanh of Inf and NaN. They report them, and the row is computed again.

# ---- scalar formulas --------------------------------------------------------------------------------------------

cdef inline real_t excess(real_t a, real_t b, real_t total) noexcept nogil:
    """What rounding added to total = a + b. Subtracting it keeps the sign of a zero."""
    cdef real_t b_seen = total - a
    return ((total - b_seen) - a) + (b_seen - b)


cdef inline real_t biased_sum(real_t x, real_t y, real_t bias, real_t bias_excess, bint careful) noexcept nogil:
    """(x + y) + (bias - bias_excess), rounded once but for what is left after two roundings.

    Unless careful, NaN where a partial sum is not finite.
    """
    cdef real_t first = x + y
    cdef real_t total = first + bias
    cdef real_t over = excess(x, y, first) + (excess(first, bias, total) + bias_excess)
    if careful:
        return total - over if over - over == 0 else total
    return total - over


cdef inline real_t last_normal(real_t one) noexcept nogil:
    """The largest |a| for which exp(-a) and exp(a) are normal numbers whose exponents `power_of_two` can make."""
    return <real_t>87 if real_t is float else <real_t>708


cdef inline void split_sigmoid(real_t a, real_t one, real_t* r, real_t* scale) noexcept nogil:
    """exp(-a) as scale * exp(r), for |a| up to 87 (708 in float64); above, it means nothing."""
    cdef real_t shifted, n
    if real_t is float:
        shifted = a * F32_LOG2E + magic(one)
        n = shifted - magic(one)
        r[0] = plus_exact_product(-a, n, F32_LN2_HI) + n * F32_LN2_LO
    else:
        shifted = a * F64_LOG2E + magic(one)
        n = shifted - magic(one)
        r[0] = plus_exact_product(-a, n, F64_LN2_HI) + n * F64_LN2_LO
    scale[0] = power_of_two(shifted)


cdef inline real_t joined_sigmoid(real_t p, real_t scale, real_t one) noexcept nogil:
    """1 / (1 + scale * (1 + p)), which keeps its digits at both ends."""
    return one / (one + plus_exact_product(scale, scale, p))


cdef inline real_t careful_sigmoid_of(real_t a, real_t one) noexcept nogil:
    """sigmoid of any a. Far below 0, where 1 + exp(a) is 1, it is exp(a), down to underflow; far above, it is 1."""
    cdef real_t limit = last_normal(one)
    cdef real_t size = magnitude_of(a)
    cdef real_t r, scale, s_last, far_below
    split_exponential(a * <real_t>0.5, one, True, &r, &scale, &s_last)
    far_below = (scale + scale * exponential_minus_one(r)) * s_last
    size = limit if size > limit else size
    split_sigmoid(-size if a < 0 else size, one, &r, &scale)
    return far_below if a < -limit else joined_sigmoid(exponential_minus_one(r), scale, one)


cdef inline void split_tanh(real_t x, real_t one, real_t* r, real_t* scale) noexcept nogil:
    """exp(-2|x|) as scale * exp(r), with |x|, NaN too, taken as at most 43.5 (354 in float64): tanh has long been 1."""
    cdef real_t unused
    split_exponential(capped(magnitude_of(x), last_normal(one) * <real_t>0.5), one, False, r, scale, &unused)


cdef inline real_t joined_tanh(real_t x, real_t p, real_t scale, real_t one) noexcept nogil:
    """tanh(x), from exp(-2|x|) = scale * (1 + p)."""
    cdef real_t t, unused
    tanh_pair(x, p, scale, one, False, &t, &unused)
    return t


cdef inline real_t tanh_of(real_t x, real_t one) noexcept nogil:
    """tanh, of any x."""
    cdef real_t r, scale
    split_tanh(x, one, &r, &scale)
    return joined_tanh(x, exponential_minus_one(r), scale, one) if x == x else x


# ---- one row of a tile ------------------------------------------------------------------------------------------

# Short loops, for the reasons given in kernel.pxi.

cdef inline void sum_row(real_t one, Py_ssize_t count,
                         row_t x, row_t y,                                                                   # IN
                         row_t a) noexcept nogil:                                                            # OUT
    cdef Py_ssize_t j
    for j in range(count):
        a[j] = <real_t>x[j] + <real_t>y[j]


cdef inline void biased_sum_row(real_t one, Py_ssize_t count,
                                row_t x, row_t y, row_t bias, row_t bias_excess,                             # IN
                                row_t a) noexcept nogil:                                                     # OUT
    cdef Py_ssize_t j
    for j in range(count):
        a[j] = biased_sum(<real_t>x[j], <real_t>y[j], <real_t>bias[j], <real_t>bias_excess[j], False)


cdef inline bint split_sigmoid_row(real_t one, Py_ssize_t count,
                                   row_t a,                                                                  # IN
                                   row_t r, row_t scale) noexcept nogil:                                     # OUT
    """Whether all of it is in the range of the fast rows (design note g)."""
    cdef Py_ssize_t j
    cdef real_t x, y, z
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    for j in range(count):
        x = a[j]
        split_sigmoid(x, one, &y, &z)
        r[j] = y
        scale[j] = z
        # The sign bit tells.
        if real_t is float:
            narrow |= bits_f32(last_normal(one)) - bits_f32(magnitude_of(x))
        else:
            wide |= bits_f64(last_normal(one)) - bits_f64(magnitude_of(x))
    return (narrow >> 31 == 0) if real_t is float else (wide >> 63 == 0)


cdef inline void joined_sigmoid_row(real_t one, Py_ssize_t count,
                                    row_t r, row_t scale,                                                    # IN
                                    row_t a) noexcept nogil:                                                 # OUT
    cdef Py_ssize_t j
    for j in range(count):
        a[j] = joined_sigmoid(exponential_minus_one(<real_t>r[j]), <real_t>scale[j], one)


cdef inline bint split_tanh_row(real_t one, Py_ssize_t count,
                                row_t a,                                                                     # IN
                                row_t r, row_t scale) noexcept nogil:                                        # OUT
    """Whether all of it is finite (design note g)."""
    cdef Py_ssize_t j
    cdef real_t x, y, z
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    for j in range(count):
        x = a[j]
        split_tanh(x, one, &y, &z)
        r[j] = y
        scale[j] = z
        if real_t is float:
            narrow |= bits_f32(x - x)
        else:
            wide |= bits_f64(x - x)
    return (narrow == 0) if real_t is float else (wide == 0)


cdef inline void joined_tanh_row(real_t one, Py_ssize_t count,
                                 row_t r, row_t scale,                                                       # IN
                                 row_t a) noexcept nogil:                                                    # INOUT
    cdef Py_ssize_t j
    for j in range(count):
        a[j] = joined_tanh(<real_t>a[j], exponential_minus_one(<real_t>r[j]), <real_t>scale[j], one)


cdef inline void cell_row(real_t one, Py_ssize_t count,
                          row_t cx, row_t i, row_t f, row_t g,                                               # IN
                          row_t cy) noexcept nogil:                                                          # OUT
    cdef Py_ssize_t j
    for j in range(count):
        cy[j] = <real_t>f[j] * <real_t>cx[j] + <real_t>i[j] * <real_t>g[j]


cdef inline void hidden_row(real_t one, Py_ssize_t count,
                            row_t cy, row_t r, row_t scale, row_t o,                                         # IN
                            row_t hy) noexcept nogil:                                                        # OUT
    cdef Py_ssize_t j
    for j in range(count):
        hy[j] = <real_t>o[j] * joined_tanh(<real_t>cy[j], exponential_minus_one(<real_t>r[j]), <real_t>scale[j], one)


cdef void careful_sum_row(real_t one, Py_ssize_t count, bint biased,
                          row_t x, row_t y, row_t bias, row_t bias_excess,                                   # IN
                          row_t a) noexcept nogil:                                                           # OUT
    """The sums of one gate, for all inputs there are."""
    cdef Py_ssize_t j
    if not biased:
        sum_row(one, count, x, y, a)
        return
    for j in range(count):
        a[j] = biased_sum(<real_t>x[j], <real_t>y[j], <real_t>bias[j], <real_t>bias_excess[j], True)


cdef void careful_activation_row(real_t one, Py_ssize_t count,
                                 row_t cx,                                                                   # IN
                                 row_t i, row_t f, row_t g, row_t o,                                         # INOUT
                                 row_t cy, row_t hy) noexcept nogil:                                         # OUT
    """As the rows above, from the sums on, for all inputs there are, in plain IEEE arithmetic."""
    cdef Py_ssize_t j
    cdef real_t in_gate, forget_gate, cell_gate, out_gate, cell
    for j in range(count):
        in_gate = careful_sigmoid_of(<real_t>i[j], one)
        forget_gate = careful_sigmoid_of(<real_t>f[j], one)
        cell_gate = tanh_of(<real_t>g[j], one)
        out_gate = careful_sigmoid_of(<real_t>o[j], one)
        cell = forget_gate * <real_t>cx[j] + in_gate * cell_gate
        i[j] = in_gate
        f[j] = forget_gate
        g[j] = cell_gate
        o[j] = out_gate
        cy[j] = cell
        hy[j] = out_gate * tanh_of(cell, one)


# ---- one tile ---------------------------------------------------------------------------------------------------

ctypedef struct ForwardBuffers: # of one thread; rows are `pitch` elements apart
    char* exponential           # [2]                           r and scale of the row at hand
    char* packed                # [FORWARD_SOURCES]             inputs that cannot be read where they lie
    char* blocks                # [FORWARD_SOURCES, BLOCK_ROWS] inputs that are read a column at a time
    char* stage                 # [FORWARD_TARGETS]             outputs that cannot be written where they go
    char* halves                # [1]                           a row of float16 or bfloat16 on its way past the cache
    lstmcell_carry* carry       # [RUN_ROWS, FORWARD_TARGETS]   what waits for the other part of its 64-byte line
    char* bias                  # [2, GATES, strip]             the biases' sum, what rounding added
    Py_ssize_t pitch
    Py_ssize_t block_row        # the first row of `blocks`
    Py_ssize_t first_column     # of the strip


cdef inline bint forward_span(real_t one, row_t kind, const Call* call, const ForwardBuffers* buffers,
                              const Ahead* ahead, Py_ssize_t first, Py_ssize_t count, real_t** source,
                              real_t* bias, real_t** target) noexcept nogil:
    """The fast path for some columns of a row of a tile; whether it is valid (design note g)."""
    cdef row_t r = <row_t>buffers.exponential
    cdef row_t scale = <row_t>buffers.exponential + buffers.pitch
    cdef Py_ssize_t lane = GATES * call.strip
    cdef bint valid = True
    cdef Py_ssize_t k
    for k in range(GATES):
        prefetch_sources(ahead, k, k + 1)
        if call.has_bias:
            biased_sum_row(one, count, <row_t>source[k] + first, <row_t>source[GATES + k] + first,
                           <row_t>(bias + k * call.strip) + first, <row_t>(bias + lane + k * call.strip) + first,
                           <row_t>target[k] + first)
        else:
            sum_row(one, count, <row_t>source[k] + first, <row_t>source[GATES + k] + first, <row_t>target[k] + first)
        prefetch_sources(ahead, GATES + k, GATES + k + 1)
        if k == 2:
            valid &= split_tanh_row(one, count, <row_t>target[k] + first, r, scale)
            joined_tanh_row(one, count, r, scale, <row_t>target[k] + first)
        else:
            valid &= split_sigmoid_row(one, count, <row_t>target[k] + first, r, scale)
            joined_sigmoid_row(one, count, r, scale, <row_t>target[k] + first)
    prefetch_sources(ahead, 2 * GATES, FORWARD_SOURCES)
    cell_row(one, count, <row_t>source[2 * GATES] + first, <row_t>target[0] + first, <row_t>target[1] + first,
             <row_t>target[2] + first, <row_t>target[4] + first)
    valid &= split_tanh_row(one, count, <row_t>target[4] + first, r, scale)
    hidden_row(one, count, <row_t>target[4] + first, r, scale, <row_t>target[3] + first, <row_t>target[5] + first)
    return valid


cdef void forward_row(real_t one, row_t kind, const Call* call, const ForwardBuffers* buffers, const Ahead* ahead,
                      Py_ssize_t row, Py_ssize_t column, Py_ssize_t count,                                   # IN
                      real_t** target) noexcept nogil:                                                       # OUT
    """One row of a tile, from the arrays to `target`: i, f, g, o, cy, hy.

    In whole vectors, and as in the backward pass what is left is done by a vector that overlaps them.
    """
    cdef real_t* source[FORWARD_SOURCES]
    cdef real_t* bias = <real_t*>buffers.bias + column - buffers.first_column
    cdef Py_ssize_t lane = GATES * call.strip
    cdef Py_ssize_t lanes = lanes_of(one)
    cdef const Plane* plane
    cdef bint valid
    cdef Py_ssize_t k
    for k in range(FORWARD_SOURCES):
        plane = &call.source[k]
        if plane.direct:
            source[k] = <real_t*>(plane.data + row * plane.row_stride + column * plane.column_stride)
        elif plane.blocked:
            source[k] = <real_t*>buffers.blocks + (k * BLOCK_ROWS + row - buffers.block_row) * buffers.pitch
        else:
            source[k] = <real_t*>buffers.packed + k * buffers.pitch
            pack_row(one, plane, call.storage, row, column, count, source[k])
    if count == TILE:       # the common case has loops of constant length
        valid = forward_span(one, kind, call, buffers, ahead, 0, <Py_ssize_t>TILE, source, bias, target)
    elif count < lanes:
        valid = forward_span(one, kind, call, buffers, ahead, 0, count, source, bias, target)
    else:
        valid = forward_span(one, kind, call, buffers, ahead, 0, count & -lanes, source, bias, target)
        if count & (lanes - 1):
            valid &= forward_span(one, kind, call, buffers, NULL, count - lanes, lanes, source, bias, target)
    if valid:
        return
    for k in range(GATES):
        careful_sum_row(one, count, call.has_bias, <row_t>source[k], <row_t>source[GATES + k],
                        <row_t>(bias + k * call.strip), <row_t>(bias + lane + k * call.strip), <row_t>target[k])
    careful_activation_row(one, count, <row_t>source[2 * GATES], <row_t>target[0], <row_t>target[1],
                           <row_t>target[2], <row_t>target[3], <row_t>target[4], <row_t>target[5])


cdef void forward_tile(real_t one, row_t kind, const Call* call, const ForwardBuffers* buffers, Ahead ahead,
                       Py_ssize_t first_row, Py_ssize_t rows, Py_ssize_t column, Py_ssize_t count, bint first,
                       bint last) noexcept nogil:
    """A run of rows by `count` columns."""
    cdef real_t* target[FORWARD_TARGETS]
    cdef const Plane* plane
    cdef lstmcell_carry* carry
    cdef Py_ssize_t r, k
    for r in range(rows):
        for k in range(FORWARD_TARGETS):
            plane = &call.target[k]
            if call.staged:
                target[k] = <real_t*>buffers.stage + k * buffers.pitch
            else:
                target[k] = <real_t*>(plane.data + (first_row + r) * plane.row_stride + column * plane.column_stride)
        forward_row(one, kind, call, buffers, &ahead if ahead.rows > 0 else NULL, first_row + r, column, count, target)
        if ahead.rows > 0:
            next_row(call, &ahead)
        if call.staged:
            for k in range(FORWARD_TARGETS):
                carry = buffers.carry + r * FORWARD_TARGETS + k
                unpack_row(one, &call.target[k], call.storage, first_row + r, column, count, call.streaming,
                           IN_PART if first else WHOLE, IN_PART if last else WAITS, target[k], buffers.halves, carry,
                           carry)


# ---- pieces and threads -----------------------------------------------------------------------------------------

cdef void forward_block(real_t one, row_t kind, const Call* call, const ForwardBuffers* buffers, Py_ssize_t first_row,
                        Py_ssize_t end_row, Py_ssize_t first_column, Py_ssize_t columns) noexcept nogil:
    """One strip of BLOCK_ROWS rows: run by run, or where inputs are read in blocks, tile by tile."""
    cdef Py_ssize_t block_columns = call.tile if call.blocked else columns
    cdef Py_ssize_t block = 0
    cdef Py_ssize_t row, column, count, k
    while block < columns:
        block_columns = min(block_columns, columns - block)
        if call.blocked:
            for k in range(FORWARD_SOURCES):
                if call.source[k].blocked:
                    pack_block(one, &call.source[k], call.storage, first_row, end_row - first_row,
                               first_column + block, block_columns, buffers.pitch,
                               <real_t*>buffers.blocks + k * BLOCK_ROWS * buffers.pitch)
        row = first_row
        while row < end_row:
            column = block
            while column < block + block_columns:
                count = min(block + block_columns - column, call.tile)
                forward_tile(one, kind, call, buffers, ahead_of(call, row, column + count, first_column, columns), row,
                             min(<Py_ssize_t>RUN_ROWS, end_row - row), first_column + column, count,
                             column == block, column + count == block + block_columns)
                column += count
            row += RUN_ROWS
        block += block_columns


cdef void forward_piece(real_t one, row_t kind, const Call* call, ForwardBuffers* buffers, Py_ssize_t first_row,
                        Py_ssize_t end_row, Py_ssize_t first_column, Py_ssize_t columns) noexcept nogil:
    while first_row < end_row:
        buffers.block_row = first_row
        forward_block(one, kind, call, buffers, first_row, min(first_row + BLOCK_ROWS, end_row), first_column, columns)
        first_row += BLOCK_ROWS


cdef void add_biases(real_t one, const Call* call, Py_ssize_t first_column, Py_ssize_t columns,               # IN
                     real_t* total) noexcept nogil:                                                          # OUT
    """The sum of the biases of a strip [GATES, strip], and behind it what rounding added; a missing one is zeros."""
    cdef real_t* second
    cdef real_t rounded
    cdef Py_ssize_t j, k
    for k in range(GATES):
        second = total + GATES * call.strip
        # Adding -0 changes nothing, the sign of a zero included.
        for j in range(columns):
            total[j] = -<real_t>0
            second[j] = -<real_t>0
        if call.bias_source[0].data != NULL:
            pack_row(one, &call.bias_source[0], call.storage, 0, k * call.hidden + first_column, columns, total)
        if call.bias_source[1].data != NULL:
            pack_row(one, &call.bias_source[1], call.storage, 0, k * call.hidden + first_column, columns, second)
        for j in range(columns):
            rounded = total[j] + second[j]
            second[j] = excess(total[j], second[j], rounded)
            total[j] = rounded
        total += call.strip


cdef inline Py_ssize_t bias_bytes(const Call* call, Py_ssize_t width) noexcept nogil:
    """Of a strip's sum of the biases, and what rounding added."""
    return padded(2 * GATES * call.strip * width)


cdef void forward_item(const Call* call, Py_ssize_t item, char* block) noexcept nogil:
    """One piece by one strip, with a thread's block of scratch memory."""
    cdef Py_ssize_t width = 8 if call.storage == STORAGE_FLOAT64 else 4
    cdef Py_ssize_t first_column = strip_start(call, item % call.strips)
    cdef Py_ssize_t columns = strip_start(call, item % call.strips + 1) - first_column
    cdef Py_ssize_t rows = <Py_ssize_t>RUN_ROWS << call.piece_level
    cdef Py_ssize_t first_row = item // call.strips * rows
    cdef Py_ssize_t end_row = min(first_row + rows, call.batch)
    cdef ForwardBuffers buffers
    # Each row has 64 bytes before it, which streaming may read.
    buffers.pitch = pitch_of(call, width)
    buffers.exponential = block + 64
    buffers.packed = buffers.exponential + 2 * buffers.pitch * width
    buffers.blocks = buffers.packed + FORWARD_SOURCES * buffers.pitch * width
    buffers.bias = buffers.blocks + (FORWARD_SOURCES * BLOCK_ROWS * buffers.pitch * width if call.blocked else 0)
    buffers.stage = buffers.bias + (bias_bytes(call, width) if call.has_bias else 0)
    buffers.halves = buffers.stage + FORWARD_TARGETS * buffers.pitch * width
    buffers.carry = <lstmcell_carry*>(buffers.halves + buffers.pitch * width)
    buffers.first_column = first_column
    if call.has_bias and call.storage == STORAGE_FLOAT64:
        add_biases(<double>1, call, first_column, columns, <double*>buffers.bias)
    elif call.has_bias:
        add_biases(<float>1, call, first_column, columns, <float*>buffers.bias)
    if call.storage == STORAGE_FLOAT64:
        forward_piece(<double>1, <f64_row>NULL, call, &buffers, first_row, end_row, first_column, columns)
    else:
        forward_piece(<float>1, <f32_row>NULL, call, &buffers, first_row, end_row, first_column, columns)


cdef void plan_forward(Call* call) noexcept nogil:
    """Cuts the work as `plan` does, into pieces of 2^piece_level runs, without nodes."""
    cdef Py_ssize_t width = 8 if call.storage == STORAGE_FLOAT64 else 4
    cdef Py_ssize_t items = 1 if call.threads == 1 else 4 * call.threads
    cdef Py_ssize_t rows = RUN_ROWS
    call.tile = min((call.hidden + 15) & ~<Py_ssize_t>15, <Py_ssize_t>TILE)
    call.piece_level = 0
    while rows * items < call.batch or (call.blocked and rows < BLOCK_ROWS):
        call.piece_level += 1
        rows *= 2
    call.pieces = (call.batch + rows - 1) // rows
    cut_strips(call)
    call.nodes_bytes = 0
    call.thread_bytes = padded(64 + (3 + FORWARD_SOURCES + FORWARD_TARGETS) * pitch_of(call, width) * width
                               + RUN_ROWS * FORWARD_TARGETS * sizeof(lstmcell_carry))
    if call.blocked:
        call.thread_bytes += padded(FORWARD_SOURCES * BLOCK_ROWS * pitch_of(call, width) * width)
    if call.has_bias:
        call.thread_bytes += bias_bytes(call, width)
    call.scratch_bytes = call.nodes_bytes + call.threads * call.thread_bytes


cdef void run_forward(Call* call) noexcept nogil:
    """The whole call, as cut by `plan_forward`, in the scratch memory that the caller has provided."""
    cdef uint64_t before = fp_state_enter()
    run_items(call, forward_item, NULL)
    fp_state_leave(before)


table.plan_forward = plan_forward
table.run_forward = run_forward
