# The fused backward pass of an LSTM cell: scalar formulas, one row, one tile, leaves and tree, threads.
#
# Notation (the published operator's; batch N, hidden size H)
#     grad_hy, grad_cy   gradients of the cell's two outputs            [N, H]
#     cx, cy             cell state that entered and that left the cell [N, H]
#     i, f, g, o         activated gates, four blocks of H columns      [N, 4H]
#     t, s               tanh(cy) and 1 - tanh(cy)^2
#     total              grad_hy * o * s + grad_cy
#     d_i, d_f, d_g, d_o gradients of the gates' pre-activations        [N, 4H]
#     grad_cx            total * f                                      [N, H]
#
# Design
# a) One pass. A *tile* is a run of at most RUN_ROWS rows by TILE columns, give or take a line. Its inputs are read
#    once, where they lie or packed into the first cache; its results leave once, directly or from a stage; its gate
#    gradients are summed over the run while they are still there.
# b) Same bits everywhere. Every multiplication and addition rounds on its own (no contraction; fma only where the
#    product is exact, so that its rounding changes nothing), columns never mix, and the bias order is fixed by the row
#    index alone: runs of RUN_ROWS rows one after another in the arithmetic type, run sums one after another in a wider
#    type within a leaf of LEAF_ROWS rows, and a binary tree in that wider type above the leaves. Threads, column strips
#    and tiles only decide who computes which part of it.
# c) Inf, NaN, |cy| past the range of the plain exponential and the gradients of note d) are rare, so the loops that
#    vectorise best do not treat them. The first loop finds the latter two, and the last ones find results that are not
#    finite; a row with any of them is computed with care.
#    (total and with it d_i takes grad_hy, o, cy and grad_cy as a factor or a term, d_i also i and g, d_f also cx and
#    f; Inf and NaN survive multiplication and addition. An Inf from overflow only costs the second look.)
# d) Many processors take hundreds of cycles for a multiplication that meets a number below the normal ones, which is
#    what vanishing gradients become. So an element whose gradients are both below 2^-63 (2^-511 in float64) is computed
#    from 2^63 (2^511) times their values, and its results are taken back; both ways by arithmetic on the bits. That
#    depends on the element alone, not on its company, and a row without such gradients is left as it is.
# e) Memory. Outputs that bypass the cache leave in whole 64-byte lines, also where two rows share one; inputs that
#    come from memory are asked for a tile ahead, a part between each two loops, so that they travel while this tile is
#    computed.
#
# Arguments are marked IN or OUT. Cython turns `1 - y` into double arithmetic, hence the typed `one`; it also makes
# the arithmetic type known beside the fused restrict pointers.

from cpython.pycapsule cimport PyCapsule_New
from cython.parallel cimport parallel, prange, threadid
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

include "kernel_abi.pxi"

cdef extern from "simd.h" nogil:
    ctypedef float* f32_row "lstmcell_f32_out"
    ctypedef double* f64_row "lstmcell_f64_out"
    uint32_t bits_f32(float x)
    float f32_bits(uint32_t u)
    uint64_t bits_f64(double x)
    double f64_bits(uint64_t u)
    uint16_t load16(const char* p, bint swapped)
    uint32_t load32(const char* p, bint swapped)
    uint64_t load64(const char* p, bint swapped)
    float f16_to_f32(uint16_t h)
    uint16_t f32_to_f16(float x)
    float bf16_to_f32(uint16_t h)
    uint16_t f32_to_bf16(float x)
    void f16_row_to_f32(const char* source, float* target, Py_ssize_t count)
    void f32_row_to_f16(const float* source, char* target, Py_ssize_t count)
    void bf16_row_to_f32(const char* source, float* target, Py_ssize_t count)
    void f32_row_to_bf16(const float* source, char* target, Py_ssize_t count)
    float f64_to_f32_odd(double x)
    float plus_exact_product_f32(float c, float a, float b)
    double plus_exact_product_f64(double c, double a, double b)
    float minus_exact_product_f32(float c, float a, float b)
    double minus_exact_product_f64(double c, double a, double b)
    void transpose_f32(const char* source, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t columns, float* target,
                       Py_ssize_t pitch)
    void transpose_f64(const char* source, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t columns, double* target,
                       Py_ssize_t pitch)
    ctypedef struct lstmcell_carry:
        pass
    ctypedef enum Edge "lstmcell_edge":
        IN_PART "LSTMCELL_IN_PART"
        WAITS "LSTMCELL_WAITS"
        WHOLE "LSTMCELL_WHOLE"
    void stream_bytes(char* target, const char* source, Py_ssize_t count, Edge first, Edge last, lstmcell_carry* own,
                      lstmcell_carry* after)
    void stream_fence()
    void prefetch_bytes(const char* p, Py_ssize_t count)
    uint64_t fp_state_enter()
    void fp_state_leave(uint64_t before)

# Constants of the exponential, derived and checked by tools/derive_tanh.py.
cdef extern from *:
    """
    static const float F32_LOG2E = 1.44269502e+00f;
    static const float F32_LN2_HI = 6.93145752e-01f;
    static const float F32_LN2_LO = 1.42860677e-06f;
    static const float F32_Q0 = 5.00000000e-01f;
    static const float F32_Q1 = 1.66665480e-01f;
    static const float F32_Q2 = 4.16668244e-02f;
    static const float F32_Q3 = 8.36611539e-03f;
    static const float F32_Q4 = 1.39010290e-03f;
    static const double F64_LOG2E = 1.4426950408889634e+00;
    static const double F64_LN2_HI = 6.9314718056011770e-01;
    static const double F64_LN2_LO = -1.7239444525614835e-13;
    static const double F64_Q0 = 5.0000000000000000e-01;
    static const double F64_Q1 = 1.6666666666666677e-01;
    static const double F64_Q2 = 4.1666666666666685e-02;
    static const double F64_Q3 = 8.3333333333217383e-03;
    static const double F64_Q4 = 1.3888888888889278e-03;
    static const double F64_Q5 = 1.9841269885468928e-04;
    static const double F64_Q6 = 2.4801587291573997e-05;
    static const double F64_Q7 = 2.7557245071969934e-06;
    static const double F64_Q8 = 2.7557317669413869e-07;
    static const double F64_Q9 = 2.5108698620984268e-08;
    static const double F64_Q10 = 2.0897607825924947e-09;
    """
    const float F32_LOG2E, F32_LN2_HI, F32_LN2_LO, F32_Q0, F32_Q1, F32_Q2, F32_Q3, F32_Q4
    const double F64_LOG2E, F64_LN2_HI, F64_LN2_LO
    const double F64_Q0, F64_Q1, F64_Q2, F64_Q3, F64_Q4, F64_Q5, F64_Q6, F64_Q7, F64_Q8, F64_Q9, F64_Q10

ctypedef fused real_t:
    float
    double

ctypedef fused row_t:
    f32_row
    f64_row


# The largest |cy| of the fast rows, 37 and 320, as bits. Up to there the products of `tanh_pair` are exact. Checked for
# every number of float32 (tools/derive_tanh.py --exact). In float64 the sum that makes r has no bit below 2^-95, so
# that p is 0 or at least 2^-96 and has none below 2^-149; and scale is at least 2^-924.
cdef extern from *:
    """
    #define FAST_LIMIT_F32 0x42140000u
    #define FAST_LIMIT_F64 0x4074000000000000u
    """
    const uint32_t FAST_LIMIT_F32
    const uint64_t FAST_LIMIT_F64


# ---- scalar formulas --------------------------------------------------------------------------------------------

cdef inline real_t magic(real_t one) noexcept nogil:
    """Adding it rounds to an integer, which the last bits of the sum then hold: 1.5 * 2^(digits - 1)."""
    return <real_t>12582912 if real_t is float else <real_t>6755399441055744


cdef inline real_t power_of_two(real_t minus_exponent_and_magic) noexcept nogil:
    """2^-n from n + magic, for n from 0 to one above the largest exponent (which gives 0)."""
    if real_t is float:
        return f32_bits((<uint32_t>(127 + 0x4b400000) - bits_f32(minus_exponent_and_magic)) << 23)
    else:
        return f64_bits((<uint64_t>(1023 + 0x4338000000000000) - bits_f64(minus_exponent_and_magic)) << 52)


cdef inline real_t magnitude_of(real_t x) noexcept nogil:
    if real_t is float:
        return f32_bits(bits_f32(x) & 0x7fffffffu)
    else:
        return f64_bits(bits_f64(x) & 0x7fffffffffffffffu)


cdef inline real_t signed_like(real_t magnitude, real_t sign) noexcept nogil:
    """A number that has no sign of its own, with the sign of the other."""
    if real_t is float:
        return f32_bits(bits_f32(magnitude) | (bits_f32(sign) & 0x80000000u))
    else:
        return f64_bits(bits_f64(magnitude) | (bits_f64(sign) & 0x8000000000000000u))


