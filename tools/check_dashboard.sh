#!/usr/bin/env bash
# The dashboard of the benchmarks, from a run over three commits, opened in a browser and looked at for graphs with data.
#
#     bash tools/check_dashboard.sh [ARGUMENT OF benches.dashboard ...]
. "$(dirname "$0")/environment.sh"
need npm npm
need chromium chromium
fresh_venv build/dashboard
install_package build/dashboard bench
env -u PYTHONSAFEPATH build/dashboard/bin/python -m benches.dashboard "$@"
