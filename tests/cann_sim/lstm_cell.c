/* Simulated CANN (test equipment): libopapi_nn.so (libopapi.so, libcust_opapi.so). The fused LSTM cell
 * operators: their argument checks, workspace sizes and arithmetic, operation for operation. See sim.h for
 * the whole picture. Must be compiled with -ffp-contract=off: the device multiplies and adds in separate
 * instructions. */
#include "sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* CANN fact: bytes of a vector core's local buffer that one reduction step may fill, and the rows of one copy
 * into it. */
enum { LOCAL_FLOATS = 195328 / 4, COPY_ROWS = 4095, MAX_CORES = 48 };
static const uint64_t LIBRARY_BYTES = 16ull << 20;

/* ---- elements ---- */

static float half_to_float(uint16_t h)
{
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                  : exponent     ? ldexpf((float)(mantissa + 1024), exponent - 25)
                                 : ldexpf((float)mantissa, -24);
    return h & 0x8000 ? -value : value;
}

/* To nearest even, overflow to infinity (the device's default mode). */
static uint16_t float_to_half(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float magnitude = fabsf(value);
    if (isnan(value))
        return sign | 0x7e00;
    if (magnitude >= 65520.0f)
        return sign | 0x7c00;
    int exponent = magnitude < 0x1p-14f ? -14 : ilogbf(magnitude);
    int units = (int)nearbyintf(ldexpf(magnitude, 10 - exponent)); /* 1024 ... 2048 for a normal number */
    return sign | (uint16_t)(((exponent + 14) << 10) + units);
}

static float *read_floats(const SimTensor *t, int64_t rows, int64_t columns)
{
    float *values = malloc((size_t)(rows * columns) * sizeof *values);
    int64_t down = t->dim_count == 2 ? t->strides[0] : 0, across = t->strides[t->dim_count - 1];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            int64_t place = i * down + j * across;
            if (t->dtype == ACL_FLOAT)
                memcpy(&values[i * columns + j], t->bytes + 4 * place, 4);
            else {
                uint16_t half;
                memcpy(&half, t->bytes + 2 * place, 2);
                values[i * columns + j] = half_to_float(half);
            }
        }
    return values;
}

/* Writes and frees the values. */
static void write_floats(const SimTensor *t, float *values, int64_t rows, int64_t columns)
{
    int64_t down = t->dim_count == 2 ? t->strides[0] : 0, across = t->strides[t->dim_count - 1];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            int64_t place = i * down + j * across;
            uint16_t half = t->dtype == ACL_FLOAT ? 0 : float_to_half(values[i * columns + j]);
            if (t->dtype == ACL_FLOAT)
                memcpy(t->bytes + 4 * place, &values[i * columns + j], 4);
            else
                memcpy(t->bytes + 2 * place, &half, 2);
        }
    free(values);
}

/* CANN fact: clipped to +-8.8, then (E - 1) / (E + 1). Near zero it loses digits, from 8.67 on it is
 * exactly 1. Written so that a NaN survives the clip, which is not settled. */
static float clipped_tanh(float x)
{
    x = x > 8.8f ? 8.8f : x;
    x = x < -8.8f ? -8.8f : x;
    float e = expf(2.0f * x);
    return (e - 1.0f) / (e + 1.0f);
}

/* ---- argument checks ---- */

static bool has_shape(const SimTensor *t, int dim_count, int64_t first, int64_t second)
{
    return t->dim_count == dim_count && t->dims[0] == first && (dim_count == 1 || t->dims[1] == second);
}

static bool is_empty(SimTensor *const *tensors)
{
    for (int i = 0; i < tensors[0]->dim_count; i++)
        if (!tensors[0]->dims[i])
            return true;
    return false;
}

enum { GRAD_HY, GRAD_C, CX, CY, STORAGE, GRAD_GATES, GRAD_CX, GRAD_BIAS, BACKWARD_TENSORS };

