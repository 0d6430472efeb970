"""The fused backward pass of an LSTM cell: three gradients in one pass over the data.

`lstm_cell_backward` takes NumPy arrays and returns the gradients of the gate pre-activations, of the previous cell
state and of the bias, computed by a deterministic Cython/OpenMP kernel, or by an Ascend NPU's own operator.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lstmcell_bwd._api import (
    BIAS_LEAF_ROWS,
    choose_device,
    choose_forward_device,
    combine_bias,
    get_isa,
    get_num_threads,
    lstm_cell_backward,
    lstm_cell_backward_part,
    lstm_cell_forward,
    set_num_threads,
    use_isa,
)
from lstmcell_bwd._types import LSTMCellGradients, LSTMCellState
from lstmcell_bwd._version import __version__
from lstmcell_bwd.dispatch import show_config
from lstmcell_bwd.errors import (
    InvalidParameterError,
    LSTMCellError,
    NPURuntimeError,
    NPUUnavailableError,
    NullPointerError,
    UnsupportedDtypeError,
)

if TYPE_CHECKING:  # at run time `__getattr__` imports them
    from lstmcell_bwd import aclnn, npu, reference

__all__ = [
    "BIAS_LEAF_ROWS",
    "InvalidParameterError",
    "LSTMCellError",
    "LSTMCellGradients",
    "LSTMCellState",
    "NPURuntimeError",
    "NPUUnavailableError",
    "NullPointerError",
    "UnsupportedDtypeError",
    "__version__",
    "aclnn",
    "choose_device",
    "choose_forward_device",
    "combine_bias",
    "get_isa",
    "get_num_threads",
    "lstm_cell_backward",
    "lstm_cell_backward_part",
    "lstm_cell_forward",
    "npu",
    "reference",
    "set_num_threads",
    "show_config",
    "use_isa",
]


def __getattr__(name: str) -> Any:
    """Import a submodule when it is first asked for, so that importing the package stays cheap."""
    if name in ("aclnn", "npu", "reference"):
        return importlib.import_module(f"{__name__}.{name}")
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
