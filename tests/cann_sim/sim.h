/* Simulated CANN: test equipment, not a product. What the three stand-in libraries share.
 *
 *   runtime.c    libascendcl.so    devices, contexts, streams, memory; faults, violations, the report
 *   nnopbase.c   libnnopbase.so    aclTensor, executors, the operator cache, launching
 *   lstm_cell.c  libopapi_nn.so    the LSTM cell operators: argument checks and arithmetic
 *
 * All state lives in libascendcl.so, behind one lock. A handle given to the caller (context, stream, tensor,
 * executor) is a number, never a pointer to something real: a stale or cut one is recognised instead of
 * crashing the process. "CANN fact" marks a rule of the real system; "our choice" marks a point that public
 * material leaves open.
 */
#ifndef CANN_SIM_H
#define CANN_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_PUBLIC __attribute__((visibility("default")))

enum {
    ACL_INVALID_PARAM = 100000,
    ACL_UNINITIALIZE = 100001,
    ACL_REPEAT_INITIALIZE = 100002,
    ACL_REPEAT_FINALIZE = 100037,
    ACL_RT_PARAM_INVALID = 107000,
    ACL_RT_INVALID_DEVICEID = 107001,
    ACL_RT_CONTEXT_NULL = 107002,
    ACL_RT_STREAM_CONTEXT = 107003,
    ACL_RT_INVALID_HANDLE = 107017,
    ACL_RT_FEATURE_NOT_SUPPORT = 207000,
    ACL_RT_MEMORY_ALLOCATION = 207001,
    ACL_RT_NO_DEVICE = 207004,
    ACL_RT_NO_STREAM_RESOURCE = 207008,
    ACL_RT_AICORE_EXCEPTION = 507015,
    ACL_RT_DRV_INTERNAL_ERROR = 507899,
    ACLNN_PARAM_NULLPTR = 161001,
    ACLNN_PARAM_INVALID = 161002,
    ACLNN_RUNTIME_ERROR = 361001,
    ACLNN_INNER = 561000,
    ACLNN_INNER_NULLPTR = 561103,
};

#pragma GCC visibility push(default) /* what follows is called across the libraries */

/* ---- runtime.c ---- */

typedef enum { ANYTIME, INITIALISED, IN_CONTEXT } SimNeeds;
typedef enum { CONTEXT, STREAM, TENSOR, EXECUTOR, SIM_KINDS } SimKind;

/* First line of every exported function: takes the lock until the function returns, counts the call, and
 * leaves with `failure` (an expression that may use sim_code) where the call is forbidden here or was told to
 * fail. */
#define SIM_CALL_OR(name, needs, failure)                                      \
    __attribute__((cleanup(sim_leave))) int sim_code = sim_enter(name, needs); \
    if (sim_code)                                                              \
    return failure
#define SIM_CALL(name, needs) SIM_CALL_OR(name, needs, sim_code)

int sim_enter(const char *function, SimNeeds needs);
void sim_leave(int *code);
int sim_fault(const char *function); /* the code an armed fault orders for this call, else 0 */
int sim_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void sim_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
void sim_count(const char *what, int64_t amount); /* adds to a counter of the report */

uint64_t sim_new(SimKind kind, void *object);
void *sim_get(SimKind kind, uint64_t handle, const char *function); /* NULL, and a violation, unless alive */
void sim_drop(uint64_t handle);

/* Memory, on the device or pinned on the host, that a task will touch. */
typedef struct {
    uint64_t address, bytes;
    bool written;
} SimUse;

typedef int (*SimBody)(void *argument, int device); /* returns 0 or a 507xxx code; owns and frees argument */
int sim_enqueue(uint64_t stream, SimBody body, void *argument, const SimUse *uses, int use_count);

/* The bytes behind a device address, or NULL and a violation. device == -1: on any device. */
void *sim_memory(uint64_t address, uint64_t bytes, int device, const char *user);
bool sim_is_device(uint64_t address);
int sim_current_device(void); /* -1 without a context */
int sim_vector_cores(void);   /* 0 where the chip does not have the operators */
bool sim_has_defect(void);
uint64_t sim_generation(void); /* changes when a test resets the simulation */

/* ---- nnopbase.c ---- */

enum { MAX_DIMS = 8, MAX_TENSORS = 8, ACL_FLOAT = 0, ACL_FLOAT16 = 1, ACL_FORMAT_ND = 2 };

typedef struct {
    int64_t dims[MAX_DIMS], strides[MAX_DIMS], storage[MAX_DIMS], offset;
    int dim_count, storage_count, dtype, format;
    uint64_t data; /* the device address given by the caller */
    char *bytes;   /* at kernel time: what element (0, 0, ...) of the view really is */
} SimTensor;

/* What an operator library tells nnopbase. Inputs come first; absent optional tensors are NULL. */
typedef struct {
    const char *name;
    int inputs, outputs;
    int (*check)(SimTensor *const *tensors, bool flag);
    bool (*is_empty)(SimTensor *const *tensors);
    uint64_t (*tiling_bytes)(SimTensor *const *tensors, bool flag);
    void (*kernel)(SimTensor *const *tensors, bool flag);
    bool last_output_needs_flag; /* the last output is neither written nor looked at unless flag */
} SimOperator;

int sim_phase_one(const SimOperator *op, const uint64_t *handles, bool flag, uint64_t *workspace_size,
                  uint64_t *executor);
int sim_phase_two(const SimOperator *op, uint64_t workspace, uint64_t workspace_size, uint64_t executor,
                  uint64_t stream);

#pragma GCC visibility pop

#endif
