"""The operators in two phases, with CANN's names, argument order and status codes, on the CPU and on an NPU.

For people who port or verify code that calls `aclnnThnnFusedLstmCellBackward` or, for the forward pass,
`aclnnThnnFusedLstmCell`, which CANN has from 9.0.0 on. Phase one checks all arguments and returns a status, the size of
the scratch memory and an executor; phase two takes the scratch memory, the executor and a stream, runs, and returns a
status. No function raises for a bad argument; `aclGetRecentErrMsg` says what was wrong.

On an NPU these are CANN's own functions, asynchronous and with a known defect: in float32, with a bias, for 4095
rows and more and a hidden size up to 96, the bias gradient is wrong. `lstmcell_bwd.lstm_cell_backward` avoids that.

Examples
--------
>>> import numpy as np
>>> from lstmcell_bwd import aclnn
>>> one, gates = np.ones((1, 8), np.float32), np.ones((1, 32), np.float32)
>>> outputs = np.empty((1, 32), np.float32), np.empty((1, 8), np.float32), np.empty(32, np.float32)
>>> status, size, executor = aclnn.aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(
...     one, one, one, one, gates, True, *outputs)
>>> int(aclnn.aclnnThnnFusedLstmCellBackward(bytearray(size), size, executor, None))
0
>>> outputs[1][0, 0].round(4)
np.float32(1.42)
"""

# ruff: noqa: EM101 - the literal is the name of the argument, which the error's text is made from
from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from lstmcell_bwd import _api, dispatch, npu
from lstmcell_bwd._arguments import (
    ForwardArguments,
    check_arguments,
    check_forward_arguments,
    missing,
    wrong_dtype,
    wrong_rank,
    wrong_type,
    wrong_value,
)
from lstmcell_bwd.errors import InvalidParameterError, LSTMCellError, NullPointerError, Status
from lstmcell_bwd.npu import BACKWARD, FORWARD

if TYPE_CHECKING:
    from lstmcell_bwd._arguments import Arguments
    from lstmcell_bwd.npu.op import NPUExecutor, Operands
    from lstmcell_bwd.npu.runtime import Companion, Device

__all__ = [
    "Executor",
    "Status",
    "aclGetRecentErrMsg",
    "aclnnThnnFusedLstmCell",
    "aclnnThnnFusedLstmCellBackward",
    "aclnnThnnFusedLstmCellBackwardGetWorkspaceSize",
    "aclnnThnnFusedLstmCellGetWorkspaceSize",
]

_recent = threading.local()


class Executor:
    """What phase one hands to phase two: one prepared call, to be run once.

    On an NPU it keeps the memory that stands for missing tensors: let it go only when the stream is done, or it waits
    for the device.

    Attributes
    ----------
    operator : str
        CANN's name of the operator.
    workspace_size : int
        Bytes of scratch memory that the call needs.
    """

    def __init__(self, backend: _HostCall | _NPUCall) -> None:
        self.operator = backend.operator
        self.workspace_size = backend.workspace_size
        self._backend: _HostCall | _NPUCall | None = backend
        self._used: _HostCall | _NPUCall | None = None  # keeps the memory of a call that still waits on its stream

    def take(self) -> _HostCall | _NPUCall:
        """Hand out the prepared call; there is none a second time."""
        backend, self._backend = self._backend, None
        if backend is None:
            message = "`executor` must be unused, got one that has run"
            raise InvalidParameterError(message)
        self._used = backend
        return backend