cdef inline real_t capped(real_t x, real_t most) noexcept nogil:
    """The smaller of two numbers that are not negative; NaN counts as the largest.

    Compared as integers. Of a choice between numbers the compiler makes two ways, one of them with constants, and goes
    both for every element; where the constant is 2^-126, that is a product below the normal numbers for each.
    """
    if real_t is float:
        return f32_bits(bits_f32(x) if bits_f32(x) < bits_f32(most) else bits_f32(most))
    else:
        return f64_bits(bits_f64(x) if bits_f64(x) < bits_f64(most) else bits_f64(most))


cdef inline real_t plus_exact_product(real_t c, real_t a, real_t b) noexcept nogil:
    """c + a * b, where a * b is exact or too small to matter, so that it is the same with fma and without."""
    return plus_exact_product_f32(c, a, b) if real_t is float else plus_exact_product_f64(c, a, b)


cdef inline real_t minus_exact_product(real_t c, real_t a, real_t b) noexcept nogil:
    """c - a * b, likewise."""
    return minus_exact_product_f32(c, a, b) if real_t is float else minus_exact_product_f64(c, a, b)


cdef inline void split_exponential(real_t cy, real_t one, bint careful,
                                   real_t* r, real_t* scale, real_t* s_last) noexcept nogil:
    """E = exp(-2|cy|) as scale * exp(r) with scale = 2^-n and |r| <= ln(2) / 2.

    Careful: any cy. Where E lies below the normal numbers, s_last is the power of two that scale lacks, else 1; |cy|
    is taken as at most 100 (800 in float64), where s_last is already 0. NaN stays NaN.
    Otherwise: |cy| up to 43.5 (354 in float64), where s_last is 1; above, the results mean nothing.
    """
    cdef real_t x = magnitude_of(cy) + magnitude_of(cy)
    cdef real_t limit, last_exponent, shifted, n, below
    if real_t is float:
        limit = <real_t>200
        last_exponent = <real_t>126
    else:
        limit = <real_t>1600
        last_exponent = <real_t>1022
    if careful:
        x = limit if x > limit else x
    if real_t is float:
        shifted = x * F32_LOG2E + magic(one)
        n = shifted - magic(one)
        r[0] = plus_exact_product(-x, n, F32_LN2_HI) + n * F32_LN2_LO
    else:
        shifted = x * F64_LOG2E + magic(one)
        n = shifted - magic(one)
        r[0] = plus_exact_product(-x, n, F64_LN2_HI) + n * F64_LN2_LO
    if careful:
        below = n - capped(n, last_exponent)
        shifted = capped(n, last_exponent) + magic(one)
        s_last[0] = power_of_two(capped(below, last_exponent + one) + magic(one))
    scale[0] = power_of_two(shifted)


cdef inline real_t exponential_minus_one(real_t r) noexcept nogil:
    """exp(r) - 1 for |r| <= ln(2) / 2, from r + r^2 Q(r)."""
    cdef real_t q
    if real_t is float:
        q = F32_Q4
        q = q * r + F32_Q3
        q = q * r + F32_Q2
        q = q * r + F32_Q1
        q = q * r + F32_Q0
    else:
        q = F64_Q10
        q = q * r + F64_Q9
        q = q * r + F64_Q8
        q = q * r + F64_Q7
        q = q * r + F64_Q6
        q = q * r + F64_Q5
        q = q * r + F64_Q4
        q = q * r + F64_Q3
        q = q * r + F64_Q2
        q = q * r + F64_Q1
        q = q * r + F64_Q0
    return r + (r * r) * q


cdef inline void tanh_pair(real_t cy, real_t p, real_t scale, real_t one, bint careful,
                           real_t* t, real_t* s) noexcept nogil:
    """tanh(cy) and 1 - tanh(cy)^2, neither by cancellation, from E = scale * (1 + p) = exp(-2|cy|).

    tanh|cy| = (1 - E) / (1 + E), where 1 - E = (1 - scale) - scale * p keeps all its digits near 0, and
    1 - tanh^2 = 4E / (1 + E)^2. Unless careful, for |cy| up to 37 (320 in float64) or if only t is wanted.
    """
    cdef real_t e = scale + scale * p if careful else plus_exact_product(scale, scale, p)
    cdef real_t q = one / (one + e)
    # Where this product is not exact, it disappears beside 1.
    t[0] = signed_like(minus_exact_product(one - scale, scale, p) * q, cy)
    s[0] = ((<real_t>4 * e) * q) * q


# The operator on one element: products from left to right, 1 - g^2 without cancellation.

cdef inline real_t total_of(real_t grad_hy, real_t grad_cy, real_t o, real_t s) noexcept nogil:
    return grad_hy * o * s + grad_cy


cdef inline real_t d_o_of(real_t grad_hy, real_t t, real_t o, real_t one) noexcept nogil:
    return grad_hy * t * o * (one - o)


cdef inline real_t d_i_of(real_t total, real_t i, real_t g, real_t one) noexcept nogil:
    return total * g * i * (one - i)


cdef inline real_t d_g_of(real_t total, real_t i, real_t g, real_t one) noexcept nogil:
    return total * i * ((one - g) * (one + g))


cdef inline real_t d_f_of(real_t total, real_t cx, real_t f, real_t one) noexcept nogil:
    return total * cx * f * (one - f)


cdef inline real_t poison(real_t x) noexcept nogil:
    """NaN for Inf and NaN, otherwise -0, the one number that changes nothing when it is added."""
    if real_t is float:
        return f32_bits(bits_f32(x * <real_t>0) | 0x80000000u)
    else:
        return f64_bits(bits_f64(x * <real_t>0) | 0x8000000000000000u)


# Gradients near and below the end of the normal numbers (design note d).

cdef extern from *:
    """
    static const float F32_LIFTED_QUANTUM = 0x1p-86f;   /* 2^63 times the smallest number above 0 */
    static const double F64_LIFTED_QUANTUM = 0x1p-563;  /* 2^511 times that */
    static const float F32_QUANTA = 0x1p86f;
    static const double F64_QUANTA = 0x1p563;
    #define F32_LOW ((127u - 63u) << 24)                /* 2^-63, as bits shifted left by one: a power of two */
    #define F64_LOW ((1023ull - 511ull) << 53)
    #define F32_MODERATE ((127u + 20u) << 24)           /* 2^20 */
    #define F64_MODERATE ((1023ull + 20ull) << 53)
    """
    const float F32_LIFTED_QUANTUM, F32_QUANTA
    const double F64_LIFTED_QUANTUM, F64_QUANTA
    const uint32_t F32_LOW, F32_MODERATE
    const uint64_t F64_LOW, F64_MODERATE


cdef inline bint is_low(real_t x) noexcept nogil:
    """Whether |x| < 2^-63 (2^-511)."""
    return bits_f32(x) << 1 < F32_LOW if real_t is float else bits_f64(x) << 1 < F64_LOW


cdef inline uint32_t high_f32(float x, float y) noexcept nogil:
    """A number whose sign bit is 0 if both are low, and not both 0."""
    # Below a power of two are both if their union is; less one, 0 is not. That is, if the two highest bits are 0.
    cdef uint32_t both = ((bits_f32(x) | bits_f32(y)) << 1) - 1u
    return both | (both << 1)


cdef inline uint64_t high_f64(double x, double y) noexcept nogil:
    cdef uint64_t both = ((bits_f64(x) | bits_f64(y)) << 1) - 1u
    return both | (both << 1)


cdef inline bint is_moderate(real_t x) noexcept nogil:
    """Whether |x| < 2^20; Inf and NaN are not."""
    return bits_f32(x) << 1 < F32_MODERATE if real_t is float else bits_f64(x) << 1 < F64_MODERATE


cdef inline real_t lifted(real_t x) noexcept nogil:
    """2^63 x (2^511 x), of a low x."""
    cdef uint32_t narrow
    cdef uint64_t wide
    cdef real_t y
    if real_t is float:
        # Below the normal numbers the bits count quanta; as the last bits of 2^23 + count they become a number.
        narrow = bits_f32(x) & 0x7fffffffu
        y = (f32_bits(narrow | 0x4b000000u) - <real_t>8388608) * F32_LIFTED_QUANTUM
        y = y if narrow < 0x00800000u else f32_bits(narrow + (<uint32_t>63 << 23))
    else:
        wide = bits_f64(x) & 0x7fffffffffffffffu
        y = (f64_bits(wide | 0x4330000000000000u) - <real_t>4503599627370496) * F64_LIFTED_QUANTUM
        y = y if wide < 0x0010000000000000u else f64_bits(wide + (<uint64_t>511 << 52))
    return signed_like(y, x)


cdef inline real_t settled(real_t y) noexcept nogil:
    """2^-63 y (2^-511 y), to nearest even, for finite y."""
    cdef uint32_t narrow
    cdef uint64_t wide
    cdef real_t x
    if real_t is float:
        narrow = bits_f32(y) & 0x7fffffffu
        x = f32_bits(bits_f32(f32_bits(narrow) * F32_QUANTA + <real_t>8388608) - 0x4b000000u)
        x = x if narrow < <uint32_t>64 << 23 else f32_bits(narrow - (<uint32_t>63 << 23))
    else:
        wide = bits_f64(y) & 0x7fffffffffffffffu
        x = f64_bits(bits_f64(f64_bits(wide) * F64_QUANTA + <real_t>4503599627370496) - 0x4330000000000000u)
        x = x if wide < <uint64_t>512 << 52 else f64_bits(wide - (<uint64_t>511 << 52))
    return signed_like(x, y)


