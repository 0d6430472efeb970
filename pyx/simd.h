/* The few lines of C that Cython cannot say.
 *
 * Included by the kernel stubs and by api.pyx; every function is static, so each extension carries the
 * copies that its own instruction-set flags allow.
 */
#ifndef LSTMCELL_BWD_SIMD_H
#define LSTMCELL_BWD_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define LSTMCELL_X86 1
#elif defined(__aarch64__)
#define LSTMCELL_ARM64 1
#endif

/* Restrict pointers to elements of any alignment. The vectoriser gives up on plain pointers (too many alias
 * checks), and an under-aligned element type makes a misaligned row legal C instead of undefined behaviour. */
typedef float lstmcell_f32 __attribute__((aligned(1), may_alias));
typedef double lstmcell_f64 __attribute__((aligned(1), may_alias));
typedef const lstmcell_f32 *restrict lstmcell_f32_in;
typedef const lstmcell_f64 *restrict lstmcell_f64_in;
typedef lstmcell_f32 *restrict lstmcell_f32_out;
typedef lstmcell_f64 *restrict lstmcell_f64_out;

/* ---- bit casts ------------------------------------------------------------------------------------------ */

static inline uint32_t bits_f32(float x) { uint32_t u; memcpy(&u, &x, sizeof u); return u; }
static inline float f32_bits(uint32_t u) { float x; memcpy(&x, &u, sizeof x); return x; }
static inline uint64_t bits_f64(double x) { uint64_t u; memcpy(&u, &x, sizeof u); return u; }
static inline double f64_bits(uint64_t u) { double x; memcpy(&x, &u, sizeof x); return x; }

/* ---- sums with an exact product -------------------------------------------------------------------------- */

/* Where a * b is exact, rounding it changes nothing: fused or not, the results have the same bits. So where there are
 * fused instructions they are used here, and only here. */
#if defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
static inline float plus_exact_product_f32(float c, float a, float b) { return __builtin_fmaf(a, b, c); }
static inline double plus_exact_product_f64(double c, double a, double b) { return __builtin_fma(a, b, c); }
static inline float minus_exact_product_f32(float c, float a, float b) { return __builtin_fmaf(-a, b, c); }
static inline double minus_exact_product_f64(double c, double a, double b) { return __builtin_fma(-a, b, c); }
#else
static inline float plus_exact_product_f32(float c, float a, float b) { return c + a * b; }
static inline double plus_exact_product_f64(double c, double a, double b) { return c + a * b; }
static inline float minus_exact_product_f32(float c, float a, float b) { return c - a * b; }
static inline double minus_exact_product_f64(double c, double a, double b) { return c - a * b; }
#endif

/* ---- elements in memory of any alignment and byte order --------------------------------------------------- */

static inline uint16_t load16(const char *p, int swapped) {
    uint16_t u; memcpy(&u, p, sizeof u); return swapped ? __builtin_bswap16(u) : u;
}
static inline uint32_t load32(const char *p, int swapped) {
    uint32_t u; memcpy(&u, p, sizeof u); return swapped ? __builtin_bswap32(u) : u;
}
static inline uint64_t load64(const char *p, int swapped) {
    uint64_t u; memcpy(&u, p, sizeof u); return swapped ? __builtin_bswap64(u) : u;
}

/* ---- half precision --------------------------------------------------------------------------------------- */

/* float16 to float32, exact. Integer arithmetic without branches, so that it vectorises at every level. */
static inline float f16_to_f32(uint16_t h) {
    const uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    /* Shifted into place, the exponent is 112 too small; a multiplication by 2^112 mends it, subnormals included. */
    uint32_t u = bits_f32(f32_bits(magnitude) * f32_bits(0x77800000u));
    u |= (magnitude >= 0x0f800000u) ? 0x7f800000u : 0u;             /* Inf and NaN keep an all-ones exponent */
    return f32_bits(u | ((uint32_t)(h & 0x8000u) << 16));
}

