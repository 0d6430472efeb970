# The steps of `.ci/run` and `.ci/long`; sourced by them. All steps run; `finish` is false where any has failed.
passed=0
failed=0
not_measured="" # names of steps that passed and say themselves that they could not measure

step() { # step NAME COMMAND [ARGUMENT ...]
    local name=$1 began=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    if "$@"; then
        passed=$((passed + 1))
        printf '=== %s: passed in %d s\n' "$name" $((SECONDS - began))
    else
        failed=$((failed + 1))
        printf '=== %s: FAILED after %d s\n' "$name" $((SECONDS - began))
    fi
}

finish() {
    printf '\n%d passed, %d failed%s\n' "$passed" "$failed" "${not_measured:+; could not measure: $not_measured}"
    [ "$failed" -eq 0 ]
}