cdef inline real_t settled_where(real_t mark, real_t y) noexcept nogil:
    """The same where all bits of `mark` are set, y where none is. With a choice the loop would not vectorise."""
    if real_t is float:
        return f32_bits((bits_f32(settled(y)) & bits_f32(mark)) | (bits_f32(y) & ~bits_f32(mark)))
    else:
        return f64_bits((bits_f64(settled(y)) & bits_f64(mark)) | (bits_f64(y) & ~bits_f64(mark)))


# ---- one row of a tile ------------------------------------------------------------------------------------------

# Five short loops over buffers in the first cache instead of one long loop, for two reasons. One element's chain of
# operations is long, and a processor has room for a limited number of waiting instructions: the shorter the loop, the
# more elements are under way at once. And arrays tend to lie at equal offsets within a page, where all their rows
# compete for the same few places of the first cache: no loop here touches more than five of them.

cdef inline bint split_row(real_t one, Py_ssize_t count,
                           row_t grad_hy, row_t grad_cy, row_t cy,                                           # IN
                           row_t r, row_t scale) noexcept nogil:                                             # OUT
    """The exponential of cy; whether the other loops may go on: no |cy| too large or NaN, no low gradients."""
    cdef Py_ssize_t j
    cdef real_t a, b, unused
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    for j in range(count):
        split_exponential(<real_t>cy[j], one, False, &a, &b, &unused)
        r[j] = a
        scale[j] = b
        # Either sign bit tells.
        if real_t is float:
            narrow |= ~high_f32(<real_t>grad_hy[j], <real_t>grad_cy[j])
            narrow |= FAST_LIMIT_F32 - bits_f32(magnitude_of(<real_t>cy[j]))
        else:
            wide |= ~high_f64(<real_t>grad_hy[j], <real_t>grad_cy[j])
            wide |= FAST_LIMIT_F64 - bits_f64(magnitude_of(<real_t>cy[j]))
    return (narrow >> 31 == 0) if real_t is float else (wide >> 63 == 0)


cdef inline void exponential_row(real_t one, Py_ssize_t count,
                                 row_t r) noexcept nogil:                                                    # INOUT
    cdef Py_ssize_t j
    for j in range(count):
        r[j] = exponential_minus_one(<real_t>r[j])


cdef inline void state_row(real_t one, Py_ssize_t count,
                           row_t grad_hy, row_t grad_cy, row_t cy, row_t o, row_t scale,                     # IN
                           row_t p,                                                                          # INOUT
                           row_t d_o) noexcept nogil:                                                        # OUT
    """d_o, and `total` in the place of p."""
    cdef Py_ssize_t j
    cdef real_t t, s
    for j in range(count):
        tanh_pair(<real_t>cy[j], <real_t>p[j], <real_t>scale[j], one, False, &t, &s)
        p[j] = total_of(<real_t>grad_hy[j], <real_t>grad_cy[j], <real_t>o[j], s)
        d_o[j] = d_o_of(<real_t>grad_hy[j], t, <real_t>o[j], one)


cdef inline bint input_row(real_t one, Py_ssize_t count,
                           row_t total, row_t i, row_t g,                                                    # IN
                           row_t d_i, row_t d_g) noexcept nogil:                                             # OUT
    """d_i and d_g; whether all of d_i is finite (design note c)."""
    cdef Py_ssize_t j
    cdef real_t a
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    for j in range(count):
        a = d_i_of(<real_t>total[j], <real_t>i[j], <real_t>g[j], one)
        d_i[j] = a
        d_g[j] = d_g_of(<real_t>total[j], <real_t>i[j], <real_t>g[j], one)
        if real_t is float:
            narrow |= bits_f32(a - a)
        else:
            wide |= bits_f64(a - a)
    return (narrow == 0) if real_t is float else (wide == 0)


cdef inline bint forget_row(real_t one, Py_ssize_t count,
                            row_t total, row_t cx, row_t f,                                                  # IN
                            row_t d_f, row_t grad_cx) noexcept nogil:                                        # OUT
    """d_f and grad_cx; whether all of d_f is finite (design note c)."""
    cdef Py_ssize_t j
    cdef real_t a
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    for j in range(count):
        a = d_f_of(<real_t>total[j], <real_t>cx[j], <real_t>f[j], one)
        d_f[j] = a
        grad_cx[j] = <real_t>total[j] * <real_t>f[j]
        if real_t is float:
            narrow |= bits_f32(a - a)
        else:
            wide |= bits_f64(a - a)
    return (narrow == 0) if real_t is float else (wide == 0)


cdef void careful_row(real_t one, Py_ssize_t count,
                      row_t grad_hy, row_t grad_cy, row_t cx, row_t cy, row_t i, row_t f, row_t g, row_t o,  # IN
                      row_t d_i, row_t d_f, row_t d_g, row_t d_o, row_t grad_cx) noexcept nogil:             # OUT
    """As the rows above, for all inputs there are, in plain IEEE arithmetic."""
    cdef Py_ssize_t j
    cdef real_t r, scale, s_last, t, s, total
    for j in range(count):
        split_exponential(<real_t>cy[j], one, True, &r, &scale, &s_last)
        tanh_pair(<real_t>cy[j], exponential_minus_one(r), scale, one, True, &t, &s)
        total = <real_t>grad_hy[j] * <real_t>o[j] * s * s_last + <real_t>grad_cy[j]
        d_i[j] = d_i_of(total, <real_t>i[j], <real_t>g[j], one)
        d_f[j] = d_f_of(total, <real_t>cx[j], <real_t>f[j], one)
        d_g[j] = d_g_of(total, <real_t>i[j], <real_t>g[j], one)
        d_o[j] = d_o_of(<real_t>grad_hy[j], t, <real_t>o[j], one)
        grad_cx[j] = total * <real_t>f[j]


cdef bint has_large_cell(real_t one, Py_ssize_t count, row_t cy) noexcept nogil:
    """Whether a finite |cy| is past the range of the fast rows."""
    cdef Py_ssize_t j
    cdef uint32_t narrow = 0
    cdef uint64_t wide = 0
    for j in range(count):
        if real_t is float:
            narrow |= <uint32_t>(bits_f32(magnitude_of(<real_t>cy[j])) > FAST_LIMIT_F32) & <uint32_t>(
                bits_f32(magnitude_of(<real_t>cy[j])) < 0x7f800000u)
        else:
            wide |= <uint64_t>(bits_f64(magnitude_of(<real_t>cy[j])) > FAST_LIMIT_F64) & <uint64_t>(
                bits_f64(magnitude_of(<real_t>cy[j])) < 0x7ff0000000000000u)
    return (narrow != 0) if real_t is float else (wide != 0)


cdef void poison_row(real_t one, Py_ssize_t count,
                     row_t grad_hy, row_t grad_cy, row_t cx, row_t cy, row_t i, row_t f, row_t g, row_t o,   # IN
                     row_t d_i, row_t d_f, row_t d_g, row_t d_o, row_t grad_cx) noexcept nogil:              # INOUT
    """The operator's rule: NaN for every result whose formula reads Inf or NaN."""
    cdef Py_ssize_t j
    cdef real_t in_total, in_d_o
    for j in range(count):
        in_d_o = poison(<real_t>grad_hy[j]) + poison(<real_t>cy[j]) + poison(<real_t>o[j])
        in_total = in_d_o + poison(<real_t>grad_cy[j])
        d_i[j] = d_i[j] + (in_total + poison(<real_t>g[j]) + poison(<real_t>i[j]))
        d_f[j] = d_f[j] + (in_total + poison(<real_t>cx[j]) + poison(<real_t>f[j]))
        d_g[j] = d_g[j] + (in_total + poison(<real_t>i[j]) + poison(<real_t>g[j]))
        d_o[j] = d_o[j] + in_d_o
        grad_cx[j] = grad_cx[j] + (in_total + poison(<real_t>f[j]))


cdef bint has_low_gradients(real_t one, Py_ssize_t count,
                            row_t grad_hy, row_t grad_cy) noexcept nogil:                                    # IN
    """Whether there is an element whose gradients are both low, and not both 0."""
    cdef Py_ssize_t j
    cdef uint32_t narrow = 0xffffffffu
    cdef uint64_t wide = 0xffffffffffffffffu
    for j in range(count):
        if real_t is float:
            narrow &= high_f32(<real_t>grad_hy[j], <real_t>grad_cy[j])
        else:
            wide &= high_f64(<real_t>grad_hy[j], <real_t>grad_cy[j])
    return (narrow >> 31 == 0) if real_t is float else (wide >> 63 == 0)