def aclnnThnnFusedLstmCellBackwardGetWorkspaceSize(  # noqa: N802 - CANN's name
    gradHyOptional: Any,  # noqa: N803
    gradCOptional: Any,  # noqa: N803
    cx: Any,
    cy: Any,
    storage: Any,
    hasBias: bool,  # noqa: N803
    gradGatesOut: Any,  # noqa: N803
    gradCxOut: Any,  # noqa: N803
    gradBiasOut: Any,  # noqa: N803
) -> tuple[int, int, Executor | None]:
    """Check the arguments: phase one.

    Parameters
    ----------
    gradHyOptional, gradCOptional : array of shape (N, H), or None
        Gradients of hy and cy; None means zeros.
    cx, cy : array of shape (N, H)
        Cell state before and after the cell.
    storage : array of shape (N, 4*H)
        Activated gates i, f, g, o.
    hasBias : bool
        Whether to compute the bias gradient.
    gradGatesOut, gradCxOut, gradBiasOut : array of shape (N, 4*H), (N, H) and (4*H,)
        Outputs. gradBiasOut may be None only without bias, and is not written then.

    Returns
    -------
    status : int
        `Status.ACLNN_SUCCESS`, or why not: 161001 for a missing tensor, 161002 for a wrong dtype or shape, or a code
        of the NPU's runtime.
    workspace_size : int
        Bytes of scratch memory for phase two; 0 on failure.
    executor : Executor or None
        For phase two; None on failure.

    Notes
    -----
    All tensors have one dtype, float32 or float16, and are NumPy arrays, or NPUArrays (or torch_npu tensors) on one
    device; N and H are above 0. Checks come in CANN's order: missing tensors, dtypes, shapes. Messages on dtypes and
    shapes use the argument names of `lstmcell_bwd.lstm_cell_backward`.
    """
    try:
        without_bias = isinstance(hasBias, (bool, np.bool_)) and not hasBias
        required = {"cx": cx, "cy": cy, "storage": storage, "gradGatesOut": gradGatesOut, "gradCxOut": gradCxOut}
        if not without_bias:
            required["gradBiasOut"] = gradBiasOut
        for name, tensor in required.items():
            if tensor is None:
                raise missing(name)
        out = (gradGatesOut, gradCxOut, None if without_bias else gradBiasOut)
        arguments = check_arguments(gradHyOptional, gradCOptional, cx, cy, storage, hasBias, out)
        unused_dtype = str(getattr(gradBiasOut, "dtype", arguments.dtype)).removeprefix("torch.")
        if unused_dtype != arguments.dtype.name:
            raise wrong_dtype("gradBiasOut", f"{arguments.dtype} like `cx`", unused_dtype)
        inputs = [arguments.grad_hy, arguments.grad_cy, arguments.cx, arguments.cy, arguments.gates]
        outputs = [arguments.grad_gates, arguments.grad_cx, arguments.grad_bias]
        call = _prepared(arguments, inputs, outputs, arguments.cx, arguments.has_bias)
    except (LSTMCellError, MemoryError) as error:
        return _failed(error), 0, None
    return Status.ACLNN_SUCCESS, call.workspace_size, Executor(call)


def aclnnThnnFusedLstmCellBackward(  # noqa: N802 - CANN's name
    workspace: Any,
    workspaceSize: int,  # noqa: N803
    executor: Executor | None,
    stream: Any = None,
) -> int:
    """Run the call: phase two. The executor is used up, whatever the status.

    Parameters
    ----------
    workspace : buffer, NPUArray, int or None
        On the CPU any writable buffer; on an NPU an NPUArray or an address. None if the size is 0.
    workspaceSize : int
        Its size in bytes, at least what phase one asked for.
    executor : Executor
        From phase one.
    stream : int, torch_npu stream or None
        On an NPU the stream to launch on; None is the default stream of the context. On the CPU None.

    Returns
    -------
    int
        A status. On an NPU the results are there when the stream is done; `NPUArray.to_numpy` waits for that.
    """
    return _phase_two(BACKWARD, workspace, workspaceSize, executor, stream)


