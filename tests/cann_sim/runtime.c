/* Simulated CANN (test equipment): the runtime, libascendcl.so. See sim.h for the whole picture. */
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* CANN fact: about 1984 streams at most on A2/A3 chips. */
enum { MAX_DEVICES = 8, MAX_FUNCTIONS = 96, MAX_VIOLATIONS = 250, MAX_STREAMS = 1984, MAX_USES = 16 };

/* Each device owns this much address space. Addresses are never handed out twice, so that a stale one stays
 * stale. */
#define DEVICE_SPAN (1ull << 40)
#define HANDLE_BASE 0x7e0000000000ull
/* A signalling NaN as float32, two NaNs as float16. */
#define POISON 0x7f857f85u

typedef struct {
    uint64_t address, bytes, taken; /* asked for; taken from the device's memory */
    char *data; /* NULL until somebody looks: a 16 MiB workspace that no kernel reads costs nothing */
    bool alive;
} Block;

typedef struct {
    Block *blocks;
    int count, room;
} BlockList;

typedef struct Task {
    struct Task *next;
    SimBody body;
    void *argument;
    SimUse uses[MAX_USES];
    int use_count;
} Task;

typedef struct {
    uint64_t handle, context;
    int device;
    Task *first, *last;
    bool is_default;
} Stream;

typedef struct {
    uint64_t handle, default_stream;
    int device;
    bool is_default;
} Context;

typedef struct {
    SimKind kind;
    void *object; /* NULL once dropped */
} Handle;

typedef struct {
    const char *name;
    int64_t calls, fail_at; /* fail_at: 0 off, n the call number, -1 every call */
    int code;
} Function;

/* In a page shared with forked children, so that the parent reads what a child did. */
typedef struct {
    int count;
    char text[MAX_VIOLATIONS][256];
} Violations;

static struct {
    int references; /* of aclInit; more than 0 means initialised */
    bool was_finalised, foreign;
    pid_t owner; /* the process that initialised; a forked child has another number */
    int devices;
    char soc[32];
    uint64_t capacity;
    bool defect, eager;
    BlockList memory[MAX_DEVICES], pinned;
    uint64_t cursor[MAX_DEVICES], used[MAX_DEVICES], default_context[MAX_DEVICES];
    int set_device[MAX_DEVICES];    /* aclrtSetDevice minus aclrtResetDevice */
    int pending_fault[MAX_DEVICES]; /* code of a failed kernel that nobody has been told yet */
    Function functions[MAX_FUNCTIONS], counters[16];
    int streams;
} sim;

/* Handles outlive a reset: numbers that a backend still holds must be recognised as stale. */
static Handle *handles;
static uint64_t handle_count, handle_room, first_handle;
static uint64_t generation = 1;
static char *device_base;
static Violations *violations;
static pid_t loader;
static pthread_mutex_t lock;
static __thread uint64_t current_context;
static __thread char last_error[512], handed_error[512];

/* ---- violations, errors, counting ---- */

void sim_violation(const char *format, ...)
{
    int index = __atomic_fetch_add(&violations->count, 1, __ATOMIC_SEQ_CST);
    if (index >= MAX_VIOLATIONS)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(violations->text[index], sizeof violations->text[index], format, arguments);
    va_end(arguments);
}

int sim_fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int used = snprintf(last_error, sizeof last_error, "E%d: ", code);
    vsnprintf(last_error + used, sizeof last_error - (size_t)used, format, arguments);
    va_end(arguments);
    return code;
}

static Function *named(Function *table, int size, const char *name)
{
    for (int i = 0; i < size; i++) {
        if (!table[i].name)
            table[i].name = strdup(name);
        if (!strcmp(table[i].name, name))
            return &table[i];
    }
    abort();
}

void sim_count(const char *what, int64_t amount)
{
    named(sim.counters, 16, what)->calls += amount;
}

int sim_fault(const char *function)
{
    Function *f = named(sim.functions, MAX_FUNCTIONS, function);
    f->calls++;
    if (f->fail_at < 0 || (f->fail_at && --f->fail_at == 0))
        return sim_fail(f->code, "simulated failure of %s", function);
    return 0;
}

/* Between the last atexit hook and the end of the process, where a finaliser must not call ACL any more. */
static bool interpreter_is_ending(void)
{
    static int (*is_finalizing)(void);
    if (!is_finalizing)
        is_finalizing = (int (*)(void))dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    if (!is_finalizing)
        is_finalizing = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    return is_finalizing && is_finalizing();
}

int sim_enter(const char *function, SimNeeds needs)
{
    pthread_mutex_lock(&lock);
    if (sim.references && getpid() != sim.owner) {
        sim_violation("%s was called in a forked child, which must not touch its parent's ACL state",
                      function);
        return sim_fail(ACL_RT_DRV_INTERNAL_ERROR, "%s: ACL belongs to the parent process", function);
    }
    if (interpreter_is_ending())
        sim_violation("%s was called after the exit hooks, while the interpreter is being taken down",
                      function);
    if (sim.was_finalised && needs != ANYTIME)
        sim_violation("%s was called after aclFinalize", function);
    int code = sim_fault(function);
    if (code)
        return code;
    if (needs != ANYTIME && !sim.references)
        return sim_fail(ACL_UNINITIALIZE, "%s: ACL is not initialised", function);
    /* CANN fact: the current device and context belong to the operating-system thread; a new thread has none.
     */
    if (needs == IN_CONTEXT && sim_current_device() < 0)
        return sim_fail(ACL_RT_CONTEXT_NULL, "%s: no context is bound to this thread", function);
    return 0;
}