cdef void lift_row(real_t one, Py_ssize_t count,
                   row_t grad_hy, row_t grad_cy, row_t cx, row_t cy, row_t i, row_t f, row_t g, row_t o,     # IN
                   row_t lifted_hy, row_t lifted_cy, row_t mark) noexcept nogil:                             # OUT
    """The gradients, lifted where `mark` is all ones: both low, and no factor so large that a product overflows."""
    cdef Py_ssize_t j
    cdef bint low
    for j in range(count):
        low = (is_low(<real_t>grad_hy[j]) & is_low(<real_t>grad_cy[j])
               & is_moderate(<real_t>cx[j]) & is_moderate(<real_t>cy[j]) & is_moderate(<real_t>i[j])
               & is_moderate(<real_t>f[j]) & is_moderate(<real_t>g[j]) & is_moderate(<real_t>o[j]))
        lifted_hy[j] = lifted(<real_t>grad_hy[j]) if low else <real_t>grad_hy[j]
        lifted_cy[j] = lifted(<real_t>grad_cy[j]) if low else <real_t>grad_cy[j]
        if real_t is float:
            mark[j] = f32_bits(0u - <uint32_t>low)
        else:
            mark[j] = f64_bits(<uint64_t>0 - <uint64_t>low)


cdef void settle_row(real_t one, Py_ssize_t count,
                     row_t mark,                                                                             # IN
                     row_t d_i, row_t d_f, row_t d_g, row_t d_o, row_t grad_cx) noexcept nogil:              # INOUT
    """Takes back what `lift_row` did."""
    cdef Py_ssize_t j
    for j in range(count):
        d_i[j] = settled_where(<real_t>mark[j], <real_t>d_i[j])
        d_f[j] = settled_where(<real_t>mark[j], <real_t>d_f[j])
        d_g[j] = settled_where(<real_t>mark[j], <real_t>d_g[j])
        d_o[j] = settled_where(<real_t>mark[j], <real_t>d_o[j])
        grad_cx[j] = settled_where(<real_t>mark[j], <real_t>grad_cx[j])


# ---- wide sums --------------------------------------------------------------------------------------------------
#
# float32 arithmetic is summed in float64. float64 is summed in pairs (high, low): high is the rounded sum, low
# collects what rounding cut off, found without error by Knuth's two-sum. A pair's lows lie `pair` doubles behind.

cdef inline double cut_off(double a, double b, double total) noexcept nogil:
    """What rounding cut off in total = a + b (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B)."""
    cdef double b_seen = total - a
    return (a - (total - b_seen)) + (b - b_seen)


cdef inline void add_run(real_t one, Py_ssize_t count,
                  row_t first, row_t second, row_t third, row_t fourth,                                      # IN
                  f64_row high, f64_row low) noexcept nogil:                                                 # INOUT
    """Sums one gate over a run of rows, and adds the run to the leaf."""
    cdef Py_ssize_t j
    cdef real_t run
    cdef double total
    for j in range(count):
        run = <real_t>first[j] + <real_t>second[j] + <real_t>third[j] + <real_t>fourth[j]
        if real_t is float:
            high[j] = high[j] + <double>run
        else:
            total = high[j] + run
            low[j] = low[j] + cut_off(high[j], run, total)
            high[j] = total


cdef void add_wide(bint pairs, Py_ssize_t count,
                   f64_row left, f64_row left_low,                                                           # INOUT
                   f64_row right, f64_row right_low) noexcept nogil:                                         # IN
    """Adds the sums of a right child to its left sibling, which becomes their parent."""
    cdef Py_ssize_t j
    cdef double total
    if not pairs:
        for j in range(count):
            left[j] = left[j] + right[j]
        return
    for j in range(count):
        total = left[j] + right[j]
        left_low[j] = (left_low[j] + right_low[j]) + cut_off(left[j], right[j], total)
        left[j] = total


# ---- into and out of a tile -------------------------------------------------------------------------------------

cdef void pack_row(real_t one, const Plane* plane, Storage storage, Py_ssize_t row, Py_ssize_t column,
                   Py_ssize_t count,                                                                         # IN
                   real_t* target) noexcept nogil:                                                           # OUT
    """Reads one row segment of any layout, byte order and storage type."""
    cdef const char* p = plane.data + row * plane.row_stride + column * plane.column_stride
    cdef Py_ssize_t step = plane.column_stride
    cdef bint swapped = plane.swapped
    cdef Py_ssize_t j
    if real_t is float:
        if storage == STORAGE_FLOAT16 and step == 2 and not swapped:
            f16_row_to_f32(p, target, count)
        elif storage == STORAGE_BFLOAT16 and step == 2 and not swapped:
            bf16_row_to_f32(p, target, count)
        elif storage == STORAGE_FLOAT16:
            for j in range(count):
                target[j] = f16_to_f32(load16(p + j * step, swapped))
        elif storage == STORAGE_BFLOAT16:
            for j in range(count):
                target[j] = bf16_to_f32(load16(p + j * step, swapped))
        else:
            for j in range(count):
                target[j] = f32_bits(load32(p + j * step, swapped))
    else:
        for j in range(count):
            target[j] = f64_bits(load64(p + j * step, swapped))


cdef void pack_block(real_t one, const Plane* plane, Storage storage, Py_ssize_t first_row, Py_ssize_t rows,
                     Py_ssize_t column, Py_ssize_t count, Py_ssize_t pitch,                                  # IN
                     real_t* target) noexcept nogil:                                                         # OUT
    """Reads a block [rows, count] whose columns lie closer than its rows, a column at a time."""
    cdef Plane turned = plane[0]
    cdef real_t line[BLOCK_ROWS]
    cdef Py_ssize_t r, j, k
    turned.data = plane.data + first_row * plane.row_stride + column * plane.column_stride
    turned.row_stride = plane.column_stride
    turned.column_stride = plane.row_stride
    for j from 0 <= j < count by BLOCK_COLUMNS:
        for k in range(j + AHEAD_COLUMNS, min(j + AHEAD_COLUMNS + BLOCK_COLUMNS, count)):
            prefetch_bytes(turned.data + k * turned.row_stride, rows * sizeof(real_t))
        if not turned.swapped and turned.column_stride == sizeof(real_t) and storage <= STORAGE_FLOAT64:
            if real_t is float:
                transpose_f32(turned.data + j * turned.row_stride, turned.row_stride, rows,
                              min(count - j, <Py_ssize_t>BLOCK_COLUMNS), target + j, pitch)
            else:
                transpose_f64(turned.data + j * turned.row_stride, turned.row_stride, rows,
                              min(count - j, <Py_ssize_t>BLOCK_COLUMNS), target + j, pitch)
            continue
        for k in range(j, min(j + BLOCK_COLUMNS, count)):
            pack_row(one, &turned, storage, k, 0, rows, line)
            for r in range(rows):
                target[r * pitch + k] = line[r]


cdef inline void unpack_row(real_t one, const Plane* plane, Storage storage, Py_ssize_t row, Py_ssize_t column,
                     Py_ssize_t count, bint streaming, Edge first, Edge last, real_t* source,                # IN
                     char* halves, lstmcell_carry* own, lstmcell_carry* after) noexcept nogil:               # SCRATCH
    """Writes one row segment from the stage: the one place where staged results leave the tile."""
    cdef char* p = plane.data + row * plane.row_stride + column * plane.column_stride
    cdef Py_ssize_t step = plane.column_stride
    cdef Py_ssize_t size = 2 if storage >= STORAGE_FLOAT16 else sizeof(real_t)
    cdef char* packed = <char*>source
    cdef Py_ssize_t j
    if real_t is float:
        if storage >= STORAGE_FLOAT16:
            packed = p if step == size and not streaming else halves
            if storage == STORAGE_FLOAT16:
                f32_row_to_f16(source, packed, count)
            else:
                f32_row_to_bf16(source, packed, count)
    if streaming:
        stream_bytes(p, packed, count * size, first, last, own, after)
    elif step != size:
        for j in range(count):
            memcpy(p + j * step, packed + j * size, size)
    elif packed != p:
        memcpy(p, packed, count * size)


# ---- one tile ---------------------------------------------------------------------------------------------------

ctypedef struct Buffers:        # of one thread; rows are `pitch` elements apart
    char* zeros                 # [1]                          stands for a missing gradient, and for rows a run lacks
    char* exponential           # [2]                          p and scale of the row at hand
    char* lifted                # [3]                          lifted gradients and which of them are
    char* packed                # [SOURCES]                    inputs that cannot be read where they lie
    char* blocks                # [SOURCES, BLOCK_ROWS]        inputs that are read a column at a time
    char* stage                 # [RUN_ROWS, TARGETS]          outputs that cannot be written where they go
    char* halves                # [1]                          a row of float16 or bfloat16 on its way past the cache
    lstmcell_carry* carry       # [RUN_ROWS, TARGETS]          what waits for the other part of its 64-byte line
    char* sums                  # [depth of the tree][1 + pairs][GATES, strip] float64
    Py_ssize_t pitch
    Py_ssize_t block_row        # the first row of `blocks`
    Py_ssize_t first_row        # of the piece at hand
    Py_ssize_t end_row          # likewise


