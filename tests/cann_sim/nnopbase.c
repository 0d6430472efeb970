/* Simulated CANN (test equipment): libnnopbase.so. aclTensor, executors, the operator cache, and both phases
 * of a call as far as they are the same for every operator. See sim.h for the whole picture. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

typedef struct Entry {
    struct Entry *next;
    bool usable; /* CANN fact: not before phase two has run the executor that made it */
    size_t key_size;
    char key[];
} Entry;

typedef struct {
    const SimOperator *op;
    uint64_t handles[MAX_TENSORS];
    SimTensor tensors[MAX_TENSORS]; /* as phase one saw them */
    uint64_t workspace_size;
    Entry *entry; /* NULL: not cached */
    bool flag, from_cache, repeatable;
} Executor;

/* What waits on the stream. */
typedef struct {
    const SimOperator *op;
    SimTensor tensors[MAX_TENSORS];
    bool present[MAX_TENSORS], flag;
    uint64_t workspace, workspace_size;
} Launch;

static __thread Entry *cache; /* CANN fact: every thread has its own */
static __thread int64_t cache_size;
static __thread uint64_t cache_generation;

/* ---- tensors ---- */

static int64_t item_size(const SimTensor *t)
{
    return t->dtype == ACL_FLOAT ? 4 : 2;
}

/* CANN fact: dimensions of length 1 do not count, whatever their stride. */
static bool is_contiguous(const SimTensor *t)
{
    int64_t expected = 1;
    for (int i = t->dim_count; i--;) {
        if (t->dims[i] != 1 && t->strides[i] != expected)
            return false;
        expected *= t->dims[i];
    }
    return true;
}

static int64_t element_count(const SimTensor *t)
{
    int64_t count = 1;
    for (int i = 0; i < t->dim_count; i++)
        count *= t->dims[i];
    return count;
}

/* Lowest and one past the highest element of the view, counted from the data pointer. */
static void extent(const SimTensor *t, int64_t *low, int64_t *high)
{
    *low = t->offset;
    *high = t->offset + 1;
    for (int i = 0; i < t->dim_count; i++)
        *(t->strides[i] < 0 ? low : high) += (t->dims[i] - 1) * t->strides[i];
}

SIM_PUBLIC uint64_t aclCreateTensor(const int64_t *dims, uint64_t dim_count, int dtype,
                                    const int64_t *strides, int64_t offset, int format,
                                    const int64_t *storage, uint64_t storage_count, uint64_t data)
{
    SIM_CALL_OR("aclCreateTensor", INITIALISED, 0);
    if ((!dims && dim_count) || (!storage && storage_count) || dim_count > MAX_DIMS ||
        storage_count > MAX_DIMS) {
        sim_fail(ACLNN_PARAM_INVALID, "aclCreateTensor: null or too many dimensions");
        return 0;
    }
    SimTensor *t = calloc(1, sizeof *t);
    *t = (SimTensor){.offset = offset,
                     .dim_count = (int)dim_count,
                     .storage_count = (int)storage_count,
                     .dtype = dtype,
                     .format = format,
                     .data = data};
    int64_t step = 1;
    for (int i = (int)dim_count; i--;) {
        t->dims[i] = dims[i];
        t->strides[i] = strides ? strides[i] : step;
        step *= dims[i];
        if (t->strides[i] < 0)
            sim_violation("aclCreateTensor: negative stride");
    }
    for (uint64_t i = 0; i < storage_count; i++)
        t->storage[i] = storage[i];
    return sim_new(TENSOR, t);
}

SIM_PUBLIC int aclDestroyTensor(uint64_t handle)
{
    SIM_CALL("aclDestroyTensor", INITIALISED);
    if (!handle)
        return 0;
    if (!sim_get(TENSOR, handle, "aclDestroyTensor"))
        return sim_fail(ACLNN_INNER, "aclDestroyTensor: not a tensor");
    sim_drop(handle);
    return 0;
}

