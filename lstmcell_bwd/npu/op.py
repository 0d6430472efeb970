"""One call of an operator on an NPU: from checked arguments to results.

`prepare` and `NPUExecutor.run` mirror the CPU backend's interface. They and everything that takes a companion run in
companion threads; see `lstmcell_bwd.npu.runtime`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lstmcell_bwd._types import LSTMCellGradients, LSTMCellState
from lstmcell_bwd.npu import BACKWARD, FORWARD, runtime
from lstmcell_bwd.npu.array import NPUArray
from lstmcell_bwd.npu.runtime import insist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lstmcell_bwd._arguments import Arguments, ForwardArguments
    from lstmcell_bwd.errors import NPURuntimeError
    from lstmcell_bwd.npu.runtime import Companion, Device

__all__ = ["NPUExecutor", "Operands", "call_stream", "lstm_cell_backward", "lstm_cell_forward", "prepare"]

# The operator's known defect: its bias sum loses rows where it reduces 4095 or more rows at a time, which it does for
# float32 and a hidden size of at most twice the number of vector cores (96 on the largest known chip; 128 leaves a
# margin). Such batches are computed in parts of fewer rows; a multiple of 8 rows keeps every part on 32 bytes.
_DEFECT_ROWS = 4095
_DEFECT_HIDDEN = 128
_PART_ROWS = 4088


# ---- the two phases -----------------------------------------------------------------------------------------------


class Operands:
    """The eight tensors of an operator on one device.

    The backward operator insists on all of them: a missing gradient is filled in with zeros and an unused bias with one
    element. The forward operator wants both biases or neither: one without the other gets zeros for company. An input
    that an output overlaps is copied before the launch, since CANN leaves open what happens then.

    Parameters
    ----------
    device : Device
    inputs : sequence of NPUArray or None
        grad_hy, grad_cy, cx, cy, gates; forward input_gates, hidden_gates, cx, input_bias, hidden_bias.
    outputs : sequence of NPUArray or None
        grad_gates, grad_cx, grad_bias; the last is None without bias. Forward hy, cy, gates.
    zeros_like : NPUArray or None
        An input of the shape of those that may be missing. None: what is missing stays away.

    Attributes
    ----------
    inputs, outputs : list of NPUArray or None
    memories : list of Memory
        What was allocated to fill in; must live until the stream is done.
    """

    def __init__(
        self,
        device: Device,
        inputs: Sequence[NPUArray | None],
        outputs: Sequence[NPUArray | None],
        zeros_like: NPUArray | None,
    ) -> None:
        self.memories: list[runtime.Memory] = []
        self._device = device
        self._copies: list[tuple[int, int, int]] = []
        try:
            self.inputs = self._filled(inputs, None if zeros_like is None else zeros_like.shape, zeros=True)
            self.outputs = self._filled(outputs, (1,), zeros=False)
            for k, array in enumerate(self.inputs):
                if array is not None and any(_overlap(array, output) for output in self.outputs if output is not None):
                    self.inputs[k] = self._copied(array)
        except BaseException:
            device.release(self.disown(), idle=True)
            raise

    def _filled(
        self, arrays: Sequence[NPUArray | None], shape: tuple[int, ...] | None, zeros: bool
    ) -> list[NPUArray | None]:
        there = [array for array in arrays if array is not None]
        if shape is None or len(there) == len(arrays):
            return list(arrays)
        missing = NPUArray.allocate(self._device, shape, there[0].dtype, zeros)
        self.memories.append(missing.memory)
        return [missing if array is None else array for array in arrays]

    def _copied(self, array: NPUArray) -> NPUArray:
        low, high = array.extent
        memory = self._device.allocate(high - low)
        self.memories.append(memory)
        self._copies.append((memory.address, array.memory.address + low, high - low))
        return NPUArray(memory, array.shape, array.dtype, array.strides, array.offset - low)

    def copy_inputs(self, stream: int) -> None:
        """Launch the copies of inputs that an output overlaps."""
        for target, source, nbytes in self._copies:
            self._device.copy_later(target, source, nbytes, stream)

    def disown(self) -> list[int]:
        """Hand all memory over to somebody who will free it."""
        return [memory.disown() for memory in self.memories]


def _overlap(a: NPUArray, b: NPUArray) -> bool:
    """Whether two arrays may share memory."""
    low_a, high_a = a.extent
    low_b, high_b = b.extent
    start_a, start_b = a.memory.address, b.memory.address
    return start_a + low_a < start_b + high_b and start_b + low_b < start_a + high_a


class NPUExecutor:
    """One prepared call on an NPU. Internal interface of a backend: `workspace_size`, then `run`, once.

    Attributes
    ----------
    workspace_size : int
        Bytes of device memory that `run` needs.
    """

    def __init__(self, device: Device, operator: str, tensors: list[int], workspace_size: int, handle: int) -> None:
        self.workspace_size = workspace_size
        self._device = device
        self._operator = operator
        self._tensors = tensors
        self._handle: int | None = handle
        device.executors.add(self)

    def run(self, workspace: int, stream: int) -> None:
        """Launch the call in device memory of `workspace_size` bytes at an address, and return at once."""
        handle, self._handle = self._handle, None
        try:
            self._device.acl.operators.phase_two(self._operator, workspace, self.workspace_size, handle, stream)
        except BaseException:
            self.discard()
            raise
        error = self.discard()
        if error is not None:
            raise error

    def discard(self) -> NPURuntimeError | None:
        """Give the tensors back, and the executor where phase two has not done so; return the first failure."""
        tensors, self._tensors = self._tensors, []
        handle, self._handle = self._handle, None
        return _give_back(self._device, tensors, handle)

    def __del__(self) -> None:
        """Give back what an executor that was never run still holds."""
        if self._handle is not None:
            self._device.soon(partial(_give_back, self._device, self._tensors, self._handle))


def _give_back(device: Device, tensors: Sequence[int], executor: int | None) -> NPURuntimeError | None:
    operators = device.acl.operators
    errors = [insist(operators.destroy_tensor, tensor)[1] for tensor in tensors if tensor]
    if executor is not None:
        errors.append(insist(operators.destroy_executor, executor)[1])
    return next((error for error in errors if error is not None), None)


def prepare(
    device: Device,
    operator: str,
    inputs: Sequence[NPUArray | None],
    outputs: Sequence[NPUArray | None],
    *flags: bool,
) -> NPUExecutor:
    """Turn an operator's eight tensors, and its flags, into an executor: phase one."""
    operators = device.acl.operators
    tensors: list[int] = []
    try:
        for array in (*inputs, *outputs):
            tensors.append(0 if array is None else operators.create_tensor(array))
        workspace_size, handle = operators.phase_one(operator, tensors, flags)
    except BaseException:
        _give_back(device, tensors, None)
        raise
    return NPUExecutor(device, operator, tensors, workspace_size, handle)


