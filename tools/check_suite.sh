#!/usr/bin/env bash
# The tree built into a virtual environment, and the suite against it; setup.py says which variables change the build.
#     PYTHON=INTERPRETER bash tools/check_suite.sh FOLDER
. "$(dirname "$0")/environment.sh"
fresh_venv "$1"
install_package "$1" test
"$1/bin/python" -c "import sys; print('Python', sys.version)"
suite "$1"
