"""The NPU backend. Importing it touches nothing of CANN."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lstmcell_bwd.npu.array import NPUArray

__all__ = ["BACKWARD", "FORWARD", "OPERATOR_DTYPES", "NPUArray", "describe", "is_available", "unavailable_reason"]

BACKWARD = "aclnnThnnFusedLstmCellBackward"
FORWARD = "aclnnThnnFusedLstmCell"  # from CANN 9.0.0 on; its first beta had the backward operator alone
OPERATOR_DTYPES = ("float32", "float16")  # what the operators have; nothing is cast to them

forked_from_acl = False  # this process was forked from one in which ACL may have been initialised, by us or by others


def _in_forked_child() -> None:
    global forked_from_acl
    libraries = ("acl", "torch_npu", "mindspore")
    forked_from_acl = forked_from_acl or any(name in sys.modules for name in libraries)


os.register_at_fork(after_in_child=_in_forked_child)


def unavailable_reason(index: int = 0, operator: str | None = None) -> str | None:
    """Say why an NPU cannot be used in this process, and what to do about it.

    The answer is looked for once per process; that initialises ACL where pyACL is installed.

    Parameters
    ----------
    index : int
        The device.
    operator : str, optional
        CANN's name of the operator that is to run, where that may be missing though the backward operator is there.

    Returns
    -------
    str or None
        None: it can be used.
    """
    from lstmcell_bwd.npu import runtime

    return runtime.unavailable_reason(index, operator)


def is_available() -> bool:
    """Tell whether an NPU can be used.

    It can where pyACL imports, a device answers, its chip is supported and the operator is installed.

    `unavailable_reason` says which of these failed and what to do.

    Returns
    -------
    bool
    """
    return unavailable_reason() is None


def describe() -> dict[str, Any]:
    """Return the state of the NPU as `show_config` reports it.

    Returns
    -------
    dict
        "available", and "reason" or the chip, versions and libraries.
    """
    from lstmcell_bwd.npu import runtime

    return runtime.describe()


def __getattr__(name: str) -> Any:
    """Import the array class when it is first asked for, so that importing the package stays cheap."""
    if name == "NPUArray":
        return importlib.import_module("lstmcell_bwd.npu.array").NPUArray
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