#define GETTER(name, type, value)                                                \
    SIM_PUBLIC int name(uint64_t handle, type *out)                              \
    {                                                                            \
        SIM_CALL(#name, INITIALISED);                                            \
        SimTensor *t = handle && out ? sim_get(TENSOR, handle, #name) : NULL;    \
        if (!t)                                                                  \
            return sim_fail(ACLNN_PARAM_NULLPTR, #name ": null or dead tensor"); \
        *out = value;                                                            \
        return 0;                                                                \
    }
GETTER(aclGetRawTensorAddr, uint64_t, t->data)
GETTER(aclGetViewOffset, int64_t, t->offset)
GETTER(aclGetFormat, int, t->format)
GETTER(aclGetDataType, int, t->dtype)

static int set_address(uint64_t handle, uint64_t address, const char *function)
{
    SIM_CALL(function, INITIALISED);
    SimTensor *t = handle ? sim_get(TENSOR, handle, function) : NULL;
    if (!t)
        return sim_fail(ACLNN_PARAM_NULLPTR, "%s: null or dead tensor", function);
    t->data = address;
    return 0;
}

SIM_PUBLIC int aclSetRawTensorAddr(uint64_t tensor, uint64_t address)
{
    return set_address(tensor, address, "aclSetRawTensorAddr");
}

/* CANN fact: for composite operators the index is not used, and a null executor is noticed too late. */
#define ADDRESS_SETTER(name)                                                                \
    SIM_PUBLIC int name(uint64_t executor, size_t index, uint64_t tensor, uint64_t address) \
    {                                                                                       \
        (void)index;                                                                        \
        int code = set_address(tensor, address, #name);                                     \
        return !code && !executor ? ACLNN_INNER_NULLPTR : code;                             \
    }
ADDRESS_SETTER(aclSetTensorAddr)
ADDRESS_SETTER(aclSetInputTensorAddr)
ADDRESS_SETTER(aclSetOutputTensorAddr)

/* ---- executors ---- */

SIM_PUBLIC int aclSetAclOpExecutorRepeatable(uint64_t handle)
{
    SIM_CALL("aclSetAclOpExecutorRepeatable", INITIALISED);
    Executor *e = handle ? sim_get(EXECUTOR, handle, "aclSetAclOpExecutorRepeatable") : NULL;
    if (!e)
        return sim_fail(ACLNN_PARAM_NULLPTR, "aclSetAclOpExecutorRepeatable: null or dead executor");
    if (e->from_cache) /* CANN fact */
        return sim_fail(ACLNN_INNER, "aclSetAclOpExecutorRepeatable: the executor came from the cache");
    e->repeatable = true;
    e->entry = NULL;
    return 0;
}

#ifndef SIM_OLD_RELEASE
SIM_PUBLIC int aclDestroyAclOpExecutor(uint64_t handle)
{
    SIM_CALL("aclDestroyAclOpExecutor", INITIALISED);
    if (!handle)
        return sim_fail(ACLNN_INNER_NULLPTR, "aclDestroyAclOpExecutor: null");
    if (!sim_get(EXECUTOR, handle, "aclDestroyAclOpExecutor"))
        return sim_fail(ACLNN_INNER, "aclDestroyAclOpExecutor: not an executor");
    sim_drop(handle);
    return 0;
}
#endif

/* CANN fact: either aclInit or aclnnInit is asked for; this simulation wants aclInit, as the official example
 * does. */
SIM_PUBLIC int aclnnInit(const char *path)
{
    (void)path;
    SIM_CALL("aclnnInit", ANYTIME);
    return 0;
}

SIM_PUBLIC int aclnnFinalize(void)
{
    SIM_CALL("aclnnFinalize", ANYTIME);
    return 0;
}

/* ---- the operator cache ---- */

/* CANN fact: the key holds everything but the addresses, and of these only which arguments share one. */
static size_t write_key(char *key, const SimOperator *op, SimTensor *const *tensors, bool flag)
{
    char *end = key;
    int cores = sim_vector_cores();
    end = mempcpy(end, &op, sizeof op);
    end = mempcpy(end, &cores, sizeof cores);
    end = mempcpy(end, &flag, sizeof flag);
    for (int i = 0; i < op->inputs + op->outputs; i++) {
        int twin = tensors[i] ? 0 : -1;
        while (tensors[i] && !(tensors[twin] && tensors[twin]->data == tensors[i]->data))
            twin++;
        end = mempcpy(end, &twin, sizeof twin);
        if (tensors[i]) {
            SimTensor bare = *tensors[i];
            bare.data = 0;
            end = mempcpy(end, &bare, sizeof bare);
        }
    }
    return (size_t)(end - key);
}

static Entry *find_entry(const char *key, size_t size)
{
    while (cache && cache_generation != sim_generation()) { /* a test has reset the simulation */
        Entry *next = cache->next;
        free(cache);
        cache = next;
        cache_size = 0;
    }
    cache_generation = sim_generation();
    for (Entry *e = cache; e; e = e->next)
        if (e->key_size == size && !memcmp(e->key, key, size))
            return e;
    return NULL;
}

static Entry *add_entry(const char *key, size_t size)
{
    const char *limit = getenv("ACLNN_CACHE_LIMIT");
    if (getenv("DISABLE_L2_CACHE") || cache_size >= (limit ? atoll(limit) : 10000))
        return NULL;
    Entry *e = malloc(sizeof *e + size);
    *e = (Entry){cache, false, size};
    memcpy(e->key, key, size);
    cache_size++;
    return cache = e;
}

/* ---- phase one ---- */

/* CANN fact: every piece of workspace is n + 32 rounded up to 512. */
static uint64_t piece(uint64_t bytes)
{
    return (bytes + 32 + 511) / 512 * 512;
}

/* How many of the tensors the kernel looks at. */
static int used_tensors(const SimOperator *op, bool flag)
{
    return op->inputs + op->outputs - (op->last_output_needs_flag && !flag);
}

/* CANN fact: the storage shape bounds a view that is not contiguous; a contiguous one passes without that
 * check. */
static bool view_fits(const SimTensor *t)
{
    int64_t low, high, storage = 1;
    extent(t, &low, &high);
    for (int i = 0; i < t->storage_count; i++)
        storage *= t->storage[i];
    return is_contiguous(t) || (low >= 0 && high <= storage);
}

int sim_phase_one(const SimOperator *op, const uint64_t *handles, bool flag, uint64_t *workspace_size,
                  uint64_t *executor)
{
    char function[80];
    strcat(strcpy(function, op->name), "GetWorkspaceSize");
    SIM_CALL(function, INITIALISED);
    if (!workspace_size || !executor)
        return sim_fail(ACLNN_PARAM_NULLPTR, "%s: no place for the results", function);
    if (sim_current_device() < 0) /* our choice of code; the facts only say that a context is needed */
        return sim_fail(ACLNN_RUNTIME_ERROR, "%s: %d, no context in this thread", function,
                        ACL_RT_CONTEXT_NULL);

    const int count = op->inputs + op->outputs;
    SimTensor *tensors[MAX_TENSORS] = {NULL};
    for (int i = 0; i < count; i++)
        if (handles[i] && !(tensors[i] = sim_get(TENSOR, handles[i], function)))
            return sim_fail(ACLNN_INNER, "%s: argument %d is not a tensor", function, i);

    char key[sizeof(SimTensor) * MAX_TENSORS + 128];
    size_t key_size = write_key(key, op, tensors, flag);
    Entry *entry = find_entry(key, key_size);
    bool hit = entry && entry->usable && !getenv("DISABLE_L2_CACHE");
    uint64_t bytes = 0;
    if (!hit) { /* CANN fact: a hit skips every parameter check */
        int code = op->check(tensors, flag);
        if (code)
            return code;
    }
    if (!op->is_empty(tensors)) {
        if (!sim_vector_cores()) /* CANN fact: no kernel for this chip; the operator has one code for all such
                                    causes */
            return sim_fail(ACLNN_INNER_NULLPTR, "%s: the operator does not support this chip", function);
        bytes = piece(op->tiling_bytes(tensors, flag));
        for (int i = 0; i < used_tensors(op, flag); i++) {
            if (tensors[i] && !view_fits(tensors[i]))
                return sim_fail(ACLNN_INNER_NULLPTR, "%s: view %d reaches beyond its storage", function, i);
            if (tensors[i] && !is_contiguous(tensors[i])) /* a contiguous copy of it */
                bytes += piece((uint64_t)(element_count(tensors[i]) * item_size(tensors[i])));
        }
    }
    Executor *e = calloc(1, sizeof *e);
    *e = (Executor){.op = op, .workspace_size = bytes, .flag = flag, .from_cache = hit};
    for (int i = 0; i < count; i++) {
        e->handles[i] = handles[i];
        if (tensors[i])
            e->tensors[i] = *tensors[i];
    }
    e->entry = entry ? NULL : add_entry(key, key_size);
    sim_count("cache_hits", hit);
    *workspace_size = bytes;
    *executor = sim_new(EXECUTOR, e);
    return 0;
}

/* ---- phase two and the kernel's run ---- */

/* Does an output share an element with an input or an earlier output? Marks the elements of one and tries the
 * other's, because interleaved views may overlap as ranges and yet be apart. */
static bool outputs_overlap(const Launch *launch, int count)
{
    for (int out = launch->op->inputs; out < count; out++)
        for (int in = 0; in < out; in++) {
            const SimTensor *a = &launch->tensors[in], *b = &launch->tensors[out];
            int64_t low_a, high_a, low_b, high_b, size = item_size(b);
            extent(a, &low_a, &high_a), extent(b, &low_b, &high_b);
            uint64_t start = a->data + (uint64_t)(low_a * size), end = a->data + (uint64_t)(high_a * size);
            if (!launch->present[in] || b->data + (uint64_t)(low_b * size) >= end ||
                start >= b->data + (uint64_t)(high_b * size))
                continue;
            char *marks = calloc(1, end - start);
            bool met = false;
            for (int pass = 0; pass < 2; pass++) {
                const SimTensor *t = pass ? b : a;
                bool one = t->dim_count == 1;
                for (int64_t i = 0; i < (one ? 1 : t->dims[0]); i++)
                    for (int64_t j = 0; j < t->dims[one ? 0 : 1]; j++) {
                        int64_t element =
                            t->offset + (one ? 0 : i * t->strides[0]) + j * t->strides[one ? 0 : 1];
                        uint64_t place = t->data + (uint64_t)(element * size) - start;
                        if (pass)
                            met |= place < end - start && marks[place];
                        else
                            memset(marks + place, 1, (size_t)size);
                    }
            }
            free(marks);
            if (met)
                return true;
        }
    return false;
}

/* Runs when the stream is synchronised: only now does it show whether every buffer is still there. */
static int run_launch(void *argument, int device)
{
    Launch *launch = argument;
    const SimOperator *op = launch->op;
    SimTensor *tensors[MAX_TENSORS] = {NULL};
    int code = sim_fault("kernel");
    for (int i = 0; i < used_tensors(op, launch->flag) && !code; i++) {
        SimTensor *t = &launch->tensors[i];
        int64_t low, high;
        extent(t, &low, &high);
        if (!launch->present[i] || op->is_empty((SimTensor *[]){t}))
            continue;
        int64_t size = item_size(t);
        char *bytes =
            sim_memory(t->data + (uint64_t)(low * size), (uint64_t)((high - low) * size), device, op->name);
        if (!bytes)
            code = sim_fail(ACL_RT_AICORE_EXCEPTION, "%s: bad address of tensor %d", op->name, i);
        t->bytes = bytes - (low - t->offset) * size;
        tensors[i] = t;
    }
    if (!code && launch->workspace_size &&
        !sim_memory(launch->workspace, launch->workspace_size, device, "a workspace"))
        code = sim_fail(ACL_RT_AICORE_EXCEPTION, "%s: bad workspace", op->name);
    if (!code && tensors[0]) {
        if (outputs_overlap(launch, used_tensors(op, launch->flag))) /* CANN fact: undocumented */
            sim_violation("%s: an output shares memory with another argument", op->name);
        op->kernel(tensors, launch->flag);
    }
    free(launch);
    return code;
}

static int launch(const Executor *e, uint64_t workspace, uint64_t workspace_size, uint64_t stream)
{
    const SimOperator *op = e->op;
    Launch *l = calloc(1, sizeof *l);
    SimUse uses[MAX_TENSORS + 1];
    int use_count = 0;
    *l = (Launch){.op = op, .flag = e->flag, .workspace = workspace, .workspace_size = workspace_size};
    if (workspace_size < e->workspace_size) {
        sim_violation("%s got a workspace of %llu bytes and asked for %llu", op->name,
                      (unsigned long long)workspace_size, (unsigned long long)e->workspace_size);
        l->workspace_size = e->workspace_size;
    }
    for (int i = 0; i < op->inputs + op->outputs; i++) {
        l->present[i] = e->handles[i] != 0;
        l->tensors[i] = e->tensors[i];
        /* CANN fact: after a miss phase two looks into the tensors themselves; after a hit it uses phase
         * one's addresses. */
        if (l->present[i] && !e->from_cache) {
            SimTensor *t = sim_get(TENSOR, e->handles[i], op->name);
            if (!t) {
                free(l);
                return sim_fail(ACLNN_INNER, "%s: tensor %d was destroyed between the phases", op->name, i);
            }
            l->tensors[i].data = t->data;
        }
        if (l->present[i] && i < used_tensors(op, e->flag) &&
            !op->is_empty((SimTensor *[]){&l->tensors[i]})) {
            int64_t low, high, size = item_size(&l->tensors[i]);
            extent(&l->tensors[i], &low, &high);
            uses[use_count++] = (SimUse){l->tensors[i].data + (uint64_t)(low * size),
                                         (uint64_t)((high - low) * size), i >= op->inputs};
        }
    }
    if (workspace_size)
        uses[use_count++] = (SimUse){workspace, workspace_size, true};
    int code = sim_enqueue(stream, run_launch, l, uses, use_count);
    if (code)
        free(l);
    return code ? ACLNN_RUNTIME_ERROR : 0;
}

int sim_phase_two(const SimOperator *op, uint64_t workspace, uint64_t workspace_size, uint64_t handle,
                  uint64_t stream)
{
    __attribute__((cleanup(sim_leave))) int code = sim_enter(op->name, INITIALISED);
    Executor *e = handle ? sim_get(EXECUTOR, handle, op->name) : NULL;
    if (!e)
        return sim_fail(handle ? ACLNN_INNER : ACLNN_PARAM_NULLPTR, "%s: null or used executor", op->name);
    if (!code && !workspace && workspace_size)
        code = sim_fail(ACLNN_PARAM_NULLPTR, "%s: no workspace", op->name);
    if (!code && sim_current_device() < 0)
        code =
            sim_fail(ACLNN_RUNTIME_ERROR, "%s: %d, no context in this thread", op->name, ACL_RT_CONTEXT_NULL);
    if (!code)
        code = launch(e, workspace, workspace_size, stream);
    if (!code && e->entry)
        e->entry->usable = true;
    if (!e->repeatable) /* CANN fact: phase two deletes a one-shot executor, whether it succeeds or fails */
        sim_drop(handle);
    return code;
}
