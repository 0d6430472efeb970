from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from lstmcell_bwd._arguments import Arguments, ForwardArguments
from lstmcell_bwd._types import BiasPart, LSTMCellGradients, LSTMCellPart, LSTMCellState
from lstmcell_bwd.dispatch import Decision
from lstmcell_bwd.npu.array import NPUArray

# Tensors of other packages are array_like by their `__array__`, those on an NPU included.
_Tensor: TypeAlias = ArrayLike | NPUArray
_Output: TypeAlias = np.ndarray | NPUArray | None
_Out: TypeAlias = tuple[_Output, _Output, _Output] | list[_Output]
_NonFinite: TypeAlias = Literal["nan", "ieee"]
_ISA: TypeAlias = Literal["baseline", "avx2", "avx512"]

__test__: dict[str, str]  # Cython's, for doctest
BIAS_LEAF_ROWS: int

@final
class CPUExecutor:
    @property
    def workspace_size(self) -> int: ...
    @property
    def threads(self) -> int: ...
    # Any buffer of bytes that can be written to; `collections.abc.Buffer` is of Python 3.12.
    def run(self, workspace: Any, stream: None = None) -> None: ...

def built_isas() -> tuple[_ISA, ...]: ...
def use_isa(name: str) -> None: ...
def get_isa() -> _ISA: ...
def set_num_threads(num_threads: int | None) -> None: ...
def get_num_threads() -> int: ...
def forked() -> bool: ...
def choose_threads(wanted: int, batch: int, hidden: int, limit: int = 0, forward: bool = False) -> int: ...
def prepare(
    arguments: Arguments | ForwardArguments,
    outputs: tuple[np.ndarray, np.ndarray, np.ndarray | None],
) -> CPUExecutor: ...
def lstm_cell_backward(
    grad_hy: _Tensor | None,
    grad_cy: _Tensor | None,
    cx: _Tensor,
    cy: _Tensor,
    gates: _Tensor,
    has_bias: bool = True,
    *,
    out: _Out | None = None,
    device: str = "auto",
    num_threads: int | None = None,
    nonfinite: _NonFinite = "nan",
    stream: object = None,
) -> LSTMCellGradients: ...
def lstm_cell_forward(
    input_gates: _Tensor,
    hidden_gates: _Tensor,
    cx: _Tensor,
    input_bias: _Tensor | None = None,
    hidden_bias: _Tensor | None = None,
    *,
    out: _Out | None = None,
    device: str = "auto",
    num_threads: int | None = None,
) -> LSTMCellState: ...
def lstm_cell_backward_part(
    grad_hy: ArrayLike | None,
    grad_cy: ArrayLike | None,
    cx: ArrayLike,
    cy: ArrayLike,
    gates: ArrayLike,
    has_bias: bool = True,
    *,
    first_row: int,
    out: _Out | None = None,
    num_threads: int | None = None,
    nonfinite: _NonFinite = "nan",
) -> LSTMCellPart: ...
def combine_bias(parts: Iterable[BiasPart], dtype: DTypeLike) -> np.ndarray: ...
def choose_device(
    grad_hy: _Tensor | None,
    grad_cy: _Tensor | None,
    cx: _Tensor,
    cy: _Tensor,
    gates: _Tensor,
    has_bias: bool = True,
    *,
    out: _Out | None = None,
    device: str = "auto",
    num_threads: int | None = None,
    nonfinite: _NonFinite = "nan",
    stream: object = None,
) -> Decision: ...
def choose_forward_device(
    input_gates: _Tensor,
    hidden_gates: _Tensor,
    cx: _Tensor,
    input_bias: _Tensor | None = None,
    hidden_bias: _Tensor | None = None,
    *,
    out: _Out | None = None,
    device: str = "auto",
    num_threads: int | None = None,
) -> Decision: ...