void sim_leave(int *code)
{
    (void)code;
    pthread_mutex_unlock(&lock);
}

/* ---- handles ---- */

uint64_t sim_new(SimKind kind, void *object)
{
    if (handle_count == handle_room)
        handles = realloc(handles, (handle_room = handle_room ? 2 * handle_room : 256) * sizeof *handles);
    handles[handle_count] = (Handle){kind, object};
    return HANDLE_BASE + 16 * handle_count++;
}

static Handle *find_handle(uint64_t handle)
{
    uint64_t index = (handle - HANDLE_BASE) / 16;
    return handle < HANDLE_BASE || handle % 16 || index >= handle_count ? NULL : &handles[index];
}

static void *peek(SimKind kind, uint64_t handle)
{
    Handle *h = find_handle(handle);
    return h && h->kind == kind ? h->object : NULL;
}

void *sim_get(SimKind kind, uint64_t handle, const char *function)
{
    static const char *const names[SIM_KINDS] = {"context", "stream", "aclTensor", "executor"};
    void *object = peek(kind, handle);
    if (!object) {
        Handle *h = find_handle(handle);
        sim_violation("%s was given %s 0x%llx, which %s", function, names[kind], (unsigned long long)handle,
                      h && h->kind == kind ? "is no longer alive" : "was never handed out (a cut pointer?)");
    }
    return object;
}

void sim_drop(uint64_t handle)
{
    Handle *h = find_handle(handle);
    free(h->object);
    h->object = NULL;
}

/* ---- memory ---- */

bool sim_is_device(uint64_t address)
{
    return address - (uint64_t)device_base < DEVICE_SPAN * MAX_DEVICES;
}

static Block *add_block(BlockList *list, Block block)
{
    if (list->count == list->room)
        list->blocks =
            realloc(list->blocks, (size_t)(list->room = list->room ? 2 * list->room : 64) * sizeof block);
    list->blocks[list->count] = block;
    return &list->blocks[list->count++];
}

static Block *find_block(BlockList *list, uint64_t address)
{
    for (int i = list->count; i--;)
        if (list->blocks[i].address <= address && address - list->blocks[i].address < list->blocks[i].bytes)
            return &list->blocks[i];
    return NULL;
}

static void fill_with_poison(char *data, uint64_t bytes)
{
    const uint32_t word = POISON;
    for (uint64_t i = 0; i < bytes; i++)
        data[i] = ((const char *)&word)[i % 4];
}

static bool check_block(const Block *block, uint64_t address, uint64_t bytes, const char *user)
{
    const unsigned long long where = address;
    if (!block)
        sim_violation("%s uses 0x%llx, which lies in no allocation", user, where);
    else if (!block->alive)
        sim_violation("%s uses 0x%llx after it was freed", user, where);
    else if (bytes > block->bytes - (address - block->address))
        sim_violation("%s uses %llu bytes at 0x%llx, beyond the end of the allocation", user,
                      (unsigned long long)bytes, where);
    else
        return true;
    return false;
}

void *sim_memory(uint64_t address, uint64_t bytes, int device, const char *user)
{
    if (!sim_is_device(address)) {
        sim_violation("%s uses 0x%llx as device memory: a host address or a cut pointer", user,
                      (unsigned long long)address);
        return NULL;
    }
    int owner = (int)((address - (uint64_t)device_base) / DEVICE_SPAN);
    Block *block = find_block(&sim.memory[owner], address);
    if (!check_block(block, address, bytes, user))
        return NULL;
    if (device >= 0 && owner != device) {
        sim_violation("%s on device %d uses memory of device %d", user, device, owner);
        return NULL;
    }
    if (!block->data) {
        block->data = malloc(block->bytes);
        fill_with_poison(block->data, block->bytes);
    }
    return block->data + (address - block->address);
}

static void *host_memory(uint64_t address, uint64_t bytes, const char *user)
{
    Block *block = find_block(&sim.pinned, address);
    if (sim_is_device(address)) {
        sim_violation("%s uses device address 0x%llx as host memory", user, (unsigned long long)address);
        return NULL;
    }
    return block && !check_block(block, address, bytes, user) ? NULL : (void *)address;
}

static int allocate(uint64_t *out, uint64_t bytes, uint64_t tail, const char *function)
{
    SIM_CALL(function, IN_CONTEXT);
    if (!out || !bytes)
        return sim_fail(ACL_INVALID_PARAM, "%s: nothing to allocate", function);
    /* CANN fact: sizes are rounded up to 32 and get a tail of 32; start addresses are 64-byte aligned. */
    int device = sim_current_device();
    uint64_t taken = (bytes + 31) / 32 * 32 + tail;
    if (bytes > sim.capacity || sim.used[device] + taken > sim.capacity)
        return sim_fail(ACL_RT_MEMORY_ALLOCATION, "%s: out of device memory", function);
    uint64_t address = sim.cursor[device];
    sim.cursor[device] += (taken + 127) / 64 * 64;
    sim.used[device] += taken;
    /* The tail is for the kernel's own padding: the caller may use what was asked for, and no more. */
    add_block(&sim.memory[device], (Block){address, bytes, taken, NULL, true});
    *out = address;
    return 0;
}

