"""Fixtures of the whole suite: which backend a test runs on, and guards around every test."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

import lstmcell_bwd
from lstmcell_bwd import _api, _features

# Helper modules lie beside the tests; with --import-mode=importlib nothing puts that folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("strategies")

# The suite tests the installed package. Child processes must not find the source tree first by being started in it.
os.environ["PYTHONSAFEPATH"] = "1"

strategies = importlib.import_module("strategies")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=200, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=5_000, database=None)
hypothesis.settings.load_profile("ci")


def missing_isa(isa):
    """Return why an instruction set cannot be tested here, or None."""
    if isa not in _api.built_isas():
        return f"this installation was not built with {isa}"
    if isa not in _features.runnable_isas():
        return f"this CPU does not run {isa}"
    return None


def missing_dtype(name):
    """Return why a dtype cannot be tested here, or None."""
    if name == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
        return "ml_dtypes is not installed"
    return None


def parameter(*reasons, values):
    """Make a parameter that is skipped, with the reason, where something is missing."""
    reason = next((reason for reason in reasons if reason), None)
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    return pytest.param(values, marks=marks, id="-".join(values) if isinstance(values, tuple) else values)


@pytest.fixture(params=[parameter(missing_isa(isa), values=isa) for isa in _features.ISAS])
def isa(request):
    """Run the test on each instruction set."""
    lstmcell_bwd.use_isa(request.param)
    yield request.param
    lstmcell_bwd.use_isa("auto")


@pytest.fixture(params=[parameter(missing_dtype(name), values=name) for name in strategies.DTYPES])
def dtype(request):
    """Run the test with each dtype."""
    return strategies.dtype_of(request.param)


@pytest.fixture(
    params=[
        parameter(missing_isa(isa), missing_dtype(name), values=(isa, name))
        for isa in _features.ISAS
        for name in strategies.DTYPES
    ]
)
def backend(request):
    """Run the test on each instruction set with each dtype; the value is the dtype."""
    isa, name = request.param
    lstmcell_bwd.use_isa(isa)
    yield strategies.dtype_of(name)
    lstmcell_bwd.use_isa("auto")


@pytest.fixture
def threads():
    """Undo what a test sets as the default number of threads."""
    yield lstmcell_bwd.set_num_threads
    lstmcell_bwd.set_num_threads(None)


@pytest.fixture(autouse=True)
def unchanged_state():
    """Fail a test that leaves another floating-point state, NumPy error handling or instruction set behind."""
    before = _features.fp_state(), np.geterr(), lstmcell_bwd.get_isa(), lstmcell_bwd.get_num_threads()
    yield
    after = _features.fp_state(), np.geterr(), lstmcell_bwd.get_isa(), lstmcell_bwd.get_num_threads()
    assert after == before
