"""Which device runs a call, and why; and a report of what this installation can use."""

# ruff: noqa: EM101 - the literal is the name of the argument, which the error's text is made from
from __future__ import annotations

import logging
import os
import platform
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lstmcell_bwd import npu
from lstmcell_bwd._arguments import wrong_dtype, wrong_type, wrong_value
from lstmcell_bwd._version import __version__
from lstmcell_bwd.errors import InvalidParameterError, NPUUnavailableError

if TYPE_CHECKING:
    from lstmcell_bwd._arguments import Arguments, ForwardArguments

__all__ = ["Decision", "check_stream", "choose", "show_config"]

logger = logging.getLogger("lstmcell_bwd")

_DEVICES = "'auto', 'cpu', 'npu', 'npu:<index>' or 'prefer-npu'"


class Decision(NamedTuple):
    """A device, "cpu" or "npu:<index>", and a sentence why."""

    device: str
    reason: str


def choose(arguments: Arguments | ForwardArguments, device: str, stream: object) -> Decision:
    """Decide where a checked call runs.

    Parameters
    ----------
    arguments : Arguments or ForwardArguments
        The checked tensors of the call; outputs count like inputs.
    device : {"auto", "cpu", "npu", "npu:<index>", "prefer-npu"}
        What the caller asked for. "auto" is replaced by the environment variable LSTMCELL_BWD_DEVICE where it is set.
    stream : object
        What the caller gave as `stream`.

    Returns
    -------
    Decision

    Raises
    ------
    InvalidParameterError, UnsupportedDtypeError
        If `device` or `stream` is malformed, or asks for what the location of the tensors does not allow; if an NPU
        was asked for and the dtype is one that it does not have.
    NPUUnavailableError
        If an NPU is needed and cannot be used.
    """
    decision = _decide(arguments, *_wanted_device(device))
    if decision.device == "cpu" and stream is not None:
        raise wrong_value("stream", "None where the CPU computes", stream)
    check_stream(stream)
    logger.debug("%s: %s", *decision)
    return decision


def check_stream(stream: object) -> None:
    """Refuse what cannot be a stream of an NPU."""
    if not (stream is None or hasattr(stream, "npu_stream")):
        if isinstance(stream, bool) or not isinstance(stream, int):
            raise wrong_type("stream", "an integer handle, a torch_npu stream or None", stream)
        if stream < 0:
            raise wrong_value("stream", "an integer handle, a torch_npu stream or None", stream)


def _wanted_device(device: str) -> tuple[str, int | None]:
    """Return the validated wish, without its index, and the index."""
    source = "device"
    if not isinstance(device, str):
        raise wrong_type(source, f"a string, one of {_DEVICES}", device)
    if device == "auto" and os.environ.get("LSTMCELL_BWD_DEVICE"):
        source, device = "LSTMCELL_BWD_DEVICE", os.environ["LSTMCELL_BWD_DEVICE"]
    match = re.fullmatch(r"(auto|cpu|npu|prefer-npu)|npu:([0-9]{1,9})", device)
    if match is None:
        raise wrong_value(source, _DEVICES, device)
    return match[1] or "npu", None if match[2] is None else int(match[2])


def _decide(arguments: Arguments | ForwardArguments, wish: str, index: int | None) -> Decision:
    """Apply the table of devices and locations."""
    homes = _locations(arguments)
    if len(homes) > 1:
        places = ", ".join(f"`{name}` on {home}" for home, name in homes.items())
        message = f"all tensors must be on the host or on one NPU, got {places}"
        raise InvalidParameterError(message)
    home = next(iter(homes))
    if home != "the host":
        return _on_npu(arguments, home, wish, index)
    if wish == "cpu":
        return Decision("cpu", "it was asked for")
    if wish == "auto":
        return Decision("cpu", "the tensors are on the host, and copying them to a device takes longer than computing")
    missing = npu.unavailable_reason(index or 0, arguments.operator)
    if wish == "prefer-npu":
        if missing is not None:
            return Decision("cpu", f"the NPU cannot be used: {missing}")
        if arguments.batch == 0 or arguments.hidden == 0:
            return Decision("cpu", "the tensors are empty")
        if arguments.dtype.name not in npu.OPERATOR_DTYPES:
            return Decision("cpu", f"the NPU's operator has no {arguments.dtype}")
        return Decision("npu:0", "it was preferred and can be used")
    if missing is not None:
        message = f"`device` is an NPU, which cannot be used: {missing}"
        raise NPUUnavailableError(message)
    _check_dtype(arguments)
    return Decision(f"npu:{index or 0}", "it was asked for")


def _on_npu(arguments: Arguments | ForwardArguments, home: str, wish: str, index: int | None) -> Decision:
    """Decide for tensors that are all on one NPU."""
    if wish == "cpu":
        raise wrong_value("device", f"the NPU where the tensors are, {home} (to use the CPU, copy them first)", wish)
    if index is not None and home != f"npu:{index}":
        raise wrong_value("device", f"the NPU where the tensors are, {home}", f"npu:{index}")
    missing = npu.unavailable_reason(int(home.removeprefix("npu:")), arguments.operator)
    if missing is not None:
        message = f"the tensors are on {home}, which cannot be used: {missing}"
        raise NPUUnavailableError(message)
    _check_dtype(arguments)
    return Decision(home, "the tensors are there")


def _check_dtype(arguments: Arguments | ForwardArguments) -> None:
    """Refuse what the NPU's operator does not have."""
    if arguments.dtype.name not in npu.OPERATOR_DTYPES:
        raise wrong_dtype("cx", f"{' or '.join(npu.OPERATOR_DTYPES)} on an NPU", arguments.dtype)


def _locations(arguments: Arguments | ForwardArguments) -> dict[str, str]:
    """Find where the tensors of a call are, each place with the name of the first tensor there."""
    homes: dict[str, str] = {}
    for name, tensor in arguments.tensors.items():
        if tensor is not None:
            home = "the host" if isinstance(tensor, np.ndarray) else f"npu:{tensor.device}"
            homes.setdefault(home, name)
    return homes


def show_config(mode: str | None = None) -> dict[str, Any] | None:
    """Report versions, instruction sets, threads and the state of the NPU: what a bug report needs.

    Finding out about the NPU initialises ACL where pyACL is installed.

    Parameters
    ----------
    mode : {None, "dict"}
        None prints, "dict" returns.

    Returns
    -------
    dict or None

    Raises
    ------
    InvalidParameterError
        For another `mode`.
    """
    from lstmcell_bwd import _api, _features

    if mode not in (None, "dict"):
        raise wrong_value("mode", "None or 'dict'", mode)
    config: dict[str, Any] = {
        "versions": {
            "lstmcell_bwd": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "build": _features.build_info(),
        "instruction sets": {
            "built": list(_api.built_isas()),
            "runnable": list(_features.runnable_isas()),
            "used": _api.get_isa(),
        },
        "threads": {
            "default": _api.get_num_threads(),
            "openmp": _features.openmp_threads(),
            "usable cpus": _features.usable_cpus(),
            "forked": _api.forked(),
        },
        "npu": npu.describe(),
    }
    if mode == "dict":
        return config
    for title, entries in config.items():
        print(f"{title}:")
        for name, value in entries.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            print(f"    {name:<18}{text}")
    return None
