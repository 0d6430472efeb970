/* The same-bytes limit: moves what the operator moves, with next to no arithmetic.
 *
 * Read once: grad_hy, grad_cy, cx, cy [N, H] and gates [N, 4H]. Written once: grad_gates [N, 4H] and grad_cx [N, H].
 *
 *     grad_gates = gates                            grad_cx = grad_hy ^ grad_cy ^ cx ^ cy      (bit by bit)
 *
 * Every input bit reaches exactly one output bit, so a read or a write that is left out shows in the result, and
 * nothing can be dropped by the compiler. Bytes are all that counts: one code for every number type.
 *
 * Shapes of the loop, all with the same result:
 *     rows    a row at a time, the operator's 13 streams side by side
 *     tiles   a row at a time, TILE bytes of each stream after the other
 *     flat    no rows: the two arrays are long runs, cut into blocks that threads share
 * Tiles and runs are cut on the 64-byte lines of the destination; there whole lines can be written past the cache.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE = 64, TILE = 4096 };
enum shape { ROWS = 0, TILES = 1, FLAT = 2 };

typedef uint8_t line_t __attribute__((vector_size(LINE), aligned(1), may_alias));

typedef struct {
    const char *grad_hy, *grad_cy, *cx, *cy, *gates;
    char *grad_gates, *grad_cx;
    int64_t rows, row_bytes; /* row_bytes: one row of [N, H]; all arrays are C-contiguous */
} arrays_t;

/* ---- one line, one run ---------------------------------------------------------------------------------------- */

#define LOAD(p) (*(const line_t *)(p))

static inline void store(char *p, line_t value, int streaming) {
#if defined(__x86_64__)
    if (streaming) { /* p is on a line */
#if defined(__AVX512F__)
        _mm512_stream_si512((void *)p, (__m512i)value);
#elif defined(__AVX__)
        __m256i part[2];
        memcpy(part, &value, sizeof part);
        for (int k = 0; k < 2; k++) _mm256_stream_si256((__m256i *)p + k, part[k]);
#else
        __m128i part[4];
        memcpy(part, &value, sizeof part);
        for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i *)p + k, part[k]);
#endif
        return;
    }
#else
    (void)streaming;
#endif
    *(line_t *)p = value;
}

static inline int64_t to_line(const char *p) { return (int64_t)(-(uintptr_t)p & (LINE - 1)); }

static inline void copy_run(char *target, const char *a, int64_t bytes, int streaming) {
    int64_t b = to_line(target);
    if (b > bytes) b = bytes;
    memcpy(target, a, (size_t)b);
    for (; b + LINE <= bytes; b += LINE) store(target + b, LOAD(a + b), streaming);
    memcpy(target + b, a + b, (size_t)(bytes - b));
}

static inline void mix_run(char *target, const char *a, const char *b, const char *c, const char *d, int64_t bytes,
                           int streaming) {
    const int64_t head = to_line(target) < bytes ? to_line(target) : bytes;
    int64_t k = 0;
    for (; k < head; k++) target[k] = a[k] ^ b[k] ^ c[k] ^ d[k];
    for (; k + LINE <= bytes; k += LINE)
        store(target + k, LOAD(a + k) ^ LOAD(b + k) ^ LOAD(c + k) ^ LOAD(d + k), streaming);
    for (; k < bytes; k++) target[k] = a[k] ^ b[k] ^ c[k] ^ d[k];
}

/* ---- shapes ----------------------------------------------------------------------------------------------------- */

static inline void move_rows(const arrays_t *m, int64_t first, int64_t end) {
    const int64_t h = m->row_bytes;
    for (int64_t r = first; r < end; r++) {
        const char *gates = m->gates + 4 * r * h;
        char *grad_gates = m->grad_gates + 4 * r * h;
        const int64_t p = r * h;
        int64_t j = 0;
        for (; j + LINE <= h; j += LINE) {
            for (int k = 0; k < 4; k++) store(grad_gates + k * h + j, LOAD(gates + k * h + j), 0);
            store(m->grad_cx + p + j, LOAD(m->grad_hy + p + j) ^ LOAD(m->grad_cy + p + j) ^ LOAD(m->cx + p + j)
                  ^ LOAD(m->cy + p + j), 0);
        }
        if (j < h) {
            for (int k = 0; k < 4; k++) memcpy(grad_gates + k * h + j, gates + k * h + j, (size_t)(h - j));
            for (; j < h; j++)
                m->grad_cx[p + j] = m->grad_hy[p + j] ^ m->grad_cy[p + j] ^ m->cx[p + j] ^ m->cy[p + j];
        }
    }
}