SIM_PUBLIC int aclrtMalloc(uint64_t *out, size_t bytes, int policy)
{
    (void)policy; /* CANN fact: unknown policies are not rejected */
    return allocate(out, bytes, 32, "aclrtMalloc");
}

SIM_PUBLIC int aclrtMallocAlign32(uint64_t *out, size_t bytes, int policy)
{
    (void)policy;
    return allocate(out, bytes, 0, "aclrtMallocAlign32");
}

static Stream *next_stream(uint64_t *cursor)
{
    for (; *cursor < handle_count; ++*cursor)
        if (handles[*cursor].kind == STREAM && handles[*cursor].object)
            return handles[(*cursor)++].object;
    return NULL;
}

/* Does a queued task of any stream but `except` use this memory in a way that clashes? */
static bool clashes(uint64_t address, uint64_t bytes, bool written, const Stream *except)
{
    uint64_t cursor = first_handle;
    for (Stream *stream; (stream = next_stream(&cursor));)
        for (Task *task = stream == except ? NULL : stream->first; task; task = task->next)
            for (int i = 0; i < task->use_count; i++) {
                const SimUse *use = &task->uses[i];
                if ((written || use->written) && address < use->address + use->bytes &&
                    use->address < address + bytes)
                    return true;
            }
    return false;
}

static int release(BlockList *list, uint64_t address, const char *function)
{
    if (!address)
        return sim_fail(ACL_INVALID_PARAM, "%s: null pointer", function);
    Block *block = find_block(list, address);
    if (!block || block->address != address || !block->alive) {
        sim_violation("%s(0x%llx): %s", function, (unsigned long long)address,
                      block && !block->alive ? "freed before" : "not the start of an allocation");
        return sim_fail(ACL_RT_PARAM_INVALID, "%s: not an allocated address", function);
    }
    if (clashes(address, block->bytes, true, NULL))
        sim_violation("%s(0x%llx): a task waiting on a stream still uses it", function,
                      (unsigned long long)address);
    block->alive = false;
    if (list == &sim.pinned) {
        mprotect(block->data, block->bytes, PROT_NONE); /* never used again, so a late access is seen */
    } else {
        sim.used[list - sim.memory] -= block->taken;
        free(block->data);
    }
    block->data = NULL;
    return 0;
}

SIM_PUBLIC int aclrtFree(uint64_t address)
{
    SIM_CALL("aclrtFree", IN_CONTEXT);
    int device = sim_is_device(address) ? (int)((address - (uint64_t)device_base) / DEVICE_SPAN) : 0;
    return release(&sim.memory[device], address, "aclrtFree");
}

SIM_PUBLIC int aclrtMallocHost(uint64_t *out, size_t bytes)
{
    SIM_CALL("aclrtMallocHost", IN_CONTEXT);
    if (!out || !bytes)
        return sim_fail(ACL_INVALID_PARAM, "aclrtMallocHost: nothing to allocate");
    char *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return sim_fail(ACL_RT_MEMORY_ALLOCATION, "aclrtMallocHost: out of memory");
    fill_with_poison(data, bytes);
    add_block(&sim.pinned, (Block){(uint64_t)data, bytes, bytes, data, true});
    *out = (uint64_t)data;
    return 0;
}

SIM_PUBLIC int aclrtFreeHost(uint64_t address)
{
    SIM_CALL("aclrtFreeHost", INITIALISED);
    return release(&sim.pinned, address, "aclrtFreeHost");
}

SIM_PUBLIC int aclrtGetMemInfo(int attribute, size_t *available, size_t *total)
{
    SIM_CALL("aclrtGetMemInfo", IN_CONTEXT);
    if (attribute < 0 || attribute > 17)
        return sim_fail(ACL_INVALID_PARAM, "aclrtGetMemInfo: unknown attribute %d", attribute);
    *total = sim.capacity;
    *available = sim.capacity - sim.used[sim_current_device()];
    return 0;
}

/* ---- streams ---- */

static int take_fault(int device)
{
    int code = sim.pending_fault[device];
    sim.pending_fault[device] = 0;
    return code ? sim_fail(code, "a task that was launched earlier on device %d failed", device) : 0;
}

static void drop_tasks(Stream *stream)
{
    while (stream->first) {
        Task *task = stream->first;
        stream->first = task->next;
        free(task->argument);
        free(task);
    }
    stream->last = NULL;
}

/* CANN fact: a kernel fault is asynchronous. The launch has long returned 0; whoever asks next is told. */
static void run_tasks(Stream *stream)
{
    while (stream->first) {
        Task *task = stream->first;
        stream->first = task->next;
        int code = task->body(task->argument, stream->device);
        free(task);
        if (code) {
            sim.pending_fault[stream->device] = code;
            drop_tasks(stream);
        }
    }
    stream->last = NULL;
}

static Stream *open_stream(Context *context, bool is_default)
{
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.context = context->handle, .device = context->device, .is_default = is_default};
    stream->handle = sim_new(STREAM, stream);
    return stream;
}