static int check_backward(SimTensor *const *t, bool has_bias)
{
    static const char *const names[] = {"gradHy",  "gradC",     "cx",     "cy",
                                        "storage", "gradGates", "gradCx", "gradBias"};
    /* CANN fact: all eight, the two called optional and the unused bias included. */
    for (int i = 0; i < BACKWARD_TENSORS; i++)
        if (!t[i])
            return sim_fail(ACLNN_PARAM_NULLPTR, "%s is null", names[i]);
    for (int i = 0; i < BACKWARD_TENSORS; i++)
        if ((t[i]->dtype != ACL_FLOAT && t[i]->dtype != ACL_FLOAT16) || t[i]->dtype != t[0]->dtype)
            return sim_fail(ACLNN_PARAM_INVALID, "%s has data type %d", names[i], t[i]->dtype);
    int64_t batch = t[0]->dim_count == 2 ? t[0]->dims[0] : 0;
    int64_t hidden = t[0]->dim_count == 2 ? t[0]->dims[1] : 0;
    if (batch <= 0 || hidden <= 0)
        return sim_fail(ACLNN_PARAM_INVALID, "gradHy must have two dimensions, none of them 0");
    for (int i = GRAD_C; i < BACKWARD_TENSORS; i++) {
        bool right = i == GRAD_BIAS                    ? !has_bias || has_shape(t[i], 1, 4 * hidden, 0)
                     : i == STORAGE || i == GRAD_GATES ? has_shape(t[i], 2, batch, 4 * hidden)
                                                       : has_shape(t[i], 2, batch, hidden);
        if (!right)
            return sim_fail(ACLNN_PARAM_INVALID, "%s has the wrong shape", names[i]);
    }
    for (int i = 0; i < BACKWARD_TENSORS; i++)
        if (t[i]->format != ACL_FORMAT_ND)
            return sim_fail(ACLNN_PARAM_INVALID, "%s has format %d and must have ND", names[i], t[i]->format);
    return 0;
}

enum { INPUT_GATES, HIDDEN_GATES, FORWARD_CX, INPUT_BIAS, HIDDEN_BIAS, HY_OUT, CY_OUT, STORAGE_OUT };
enum { FORWARD_TENSORS = STORAGE_OUT + 1 };

/* Order of the forward operator: null, empty, shape, type. It looks at no format. */
static int check_forward(SimTensor *const *t, bool flag)
{
    (void)flag;
    if (!t[INPUT_GATES] || !t[HIDDEN_GATES] || !t[FORWARD_CX] || !t[INPUT_BIAS] != !t[HIDDEN_BIAS] ||
        !t[HY_OUT] || !t[CY_OUT] || !t[STORAGE_OUT])
        return sim_fail(ACLNN_PARAM_NULLPTR, "a required tensor, or one of the two biases, is null");
    if (is_empty(t))
        return 0;
    int64_t batch = t[FORWARD_CX]->dims[0], hidden = t[FORWARD_CX]->dims[1];
    for (int i = 0; i < FORWARD_TENSORS; i++) {
        bool wide = i == INPUT_GATES || i == HIDDEN_GATES || i == STORAGE_OUT;
        bool bias = i == INPUT_BIAS || i == HIDDEN_BIAS;
        if (t[i] && !has_shape(t[i], bias ? 1 : 2, bias ? 4 * hidden : batch, wide ? 4 * hidden : hidden))
            return sim_fail(ACLNN_PARAM_INVALID, "tensor %d has the wrong shape", i);
    }
    for (int i = 0; i < FORWARD_TENSORS; i++)
        if (t[i] && ((t[i]->dtype != ACL_FLOAT && t[i]->dtype != ACL_FLOAT16) || t[i]->dtype != t[0]->dtype))
            return sim_fail(ACLNN_PARAM_INVALID, "tensor %d has data type %d", i, t[i]->dtype);
    return 0;
}

/* ---- workspace ---- */

