#!/usr/bin/env bash
# The suite with compiled modules under AddressSanitizer and UndefinedBehaviorSanitizer; any finding is an error.
#     bash tools/check_sanitizers.sh [PYTEST ARGUMENTS]
# Leaks are not looked for (the interpreter itself leaks), and a segmentation fault is left to the operating system (tests
# of the simulated CANN expect one). test_build.py is about the modules of an ordinary build.
. "$(dirname "$0")/environment.sh"
fresh_venv build/sanitized
LSTMCELL_BWD_SANITIZE=address,undefined install_package build/sanitized test
for module in build/sanitized/lib/python3*/site-packages/lstmcell_bwd/_*.so; do
    for name in __asan_init __ubsan_handle_add_overflow_abort; do
        nm -D "$module" | grep " $name" >/dev/null || { echo "$module was built without $name"; exit 1; }
    done
done
export LD_PRELOAD ASAN_OPTIONS UBSAN_OPTIONS
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
ASAN_OPTIONS=detect_leaks=0:handle_segv=0:allocator_may_return_null=1
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
suite build/sanitized --timeout 900 --ignore tests/test_build.py "$@"