ctypedef struct Ahead:                  # the later tile whose inputs are asked for
    const char* data[FORWARD_SOURCES]   # its next row; NULL has nothing to ask for
    Py_ssize_t rows                     # that are left; 0: nothing at all is asked for
    Py_ssize_t bytes                    # of one row


cdef inline Py_ssize_t padded(Py_ssize_t size) noexcept nogil:
    return (size + 63) & ~<Py_ssize_t>63


cdef inline Py_ssize_t lanes_of(real_t one) noexcept nogil:
    """Elements in 64 bytes."""
    return 64 // sizeof(real_t)


cdef inline Py_ssize_t pitch_of(const Call* call, Py_ssize_t width) noexcept nogil:
    """A tile's widest row, space to begin it anywhere on a line, and the 64 bytes before it that streaming may read."""
    return call.tile + 4 * 64 // width


cdef inline Py_ssize_t sources_of(const Call* call) noexcept nogil:
    return FORWARD_SOURCES if call.forward else SOURCES


cdef inline Py_ssize_t strip_shift(const Call* call) noexcept nogil:
    """Columns by which strips begin earlier, so as to begin on a line of the first output; 0 where its rows differ."""
    cdef const Plane* plane = &call.target[0]
    cdef Py_ssize_t behind = <Py_ssize_t>plane.data & 63
    if (call.strips == 1 or plane.column_stride != call.item_bytes or plane.row_stride % 64
            or call.hidden * call.item_bytes % 64 or behind % call.item_bytes):
        return 0
    return behind // call.item_bytes


cdef inline Py_ssize_t lines_of(const Call* call) noexcept nogil:
    """64-byte lines of one output row, of which the strips are made."""
    return ((call.hidden + strip_shift(call)) * call.item_bytes + 63) // 64


cdef inline Py_ssize_t strip_start(const Call* call, Py_ssize_t strip) noexcept nogil:
    """The column where a strip begins; behind the last one, where that ends."""
    cdef Py_ssize_t column = strip * lines_of(call) // call.strips * 64 // call.item_bytes - strip_shift(call)
    return min(call.hidden, max(<Py_ssize_t>0, column))


cdef inline Py_ssize_t sums_doubles(const Call* call) noexcept nogil:
    """float64 numbers in the wide sums of one strip."""
    return (2 if call.storage == STORAGE_FLOAT64 else 1) * GATES * call.strip


cdef inline void prefetch_sources(const Ahead* ahead, int first, int end) noexcept nogil:
    """Asks for some of the inputs of a later tile, if there is one, so that they come while this one is computed."""
    cdef int k
    if ahead != NULL:
        for k in range(first, end):
            if ahead.data[k] == NULL:
                continue
            if ahead.bytes == TILE * sizeof(float):
                prefetch_bytes(ahead.data[k], TILE * sizeof(float))
            else:
                prefetch_bytes(ahead.data[k], ahead.bytes)


cdef inline Ahead ahead_of(const Call* call, Py_ssize_t row, Py_ssize_t column, Py_ssize_t first_column,
                           Py_ssize_t columns) noexcept nogil:
    """The tile that begins at `column` (counted from `first_column`), or the first of the next run."""
    cdef Ahead ahead
    cdef const Plane* plane
    cdef Py_ssize_t k
    ahead.rows = 0
    ahead.bytes = 0
    if column >= columns:
        row += RUN_ROWS
        column = 0
    if call.prefetch and row < call.batch:
        ahead.rows = call.batch - row
        ahead.bytes = min(columns - column, call.tile) * call.item_bytes
        for k in range(sources_of(call)):
            plane = &call.source[k]
            ahead.data[k] = NULL
            if plane.data != NULL:
                ahead.data[k] = plane.data + row * plane.row_stride + (first_column + column) * plane.column_stride
    return ahead


cdef inline void next_row(const Call* call,
                          Ahead* ahead) noexcept nogil:                                                      # INOUT
    cdef Py_ssize_t k
    ahead.rows -= 1
    for k in range(sources_of(call)):
        if ahead.data[k] != NULL:
            ahead.data[k] += call.source[k].row_stride


cdef enum:                      # what the fast path finds
    NOT_FINITE = 1              # results that are not, or no longer
    LEFT_OUT = 2                # what its first loop looks for; it ended there


cdef inline int fast_span(real_t one, row_t kind, bint eager, const Buffers* buffers, const Ahead* ahead,
                          Py_ssize_t first, Py_ssize_t count, real_t** source, real_t** target) noexcept nogil:
    """The fast path for some columns of a row of a tile; what it finds, 0 if it is valid (design notes c and d).

    Unless eager, it goes on after its first loop whatever that finds.
    """
    cdef row_t p = <row_t>buffers.exponential + first
    cdef row_t scale = <row_t>buffers.exponential + buffers.pitch + first
    cdef bint valid
    prefetch_sources(ahead, 0, 2)
    valid = split_row(one, count, <row_t>source[0] + first, <row_t>source[1] + first, <row_t>source[3] + first,
                      p, scale)
    if eager and not valid:
        return LEFT_OUT
    prefetch_sources(ahead, 2, 4)
    exponential_row(one, count, p)
    prefetch_sources(ahead, 4, 6)
    state_row(one, count, <row_t>source[0] + first, <row_t>source[1] + first, <row_t>source[3] + first,
              <row_t>source[7] + first, scale, p, <row_t>target[3] + first)
    prefetch_sources(ahead, 6, 8)
    valid = input_row(one, count, p, <row_t>source[4] + first, <row_t>source[6] + first, <row_t>target[0] + first,
                      <row_t>target[2] + first)
    valid &= forget_row(one, count, p, <row_t>source[2] + first, <row_t>source[5] + first, <row_t>target[1] + first,
                        <row_t>target[4] + first)
    return 0 if valid else NOT_FINITE


cdef int fast_line(real_t one, row_t kind, bint eager, const Buffers* buffers, Py_ssize_t first, real_t** source,
                   real_t** target) noexcept nogil:
    """The fast path for 64 bytes of each row."""
    return fast_span(one, kind, eager, buffers, NULL, first, lanes_of(one), source, target)


cdef inline int fast_row(real_t one, row_t kind, bint eager, const Buffers* buffers, const Ahead* ahead,
                         Py_ssize_t lead, Py_ssize_t count, real_t** source, real_t** target) noexcept nogil:
    """The fast path for one row of a tile; what it finds, 0 if it is valid.

    Loops run over whole vectors, which begin `lead` columns in, on a line of memory. What is left at either end is done
    by a vector that overlaps them: results do not depend on the company, so that doing an element twice does no harm.
    """
    cdef Py_ssize_t lanes = lanes_of(one)
    cdef Py_ssize_t whole = (count - lead) & -lanes
    cdef int found
    if count < lanes:
        return fast_span(one, kind, eager, buffers, ahead, 0, count, source, target)
    if count - lead == TILE:        # the common case has loops of constant length
        found = fast_span(one, kind, eager, buffers, ahead, lead, <Py_ssize_t>TILE, source, target)
    else:
        found = fast_span(one, kind, eager, buffers, ahead, lead, whole, source, target)
        if lead + whole < count:
            found |= fast_line(one, kind, eager, buffers, count - lanes, source, target)
    if lead > 0:
        found |= fast_line(one, kind, eager, buffers, 0, source, target)
    return found


cdef void row_with_care(real_t one, row_t kind, const Call* call, const Buffers* buffers, int found, Py_ssize_t lead,
                        Py_ssize_t count, real_t** source,                                                   # IN
                        real_t** target) noexcept nogil:                                                     # INOUT
    """One row of a tile in which the eager fast path found something (design notes c and d)."""
    cdef row_t lifted = <row_t>buffers.lifted
    cdef row_t mark = lifted + 2 * buffers.pitch
    cdef real_t* gradient[2]
    cdef bint left_out = found & LEFT_OUT
    cdef bint low = left_out and has_low_gradients(one, count, <row_t>source[0], <row_t>source[1])
    cdef bint large = left_out and has_large_cell(one, count, <row_t>source[3])
    cdef Py_ssize_t k
    if low:
        lift_row(one, count, <row_t>source[0], <row_t>source[1], <row_t>source[2], <row_t>source[3],
                 <row_t>source[4], <row_t>source[5], <row_t>source[6], <row_t>source[7],
                 lifted, lifted + buffers.pitch, mark)
        for k in range(2):
            gradient[k] = source[k]
            source[k] = <real_t*>lifted + k * buffers.pitch
    if left_out:
        found = fast_row(one, kind, False, buffers, NULL, lead, count, source, target)
    # Under the operator's rule only a large |cy| needs other arithmetic; what Inf and NaN give is NaN in any case.
    if large or (found and not call.nonfinite_nan):
        careful_row(one, count, <row_t>source[0], <row_t>source[1], <row_t>source[2],
                    <row_t>source[3], <row_t>source[4], <row_t>source[5], <row_t>source[6], <row_t>source[7],
                    <row_t>target[0], <row_t>target[1], <row_t>target[2], <row_t>target[3], <row_t>target[4])
    if (large or found) and call.nonfinite_nan:
        poison_row(one, count, <row_t>source[0], <row_t>source[1], <row_t>source[2],
                   <row_t>source[3], <row_t>source[4], <row_t>source[5], <row_t>source[6], <row_t>source[7],
                   <row_t>target[0], <row_t>target[1], <row_t>target[2], <row_t>target[3], <row_t>target[4])
    if low:
        settle_row(one, count, mark, <row_t>target[0], <row_t>target[1], <row_t>target[2], <row_t>target[3],
                   <row_t>target[4])
        for k in range(2):
            source[k] = gradient[k]