/* Where the next tile that begins at `from` ends: on a line of the target, or at the end. */
static inline int64_t tile_end(const char *target, int64_t from, int64_t end) {
    const int64_t to = from + TILE - (int64_t)((uintptr_t)(target + from) & (LINE - 1));
    return to < end ? to : end;
}

static inline void move_tiles(const arrays_t *m, int64_t first, int64_t end, int streaming) {
    const int64_t h = m->row_bytes;
    for (int64_t r = first; r < end; r++) {
        const char *gates = m->gates + 4 * r * h;
        char *grad_gates = m->grad_gates + 4 * r * h;
        const int64_t p = r * h;
        int64_t from[5] = {0, 0, 0, 0, 0};
        while (from[0] < h || from[1] < h || from[2] < h || from[3] < h || from[4] < h) {
            for (int k = 0; k < 4; k++) {
                const int64_t to = tile_end(grad_gates + k * h, from[k], h);
                copy_run(grad_gates + k * h + from[k], gates + k * h + from[k], to - from[k], streaming);
                from[k] = to;
            }
            const int64_t j = p + from[4], to = tile_end(m->grad_cx + p, from[4], h);
            mix_run(m->grad_cx + j, m->grad_hy + j, m->grad_cy + j, m->cx + j, m->cy + j, to - from[4], streaming);
            from[4] = to;
        }
    }
}

/* Block `k` of `blocks` of a run of `bytes`, cut on the target's lines. */
static inline int64_t cut(const char *target, int64_t bytes, int64_t k, int64_t blocks) {
    if (k == 0) return 0;
    int64_t at = (int64_t)((double)bytes / (double)blocks * (double)k);
    at += to_line(target + at);
    return (k == blocks || at > bytes) ? bytes : at;
}

static inline void move_flat(const arrays_t *m, int64_t k, int64_t blocks, int streaming) {
    const int64_t plane = m->rows * m->row_bytes;
    int64_t from = cut(m->grad_gates, 4 * plane, k, blocks), to = cut(m->grad_gates, 4 * plane, k + 1, blocks);
    copy_run(m->grad_gates + from, m->gates + from, to - from, streaming);
    from = cut(m->grad_cx, plane, k, blocks), to = cut(m->grad_cx, plane, k + 1, blocks);
    mix_run(m->grad_cx + from, m->grad_hy + from, m->grad_cy + from, m->cx + from, m->cy + from, to - from, streaming);
}

static void move_part(const arrays_t *m, int shape, int streaming, int64_t part, int64_t parts) {
    const int64_t first = m->rows * part / parts, end = m->rows * (part + 1) / parts;
    if (shape == ROWS) move_rows(m, first, end);
    else if (shape == TILES && streaming) move_tiles(m, first, end, 1);
    else if (shape == TILES) move_tiles(m, first, end, 0);
    else if (streaming) move_flat(m, part, parts, 1);
    else move_flat(m, part, parts, 0);
#if defined(__x86_64__)
    if (streaming) _mm_sfence();
#endif
}

/* ---- what the library exports ----------------------------------------------------------------------------------- */

/* Moves everything `times` times. ROWS has no streaming variant: its rows need not begin on lines. */
void same_bytes_move(const arrays_t *m, int shape, int streaming, int threads, int64_t times) {
    for (int64_t t = 0; t < times; t++) {
        if (threads == 1) {
            move_part(m, shape, streaming, 0, 1);
        } else {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
            for (int part = 0; part < threads; part++) move_part(m, shape, streaming, part, threads);
        }
    }
}

/* The highest level that the CPU and the operating system run: 0 none, 1 -mavx2, 2 -mavx512f. */
int same_bytes_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
#else
    return 0;
#endif
}
