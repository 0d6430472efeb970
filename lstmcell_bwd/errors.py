"""The exceptions of the package and the status codes they stand for."""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "InvalidParameterError",
    "LSTMCellError",
    "NPURuntimeError",
    "NPUUnavailableError",
    "NullPointerError",
    "Status",
    "UnsupportedDtypeError",
]


class Status(IntEnum):
    """Status codes of CANN's aclnn interface; further codes of the runtime are plain integers.

    Source: the table of return codes in the aclnn documentation of CANN 9.
    """

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002
    ACLNN_ERR_RUNTIME_ERROR = 361001
    ACLNN_ERR_INNER = 561000
    ACLNN_ERR_INNER_INFERSHAPE_ERROR = 561001
    ACLNN_ERR_INNER_TILING_ERROR = 561002
    ACLNN_ERR_INNER_FIND_KERNEL_ERROR = 561003
    ACLNN_ERR_INNER_CREATE_EXECUTOR = 561101
    ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR = 561102
    ACLNN_ERR_INNER_NULLPTR = 561103
    ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND = 561107
    ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND = 561112


class LSTMCellError(Exception):
    """Base of all exceptions that this package raises on purpose.

    Attributes
    ----------
    status : int
        The status code under which the two-phase form (`lstmcell_bwd.aclnn`) reports the error.
    """

    status: int = Status.ACLNN_ERR_INNER


class NullPointerError(LSTMCellError, TypeError):
    """A required tensor is missing."""

    status = Status.ACLNN_ERR_PARAM_NULLPTR


class InvalidParameterError(LSTMCellError, ValueError):
    """An argument has the wrong rank, shape, layout or value."""

    status = Status.ACLNN_ERR_PARAM_INVALID


class UnsupportedDtypeError(LSTMCellError, TypeError):
    """An argument has a dtype or type that the operator does not take, or not together with the others."""

    status = Status.ACLNN_ERR_PARAM_INVALID


class NPUUnavailableError(LSTMCellError, RuntimeError):
    """An NPU was asked for and cannot be used; the message says what is missing and what to do."""

    status = Status.ACLNN_ERR_RUNTIME_ERROR


class NPURuntimeError(LSTMCellError, RuntimeError):
    """A call into the NPU's runtime failed.

    Parameters
    ----------
    function : str
        Name of the function that failed.
    status : int
        The code it returned.
    name : str
        The code's name in CANN's headers.
    detail : str
        The runtime's own last message, or an empty string.
    """

    def __init__(self, function: str, status: int, name: str, detail: str = "") -> None:
        self.function = function
        self.status = status
        self.name = name
        self.detail = detail
        message = f"{function} returned {status} ({name})"
        super().__init__(f"{message}: {detail}" if detail else message)