/* float32 to float16, to nearest even; a NaN becomes the quiet NaN of its sign. */
static inline uint16_t f32_to_f16(float x) {
    const uint32_t u = bits_f32(x), magnitude = u & 0x7fffffffu;
    /* Normal results: rebias, then round on the 13 bits that go. The carry may run up into Inf, as it should. */
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* Subnormal results: adding 0.5 puts the quantum 2^-24 at the last place; the adder rounds to nearest even. */
    const uint32_t subnormal = bits_f32(f32_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
    h = magnitude >= 0x477ff000u ? 0x7c00u : h;                     /* 65520 and above, Inf */
    h = magnitude > 0x7f800000u ? 0x7e00u : h;
    return (uint16_t)(h | ((u >> 16) & 0x8000u));
}

static inline float bf16_to_f32(uint16_t h) { return f32_bits((uint32_t)h << 16); }

/* float32 to bfloat16, to nearest even; a NaN becomes the quiet NaN of its sign. */
static inline uint16_t f32_to_bf16(float x) {
    const uint32_t u = bits_f32(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) & 0x8000u) | 0x7fc0u : rounded);
}

/* Whole rows. F16C has instructions for float16; the rest is left to the vectoriser. */
static inline void f16_row_to_f32(const char *source, float *restrict target, Py_ssize_t count) {
    Py_ssize_t j = 0;
#ifdef __AVX512F__
#pragma GCC unroll 8
    for (; j + 16 <= count; j += 16)
        _mm512_storeu_ps(target + j, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(source + 2 * j))));
#endif
#ifdef __F16C__
#pragma GCC unroll 8
    for (; j + 8 <= count; j += 8)
        _mm256_storeu_ps(target + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + 2 * j))));
#endif
    for (; j < count; j++) target[j] = f16_to_f32(load16(source + 2 * j, 0));
}

static inline void f32_row_to_f16(const float *restrict source, char *target, Py_ssize_t count) {
    Py_ssize_t j = 0;
#ifdef __AVX512F__
#pragma GCC unroll 8
    for (; j + 16 <= count; j += 16)
        _mm256_storeu_si256((__m256i *)(target + 2 * j), _mm512_cvtps_ph(_mm512_loadu_ps(source + j), 0));
#endif
#ifdef __F16C__
#pragma GCC unroll 8
    for (; j + 8 <= count; j += 8)
        _mm_storeu_si128((__m128i *)(target + 2 * j), _mm256_cvtps_ph(_mm256_loadu_ps(source + j), 0));
#endif
    for (; j < count; j++) { const uint16_t h = f32_to_f16(source[j]); memcpy(target + 2 * j, &h, sizeof h); }
}

static inline void bf16_row_to_f32(const char *source, float *restrict target, Py_ssize_t count) {
    Py_ssize_t j = 0;
#ifdef __AVX512F__
#pragma GCC unroll 8
    for (; j + 16 <= count; j += 16)
        _mm512_storeu_si512(target + j, _mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(source + 2 * j))), 16));
#endif
    for (; j < count; j++) target[j] = bf16_to_f32(load16(source + 2 * j, 0));
}

static inline void f32_row_to_bf16(const float *restrict source, char *target, Py_ssize_t count) {
    Py_ssize_t j = 0;
#ifdef __AVX512BW__
    /* f32_to_bf16 in half the instructions: where the last bit that stays is 1, a half is added, else a half less one;
     * what stays of two vectors are their odd 16-bit words. */
    static const uint16_t odd_words[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                           33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    for (; j + 32 <= count; j += 32) {
        __m512i part[2];
        for (int k = 0; k < 2; k++) {
            const __m512 x = _mm512_loadu_ps(source + j + 16 * k);
            const __m512i u = _mm512_castps_si512(x);
            const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
            const __m512i sign = _mm512_and_epi32(u, _mm512_set1_epi32((int)0x80000000u));
            __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
            r = _mm512_mask_add_epi32(r, odd, u, _mm512_set1_epi32(0x8000));
            part[k] = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), sign,
                                           _mm512_set1_epi32(0x7fc00000));
        }
        _mm512_storeu_si512(target + 2 * j,
                            _mm512_permutex2var_epi16(part[0], _mm512_loadu_si512(odd_words), part[1]));
    }
