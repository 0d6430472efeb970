#!/usr/bin/env bash
# The package on emulated arm64: cross-compiled, run by the arm64 Python of a Debian root, bits compared with this machine.
#     bash tools/check_arm64.sh [PYTHON]            (a Python 3.11 that has the package, to compare with; .venv/bin/python)
# Nothing is run inside the root by itself (no binfmt_misc needed): its packages are unpacked, and qemu runs its Python,
# which in turn may start this machine's cross-compiler. The OpenMP probe cannot run there, so OpenMP is given by flags.
. "$(dirname "$0")/environment.sh"
python=$(realpath -s "${1:-.venv/bin/python}")
need qemu-aarch64-static qemu-user-static
need debootstrap debootstrap
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
arm=$root/build/arm64
rm -rf "$arm"
mkdir -p "$arm/source"
debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libpython3.11-dev,libgomp1,libstdc++6 \
    bookworm "$arm/debian" >"$arm/debootstrap.log" || { tail -20 "$arm/debootstrap.log"; exit 1; }
for package in "$arm"/debian/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$arm/debian"; done
"$python" -m pip install -q --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --python-version 3.11 --only-binary=:all: --target "$arm/site" \
    "numpy>=2.0" "Cython>=3.1,<3.4" "setuptools>=77" ml_dtypes pytest pytest-timeout hypothesis threadpoolctl

export PYTHONDONTWRITEBYTECODE=1
emulated() { qemu-aarch64-static -L "$arm/debian" "$arm/debian/usr/bin/python3.11" "$@"; }
cp -r pyx lstmcell_bwd setup.py pyproject.toml README.md LICENSE "$arm/source"
rm -f "$arm"/source/lstmcell_bwd/*.so
cd "$arm/source"
PYTHONPATH=$arm/site CC=aarch64-linux-gnu-gcc LDSHARED="aarch64-linux-gnu-gcc -shared" LDFLAGS=-fopenmp \
    CFLAGS="-fopenmp -idirafter $arm/debian/usr/include" emulated setup.py -q build --build-lib "$arm/lib" \
    >"$arm/build.log" 2>&1 || { tail -30 "$arm/build.log"; exit 1; }
cd "$root"
"$python" tools/bits.py >"$arm/here"
export PYTHONPATH=$arm/lib:$arm/site
emulated tools/bits.py >"$arm/there"
grep -q '^# aarch64, baseline' "$arm/there"
same_bits "$arm/there" "$arm/here"
# What depends on the machine, of the parts of the suite that start no other process, which emulation without binfmt_misc
# cannot; in two halves at once, without the tests of x86-64's instruction sets.
half() { emulated -m pytest -q -p no:cacheprovider --timeout 1200 -k "not avx" "$@"; }
half tests/test_forward.py tests/test_nonfinite.py tests/test_bits.py >"$arm/suite.log" &
half tests/test_properties.py tests/test_golden.py tests/test_accuracy.py tests/test_cases.py tests/test_layouts.py
wait $! || { tail -50 "$arm/suite.log"; exit 1; }
tail -1 "$arm/suite.log"