cdef void stream_row(real_t one, const Call* call, const Buffers* buffers, Py_ssize_t first_row, Py_ssize_t r,
                     Py_ssize_t rows, Py_ssize_t column, Py_ssize_t count, bint first, bint last,            # IN
                     real_t** source) noexcept nogil:                                                        # OUT
    """Writes one tile's part of row r of a run of `rows` from the stage.

    Where rows are joined, the end of one shares a line with the beginning of the next. Within a run beginnings come
    before ends, and wait; but if a tile is a whole row, its end comes before the beginning of the next, and waits. So
    does the end of a run for the next one.
    """
    cdef lstmcell_carry* own
    cdef lstmcell_carry* after
    cdef Edge start, end
    cdef Py_ssize_t k
    for k in range(TARGETS):
        own = after = buffers.carry + r * TARGETS + k
        start = IN_PART if first else WHOLE
        end = IN_PART if last else WAITS
        if call.joined and first and (0 < k < GATES or r > 0):
            start = WHOLE if last else WAITS
        elif call.joined and first and first_row > buffers.first_row:
            start = WHOLE
        if call.joined and last and (k < GATES - 1 or r < rows - 1):
            after += 1 if k < GATES - 1 else TARGETS - (k if k < GATES else 0)
            end = WAITS if first else WHOLE
        elif call.joined and last and first_row + rows < buffers.end_row:
            after = buffers.carry + (0 if k < GATES else k)
            end = WAITS
        unpack_row(one, &call.target[k], call.storage, first_row + r, column, count, call.streaming, start, end,
                   source[k], buffers.halves, own, after)


cdef void add_tile(real_t one, row_t kind, const Call* call, Py_ssize_t first_row, Py_ssize_t lead, Py_ssize_t count,
                   real_t* target[RUN_ROWS][TARGETS],                                                        # IN
                   double* sums) noexcept nogil:                                                             # INOUT
    """Adds a run's gate gradients to the leaf's wide sums; the first run of a leaf finds none."""
    cdef Py_ssize_t low = GATES * call.strip
    cdef Py_ssize_t r, k
    for k in range(GATES):
        if first_row % LEAF_ROWS == 0:
            for r in range(2 if call.storage == STORAGE_FLOAT64 else 1):
                memset(sums + r * low, 0, count * sizeof(double))
        if lead > 0:
            add_run(one, lead, <row_t>target[0][k], <row_t>target[1][k], <row_t>target[2][k], <row_t>target[3][k],
                    sums, sums + low)
        if count - lead == TILE:
            add_run(one, <Py_ssize_t>TILE, <row_t>target[0][k] + lead, <row_t>target[1][k] + lead,
                    <row_t>target[2][k] + lead, <row_t>target[3][k] + lead, sums + lead, sums + low + lead)
        else:
            add_run(one, count - lead, <row_t>target[0][k] + lead, <row_t>target[1][k] + lead,
                    <row_t>target[2][k] + lead, <row_t>target[3][k] + lead, sums + lead, sums + low + lead)
        sums += call.strip


cdef void compute_tile(real_t one, row_t kind, const Call* call, const Buffers* buffers, Ahead* ahead,
                       Py_ssize_t first_row, Py_ssize_t rows, Py_ssize_t column, Py_ssize_t count,
                       Py_ssize_t lead, bint first, bint last,                                               # IN
                       double* sums) noexcept nogil:                                                         # INOUT
    """A run of rows by `count` columns; adds its gate gradients to the leaf's wide sums from this column on.

    The `first` tile of a row has no other before it, the `last` none behind it.

    `lead` columns in, arrays begin on a 64-byte line; buffers are made to do so, too.
    """
    cdef Py_ssize_t shift = -lead & (lanes_of(one) - 1)
    cdef Buffers shifted = buffers[0]
    cdef real_t* source[SOURCES]
    cdef real_t* target[RUN_ROWS][TARGETS]
    cdef Py_ssize_t step[SOURCES]
    cdef const Plane* plane
    cdef int found
    cdef Py_ssize_t r, k
    shifted.exponential += shift * sizeof(real_t)
    shifted.lifted += shift * sizeof(real_t)
    for k in range(SOURCES):
        plane = &call.source[k]
        step[k] = 0
        if plane.data == NULL:
            source[k] = <real_t*>buffers.zeros + shift
        elif plane.direct:
            source[k] = <real_t*>(plane.data + first_row * plane.row_stride + column * plane.column_stride)
            step[k] = plane.row_stride
        elif plane.blocked:
            source[k] = <real_t*>buffers.blocks + (k * BLOCK_ROWS + first_row - buffers.block_row) * buffers.pitch
            step[k] = buffers.pitch * sizeof(real_t)
        else:
            source[k] = <real_t*>buffers.packed + k * buffers.pitch + shift
    for k in range(TARGETS):
        plane = &call.target[k]
        for r in range(RUN_ROWS):
            if r >= rows:
                target[r][k] = <real_t*>buffers.zeros + shift
            elif call.staged:
                target[r][k] = <real_t*>buffers.stage + (r * TARGETS + k) * buffers.pitch + shift
            else:
                target[r][k] = <real_t*>(plane.data + (first_row + r) * plane.row_stride + column * plane.column_stride)
    for r in range(rows):
        if call.packed:
            for k in range(SOURCES):
                plane = &call.source[k]
                if plane.data != NULL and not plane.direct and not plane.blocked:
                    pack_row(one, plane, call.storage, first_row + r, column, count, source[k])
        if ahead.rows > 0:
            found = fast_row(one, kind, True, &shifted, ahead, lead, count, source, target[r])
            next_row(call, ahead)
        else:
            found = fast_row(one, kind, True, &shifted, NULL, lead, count, source, target[r])
        if found:
            row_with_care(one, kind, call, &shifted, found, lead, count, source, target[r])
        if call.staged:
            stream_row(one, call, buffers, first_row, r, rows, column, count, first, last, target[r])
        for k in range(SOURCES):
            source[k] = <real_t*>(<char*>source[k] + step[k])
    if call.has_bias:
        add_tile(one, kind, call, first_row, lead, count, target, sums)


# ---- leaves, tree and threads -----------------------------------------------------------------------------------

cdef inline int node_level(Py_ssize_t first_leaf, Py_ssize_t end_leaf, int most) noexcept nogil:
    """Level of the largest complete node, at most level `most`, that begins at `first_leaf` and ends by `end_leaf`."""
    cdef int level = 0
    while (level < most and (first_leaf >> level) & 1 == 0
           and first_leaf + (<Py_ssize_t>2 << level) <= end_leaf):
        level += 1
    return level


cdef inline Py_ssize_t leaves_of(const Call* call) noexcept nogil:
    return (call.batch + LEAF_ROWS - 1) // LEAF_ROWS


cdef inline void prefetch_edges(const Call* call, Py_ssize_t row, Py_ssize_t first_column,
                                Py_ssize_t end_column) noexcept nogil:
    """Asks for the lines at the ends of a run's output rows, where they are shared with other data.

    Only whole lines can bypass the cache. A store to any other waits for its line, and all later stores wait behind it.
    """
    cdef const Plane* plane
    cdef const char* p
    cdef Py_ssize_t r, k
    for k in range(TARGETS):
        plane = &call.target[k]
        for r in range(row, min(row + 2 * RUN_ROWS, call.batch)):
            p = plane.data + r * plane.row_stride + first_column * plane.column_stride
            if r >= row + RUN_ROWS and <Py_ssize_t>p & 63:
                prefetch_bytes(p, 1)
            p += (end_column - first_column) * plane.column_stride
            if r < row + RUN_ROWS and <Py_ssize_t>p & 63:
                prefetch_bytes(p - 1, 1)


cdef inline Py_ssize_t lead_of(const Call* call, Py_ssize_t first_column, Py_ssize_t columns) noexcept nogil:
    """Columns before the first 64-byte line of every row; 0 where rows differ in it, or where little is gained.

    A line that two vectors share is read or written twice. The inputs decide where outputs pass through the stage, but
    for halves, which pass through it on either side: there the lines of the outputs, which leave the cache, do.
    """
    cdef bint halves = call.storage >= STORAGE_FLOAT16
    cdef const Plane* plane = &call.source[4] if call.staged and not halves else &call.target[0]
    cdef Py_ssize_t size = call.item_bytes
    cdef Py_ssize_t lead = -<Py_ssize_t>(plane.data + first_column * size) & 63
    if (columns < (2 * LEAD_PAYS if call.staged else LEAD_PAYS) or call.blocked
            or not (call.streaming if halves else plane.direct)
            or call.hidden * size % 64 or plane.row_stride % 64 or lead % size):
        return 0
    return lead // size