/* CANN fact: columns that one core reduces at a time, and the rows of them that fit into its local buffer. */
static int64_t reduce_columns(int64_t hidden, int dtype)
{
    int64_t cores = sim_vector_cores(), multiple = dtype == ACL_FLOAT ? 8 : 16;
    int64_t columns = ((4 * hidden + cores - 1) / cores + multiple - 1) / multiple * multiple;
    return columns < 128 ? columns : 128;
}

static uint64_t backward_bytes(SimTensor *const *t, bool has_bias)
{
    int64_t batch = t[CX]->dims[0], hidden = t[CX]->dims[1];
    int64_t rows = LOCAL_FLOATS / reduce_columns(hidden, t[CX]->dtype);
    uint64_t chunk_sums = batch > rows ? (uint64_t)(16 * hidden * ((batch + rows - 1) / rows)) : 0;
    uint64_t wide_gates = t[CX]->dtype == ACL_FLOAT16 && has_bias ? (uint64_t)(16 * hidden * batch) : 0;
    return LIBRARY_BYTES + chunk_sums + wide_gates;
}

static uint64_t forward_bytes(SimTensor *const *t, bool flag)
{
    (void)t, (void)flag;
    return LIBRARY_BYTES;
}

/* ---- bias reduction ---- */

/* A core's local buffer keeps what the last work left in it; what was there at first is anybody's guess. */
static float *local_buffer(int core)
{
    static float *buffers[MAX_CORES];
    static uint64_t generation;
    for (int i = 0; i < MAX_CORES && generation != sim_generation(); i++) {
        free(buffers[i]);
        buffers[i] = NULL;
    }
    generation = sim_generation();
    if (!buffers[core]) {
        buffers[core] = malloc(LOCAL_FLOATS * sizeof(float));
        for (int i = 0; i < LOCAL_FLOATS; i++)
            buffers[core][i] = 1000.0f + (float)(i % 97);
    }
    return buffers[core];
}

/* CANN fact, the known defect: one copy moves at most 4095 rows; the last copy moves `rows % 4095`, so none
 * at all where rows is a multiple; and every copy goes to the start of the buffer. What is not overwritten is
 * summed as it is. */
static void load_rows(float *local, const float *source, int64_t rows, int64_t row_length, int64_t width,
                      int64_t padded)
{
    int64_t copies = (rows + COPY_ROWS - 1) / COPY_ROWS;
    for (int64_t c = 0; c < copies; c++) {
        int64_t left = rows - c * COPY_ROWS, count = left < COPY_ROWS ? left : COPY_ROWS;
        float *target = local + c * COPY_ROWS * padded;
        if (sim_has_defect()) {
            count = c == copies - 1 ? rows % COPY_ROWS : COPY_ROWS;
            target = local;
        }
        for (int64_t i = 0; i < count; i++)
            memcpy(target + i * padded, source + (c * COPY_ROWS + i) * row_length,
                   (size_t)width * sizeof(float));
    }
}

/* CANN fact: neighbours first. Level l adds row i + 2^l to row i where i is a multiple of 2^(l+1). */
static void sum_rows(float *local, int64_t rows, int64_t width, int64_t padded)
{
    for (int64_t step = 1; step < rows; step *= 2)
        for (int64_t i = 0; i + step < rows; i += 2 * step)
            for (int64_t j = 0; j < width; j++)
                local[i * padded + j] += local[(i + step) * padded + j];
}

/* Columns are shared out in blocks; each is summed in chunks of rows, then the chunk sums, until one is left.
 * The core that sums a block is our choice; it decides only whose stale data the defect finds. */