/* The stream meant by a handle in this thread; 0 is the current context's default stream. */
static int find_stream(uint64_t handle, Stream **out, const char *function)
{
    Context *context = peek(CONTEXT, current_context);
    if (!handle && !context->default_stream)
        context->default_stream = open_stream(context, true)->handle;
    *out = sim_get(STREAM, handle ? handle : context->default_stream, function);
    if (!*out)
        return sim_fail(ACL_RT_INVALID_HANDLE, "%s: not a stream", function);
    if ((*out)->context != current_context)
        return sim_fail(ACL_RT_STREAM_CONTEXT, "%s: the stream belongs to another context", function);
    return 0;
}

int sim_enqueue(uint64_t handle, SimBody body, void *argument, const SimUse *uses, int use_count)
{
    Stream *stream;
    int code = find_stream(handle, &stream, "a launch");
    if (code)
        return code;
    Task *task = calloc(1, sizeof *task);
    *task = (Task){.body = body, .argument = argument, .use_count = use_count};
    memcpy(task->uses, uses, (size_t)use_count * sizeof *uses);
    for (int i = 0; i < use_count; i++)
        if (clashes(uses[i].address, uses[i].bytes, uses[i].written, stream))
            sim_violation("two streams use memory at 0x%llx at the same time, and one of them writes",
                          (unsigned long long)uses[i].address);
    *(stream->last ? &stream->last->next : &stream->first) = task;
    stream->last = task;
    if (sim.eager)
        run_tasks(stream);
    return 0;
}

static int create_stream(uint64_t *out, const char *function)
{
    SIM_CALL(function, IN_CONTEXT);
    if (sim.streams == MAX_STREAMS)
        return sim_fail(ACL_RT_NO_STREAM_RESOURCE, "%s: no stream left", function);
    sim.streams++;
    *out = open_stream(peek(CONTEXT, current_context), false)->handle;
    return 0;
}

SIM_PUBLIC int aclrtCreateStream(uint64_t *out)
{
    return create_stream(out, "aclrtCreateStream");
}

SIM_PUBLIC int aclrtCreateStreamWithConfig(uint64_t *out, uint32_t priority, uint32_t flag)
{
    (void)priority;
    (void)flag;
    return create_stream(out, "aclrtCreateStreamWithConfig");
}

SIM_PUBLIC int aclrtCtxGetCurrentDefaultStream(uint64_t *out)
{
    SIM_CALL("aclrtCtxGetCurrentDefaultStream", IN_CONTEXT);
    Stream *stream;
    int code = find_stream(0, &stream, "aclrtCtxGetCurrentDefaultStream");
    *out = stream->handle;
    return code;
}

SIM_PUBLIC int aclrtDestroyStream(uint64_t handle)
{
    SIM_CALL("aclrtDestroyStream", IN_CONTEXT);
    Stream *stream;
    int code = find_stream(handle, &stream, "aclrtDestroyStream");
    if (code || stream->is_default)
        return code ? code : sim_fail(ACL_INVALID_PARAM, "aclrtDestroyStream: a default stream stays");
    if (stream->first)
        sim_violation("aclrtDestroyStream: tasks are still waiting; synchronise first");
    drop_tasks(stream);
    sim_drop(handle);
    sim.streams--;
    return 0;
}

static int synchronise(uint64_t handle, const char *function)
{
    SIM_CALL(function, IN_CONTEXT);
    Stream *stream;
    int code = find_stream(handle, &stream, function);
    if (code)
        return code;
    run_tasks(stream);
    return take_fault(stream->device);
}

SIM_PUBLIC int aclrtSynchronizeStream(uint64_t stream)
{
    return synchronise(stream, "aclrtSynchronizeStream");
}

SIM_PUBLIC int aclrtSynchronizeStreamWithTimeout(uint64_t stream, int32_t milliseconds)
{
    (void)milliseconds;
    return synchronise(stream, "aclrtSynchronizeStreamWithTimeout");
}

SIM_PUBLIC int aclrtSynchronizeDevice(void)
{
    SIM_CALL("aclrtSynchronizeDevice", IN_CONTEXT);
    int device = sim_current_device();
    uint64_t cursor = first_handle;
    for (Stream *stream; (stream = next_stream(&cursor));)
        if (stream->device == device)
            run_tasks(stream);
    return take_fault(device);
}

/* ---- copies ---- */

typedef struct {
    uint64_t to, from, bytes;
    bool to_device, from_device;
} Copy;

/* Which sides are on the device, by the declared kind; 4 lets the runtime tell. A kind that contradicts the
 * addresses is a violation: new releases look at the addresses, older ones believe the kind. */
static int plan_copy(Copy *copy, uint64_t to, uint64_t room, uint64_t from, uint64_t bytes, int kind,
                     const char *function)
{
    *copy = (Copy){to, from, bytes, sim_is_device(to), sim_is_device(from)};
    if (kind < 0 || kind > 5 || !to || !from || bytes > room)
        return sim_fail(ACL_INVALID_PARAM, "%s: null pointer, unknown kind or destination too small",
                        function);
    if (kind != 4) {
        copy->to_device = kind == 1 || kind == 3 || kind == 5;
        copy->from_device = kind == 2 || kind == 3;
    }
    void *target = copy->to_device ? sim_memory(to, bytes, -1, function) : host_memory(to, bytes, function);
    void *source =
        copy->from_device ? sim_memory(from, bytes, -1, function) : host_memory(from, bytes, function);
    return target && source ? 0
                            : sim_fail(ACL_RT_PARAM_INVALID, "%s: bad address for kind %d", function, kind);
}