#endif
    for (; j < count; j++) {
        const uint16_t h = f32_to_bf16(source[j]);
        memcpy(target + 2 * j, &h, sizeof h);
    }
}

/* double to float, to odd: the last bit records that something was cut off, so that a second rounding to a half
 * type has the result of a single one. */
static inline float f64_to_f32_odd(double x) {
    const float y = (float)x;
    const uint32_t inexact = ((double)y < x) | ((double)y > x);     /* not for NaN */
    const uint32_t too_large = fabs((double)y) > fabs(x);
    return f32_bits((bits_f32(y) - (inexact & too_large)) | inexact);
}

/* ---- transposed blocks ------------------------------------------------------------------------------------------ */

/* target[r][j] = element r of column j, for columns that are contiguous and `stride` bytes apart. */
static inline void transpose_f32(const char *source, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t columns,
                                 float *restrict target, Py_ssize_t pitch) {
    Py_ssize_t whole_rows = 0, whole_columns = 0;
#ifdef LSTMCELL_X86
    whole_rows = rows & ~(Py_ssize_t)3;
    whole_columns = columns & ~(Py_ssize_t)3;
    for (Py_ssize_t j = 0; j < whole_columns; j += 4)
        for (Py_ssize_t r = 0; r < whole_rows; r += 4) {
            const char *p = source + j * stride + 4 * r;
            __m128 a = _mm_loadu_ps((const float *)p), b = _mm_loadu_ps((const float *)(p + stride));
            __m128 c = _mm_loadu_ps((const float *)(p + 2 * stride)), d = _mm_loadu_ps((const float *)(p + 3 * stride));
            _MM_TRANSPOSE4_PS(a, b, c, d);
            float *q = target + r * pitch + j;
            _mm_storeu_ps(q, a);
            _mm_storeu_ps(q + pitch, b);
            _mm_storeu_ps(q + 2 * pitch, c);
            _mm_storeu_ps(q + 3 * pitch, d);
        }
#endif
    for (Py_ssize_t j = 0; j < columns; j++)
        for (Py_ssize_t r = j < whole_columns ? whole_rows : 0; r < rows; r++)
            memcpy(target + r * pitch + j, source + j * stride + 4 * r, 4);
}

static inline void transpose_f64(const char *source, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t columns,
                                 double *restrict target, Py_ssize_t pitch) {
    for (Py_ssize_t j = 0; j < columns; j++)
        for (Py_ssize_t r = 0; r < rows; r++) memcpy(target + r * pitch + j, source + j * stride + 8 * r, 8);
}

/* ---- stores that bypass the cache ------------------------------------------------------------------------- */

#ifdef LSTMCELL_X86
static inline void stream_line(char *target, const char *source) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)target, _mm512_loadu_si512((const void *)source));
#elif defined(__AVX__)
    for (int k = 0; k < 64; k += 32)
        _mm256_stream_si256((__m256i *)(target + k), _mm256_loadu_si256((const __m256i *)(source + k)));
#else
    for (int k = 0; k < 64; k += 16)
        _mm_stream_si128((__m128i *)(target + k), _mm_loadu_si128((const __m128i *)(source + k)));
#endif
}
#endif

/* What waits for the other part of its 64-byte line, at the end and at the beginning of a row. */
typedef struct {
    char tail[64]; /* the last bytes */
    char head[64]; /* the first ones */
} lstmcell_carry;

/* What becomes of a line that is shared with other data: the part that is here is written; or it waits for the other;
 * or the other waits already, and the line is written whole. */
typedef enum { LSTMCELL_IN_PART, LSTMCELL_WAITS, LSTMCELL_WHOLE } lstmcell_edge;

#ifdef LSTMCELL_X86
/* Writes a line whose first `cut` bytes are those before `end`, and whose others are those from `start` on. 64 bytes
 * may be read before `end` and on either side of `start`. */