cdef void compute_leaves(real_t one, row_t kind, const Call* call, const Buffers* buffers, Py_ssize_t first_row,
                         Py_ssize_t end_row, Py_ssize_t first_column, Py_ssize_t columns, Py_ssize_t lead,   # IN
                         double* sums) noexcept nogil:                                                       # OUT
    """One strip of one leaf, run by run; or where inputs are read in blocks, of up to BLOCK_ROWS, tile by tile."""
    cdef Py_ssize_t block_columns = call.tile if call.blocked else columns
    cdef Py_ssize_t block = 0
    cdef Py_ssize_t row, column, count, k
    cdef double* leaf_sums
    cdef Ahead ahead
    while block < columns:
        block_columns = min(block_columns, columns - block)
        if call.blocked:
            for k in range(SOURCES):
                if call.source[k].blocked:
                    pack_block(one, &call.source[k], call.storage, first_row, end_row - first_row,
                               first_column + block, block_columns, buffers.pitch,
                               <real_t*>buffers.blocks + k * BLOCK_ROWS * buffers.pitch)
        row = first_row
        while row < end_row:
            if call.streaming and not call.joined:
                prefetch_edges(call, row, first_column + block, first_column + block + block_columns)
            leaf_sums = sums + (row - first_row) // LEAF_ROWS * sums_doubles(call)
            column = block
            while column < block + block_columns:
                # The first tile takes the lead too, and the last what would be too little for a tile of its own.
                count = block + block_columns - column
                if count > call.tile + lanes_of(one):
                    count = call.tile + (lead if column == 0 else 0)
                ahead = ahead_of(call, row, column + count, first_column, columns)
                compute_tile(one, kind, call, buffers, &ahead, row, min(<Py_ssize_t>RUN_ROWS, end_row - row),
                             first_column + column, count,
                             lead if column == 0 and call.storage < STORAGE_FLOAT16 else 0,
                             column == block, column + count == block + block_columns, leaf_sums + column)
                column += count
            row += RUN_ROWS
        block += block_columns


cdef void merge_sums(const Call* call, Py_ssize_t columns,
                     double* left,                                                                           # INOUT
                     double* right) noexcept nogil:                                                          # IN
    """One step of the tree on the wide sums of one strip: the left child becomes the parent."""
    cdef bint pairs = call.storage == STORAGE_FLOAT64
    cdef Py_ssize_t low = GATES * call.strip
    cdef Py_ssize_t k
    for k in range(GATES):
        add_wide(pairs, columns, left + k * call.strip, left + low + k * call.strip,
                 right + k * call.strip, right + low + k * call.strip)


cdef void round_sums(Storage storage, Py_ssize_t count, const double* high, const double* low,               # IN
                     char* bias, Py_ssize_t stride) noexcept nogil:                                          # OUT
    """Rounds wide sums once, to the output's type, so many elements at a time."""
    cdef float rounded[64]
    cdef uint16_t halves[64]
    cdef char* source = <char*>rounded if storage == STORAGE_FLOAT32 else <char*>halves
    cdef Py_ssize_t size = 4 if storage == STORAGE_FLOAT32 else 2
    cdef Py_ssize_t first, some, j
    cdef double total
    if storage == STORAGE_FLOAT64:
        for j in range(count):
            # Where the sum is Inf the pair's low part is NaN: what was cut off has no value then.
            total = high[j] + low[j] if high[j] - high[j] == 0 else high[j]
            memcpy(bias + j * stride, &total, 8)
        return
    for first from 0 <= first < count by 64:
        some = min(count - first, <Py_ssize_t>64)
        if storage == STORAGE_FLOAT32:
            for j in range(some):
                rounded[j] = <float>high[first + j]
        else:
            for j in range(some):
                rounded[j] = f64_to_f32_odd(high[first + j])
            if storage == STORAGE_FLOAT16:
                f32_row_to_f16(rounded, source, some)
            else:
                f32_row_to_bf16(rounded, source, some)
        if stride == size:
            memcpy(bias + first * size, source, some * size)
        else:
            for j in range(some):
                memcpy(bias + (first + j) * stride, source + j * size, size)


cdef inline bint is_root(const Call* call) noexcept nogil:
    """Whether the only piece is the whole batch, and its sums are rounded as soon as they are there."""
    return call.pieces == 1 and call.bias != NULL