static int run_copy(void *argument, int device)
{
    Copy copy = *(Copy *)argument;
    (void)device;
    free(argument);
    const char *user = "a copy";
    void *target =
        copy.to_device ? sim_memory(copy.to, copy.bytes, -1, user) : host_memory(copy.to, copy.bytes, user);
    void *source = copy.from_device ? sim_memory(copy.from, copy.bytes, -1, user)
                                    : host_memory(copy.from, copy.bytes, user);
    if (!target || !source)
        return ACL_RT_AICORE_EXCEPTION;
    memmove(target, source, copy.bytes);
    static const char *const names[] = {"h2h_bytes", "d2h_bytes", "h2d_bytes", "d2d_bytes"};
    sim_count(names[2 * copy.to_device + copy.from_device], (int64_t)copy.bytes);
    return 0;
}

/* The synchronous calls do not wait for any stream: what a waiting task still needs must be left alone. */
static void check_no_task_waits(uint64_t address, uint64_t bytes, bool written, const char *function)
{
    if (clashes(address, bytes, written, NULL))
        sim_violation("%s %s memory that a task waiting on a stream still %s; synchronise first", function,
                      written ? "overwrites" : "reads", written ? "uses" : "has to write");
}

/* CANN fact: does not wait for any stream. What a waiting kernel has not written yet, this does not see. */
SIM_PUBLIC int aclrtMemcpy(uint64_t to, size_t room, uint64_t from, size_t bytes, int kind)
{
    SIM_CALL("aclrtMemcpy", IN_CONTEXT);
    Copy *copy = malloc(sizeof *copy);
    int code = bytes ? plan_copy(copy, to, room, from, bytes, kind, "aclrtMemcpy") : 0;
    if (!code)
        code = take_fault(sim_current_device());
    if (!bytes || code) {
        free(copy);
        return code;
    }
    check_no_task_waits(from, bytes, false, "aclrtMemcpy");
    check_no_task_waits(to, bytes, true, "aclrtMemcpy");
    return run_copy(copy, 0);
}

SIM_PUBLIC int aclrtMemcpyAsync(uint64_t to, size_t room, uint64_t from, size_t bytes, int kind,
                                uint64_t handle)
{
    SIM_CALL("aclrtMemcpyAsync", IN_CONTEXT);
    if (kind == 0)
        return sim_fail(ACL_RT_FEATURE_NOT_SUPPORT, "aclrtMemcpyAsync: no host to host copies");
    if (!bytes)
        return 0;
    Stream *stream;
    Copy *copy = malloc(sizeof *copy);
    int code = find_stream(handle, &stream, "aclrtMemcpyAsync");
    if (!code)
        code = plan_copy(copy, to, room, from, bytes, kind, "aclrtMemcpyAsync");
    if (code) {
        free(copy);
        return code;
    }
    const SimUse uses[2] = {{to, bytes, true}, {from, bytes, false}};
    bool pageable = (!copy->to_device && !find_block(&sim.pinned, to)) ||
                    (!copy->from_device && !find_block(&sim.pinned, from));
    sim_enqueue(stream->handle, run_copy, copy, uses, 2);
    /* CANN fact: with ordinary host memory the call effectively blocks; only pinned memory makes it
     * asynchronous. */
    if (pageable)
        run_tasks(stream);
    return 0;
}

SIM_PUBLIC int aclrtMemset(uint64_t address, size_t room, int value, size_t bytes)
{
    SIM_CALL("aclrtMemset", IN_CONTEXT);
    if (!address || bytes > room)
        return sim_fail(ACL_INVALID_PARAM, "aclrtMemset: null pointer or more bytes than room");
    char *target = sim_is_device(address) ? sim_memory(address, bytes, -1, "aclrtMemset")
                                          : host_memory(address, bytes, "aclrtMemset");
    if (!target)
        return sim_fail(ACL_RT_PARAM_INVALID, "aclrtMemset: bad address");
    check_no_task_waits(address, bytes, true, "aclrtMemset");
    memset(target, value, bytes);
    return 0;
}

/* ---- devices and contexts ---- */

int sim_current_device(void)
{
    Context *context = peek(CONTEXT, current_context);
    return context ? context->device : -1;
}

static int check_device(int device, const char *function)
{
    if (!sim.devices)
        return sim_fail(ACL_RT_NO_DEVICE, "%s: no device", function);
    if (device < 0 || device >= sim.devices)
        return sim_fail(ACL_RT_INVALID_DEVICEID, "%s: there is no device %d", function, device);
    return 0;
}

static Context *open_context(int device, bool is_default)
{
    Context *context = calloc(1, sizeof *context);
    *context = (Context){.device = device, .is_default = is_default};
    context->handle = sim_new(CONTEXT, context);
    return context;
}

static void close_context(Context *context, const char *function)
{
    uint64_t cursor = first_handle;
    for (Stream *stream; (stream = next_stream(&cursor));)
        if (stream->context == context->handle) {
            /* CANN fact: the order is streams, contexts, reset_device, finalize. */
            if (!stream->is_default || stream->first)
                sim_violation("%s: a stream of the context is %s", function,
                              stream->first ? "not synchronised" : "not destroyed");
            sim.streams -= !stream->is_default;
            drop_tasks(stream);
            sim_drop(stream->handle);
        }
    sim_drop(context->handle);
}

