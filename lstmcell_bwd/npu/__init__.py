"""The NPU backend. Importing it touches nothing of CANN."""

from __future__ import annotations

from lstmcell_bwd.npu.array import NPUArray
from lstmcell_bwd.npu.runtime import unavailable_reason

__all__ = ["NPUArray", "is_available", "unavailable_reason"]


def is_available() -> bool:
    """Whether an NPU can be used: pyACL imports, a device answers, its chip is supported, the operator is installed.

    The answer is looked for once per process; `unavailable_reason` says which of these failed and what to do.

    Returns
    -------
    bool
    """
    return unavailable_reason() is None