def _launch(
    device: Device,
    companion: Companion,
    stream: int,
    operator: str,
    inputs: Sequence[NPUArray | None],
    outputs: Sequence[NPUArray | None],
    *flags: bool,
) -> None:
    """Both phases, in the companion's workspace."""
    executor = prepare(device, operator, inputs, outputs, *flags)
    try:
        workspace = device.workspace(companion, executor.workspace_size, stream)
    except BaseException:
        executor.discard()
        raise
    executor.run(workspace, stream)


# ---- streams ------------------------------------------------------------------------------------------------------


def call_stream(device: Device, tensors: Sequence[NPUArray], stream: Any) -> tuple[int | None, bool]:
    """Find the stream of a call; for the calling thread, right before the launch.

    Parameters
    ----------
    device : Device
    tensors : sequence of NPUArray
    stream : int, torch_npu stream or None

    Returns
    -------
    handle : int or None
        None: a stream of our own.
    wait : bool
        Whether the device must be awaited first, because earlier work on these tensors is on another stream.
    """
    of_torch = any(tensor.memory.owner is not None for tensor in tensors)
    torch_npu = sys.modules.get("torch_npu") if of_torch else None
    # Reading the number drains torch_npu's queue of work that is not launched yet, so it is read anew for every call.
    current = None if torch_npu is None else torch_npu.npu.current_stream(device.index).npu_stream
    if stream is None:
        wait = any(tensor.memory.launched_at is not None for tensor in tensors) or (of_torch and torch_npu is None)
        return current, wait
    handle = stream if isinstance(stream, int) else stream.npu_stream
    return handle, current not in (None, handle)


# ---- the whole call -----------------------------------------------------------------------------------------------


