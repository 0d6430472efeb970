#!/usr/bin/env bash
# The suite with compiled modules under AddressSanitizer and UndefinedBehaviorSanitizer; any finding is an error.
#     bash tools/check_sanitizers.sh [PYTEST ARGUMENTS]
# Leaks are not looked for (the interpreter itself leaks), and a segmentation fault is left to the operating system (tests
# of the simulated CANN expect one). test_build.py is about the modules of an ordinary build.
. "$(dirname "$0")/environment.sh"
fresh_venv build/sanitized ml_dtypes click rich matplotlib threadpoolctl pytest pytest-timeout hypothesis
LSTMCELL_BWD_SANITIZE=address,undefined LSTMCELL_BWD_REQUIRE_OPENMP=1 install_package build/sanitized
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:handle_segv=0:allocator_may_return_null=1 \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    build/sanitized/bin/pytest -q --timeout 900 -p no:cacheprovider --ignore tests/test_build.py "$@"