SIM_PUBLIC int aclrtGetDeviceCount(uint32_t *out)
{
    SIM_CALL("aclrtGetDeviceCount", INITIALISED);
    *out = (uint32_t)sim.devices;
    return 0;
}

/* CANN fact: binds the thread to the device's default context, which all threads share; counted against
 * reset. */
SIM_PUBLIC int aclrtSetDevice(int32_t device)
{
    SIM_CALL("aclrtSetDevice", INITIALISED);
    int code = check_device(device, "aclrtSetDevice");
    if (code)
        return code;
    if (!sim.set_device[device]++)
        sim.default_context[device] = open_context(device, true)->handle;
    current_context = sim.default_context[device];
    return 0;
}

static int reset_device(int device, bool force, const char *function)
{
    SIM_CALL(function, INITIALISED);
    int code = check_device(device, function);
    if (code)
        return code;
    if (!sim.set_device[device]) {
        sim_violation("%s(%d) without a matching aclrtSetDevice", function, device);
        return sim_fail(ACL_RT_CONTEXT_NULL, "%s: device %d is not set", function, device);
    }
    sim.set_device[device] = force ? 0 : sim.set_device[device] - 1;
    if (sim.set_device[device])
        return 0;
    for (uint64_t i = first_handle; i < handle_count; i++) {
        Context *context = handles[i].kind == CONTEXT ? handles[i].object : NULL;
        if (context && context->device == device && !context->is_default)
            sim_violation("%s(%d): a context of that device is not destroyed", function, device);
    }
    close_context(peek(CONTEXT, sim.default_context[device]), function);
    sim.pending_fault[device] = 0;
    for (int i = 0; i < sim.memory[device].count; i++)
        if (sim.memory[device].blocks[i].alive) {
            sim_violation("%s(%d): device memory is not freed", function, device);
            release(&sim.memory[device], sim.memory[device].blocks[i].address, function);
        }
    return 0;
}

SIM_PUBLIC int aclrtResetDevice(int32_t device)
{
    return reset_device(device, false, "aclrtResetDevice");
}

SIM_PUBLIC int aclrtResetDeviceForce(int32_t device)
{
    return reset_device(device, true, "aclrtResetDeviceForce");
}

SIM_PUBLIC int aclrtGetDevice(int32_t *out)
{
    SIM_CALL("aclrtGetDevice", IN_CONTEXT);
    *out = sim_current_device();
    return 0;
}

SIM_PUBLIC int aclrtGetRunMode(int *out)
{
    SIM_CALL("aclrtGetRunMode", INITIALISED);
    *out = 1; /* on the host, not on the device */
    return 0;
}

SIM_PUBLIC int aclrtCreateContext(uint64_t *out, int32_t device)
{
    SIM_CALL("aclrtCreateContext", INITIALISED);
    int code = check_device(device, "aclrtCreateContext");
    if (!code)
        *out = current_context = open_context(device, false)->handle;
    return code;
}

SIM_PUBLIC int aclrtDestroyContext(uint64_t handle)
{
    SIM_CALL("aclrtDestroyContext", INITIALISED);
    Context *context = handle ? sim_get(CONTEXT, handle, "aclrtDestroyContext") : NULL;
    if (!context || context->is_default) /* CANN fact: a default context goes with reset_device only */
        return sim_fail(ACL_INVALID_PARAM, "aclrtDestroyContext: null, dead or default context");
    close_context(context, "aclrtDestroyContext");
    return 0;
}

SIM_PUBLIC int aclrtSetCurrentContext(uint64_t handle)
{
    SIM_CALL("aclrtSetCurrentContext", INITIALISED);
    if (!handle || !sim_get(CONTEXT, handle, "aclrtSetCurrentContext"))
        return sim_fail(ACL_INVALID_PARAM, "aclrtSetCurrentContext: null or dead context");
    current_context = handle;
    return 0;
}

SIM_PUBLIC int aclrtGetCurrentContext(uint64_t *out)
{
    SIM_CALL("aclrtGetCurrentContext", IN_CONTEXT);
    *out = current_context;
    return 0;
}

/* ---- the chip ---- */

SIM_PUBLIC const char *aclrtGetSocName(void)
{
    SIM_CALL_OR("aclrtGetSocName", ANYTIME, NULL);
    return sim.soc;
}

/* CANN fact: the operators exist on the A2 and A3 families only. Mind the bare "Ascend910B": the old,
 * unsupported 910. */
int sim_vector_cores(void)
{
    static const char *const with_48[] = {"Ascend910B1",    "Ascend910B2",    "Ascend910B2C",
                                          "Ascend910_9381", "Ascend910_9382", "Ascend910_9391",
                                          "Ascend910_9392"};
    static const char *const with_40[] = {"Ascend910B3",    "Ascend910B4",    "Ascend910B4-1",
                                          "Ascend910_9362", "Ascend910_9363", "Ascend910_9372"};
    for (size_t i = 0; i < sizeof with_48 / sizeof *with_48; i++)
        if (!strcmp(sim.soc, with_48[i]))
            return 48;
    for (size_t i = 0; i < sizeof with_40 / sizeof *with_40; i++)
        if (!strcmp(sim.soc, with_40[i]))
            return 40;
    return 0;
}

