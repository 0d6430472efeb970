"""The watchman over skipped tests: it lets through what is on its list, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("watchman", Path(__file__).parent / "check_no_unexpected_skips.py")
watchman = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watchman)

ON_THE_LIST = ("tests.test_processes", "test_beside_another_openmp_runtime[torch-before]", "torch is not installed")


def report(folder, *cases):
    """Write a JUnit report of (class, name, reason or None); returns its path."""
    lines = []
    for where, name, reason in cases:
        skip = "" if reason is None else f'<skipped type="pytest.skip" message="{reason}">x</skipped>'
        lines.append(f'<testcase classname="{where}" name="{name}">{skip}</testcase>')
    path = folder / f"{len(list(folder.iterdir()))}.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    return str(path)


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        ([("tests.test_bits", "test_a", None)], 0),
        ([("tests.test_bits", "test_a", None), ON_THE_LIST], 0),
        ([("tests.test_bits", "test_a", "no reason")], 1),
        ([(*ON_THE_LIST[:2], "another reason")], 1),
        ([("tests.test_bits", "test_x", ON_THE_LIST[2])], 1),
        ([("tests.test_bits", "test_a[avx512-float32]", "this CPU does not run avx512")], 0),
        ([("tests.test_bits", "test_a[baseline-float32]", "this CPU does not run baseline")], 1),
        ([("tests.test_bits", "test_a[baseline-bfloat16]", "ml_dtypes is not installed")], 1),
        ([], 1),
    ],
)
def test_verdict(tmp_path, capsys, cases, code):
    assert watchman.main([report(tmp_path, *cases)]) == code
    assert ("on the list: " in capsys.readouterr().err) == (code == 1 and bool(cases))


@pytest.mark.parametrize(
    ("file", "reason", "code"),
    [("test_torch", "torch is not installed", 0), ("test_torch", "no reason", 1), ("test_bits", "not here", 1)],
)
def test_skipped_files(tmp_path, file, reason, code):
    """What pytest writes where a file skips itself when it is collected."""
    path = tmp_path / "report.xml"
    path.write_text(
        f'<testsuite><testcase classname="" name="tests.{file}"><skipped message="collection skipped">'
        f"('tests/{file}.py', 16, 'Skipped: {reason}')</skipped></testcase></testsuite>"
    )
    assert watchman.main([str(path)]) == code


def test_run_elsewhere_counts(tmp_path):
    """Skipped in one job, run in another."""
    skipped, ran = ("tests.test_bits", "test_a", "not here"), ("tests.test_bits", "test_a", None)
    assert watchman.main([report(tmp_path, skipped)]) == 1
    assert watchman.main([report(tmp_path, skipped), report(tmp_path, ran)]) == 0


def test_expected_failures_are_not_skips(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuite><testcase classname="tests.test_bits" name="test_a">'
        '<skipped type="pytest.xfail" message="known">x</skipped></testcase></testsuite>'
    )
    assert watchman.main([str(path)]) == 0