static float *sum_columns(const float *gates, int64_t batch, int64_t columns, int dtype)
{
    int64_t block = reduce_columns(columns / 4, dtype), chunk = LOCAL_FLOATS / block;
    float *sums = malloc((size_t)columns * sizeof *sums);
    float *partial = malloc((size_t)((batch + chunk - 1) / chunk * columns) * sizeof *partial);
    for (int64_t start = 0; start < columns; start += block) {
        float *local = local_buffer((int)(start / block % sim_vector_cores()));
        int64_t width = start + block < columns ? block : columns - start, padded = (width + 7) / 8 * 8;
        const float *source = gates;
        for (int64_t rows = batch, chunks; source; rows = chunks) {
            chunks = (rows + chunk - 1) / chunk;
            for (int64_t c = 0; c < chunks; c++) {
                int64_t count = rows - c * chunk < chunk ? rows - c * chunk : chunk;
                load_rows(local, source + c * chunk * columns + start, count, columns, width, padded);
                sum_rows(local, count, width, padded);
                memcpy((chunks > 1 ? partial + c * columns : sums) + start, local,
                       (size_t)width * sizeof(float));
            }
            source = chunks > 1 ? partial : NULL;
        }
    }
    free(partial);
    return sums;
}

/* ---- kernels ---- */

/* CANN fact: float32 throughout, in this association; float16 is widened first and rounded once at the end,
 * and its bias is summed from the unrounded gates. */
static void backward_kernel(SimTensor *const *t, bool has_bias)
{
    int64_t batch = t[CX]->dims[0], hidden = t[CX]->dims[1];
    float *in[GRAD_GATES], *d_gates = malloc((size_t)(batch * 4 * hidden) * sizeof(float));
    float *d_cx = malloc((size_t)(batch * hidden) * sizeof(float));
    for (int i = 0; i < GRAD_GATES; i++)
        in[i] = read_floats(t[i], batch, i == STORAGE ? 4 * hidden : hidden);
    for (int64_t row = 0; row < batch; row++)
        for (int64_t j = 0; j < hidden; j++) {
            int64_t at = row * hidden + j;
            const float *gate = in[STORAGE] + row * 4 * hidden + j;
            float *d = d_gates + row * 4 * hidden + j;
            float i = gate[0], f = gate[hidden], g = gate[2 * hidden], o = gate[3 * hidden];
            float dh = in[GRAD_HY][at], tanh_c = clipped_tanh(in[CY][at]);
            float dc = (1.0f + -(tanh_c * tanh_c)) * (o * dh) + in[GRAD_C][at];
            d[0] = dc * g * (1.0f - i) * i;
            d[hidden] = dc * in[CX][at] * (1.0f - f) * f;
            d[2 * hidden] = dc * i * (1.0f + -(g * g));
            d[3 * hidden] = dh * tanh_c * (1.0f - o) * o;
            d_cx[at] = dc * f;
        }
    if (has_bias)
        write_floats(t[GRAD_BIAS], sum_columns(d_gates, batch, 4 * hidden, t[CX]->dtype), 1, 4 * hidden);
    write_floats(t[GRAD_GATES], d_gates, batch, 4 * hidden);
    write_floats(t[GRAD_CX], d_cx, batch, hidden);
    for (int i = 0; i < GRAD_GATES; i++)
        free(in[i]);
}

static float sigmoid(float x)
{
    return 1.0f / (expf(-x) + 1.0f);
}

/* The forward operator repairs the clipped tanh near zero with a polynomial; the backward one does not. */
static float forward_tanh(float x)
{
    float s = x * x;
    float near = ((s * 0.016090461204f + -0.052421370438f) * s + 0.133147126779f) * s + -0.333324134737f;
    near = (near * s + 0.999999873294f) * x;
    return fabsf(x) <= 0.55f ? near : clipped_tanh(x);
}

