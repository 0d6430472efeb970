# What the check scripts share; sourced by them. Folder names are relative to the root of the source tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
export PYTHONSAFEPATH=1 # the installed package is tested, never the tree
export DIST_EXTRA_CONFIG=$root/tools/build.cfg

need() { # need COMMAND PACKAGE ...: installs Debian packages where a command is missing
    local command=$1
    shift
    command -v "$command" >/dev/null && return
    { apt-get install -y -q "$@" || { apt-get update -q && apt-get install -y -q "$@"; }; } >/dev/null 2>&1 \
        || { echo "$command is missing, and the Debian packages $* could not be installed"; return 1; }
}

fresh_venv() { # fresh_venv FOLDER [PACKAGE ...]: a virtual environment of $PYTHON with what builds the package, and more
    local folder=$1
    shift
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/pip" install -q "setuptools>=77" "Cython>=3.1,<3.4" "numpy>=2.0" "$@"
}

install_package() { # install_package VENV [EXTRA]: builds the tree into a fresh_venv, from a copy without old objects
    local copy
    copy=$(mktemp -d)
    cp -r pyx lstmcell_bwd setup.py pyproject.toml README.md LICENSE "$copy"
    rm -f "$copy"/lstmcell_bwd/*.so
    LSTMCELL_BWD_REQUIRE_OPENMP=1 "$1/bin/pip" install -q --no-build-isolation "$copy${2:+[$2]}"
    rm -rf "$copy"
}

suite() { # suite VENV [PYTEST ARGUMENT ...]: two files at a time; a test skipped for no reason on the list is a failure
    local report=$1/suite.xml
    "$1/bin/pytest" -q -n 2 --dist loadfile -p no:cacheprovider --junit-xml="$report" "${@:2}"
    "$1/bin/python" tests/check_no_unexpected_skips.py "$report"
}

same_bits() { # same_bits FILE FILE: compares two outputs of tools/bits.py, their first lines aside
    [ "$(wc -l <"$1")" -ge 28 ] || { echo "$1 has too few lines"; return 1; }
    diff <(tail -n +2 "$1") <(tail -n +2 "$2") && echo "same bits: $(head -1 "$1") and $(head -1 "$2")"
}
