"""The dispatcher and `show_config` on a host without an NPU; `test_npu.py` has the rest of the table."""

import logging

import numpy as np
import pytest
from strategies import make_inputs

import lstmcell_bwd
from lstmcell_bwd import choose_device, lstm_cell_backward, show_config

WANTED = "must be 'auto', 'cpu', 'npu', 'npu:<index>' or 'prefer-npu', got"


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING])
def test_decision_is_logged(caplog, device, level):
    """At DEBUG, with its reason; otherwise the short way is taken, to the same result."""
    inputs = make_inputs(3, 4)
    with caplog.at_level(level, "lstmcell_bwd"):
        grad_cx = lstm_cell_backward(*inputs, device=device).grad_cx
    assert np.array_equal(grad_cx, lstm_cell_backward(*inputs).grad_cx)
    decision = choose_device(*inputs, device=device)
    assert decision.device == "cpu"
    assert caplog.messages == ([f"cpu: {decision.reason}"] if level == logging.DEBUG else [])


@pytest.mark.parametrize("function", [lstm_cell_backward, choose_device])
@pytest.mark.parametrize("value", ["gpu", "npu:", "npu:-1", "NPU", "prefer-npu:0", "cpu "])
def test_environment_variable(monkeypatch, function, value):
    """It is checked like the argument, under its own name, and only where it counts."""
    inputs = make_inputs(2, 3)
    monkeypatch.setenv("LSTMCELL_BWD_DEVICE", value)
    with pytest.raises(ValueError, match=rf"`LSTMCELL_BWD_DEVICE` {WANTED} '{value}'"):
        function(*inputs)
    function(*inputs, device="cpu")
    monkeypatch.setenv("LSTMCELL_BWD_DEVICE", "")
    function(*inputs)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING])
def test_stream_on_the_cpu(caplog, level):
    """A stream where the CPU computes is an error on the short way and on the long one."""
    with caplog.at_level(level, "lstmcell_bwd"), pytest.raises(ValueError, match="`stream` must be None where the CPU"):
        lstm_cell_backward(*make_inputs(2, 3), stream=0)


def test_show_config(capsys):
    """It prints what it returns."""
    config = show_config("dict")
    assert config["versions"]["lstmcell_bwd"] == lstmcell_bwd.__version__
    assert config["instruction sets"]["used"] in config["instruction sets"]["built"]
    assert config["threads"]["default"] == lstmcell_bwd.get_num_threads()
    assert config["npu"]["available"] is lstmcell_bwd.npu.is_available()
    assert capsys.readouterr().out == ""
    assert show_config() is None
    printed = capsys.readouterr().out
    for entries in config.values():
        for name, value in entries.items():
            assert name in printed
            assert isinstance(value, list) or str(value) in printed


def test_show_config_mode():
    """An unknown mode is refused."""
    with pytest.raises(ValueError, match="`mode` must be None or 'dict', got 'json'"):
        show_config("json")


def test_unknown_attribute():
    """The lazy attributes do not hide a misspelt name."""
    with pytest.raises(AttributeError, match="module 'lstmcell_bwd' has no attribute 'npus'"):
        lstmcell_bwd.npus  # noqa: B018 - the look-up is what is tested
    with pytest.raises(AttributeError, match=r"module 'lstmcell_bwd\.npu' has no attribute 'Array'"):
        lstmcell_bwd.npu.Array  # noqa: B018 - the look-up is what is tested
