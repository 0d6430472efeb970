# cython: language_level=3
"""What the CPU can run, how many CPUs the process may use, and how the package was built."""

import os
import time

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #else
    static int omp_get_max_threads(void) { return 1; }
    #define _OPENMP 0
    #endif
    #include <stdint.h>

    #if defined(__x86_64__)
    #include <cpuid.h>
    /* GCC's and Clang's own detection; it includes the operating system's support for the wide registers. Asked for are
     * exactly the features whose flags the stubs are compiled with. Clang's detection does not know F16C. */
    static int lstmcell_has_f16c(void) {
        unsigned a, b, c, d;
        return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    }
    static int lstmcell_runs_avx2(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && lstmcell_has_f16c();
    }
    static int lstmcell_runs_avx512(void) {
        return lstmcell_runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
               && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    static uint64_t lstmcell_fp_state(void) { return __builtin_ia32_stmxcsr() & ~(uint64_t)0x3f; }
    #elif defined(__aarch64__)
    static int lstmcell_runs_avx2(void) { return 0; }
    static int lstmcell_runs_avx512(void) { return 0; }
    static uint64_t lstmcell_fp_state(void) {
        uint64_t state;
        __asm__ volatile("mrs %0, fpcr" : "=r"(state));
        return state;
    }
    #else
    static int lstmcell_runs_avx2(void) { return 0; }
    static int lstmcell_runs_avx512(void) { return 0; }
    static uint64_t lstmcell_fp_state(void) { return 0; }
    #endif

    #define LSTMCELL_TEXT_(x) #x
    #define LSTMCELL_TEXT(x) LSTMCELL_TEXT_(x)
    #define LSTMCELL_CYTHON LSTMCELL_TEXT(CYTHON_HEX_VERSION)
    #if defined(__clang__)
    #define LSTMCELL_COMPILER "clang " __clang_version__
    #elif defined(__GNUC__)
    #define LSTMCELL_COMPILER "gcc " __VERSION__
    #else
    #define LSTMCELL_COMPILER "unknown"
    #endif
    """
    int _OPENMP
    int omp_get_max_threads()
    bint lstmcell_runs_avx2()
    bint lstmcell_runs_avx512()
    uint64_t lstmcell_fp_state()
    const char* LSTMCELL_COMPILER
    const char* CYTHON_HEX "LSTMCELL_CYTHON"


# All instruction-set levels, lowest first; setup.py has their flags.
ISAS = ("baseline", "avx2", "avx512")


def runnable_isas():
    """Instruction-set levels that this CPU and operating system can run, lowest first.

    Returns
    -------
    tuple of str
    """
    runs = {"baseline": True, "avx2": lstmcell_runs_avx2(), "avx512": lstmcell_runs_avx512()}
    return tuple(isa for isa in ISAS if runs[isa])


def fp_state():
    """The calling thread's floating-point control state without the sticky exception flags.

    Returns
    -------
    int
        MXCSR on x86-64, FPCR on arm64: rounding mode, exception masks and flush-to-zero flags.
    """
    return lstmcell_fp_state()


def openmp_threads():
    """The OpenMP runtime's own limit, `omp_get_max_threads()`, for the calling thread."""
    return omp_get_max_threads()


def cgroup_cpus():
    """CPUs that the process's control group may use, or None where there is no limit.

    Returns
    -------
    float or None
        Quota over period of the tightest limit on the path to the root (version 2: `cpu.max`; version 1:
        `cpu.cfs_quota_us` over `cpu.cfs_period_us`).
    """
    limits = []
    try:
        with open("/proc/self/cgroup") as lines:
            groups = [line.rstrip("\n").split(":", 2) for line in lines]
    except OSError:
        return None
    for _, controllers, path in groups:
        if controllers == "":
            root, files = "/sys/fs/cgroup", ("cpu.max",)
        elif "cpu" in controllers.split(","):
            root, files = "/sys/fs/cgroup/cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        while True:
            try:
                words = []
                for name in files:
                    with open(f"{root}{path.rstrip('/')}/{name}") as content:
                        words += content.read().split()
                if words[0] not in ("max", "-1"):
                    limits.append(int(words[0]) / int(words[1]))
            except (OSError, ValueError, IndexError, ZeroDivisionError):
                pass  # no such controller at this level of the tree
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return min(limits, default=None)


# The control group's files take longer to read than a small call to run, so they are read once a second at most.
cdef object group_quota = None
cdef double group_quota_expires = 0


def usable_cpus():
    """CPUs that this process may use by affinity and by its control group's quota, at least 1.

    Returns
    -------
    int
    """
    global group_quota, group_quota_expires
    cdef int count
    cdef double now = time.monotonic()
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    if now >= group_quota_expires:
        group_quota = cgroup_cpus()
        group_quota_expires = now + 1
    if group_quota is not None:
        count = min(count, max(1, int(group_quota + 0.5)))
    return max(1, count)


def build_info():
    """How the package was compiled.

    Returns
    -------
    dict
        Compiler, Cython version and the OpenMP version date (0: built without OpenMP).
    """
    return {
        "compiler": LSTMCELL_COMPILER.decode(),
        "cython": ".".join(str(int(CYTHON_HEX, 16) >> shift & 255) for shift in (24, 16, 8)),
        "openmp": _OPENMP,
    }