static inline void stream_joined(char *line, const char *end, const char *start, Py_ssize_t cut) {
#ifdef __AVX512BW__
    /* In a register: a load that meets two recent stores waits for both, and for all stores before them. */
    _mm512_stream_si512((void *)line, _mm512_mask_loadu_epi8(_mm512_loadu_si512((const void *)(start - cut)),
                                                             ((__mmask64)1 << cut) - 1, end - cut));
#else
    char bytes[128];
    memcpy(bytes, end - 64, 64);
    memcpy(bytes + 64, start, 64);
    stream_line(line, bytes + 64 - cut);
#endif
}
#endif

/* Writes `count` bytes of a row past the cache, in whole 64-byte lines of the target. The first line, where the row's
 * bytes do not begin it, is that of `own`; the last one is that of `after`, which is `own` if more of the row follows,
 * else the row behind it. Up to 64 bytes before and after those at `source` are read. */
static inline void stream_bytes(char *target, const char *source, Py_ssize_t count, lstmcell_edge first,
                                lstmcell_edge last, lstmcell_carry *own, lstmcell_carry *after) {
#ifdef LSTMCELL_X86
    const Py_ssize_t cut = (Py_ssize_t)((uintptr_t)target & 63u);
    Py_ssize_t b = -cut, rest;
    char bytes[192];
    if (first == LSTMCELL_WHOLE && cut + count < 64) { /* too little for a line: seen together with what waits */
        memcpy(bytes, own->tail, 64);
        memcpy(bytes + 64, source, (size_t)count);
        source = bytes + 64 - cut;
        target -= cut;
        count += cut;
        b = 0;
    } else if (cut) {
        if (first == LSTMCELL_WHOLE)
            stream_joined(target - cut, own->tail + 64, source, cut);
        else if (first == LSTMCELL_WAITS)
            memcpy(own->head, source, 64);
        else
            memcpy(target, source, (size_t)(count < 64 - cut ? count : 64 - cut));
        b += 64;
    }
#pragma GCC unroll 4
    for (; b + 64 <= count; b += 64) stream_line(target + b, source + b);
    rest = count - b;
    if (rest <= 0) return;
    if (last == LSTMCELL_WHOLE)
        stream_joined(target + b, source + count, after->head, rest);
    else if (last == LSTMCELL_WAITS)
        memcpy(after->tail, source + count - 64, 64);
    else
        memcpy(target + b, source + b, (size_t)rest);
#else
    (void)first;
    (void)last;
    (void)own;
    (void)after;
    memcpy(target, source, (size_t)count);
#endif
}

static inline void stream_fence(void) {
#ifdef LSTMCELL_X86
    _mm_sfence();
#endif
}

/* ---- prefetch into the second cache --------------------------------------------------------------------------- */

/* Written as volatile assembly: GCC takes a function that does nothing but prefetch for one without effect, and drops
 * the calls. */
static inline void prefetch_bytes(const char *p, Py_ssize_t count) {
#pragma GCC unroll 8
    for (Py_ssize_t b = 0; b < count; b += 64)
#if defined(LSTMCELL_X86)
        __asm__ volatile("prefetcht1 %0" : : "m"(p[b]));
#elif defined(LSTMCELL_ARM64)
        __asm__ volatile("prfm pldl2keep, %0" : : "Q"(p[b]));
#else
        (void)p;
#endif
}

/* ---- floating-point state --------------------------------------------------------------------------------- */

/* Sets round-to-nearest, all exceptions masked, no flush-to-zero, and returns what was there before. */
static inline uint64_t fp_state_enter(void) {
#if defined(LSTMCELL_X86)
    const uint64_t before = _mm_getcsr();
    _mm_setcsr(0x1f80u);
    return before;
#elif defined(LSTMCELL_ARM64)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return before;
#else
    return 0;
#endif
}

static inline void fp_state_leave(uint64_t before) {
#if defined(LSTMCELL_X86)
    _mm_setcsr((unsigned)before);
#elif defined(LSTMCELL_ARM64)
    __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
#else
    (void)before;
#endif
}

#endif
