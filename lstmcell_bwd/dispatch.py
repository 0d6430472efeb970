"""Which device runs a call, and why."""

from __future__ import annotations

import logging
import os
import re
from typing import NamedTuple

from lstmcell_bwd.errors import InvalidParameterError, NPUUnavailableError, UnsupportedDtypeError

__all__ = ["Decision", "choose"]

logger = logging.getLogger("lstmcell_bwd")


class Decision(NamedTuple):
    """A device and the reason for it."""

    device: str
    reason: str


def choose(arguments, device, stream):
    """Decides where a checked call runs.

    Parameters
    ----------
    arguments : Arguments
    device : str
    stream : object

    Returns
    -------
    Decision
    """
    if not isinstance(device, str):
        raise UnsupportedDtypeError(f"`device` must be a string, got {type(device).__name__}")
    if device == "auto":
        device = os.environ.get("LSTMCELL_BWD_DEVICE") or "auto"
    if not re.fullmatch(r"auto|cpu|prefer-npu|npu(:[0-9]+)?", device):
        raise InvalidParameterError(
            f"`device` must be 'auto', 'cpu', 'npu', 'npu:<index>' or 'prefer-npu', got {device!r}"
        )
    if device.startswith("npu"):
        raise NPUUnavailableError("no NPU backend in this version")
    decision = Decision("cpu", "the tensors are on the host")
    logger.debug("%s: %s", *decision)
    return decision