cdef void compute_piece(real_t one, row_t kind, const Call* call, Buffers* buffers, Node piece,
                        Py_ssize_t first_column, Py_ssize_t columns,                                         # IN
                        double* node) noexcept nogil:                                                        # OUT
    """One strip of one piece, a complete node of the tree; its wide sums go to `node` [1 + pairs][GATES, hidden]."""
    cdef Py_ssize_t size = sums_doubles(call)
    cdef bint pairs = call.storage == STORAGE_FLOAT64
    cdef Py_ssize_t lead = lead_of(call, first_column, columns)
    cdef double* base = <double*>buffers.sums + (-lead & 7)     # so that they, too, are on a line at the lead
    cdef Py_ssize_t at_once = BLOCK_ROWS // LEAF_ROWS if call.blocked else 1
    cdef Py_ssize_t leaves = min(<Py_ssize_t>1 << piece.level, at_once)
    cdef Py_ssize_t first = (piece.first_leaf - call.first_leaf) * LEAF_ROWS
    cdef Py_ssize_t depth = 0
    cdef Py_ssize_t group, row, k, merged
    buffers.first_row = first
    buffers.end_row = min(first + (<Py_ssize_t>LEAF_ROWS << piece.level), call.batch)
    for group in range((<Py_ssize_t>1 << piece.level) // leaves):
        row = first + group * leaves * LEAF_ROWS
        buffers.block_row = row
        compute_leaves(one, kind, call, buffers, row, min(row + leaves * LEAF_ROWS, buffers.end_row), first_column,
                       columns, lead, base + depth * size)
        if not call.has_bias:
            continue
        # Every leaf completes as many nodes as its number, counted from 1, has factors 2. (The sums of more than two
        # leaves at a time would not lie where merging expects them.)
        for k in range(group * leaves, (group + 1) * leaves):
            depth += 1
            merged = k
            while merged & 1:
                depth -= 1
                merge_sums(call, columns, base + (depth - 1) * size, base + depth * size)
                merged >>= 1
    if call.has_bias and is_root(call):
        for k in range(GATES):
            round_sums(call.storage, columns, base + k * call.strip, base + (GATES + k) * call.strip,
                       call.bias + (k * call.hidden + first_column) * call.bias_stride, call.bias_stride)
    elif call.has_bias:
        for k in range((1 + pairs) * GATES):
            memcpy(node + k * call.hidden + first_column, base + k * call.strip, columns * sizeof(double))


cdef inline Node* pieces_of(const Call* call) noexcept nogil:
    return <Node*>call.scratch


cdef inline double* nodes_of(const Call* call) noexcept nogil:
    return <double*>(call.scratch + padded(call.pieces * sizeof(Node)))


cdef void compute_item(const Call* call, Py_ssize_t item, char* block) noexcept nogil:
    """One piece by one strip, with a thread's block of scratch memory."""
    cdef const Node* pieces = pieces_of(call)
    cdef double* nodes = nodes_of(call)
    cdef Py_ssize_t width = 8 if call.storage == STORAGE_FLOAT64 else 4
    cdef Py_ssize_t first_column = strip_start(call, item % call.strips)
    cdef Py_ssize_t columns = strip_start(call, item % call.strips + 1) - first_column
    cdef Py_ssize_t piece = item // call.strips
    cdef Buffers buffers
    # Each row has 64 bytes before it, which streaming may read. The pitch is no power of two, so that rows do not all
    # compete for the same places of the cache.
    buffers.pitch = pitch_of(call, width)
    buffers.zeros = block + 64
    buffers.exponential = buffers.zeros + buffers.pitch * width
    buffers.lifted = buffers.exponential + 2 * buffers.pitch * width
    buffers.packed = buffers.lifted + 3 * buffers.pitch * width
    buffers.blocks = buffers.packed + SOURCES * buffers.pitch * width
    buffers.stage = buffers.blocks + (SOURCES * BLOCK_ROWS * buffers.pitch * width if call.blocked else 0)
    buffers.halves = buffers.stage + RUN_ROWS * TARGETS * buffers.pitch * width
    buffers.carry = <lstmcell_carry*>(buffers.halves + buffers.pitch * width)
    buffers.sums = <char*>(buffers.carry + RUN_ROWS * TARGETS)
    memset(buffers.zeros, 0, buffers.pitch * width)
    if call.storage == STORAGE_FLOAT64:
        compute_piece(<double>1, <f64_row>NULL, call, &buffers, pieces[piece], first_column,
                      columns, nodes + piece * 2 * GATES * call.hidden)
    else:
        compute_piece(<float>1, <f32_row>NULL, call, &buffers, pieces[piece], first_column,
                      columns, nodes + piece * GATES * call.hidden)


cdef void cut_strips(Call* call) noexcept nogil:
    """Cuts the columns where there are fewer pieces than items wanted.

    Where each thread has its fixed share (run_items), that only makes shares equal, so pieces that are so already are
    left whole. Strips begin on a 64-byte line of the outputs: a line that two threads write travels between them.
    Several strips for each thread keep two threads from working on neighbouring columns at the same time.
    """
    cdef Py_ssize_t items = 4 * call.threads
    cdef Py_ssize_t wanted = 1
    if call.threads > 1 and call.pieces < items and (call.streaming or call.pieces % call.threads != 0):
        wanted = (items + call.pieces - 1) // call.pieces
        while not call.streaming and wanted * call.pieces % call.threads != 0:
            wanted += 1
    call.strips = max(min(wanted, call.hidden // LEAST_STRIP), (call.hidden + MOST_STRIP - 1) // MOST_STRIP)
    call.strip = (lines_of(call) + call.strips - 1) // call.strips * 64 // call.item_bytes
    call.threads = <int>min(<Py_ssize_t>call.threads, call.pieces * call.strips)


cdef void plan(Call* call) noexcept nogil:
    """Cuts the work into pieces and strips for the number of threads, and says how much scratch memory that takes.

    With several threads about four items each, so that a thread that is held up does not hold up the rest.
    """
    cdef Py_ssize_t leaves = leaves_of(call)
    cdef Py_ssize_t end_leaf = call.first_leaf + leaves
    cdef Py_ssize_t width = 8 if call.storage == STORAGE_FLOAT64 else 4
    cdef Py_ssize_t items = 4 * call.threads
    cdef Py_ssize_t leaf = call.first_leaf
    call.piece_level = 0
    while (leaves >> call.piece_level) > (1 if call.threads == 1 else items):
        call.piece_level += 1
    call.pieces = 0
    while leaf < end_leaf:
        leaf += <Py_ssize_t>1 << node_level(leaf, end_leaf, call.piece_level)
        call.pieces += 1
    cut_strips(call)
    call.joined = (call.strips == 1 and not call.blocked and call.hidden * call.item_bytes >= 128
                   and call.target[0].row_stride == GATES * call.hidden * call.item_bytes
                   and call.target[4].row_stride == call.hidden * call.item_bytes)
    call.nodes_bytes = padded(call.pieces * sizeof(Node))
    if call.has_bias and not is_root(call):
        call.nodes_bytes += padded(call.pieces * (width // 4) * GATES * call.hidden * sizeof(double))
    call.tile = min((call.hidden + 15) & ~<Py_ssize_t>15, <Py_ssize_t>TILE)
    call.thread_bytes = padded(64 + (7 + SOURCES + RUN_ROWS * TARGETS) * pitch_of(call, width) * width
                               + RUN_ROWS * TARGETS * sizeof(lstmcell_carry))
    if call.blocked:
        call.thread_bytes += padded(SOURCES * BLOCK_ROWS * pitch_of(call, width) * width)
    if call.has_bias:
        call.thread_bytes += padded(((call.piece_level + 2) * sums_doubles(call) + 8) * sizeof(double))
    call.scratch_bytes = call.nodes_bytes + call.threads * call.thread_bytes


cdef void merge_nodes(bint pairs, Py_ssize_t count,
                      double* left,                                                                          # INOUT
                      const double* right) noexcept nogil:                                                   # IN
    """One step of the tree on whole nodes: the left child becomes the parent."""
    cdef double* other = <double*>right
    add_wide(pairs, count, left, left + count, other, other + count)


cdef void round_bias(Storage storage, Py_ssize_t count, const double* root,                                  # IN
                     char* bias, Py_ssize_t stride) noexcept nogil:                                          # OUT
    """Rounds the root of the tree."""
    round_sums(storage, count, root, root + count, bias, stride)


cdef enum:
    MOST_NODES = 128    # complete nodes, one after another, of which no two are siblings; of any number of rows


cdef Py_ssize_t fold_nodes(const Call* call, Py_ssize_t first, Py_ssize_t count,                             # IN
                           Node* kept, double* nodes) noexcept nogil:                                        # OUT
    """Merges sibling nodes until none is left, so many of their sums from the first on.

    What remains are at most 2 log2 complete nodes, in order: their number, what they are, and their sums at the
    beginning of `nodes`. `kept` may be the pieces themselves.
    """
    cdef const Node* pieces = pieces_of(call)
    cdef bint pairs = call.storage == STORAGE_FLOAT64
    cdef Py_ssize_t lane = GATES * call.hidden
    cdef Py_ssize_t size = (1 + pairs) * lane
    cdef Py_ssize_t number = 0
    cdef Py_ssize_t piece, k
    cdef double* node
    for piece in range(call.pieces):
        kept[number] = pieces[piece]
        if number != piece:
            for k in range(1 + pairs):
                memcpy(nodes + number * size + k * lane + first, nodes + piece * size + k * lane + first,
                       count * sizeof(double))
        number += 1
        while (number > 1 and kept[number - 2].level == kept[number - 1].level
               and (kept[number - 2].first_leaf >> kept[number - 2].level) & 1 == 0):
            number -= 1
            node = nodes + number * size + first
            add_wide(pairs, count, node - size, node - size + lane, node, node + lane)
            kept[number - 1].level += 1
    return number


cdef void finish_part(const Call* call, Py_ssize_t part) noexcept nogil:
    """One thread's part of the columns of the sums, from the pieces' nodes to the bias."""
    cdef bint pairs = call.storage == STORAGE_FLOAT64
    cdef Py_ssize_t lane = GATES * call.hidden
    cdef Py_ssize_t size = (1 + pairs) * lane
    cdef Py_ssize_t share = (lane // call.threads + 64) & ~<Py_ssize_t>63
    cdef Py_ssize_t first = min(part * share, lane)
    cdef Py_ssize_t count = min(share, lane - first)
    cdef double* nodes = nodes_of(call)
    cdef double* node
    cdef Node kept[MOST_NODES]
    cdef Py_ssize_t k
    cdef Py_ssize_t number = fold_nodes(call, first, count, kept, nodes)
    if call.bias != NULL:
        # The right edge of the tree: where a right child is missing, the left one passes unchanged.
        for k in range(number - 1, 0, -1):
            node = nodes + k * size + first
            add_wide(pairs, count, node - size, node - size + lane, node, node + lane)
        round_sums(call.storage, count, nodes + first, nodes + lane + first, call.bias + first * call.bias_stride,
                   call.bias_stride)


cdef void run_items(const Call* call, void (*compute)(const Call*, Py_ssize_t, char*) noexcept nogil,
                    void (*finish)(const Call*, Py_ssize_t) noexcept nogil) noexcept nogil:
    """All items, on the calling thread or on a team; each thread with its own scratch and a clean FPU state.

    When all are done, each thread finishes its part, if there is anything to finish.
    """
    cdef Py_ssize_t items = call.pieces * call.strips
    cdef char* blocks = call.scratch + call.nodes_bytes
    cdef Py_ssize_t item
    cdef uint64_t before = 0
    if call.threads == 1:
        for item in range(items):
            compute(call, item, blocks)
        if finish != NULL:
            finish(call, 0)
        if call.streaming:
            stream_fence()
        return
    with parallel(num_threads=call.threads):
        before = fp_state_enter()
        # What fits the caches stays with the thread, and so the core, that had it in the call before.
        if call.streaming:
            for item in prange(items, schedule="dynamic", chunksize=1):
                compute(call, item, blocks + threadid() * call.thread_bytes)
        else:
            for item in prange(items, schedule="static"):
                compute(call, item, blocks + threadid() * call.thread_bytes)
        if finish != NULL:
            for item in prange(call.threads, schedule="static"):
                finish(call, item)
        if call.streaming:
            stream_fence()
        fp_state_leave(before)


cdef void run(Call* call) noexcept nogil:
    """The whole call, as cut by `plan`, in the scratch memory that the caller has provided."""
    cdef Node* pieces = pieces_of(call)
    cdef Py_ssize_t end_leaf = call.first_leaf + leaves_of(call)
    cdef Py_ssize_t leaf = call.first_leaf
    cdef Py_ssize_t piece
    cdef uint64_t before = fp_state_enter()
    for piece in range(call.pieces):
        pieces[piece].first_leaf = leaf
        pieces[piece].level = node_level(leaf, end_leaf, call.piece_level)
        leaf += <Py_ssize_t>1 << pieces[piece].level
    if call.has_bias and not is_root(call):
        run_items(call, compute_item, finish_part)
        call.node_count = fold_nodes(call, 0, 0, pieces, nodes_of(call))
    else:
        run_items(call, compute_item, NULL)
    fp_state_leave(before)


# ---- what the module publishes ----------------------------------------------------------------------------------

cdef KernelTable table
table.version = ABI_VERSION
table.plan = plan
table.run = run
table.merge_nodes = merge_nodes
table.round_bias = round_bias

kernel_table = PyCapsule_New(&table, "lstmcell_bwd.kernel_table", NULL)