def aclnnThnnFusedLstmCellGetWorkspaceSize(  # noqa: N802 - CANN's name
    inputGates: Any,  # noqa: N803
    hiddenGates: Any,  # noqa: N803
    cx: Any,
    inputBiasOptional: Any,  # noqa: N803
    hiddenBiasOptional: Any,  # noqa: N803
    hyOut: Any,  # noqa: N803
    cyOut: Any,  # noqa: N803
    storageOut: Any,  # noqa: N803
) -> tuple[int, int, Executor | None]:
    """Check the arguments of the forward pass: phase one.

    Parameters
    ----------
    inputGates, hiddenGates : array of shape (N, 4*H)
        The two matrix products, in the order i, f, g, o.
    cx : array of shape (N, H)
        Cell state before the cell.
    inputBiasOptional, hiddenBiasOptional : array of shape (4*H,), or None
        Both or neither, as CANN wants it.
    hyOut, cyOut, storageOut : array of shape (N, H), (N, H) and (N, 4*H)
        Outputs; storageOut takes the activated gates.

    Returns
    -------
    status : int
    workspace_size : int
    executor : Executor or None
        As of `aclnnThnnFusedLstmCellBackwardGetWorkspaceSize`, under the same rules.
    """
    try:
        required = {"inputGates": inputGates, "hiddenGates": hiddenGates, "cx": cx}
        if inputBiasOptional is not None or hiddenBiasOptional is not None:
            required |= {"inputBiasOptional": inputBiasOptional, "hiddenBiasOptional": hiddenBiasOptional}
        required |= {"hyOut": hyOut, "cyOut": cyOut, "storageOut": storageOut}
        for name, tensor in required.items():
            if tensor is None:
                raise missing(name)
        out = (hyOut, cyOut, storageOut)
        arguments = check_forward_arguments(inputGates, hiddenGates, cx, inputBiasOptional, hiddenBiasOptional, out)
        inputs = [arguments.input_gates, arguments.hidden_gates, arguments.cx]
        inputs += [arguments.input_bias, arguments.hidden_bias]
        call = _prepared(arguments, inputs, [arguments.hy, arguments.cy, arguments.gates], None)
    except (LSTMCellError, MemoryError) as error:
        return _failed(error), 0, None
    return Status.ACLNN_SUCCESS, call.workspace_size, Executor(call)


def aclnnThnnFusedLstmCell(  # noqa: N802 - CANN's name
    workspace: Any,
    workspaceSize: int,  # noqa: N803
    executor: Executor | None,
    stream: Any = None,
) -> int:
    """Run the forward call: phase two, as `aclnnThnnFusedLstmCellBackward`.

    Parameters
    ----------
    workspace : buffer, NPUArray, int or None
    workspaceSize : int
    executor : Executor
        From `aclnnThnnFusedLstmCellGetWorkspaceSize`.
    stream : int, torch_npu stream or None

    Returns
    -------
    int
        A status.
    """
    return _phase_two(FORWARD, workspace, workspaceSize, executor, stream)


def aclGetRecentErrMsg() -> str | None:  # noqa: N802 - CANN's name
    """Return the reason of the last failure in this thread; reading clears it.

    Returns
    -------
    str or None
    """
    message = getattr(_recent, "message", None)
    _recent.message = None
    return message


def _failed(error: BaseException) -> int:
    """Keep the message of an exception and return its status."""
    _recent.message = str(error)
    code: int = getattr(error, "status", Status.ACLNN_ERR_RUNTIME_ERROR)
    try:
        return Status(code)
    except ValueError:  # a code of the NPU's runtime
        return code


def _prepared(
    arguments: Arguments | ForwardArguments,
    inputs: list[Any],
    outputs: list[Any],
    zeros_like: Any,
    *flags: bool,
) -> _HostCall | _NPUCall:
    """Check what phase one refuses beyond the rules of the functions on arrays, and prepare the call."""
    if arguments.dtype.name not in npu.OPERATOR_DTYPES:
        raise wrong_dtype("cx", " or ".join(npu.OPERATOR_DTYPES), arguments.dtype)
    if arguments.batch == 0 or arguments.hidden == 0:
        raise wrong_rank("cx", f"{arguments.cx.shape}, which is empty")
    if arguments.on_host:
        return _HostCall(arguments, outputs)
    device = dispatch.choose(arguments, "npu", None).device
    return _NPUCall(arguments.operator, device, inputs, outputs, zeros_like, flags)


