#!/usr/bin/env bash
# Coverage-guided fuzzing of the argument checks and the kernel, with AddressSanitizer and UndefinedBehaviorSanitizer:
#     bash tools/fuzz.sh SECONDS                    (two processes for so long, on one corpus)
# Needs Clang (installed from Debian where it is missing) and atheris (in an environment of its own, build/fuzz).
. "$(dirname "$0")/environment.sh"
seconds=${1:-60}
need clang clang
need llvm-symbolizer llvm
clang -fopenmp -x c - -o /dev/null <<<"int main(void) { return 0; }" 2>/dev/null \
    || { apt-get update -q && apt-get install -y -q libomp-dev; } >/dev/null 2>&1
fresh_venv build/fuzz atheris ml_dtypes
CC=clang LDSHARED="clang -shared" LSTMCELL_BWD_SANITIZE=fuzzer-no-link,address,undefined install_package build/fuzz
runtime=$(build/fuzz/bin/python -c "import atheris; print(atheris.path())")/asan_with_fuzzer.so
mkdir -p build/fuzz/corpus
fuzz() { # fuzz NUMBER
    # Waiting threads must not spin: most calls are small, and machines that fuzz are busy.
    KMP_BLOCKTIME=0 LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 build/fuzz/bin/python tests/fuzz/fuzz_call.py \
        build/fuzz/corpus tests/fuzz/corpus -max_total_time="$seconds" -max_len=512 -len_control=0 -timeout=60 \
        -artifact_prefix=build/fuzz/ -print_final_stats=1 -verbosity=0 >"build/fuzz/log$1" 2>&1 \
        || { grep -av '^"' "build/fuzz/log$1" | head -200; return 1; }
    grep -a ^stat:: "build/fuzz/log$1"
    grep -a ^calls:: "build/fuzz/log$1" | tail -1 | grep "backward taken.*forward taken" \
        || { echo "the calls that were made are not of both operators"; return 1; }
}
failed=0
fuzz 1 &
fuzz 2 || failed=1
wait $! || failed=1
exit "$failed"