bool sim_has_defect(void)
{
    return sim.defect;
}

/* ---- init, finalize, messages ---- */

SIM_PUBLIC int aclInit(const char *path)
{
    (void)path;
    SIM_CALL("aclInit", ANYTIME);
    /* CANN fact: a second call counts up, ignores its configuration and returns 100002. */
    if (sim.references++)
        return sim_fail(ACL_REPEAT_INITIALIZE, "aclInit: initialised before");
    sim.owner = getpid();
    sim.was_finalised = false;
    return 0;
}

static int finalise(bool at_once, uint64_t *left, const char *function)
{
    SIM_CALL(function, ANYTIME);
    if (!sim.references)
        return sim_fail(ACL_REPEAT_FINALIZE, "%s: not initialised", function);
    sim.references = at_once ? 0 : sim.references - 1;
    if (left)
        *left = (uint64_t)sim.references;
    sim.was_finalised = !sim.references;
    if (sim.was_finalised && sim.foreign)
        sim_violation("%s took ACL away from the library that initialised it first", function);
    return 0;
}

SIM_PUBLIC int aclFinalize(void)
{
    return finalise(true, NULL, "aclFinalize");
}

SIM_PUBLIC int aclFinalizeReference(uint64_t *left)
{
    return finalise(false, left, "aclFinalizeReference");
}

/* CANN fact: per thread, and reading clears it. */
SIM_PUBLIC const char *aclGetRecentErrMsg(void)
{
    SIM_CALL_OR("aclGetRecentErrMsg", ANYTIME, NULL);
    memcpy(handed_error, last_error, sizeof last_error);
    last_error[0] = 0;
    return handed_error[0] ? handed_error : NULL;
}

SIM_PUBLIC int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch)
{
    SIM_CALL("aclrtGetVersion", ANYTIME);
    *major = 1;
    *minor = 15;
    *patch = 0;
    return 0;
}

/* The version itself is written down in acl.py. */
SIM_PUBLIC int aclsysGetCANNVersion(int package)
{
    SIM_CALL("aclsysGetCANNVersion", ANYTIME);
    return package < 0 || package > 7 ? sim_fail(ACL_INVALID_PARAM, "no package %d", package) : 0;
}

/* ---- control by the tests: not part of CANN ---- */

SIM_PUBLIC void sim_arm_fault(const char *function, int64_t nth, int code)
{
    Function *f = named(sim.functions, MAX_FUNCTIONS, function);
    f->fail_at = nth;
    f->code = code;
}

/* 0 where the key is unknown. */
SIM_PUBLIC int sim_configure(const char *key, const char *value)
{
    char function[64];
    long long nth;
    int code, used;
    if (!strcmp(key, "SOC"))
        snprintf(sim.soc, sizeof sim.soc, "%s", value);
    else if (!strcmp(key, "DEVICES"))
        sim.devices = atoi(value) < MAX_DEVICES ? atoi(value) : MAX_DEVICES;
    else if (!strcmp(key, "MEMORY"))
        sim.capacity = strtoull(value, NULL, 10);
    else if (!strcmp(key, "DEFECT"))
        sim.defect = atoi(value);
    else if (!strcmp(key, "EAGER"))
        sim.eager = atoi(value);
    else if (!strcmp(key, "INITIALISED")) {
        sim.references = atoi(value);
        sim.foreign = sim.references > 0;
        sim.owner = getpid();
    } else if (!strcmp(key, "FAULTS")) {
        while (sscanf(value, "%63[^:]:%lld:%d%n", function, &nth, &code, &used) == 3) {
            sim_arm_fault(function, nth, code);
            value += used;
            value += *value == ',';
        }
    } else
        return 0;
    return 1;
}

uint64_t sim_generation(void)
{
    return generation;
}

/* As after loading: every object is forgotten, and handles and addresses from before are stale. */
SIM_PUBLIC void sim_reset(void)
{
    static const char *const keys[] = {"SOC",   "DEVICES",     "MEMORY", "DEFECT",
                                       "EAGER", "INITIALISED", "FAULTS"};
    uint64_t cursors[MAX_DEVICES];
    pthread_mutex_lock(&lock);
    for (uint64_t i = first_handle; i < handle_count; i++)
        if (handles[i].object) {
            if (handles[i].kind == STREAM)
                drop_tasks(handles[i].object);
            sim_drop(HANDLE_BASE + 16 * i);
        }
    first_handle = handle_count;
    for (int device = 0; device <= MAX_DEVICES; device++) {
        BlockList *list = device < MAX_DEVICES ? &sim.memory[device] : &sim.pinned;
        for (int i = 0; i < list->count && list != &sim.pinned; i++)
            free(list->blocks[i].data);
        free(list->blocks);
    }
    memcpy(cursors, sim.cursor, sizeof cursors);
    memset(&sim, 0, sizeof sim);
    for (int device = 0; device < MAX_DEVICES; device++)
        sim.cursor[device] =
            cursors[device] ? cursors[device] : (uint64_t)device_base + (uint64_t)device * DEVICE_SPAN + 4096;
    snprintf(sim.soc, sizeof sim.soc, "Ascend910B1");
    sim.devices = 1;
    sim.capacity = 64ull << 30;
    sim.defect = true;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char name[64];
        snprintf(name, sizeof name, "CANN_SIM_%s", keys[i]);
        if (getenv(name))
            sim_configure(keys[i], getenv(name));
    }
    violations->count = 0;
    generation++;
    pthread_mutex_unlock(&lock);
}