def _phase_two(operator: str, workspace: Any, size: int, executor: Executor | None, stream: Any) -> int:
    """Run a prepared call."""
    try:
        if executor is None:
            message = "`executor` must be one from phase one, got None"
            raise NullPointerError(message)
        if not isinstance(executor, Executor):
            raise wrong_type("executor", "one from phase one", executor)
        if executor.operator != operator:
            raise wrong_value("executor", f"one from {operator}GetWorkspaceSize", executor)
        call = executor.take()
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise wrong_type("workspaceSize", "a number of bytes", size)
        if workspace is None and size != 0:
            raise missing("workspace")
        if size < call.workspace_size:
            raise wrong_value("workspaceSize", f"at least {call.workspace_size}", size)
        call.run(workspace, int(size), stream)
    except (LSTMCellError, MemoryError) as error:
        return _failed(error)
    return Status.ACLNN_SUCCESS


class _HostCall:
    """A prepared call on the CPU."""

    def __init__(self, arguments: Arguments | ForwardArguments, outputs: list[Any]) -> None:
        self.operator = arguments.operator
        self._executor = _api.prepare(arguments, tuple(outputs))
        self.workspace_size: int = self._executor.workspace_size

    def run(self, workspace: Any, workspace_size: int, stream: object) -> None:
        if stream is not None:
            raise wrong_value("stream", "None where the CPU computes", stream)
        try:
            buffer = memoryview(workspace).cast("B")
        except (TypeError, ValueError) as error:
            raise wrong_type("workspace", f"a contiguous buffer ({error})", workspace) from None
        if buffer.readonly or buffer.nbytes < workspace_size:
            what = "a read-only one" if buffer.readonly else f"{buffer.nbytes} bytes"
            message = f"`workspace` must be a writable buffer of {workspace_size} bytes, got {what}"
            raise InvalidParameterError(message)
        self._executor.run(buffer)


class _NPUCall:
    """A prepared call on an NPU."""

    def __init__(
        self,
        operator: str,
        device: str,
        inputs: list[Any],
        outputs: list[Any],
        zeros_like: Any,
        flags: tuple[bool, ...],
    ) -> None:
        from lstmcell_bwd.npu import op, runtime

        self.operator = operator
        self._device: Device = runtime.get_device(int(device.removeprefix("npu:")))
        self._operands: Operands
        self._executor: NPUExecutor

        def job(_: Companion) -> None:
            self._operands = op.Operands(self._device, inputs, outputs, zeros_like)
            try:
                self._executor = op.prepare(
                    self._device, operator, self._operands.inputs, self._operands.outputs, *flags
                )
            except BaseException:
                self._device.release(self._operands.disown(), idle=True)
                raise

        self._device.run(job)
        self.workspace_size = self._executor.workspace_size

    def run(self, workspace: Any, workspace_size: int, stream: Any) -> None:
        dispatch.check_stream(stream)
        address = self._address(workspace, workspace_size)
        handle = 0 if stream is None else stream if isinstance(stream, int) else stream.npu_stream

        def job(_: Companion) -> None:
            faults = self._device.faults
            self._operands.copy_inputs(handle)
            self._executor.run(address, handle)
            for output in self._operands.outputs:
                if output is not None:
                    output.memory.launched_at = faults

        self._device.run(job, self._device.caller_context())

    def _address(self, workspace: Any, workspace_size: int) -> int:
        from lstmcell_bwd.npu.array import NPUArray

        if isinstance(workspace, NPUArray):
            workspace.check_open()
            if workspace.device != self._device.index or not workspace.is_contiguous:
                raise wrong_value("workspace", f"contiguous memory of npu:{self._device.index}", workspace)
            if workspace.nbytes < workspace_size:
                raise wrong_value("workspace", f"memory of {workspace_size} bytes", workspace)
            return workspace.pointer
        if workspace is None:
            return 0
        if isinstance(workspace, bool) or not isinstance(workspace, int):
            raise wrong_type("workspace", "an NPUArray or an integer address", workspace)
        if workspace <= 0:
            raise wrong_value("workspace", "an NPUArray or an integer address", workspace)
        return workspace
