"""Fail if pytest skipped a test that is not on the list below.

    python -m pytest --junit-xml=report.xml
    python tests/check_no_unexpected_skips.py report.xml [more reports]

A test that is skipped in one report and passed in another counts as run. CI runs this: a test that silently stops
running is worse than one that fails.
"""

import argparse
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

# Pattern of "file::test" (re.fullmatch) and of the reason (re.search), and why it may be skipped.
ALLOWED = [
    (r"test_npu.*", r"no NPU", "needs an Ascend NPU; the simulated CANN stands in for it"),
    (r"test_processes::test_beside_another_openmp_runtime.*", r"is not installed", "torch and scikit-learn are large"),
    (r"::tests.test_torch", r"torch is not installed", "torch is large; .ci/run has a step of its own for it"),
    (r"test_dask::test_benchmark.*", r"in the source tree alone", "a wheel is tested without the benchmarks"),
    (r".*avx512.*", r"this CPU does not run avx512", "not every CPU has it"),
    (r".*avx2.*", r"this CPU does not run avx2", "not every CPU has it"),
    (r".*avx(2|512).*", r"was not built with avx", "built for x86-64 only"),
    (r"test_processes::test_a_real_control_group", r"no control group may be made", "root may, not everywhere"),
]


def skipped_tests(reports):
    """Collect the tests that were skipped in every report they appear in, with their reasons."""
    outcomes = defaultdict(list)
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            classes = case.get("classname", "").removeprefix("tests.").replace(".", "::")
            skip = case.find("skipped")
            # An expected failure is reported as a skip of type pytest.xfail; it did run.
            reason = None if skip is None or skip.get("type") == "pytest.xfail" else skip.get("message", "")
            if reason == "collection skipped":  # a whole file, whose reason stands elsewhere
                reason = skip.text
            outcomes[f"{classes}::{case.get('name')}"].append(reason)
    return {test: reasons[0] for test, reasons in outcomes.items() if None not in reasons}, len(outcomes)


def is_allowed(test, reason):
    """Tell whether a skipped test is on the list."""
    return any(re.fullmatch(name, test) and re.search(why, reason) for name, why, _ in ALLOWED)


def main(arguments=None):
    """Check the reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="+", type=Path)
    skipped, total = skipped_tests(parser.parse_args(arguments).report)
    if not total:
        print("no tests in the reports", file=sys.stderr)
        return 1
    unexpected = {test: reason for test, reason in skipped.items() if not is_allowed(test, reason)}
    for test, reason in sorted(unexpected.items()):
        print(f"skipped and not on the list: {test}: {reason}", file=sys.stderr)
    print(f"{total} tests, {len(skipped)} skipped, {len(unexpected)} of them not on the list")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
