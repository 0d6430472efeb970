#!/usr/bin/env bash
# Valgrind's memcheck on tools/bits.py: every dtype, special values, both rules for Inf and NaN. Valgrind knows AVX2 at most,
# so the baseline and AVX2 run. Only findings with the package in their stack count: the interpreter has its own.
#     bash tools/check_valgrind.sh [PYTHON]         (a Python that has the package; .venv/bin/python)
. "$(dirname "$0")/environment.sh"
python=${1:-.venv/bin/python}
need valgrind valgrind
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
checked() { PYTHONMALLOC=malloc valgrind --tool=memcheck --log-file="$logs/$1" "$python" tools/bits.py --isa "$1" >/dev/null; }
checked baseline &
checked avx2
wait $!
for isa in baseline avx2; do
    grep -q "ERROR SUMMARY" "$logs/$isa"
    # Each finding names the functions of its stack, with their file in brackets.
    if grep -E "_kernel_|lstmcell_bwd" "$logs/$isa"; then exit 1; fi
    echo "$isa: no finding in the package; in all, $(tail -1 "$logs/$isa" | sed 's/==[0-9]*== //')"
done