/* Counts, violations and armed faults start anew; objects, memory and contexts stay. */
SIM_PUBLIC void sim_forget(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_FUNCTIONS; i++)
        sim.functions[i].calls = sim.functions[i].fail_at = 0;
    for (int i = 0; i < 16; i++)
        sim.counters[i].calls = 0;
    violations->count = 0;
    pthread_mutex_unlock(&lock);
}

/* The calling thread's device (-1: none) and context, without a call being counted. */
SIM_PUBLIC int sim_thread_state(uint64_t *context)
{
    pthread_mutex_lock(&lock);
    int device = sim_current_device();
    *context = device < 0 ? 0 : current_context;
    pthread_mutex_unlock(&lock);
    return device;
}

static void write_counts(FILE *file, const char *title, const Function *table, int size)
{
    const char *comma = "";
    fprintf(file, ", \"%s\": {", title);
    for (int i = 0; i < size && table[i].name; i++)
        if (table[i].calls) {
            fprintf(file, "%s\"%s\": %lld", comma, table[i].name, (long long)table[i].calls);
            comma = ", ";
        }
    fprintf(file, "}");
}

static void write_blocks(FILE *file, const char *title, const BlockList *lists, int count)
{
    const char *comma = "";
    fprintf(file, "\"%s\": [", title);
    for (int device = 0; device < count; device++)
        for (int i = 0; i < lists[device].count; i++)
            if (lists[device].blocks[i].alive) {
                const Block *block = &lists[device].blocks[i];
                fprintf(file, "%s{\"device\": %d, \"address\": %llu, \"bytes\": %llu}", comma, device,
                        (unsigned long long)block->address, (unsigned long long)block->bytes);
                comma = ", ";
            }
    fprintf(file, "], ");
}

/* The report as JSON, for sim_free. */
SIM_PUBLIC char *sim_report(void)
{
    char *text;
    size_t size;
    int alive[SIM_KINDS] = {0}, waiting = 0;
    FILE *file = open_memstream(&text, &size);
    pthread_mutex_lock(&lock);
    fprintf(file, "{\"violations\": [");
    for (int i = 0; i < violations->count && i < MAX_VIOLATIONS; i++)
        fprintf(file, "%s\"%s\"", i ? ", " : "", violations->text[i]);
    fprintf(file, "]");
    write_counts(file, "calls", sim.functions, MAX_FUNCTIONS);
    write_counts(file, "counters", sim.counters, 16);
    for (uint64_t i = first_handle; i < handle_count; i++) {
        void *object = handles[i].object;
        /* Default contexts and streams belong to the device; set_device below tells whether it was given
         * back. */
        bool counted = object && !(handles[i].kind == CONTEXT && ((Context *)object)->is_default) &&
                       !(handles[i].kind == STREAM && ((Stream *)object)->is_default);
        alive[handles[i].kind] += counted;
        for (Task *task = object && handles[i].kind == STREAM ? ((Stream *)object)->first : NULL; task;
             task = task->next)
            waiting++;
    }
    fprintf(file, ", \"leaks\": {");
    write_blocks(file, "device_memory", sim.memory, MAX_DEVICES);
    write_blocks(file, "host_memory", &sim.pinned, 1);
    fprintf(file,
            "\"contexts\": %d, \"streams\": %d, \"tensors\": %d, \"executors\": %d, \"waiting_tasks\": %d, ",
            alive[CONTEXT], alive[STREAM], alive[TENSOR], alive[EXECUTOR], waiting);
    fprintf(file, "\"set_device\": [");
    for (int device = 0; device < sim.devices; device++)
        fprintf(file, "%s%d", device ? ", " : "", sim.set_device[device]);
    fprintf(file, "]}, \"acl_references\": %d}", sim.references);
    fclose(file);
    pthread_mutex_unlock(&lock);
    return text;
}

SIM_PUBLIC void sim_free(void *text)
{
    free(text);
}

static void make_lock(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &attributes);
}

__attribute__((constructor)) static void start(void)
{
    make_lock();
    pthread_atfork(NULL, NULL, make_lock); /* another thread of the parent may have held it */
    loader = getpid();
    const int flags = MAP_ANONYMOUS | MAP_NORESERVE;
    device_base = mmap(NULL, DEVICE_SPAN * MAX_DEVICES, PROT_NONE, MAP_PRIVATE | flags, -1, 0);
    violations = mmap(NULL, sizeof *violations, PROT_READ | PROT_WRITE, MAP_SHARED | flags, -1, 0);
    if (device_base == MAP_FAILED || violations == MAP_FAILED) {
        perror("simulated CANN: cannot reserve the device address space");
        abort();
    }
    sim_reset();
}

/* The report of the whole process, written when nothing of it can run any more. */
__attribute__((destructor)) static void finish(void)
{
    const char *path = getenv("CANN_SIM_REPORT");
    FILE *file = path && getpid() == loader ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%s\n", sim_report());
        fclose(file);
    }
}