def lstm_cell_backward(arguments: Arguments, out: Any, device: str, stream: Any) -> LSTMCellGradients:
    """`lstmcell_bwd.lstm_cell_backward` where the dispatcher chose an NPU.

    Parameters
    ----------
    arguments : Arguments
        All on the host, or all on that NPU.
    out : tuple or None
        As the caller gave it.
    device : str
        "npu:<index>".
    stream : int, torch_npu stream or None

    Returns
    -------
    LSTMCellGradients
        ndarrays, NPUArrays or torch_npu tensors, like `cx`.
    """
    inputs = [arguments.grad_hy, arguments.grad_cy, arguments.cx, arguments.cy, arguments.gates]
    outputs = [arguments.grad_gates, arguments.grad_cx, arguments.grad_bias]
    shapes = [arguments.gates.shape, arguments.cx.shape, (4 * arguments.hidden,)]
    call = _BackwardCall(device, arguments, inputs, outputs, shapes[: 3 if arguments.has_bias else 2])
    return LSTMCellGradients(*call.results(out, stream))


def lstm_cell_forward(arguments: ForwardArguments, out: Any, device: str) -> LSTMCellState:
    """`lstmcell_bwd.lstm_cell_forward` where the dispatcher chose an NPU; the arguments are those of the above."""
    inputs = [arguments.input_gates, arguments.hidden_gates, arguments.cx, arguments.input_bias, arguments.hidden_bias]
    outputs = [arguments.hy, arguments.cy, arguments.gates]
    shapes = [arguments.cx.shape, arguments.cx.shape, arguments.input_gates.shape]
    call = _ForwardCall(device, arguments, inputs, outputs, shapes)
    return LSTMCellState(*call.results(out, None))


class _Call:
    """One call on a device, with what it holds there while it runs.

    Parameters
    ----------
    device : str
        "npu:<index>".
    arguments : Arguments or ForwardArguments
    inputs, outputs : list of ndarray, NPUArray or None
    shapes : list of tuple
        Shapes of the outputs that are wanted.
    """

    def __init__(
        self,
        device: str,
        arguments: Arguments | ForwardArguments,
        inputs: list[Any],
        outputs: list[Any],
        shapes: list[tuple[int, ...]],
    ) -> None:
        self._device = runtime.get_device(int(device.removeprefix("npu:")))
        self._on_host = arguments.on_host
        self._owner = None if arguments.on_host else arguments.cx.memory.owner
        self._dtype = arguments.dtype.newbyteorder("=")
        self._batch, self._hidden = arguments.batch, arguments.hidden
        self._inputs, self._outputs, self._shapes = inputs, outputs, shapes
        self._temporary: list[runtime.Memory] = []
        self._created: list[runtime.Memory] = []

    def results(self, out: Any, stream: Any) -> list[Any]:
        """Run the call; return ndarrays, NPUArrays or torch_npu tensors, like `cx`, or what was given as `out`."""
        outputs, wanted = self._outputs, range(len(self._shapes))
        given: list[Any] = list(out) if out is not None else [None] * 3
        if self._owner is not None:
            from lstmcell_bwd.npu.array import adopt

            for k in wanted:
                if outputs[k] is None:
                    given[k] = self._owner.new_empty(self._shapes[k])
                    outputs[k] = adopt("out", given[k])
        tensors = [array for array in (*self._inputs, *outputs) if isinstance(array, NPUArray)]
        handle, wait = call_stream(self._device, tensors, stream)
        context = 0 if handle is None else self._device.caller_context()
        results = self._device.run(partial(self.run, stream=handle, wait=wait), context)
        for k in wanted:
            if isinstance(outputs[k], np.ndarray):
                np.copyto(outputs[k], results[k])
            if given[k] is None:
                given[k] = results[k]
        return given

    def run(self, companion: Companion, stream: int | None, wait: bool) -> list[Any]:
        """Compute, wait, and return the outputs: as ndarrays where the tensors are on the host."""
        device = self._device
        try:
            results = self._run(companion, stream, wait)
        except BaseException:
            device.abandon(companion, [memory.disown() for memory in (*self._temporary, *self._created)])
            raise
        error = device.release([memory.disown() for memory in self._temporary], idle=True)
        if error is not None:
            device.release([memory.disown() for memory in self._created], idle=True)
            raise error
        return results

    def _run(self, companion: Companion, stream: int | None, wait: bool) -> list[Any]:
        device = self._device
        faults = device.faults
        if wait:
            device.synchronise()
        outputs = [self._output(k) for k in range(len(self._shapes))]
        if self._batch and self._hidden:
            inputs = [self._input(array) for array in self._inputs]
            if stream is None:
                stream = device.own_stream(companion)
            last = self._compute(companion, inputs, outputs, stream)
            for array in inputs:
                if array is not None and array.memory.launched_at is not None:
                    faults = min(faults, array.memory.launched_at)
            device.check(faults)
        else:
            last = self._empty()
        if self._on_host:
            return [last if k == 2 and last is not None else output.fetch(device) for k, output in enumerate(outputs)]
        if last is not None:
            outputs[2].fill_from(device, last)
        return outputs

    def _input(self, array: np.ndarray | NPUArray | None) -> NPUArray | None:
        """Put an input on the device."""
        if array is None or isinstance(array, NPUArray):
            return array
        on_device = NPUArray.upload(self._device, array.astype(self._dtype, copy=False))
        self._temporary.append(on_device.memory)
        return on_device

    def _output(self, k: int) -> NPUArray:
        """Find or make the tensor on the device that output k is written to."""
        array = self._outputs[k]
        if not isinstance(array, NPUArray):
            array = NPUArray.allocate(self._device, self._shapes[k], self._dtype)
            (self._temporary if self._on_host else self._created).append(array.memory)
        return array

    def _empty(self) -> np.ndarray | None:
        """Return the last output of an empty call, where that has elements."""
        return None

    def _compute(
        self, companion: Companion, inputs: list[NPUArray | None], outputs: list[NPUArray], stream: int
    ) -> np.ndarray | None:
        """Launch and wait; return the last output where it had to be made here."""
        raise NotImplementedError

    def _operands(
        self,
        inputs: list[NPUArray | None],
        outputs: Sequence[NPUArray | None],
        zeros_like: NPUArray | None,
        stream: int,
    ) -> Operands:
        operands = Operands(self._device, inputs, outputs, zeros_like)
        self._temporary += operands.memories
        operands.copy_inputs(stream)
        return operands