static void forward_kernel(SimTensor *const *t, bool flag)
{
    (void)flag;
    int64_t batch = t[FORWARD_CX]->dims[0], hidden = t[FORWARD_CX]->dims[1], columns = 4 * hidden;
    float *a = read_floats(t[INPUT_GATES], batch, columns), *b = read_floats(t[HIDDEN_GATES], batch, columns);
    float *c = read_floats(t[FORWARD_CX], batch, hidden), *h = malloc((size_t)(batch * hidden) * sizeof *h);
    float *none = calloc((size_t)columns, sizeof *none);
    float *bias = t[INPUT_BIAS] ? read_floats(t[INPUT_BIAS], 1, columns) : none;
    float *bias_2 = t[HIDDEN_BIAS] ? read_floats(t[HIDDEN_BIAS], 1, columns) : none;
    for (int64_t row = 0; row < batch; row++) {
        float *gate = a + row * columns;
        for (int64_t j = 0; j < columns; j++) {
            float x = gate[j] + b[row * columns + j] + bias[j] + bias_2[j];
            gate[j] = j / hidden == 2 ? forward_tanh(x) : sigmoid(x);
        }
        for (int64_t j = 0; j < hidden; j++) {
            float *cell = c + row * hidden + j;
            *cell = gate[hidden + j] * *cell + gate[j] * gate[2 * hidden + j];
            h[row * hidden + j] = gate[3 * hidden + j] * forward_tanh(*cell);
        }
    }
    write_floats(t[HY_OUT], h, batch, hidden);
    write_floats(t[CY_OUT], c, batch, hidden);
    write_floats(t[STORAGE_OUT], a, batch, columns);
    free(b);
    free(none);
    if (t[INPUT_BIAS]) {
        free(bias);
        free(bias_2);
    }
}

/* ---- the exported operators ---- */

static bool never_empty(SimTensor *const *tensors)
{
    (void)tensors;
    return false;
}

static const SimOperator backward = {
    .name = "aclnnThnnFusedLstmCellBackward",
    .inputs = 5,
    .outputs = 3,
    .check = check_backward,
    .is_empty = never_empty,
    .tiling_bytes = backward_bytes,
    .kernel = backward_kernel,
    .last_output_needs_flag = true,
};
#ifndef SIM_WITHOUT_FORWARD
static const SimOperator forward = {
    .name = "aclnnThnnFusedLstmCell",
    .inputs = 5,
    .outputs = 3,
    .check = check_forward,
    .is_empty = is_empty,
    .tiling_bytes = forward_bytes,
    .kernel = forward_kernel,
};
#endif

#ifndef SIM_WITHOUT_PHASE_ONE
SIM_PUBLIC int aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(uint64_t grad_hy, uint64_t grad_c, uint64_t cx,
                                                              uint64_t cy, uint64_t storage, bool has_bias,
                                                              uint64_t grad_gates, uint64_t grad_cx,
                                                              uint64_t grad_bias, uint64_t *workspace_size,
                                                              uint64_t *executor)
{
    const uint64_t handles[] = {grad_hy, grad_c, cx, cy, storage, grad_gates, grad_cx, grad_bias};
    return sim_phase_one(&backward, handles, has_bias, workspace_size, executor);
}
#endif

#ifndef SIM_WITHOUT_PHASE_TWO
SIM_PUBLIC int aclnnThnnFusedLstmCellBackward(uint64_t workspace, uint64_t workspace_size, uint64_t executor,
                                              uint64_t stream)
{
    return sim_phase_two(&backward, workspace, workspace_size, executor, stream);
}
#endif

#ifndef SIM_WITHOUT_FORWARD
SIM_PUBLIC int aclnnThnnFusedLstmCellGetWorkspaceSize(uint64_t input_gates, uint64_t hidden_gates,
                                                      uint64_t cx, uint64_t input_bias, uint64_t hidden_bias,
                                                      uint64_t hy, uint64_t cy, uint64_t storage,
                                                      uint64_t *workspace_size, uint64_t *executor)
{
    const uint64_t handles[] = {input_gates, hidden_gates, cx, input_bias, hidden_bias, hy, cy, storage};
    return sim_phase_one(&forward, handles, false, workspace_size, executor);
}

SIM_PUBLIC int aclnnThnnFusedLstmCell(uint64_t workspace, uint64_t workspace_size, uint64_t executor,
                                      uint64_t stream)
{
    return sim_phase_two(&forward, workspace, workspace_size, executor, stream);
}
#endif
