# The steps of `.ci/run` and `.ci/long`; sourced by them. All steps run; `finish` is false where any has failed.
passed=0
failed=0

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
    printf '\n%d passed, %d failed\n' "$passed" "$failed"
    [ "$failed" -eq 0 ]
}