class _ForwardCall(_Call):
    """One call of `lstm_cell_forward`."""

    def _compute(
        self, companion: Companion, inputs: list[NPUArray | None], outputs: list[NPUArray], stream: int
    ) -> None:
        operands = self._operands(inputs, outputs, inputs[4] if inputs[3] is None else inputs[3], stream)
        _launch(self._device, companion, stream, FORWARD, operands.inputs, operands.outputs)
        self._device.synchronise(stream)


class _BackwardCall(_Call):
    """One call of `lstm_cell_backward`."""

    @property
    def _has_bias(self) -> bool:
        return len(self._shapes) == 3

    def _empty(self) -> np.ndarray | None:
        return np.zeros(self._shapes[2], self._dtype) if self._has_bias else None

    def _compute(
        self, companion: Companion, inputs: list[NPUArray | None], outputs: list[NPUArray], stream: int
    ) -> np.ndarray | None:
        device = self._device
        operands = self._operands(inputs, [*outputs, None][:3], inputs[2], stream)
        if not (
            self._has_bias
            and self._dtype == np.float32
            and self._batch >= _DEFECT_ROWS
            and self._hidden <= _DEFECT_HIDDEN
        ):
            _launch(device, companion, stream, BACKWARD, operands.inputs, operands.outputs, self._has_bias)
            device.synchronise(stream)
            return None
        parts = [slice(row, row + _PART_ROWS) for row in range(0, self._batch, _PART_ROWS)]
        pitch = -(-4 * self._hidden // 8) * 8  # rows of 32-byte units
        sums = NPUArray.allocate(device, (len(parts), pitch), self._dtype)
        self._temporary.append(sums.memory)
        for k, rows in enumerate(parts):
            part_sum = NPUArray(sums.memory, self._shapes[2], self._dtype, sums.strides[1:], k * sums.strides[0])
            part_outputs = [*(array[rows] for array in outputs[:2]), part_sum]
            part_inputs = [array[rows] for array in operands.inputs if array is not None]
            _launch(device, companion, stream, BACKWARD, part_inputs, part_outputs, True)
        device.synchronise(stream)
        total = np.zeros(self._shapes[2])
        with np.errstate(all="ignore"):
            for part in sums.fetch(device)[:, : 4 * self._hidden]:
                total += part
            return total.astype(self._dtype)
