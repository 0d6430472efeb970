"""Arrays in device memory: `NPUArray`, and views of the tensors of torch_npu."""

# ruff: noqa: EM101 - the literal is the name of the argument, which the error's text is made from
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from lstmcell_bwd._arguments import bad_argument, wrong_dtype, wrong_type, wrong_value
from lstmcell_bwd.errors import InvalidParameterError
from lstmcell_bwd.npu import OPERATOR_DTYPES, runtime

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from numpy.typing import ArrayLike, DTypeLike

__all__ = ["NPUArray", "adopt"]

_DTYPES = ("float32", "float16", "uint8")
_FORMAT_ND = 2


class NPUArray:
    """An array in the memory of an NPU, or a view of one. Made by `from_numpy`, `empty` and slicing.

    The memory is given back when the last array that views it goes, at the end of a ``with`` block, or by `close`;
    that waits for the device first.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        float32, float16 or uint8.
    strides : tuple of int
        Steps in bytes, as in NumPy; never negative.
    memory : Memory
        The device memory behind it.
    offset : int
        Bytes from the beginning of the memory to the first element.
    """

    __slots__ = ("dtype", "memory", "offset", "shape", "strides")

    def __init__(
        self, memory: runtime.Memory, shape: tuple[int, ...], dtype: DTypeLike, strides: tuple[int, ...], offset: int
    ) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.strides = strides
        self.offset = offset

    @classmethod
    def empty(cls, shape: int | tuple[int, ...], dtype: DTypeLike, device: int = 0) -> Self:
        """Make a new array whose contents are undefined.

        Parameters
        ----------
        shape : int or tuple of int
        dtype : dtype
            float32, float16 or uint8.
        device : int
            The device's index.

        Raises
        ------
        UnsupportedDtypeError
            For another dtype.
        NPUUnavailableError, NPURuntimeError
            If there is no such NPU, or no memory.
        """
        dtype = _supported(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(length < 0 for length in shape):
            raise wrong_value("shape", "a tuple of non-negative integers", shape)
        place = runtime.get_device(_device_index(device))
        return place.run(lambda _: cls.allocate(place, shape, dtype))

    @classmethod
    def from_numpy(cls, a: ArrayLike, device: int = 0) -> Self:
        """Copy an array to a device.

        Parameters
        ----------
        a : array_like
            Of dtype float32, float16 or uint8, in any layout.
        device : int
            The device's index.

        Raises
        ------
        UnsupportedDtypeError
            For another dtype.
        NPUUnavailableError, NPURuntimeError
            If there is no such NPU, or the copy failed.
        """
        array = np.asarray(a)
        dtype = _supported(array.dtype)
        place = runtime.get_device(_device_index(device))
        return place.run(lambda _: cls.upload(place, array.astype(dtype, copy=False)))

    @classmethod
    def allocate(cls, device: runtime.Device, shape: tuple[int, ...], dtype: DTypeLike, zeros: bool = False) -> Self:
        """Do what `empty` does, or make zeros, for jobs in companion threads."""
        strides: list[int] = []
        step = np.dtype(dtype).itemsize
        for length in reversed(shape):
            strides.insert(0, step)
            step *= length
        return cls(device.allocate(step, zeros), tuple(map(int, shape)), dtype, tuple(strides), 0)

    @classmethod
    def upload(cls, device: runtime.Device, array: np.ndarray) -> Self:
        """Do what `from_numpy` does, for jobs in companion threads."""
        target = cls.allocate(device, array.shape, array.dtype)
        try:
            target.fill_from(device, array)
        except BaseException:
            device.release([target.memory.disown()], idle=True)
            raise
        return target

    def fill_from(self, device: runtime.Device, array: np.ndarray) -> None:
        """Copy an array of the same shape and dtype into this one; for jobs in companion threads."""
        source = np.ascontiguousarray(array)
        if self.is_contiguous:
            if self.nbytes:
                device.write(self.pointer, source.ctypes.data, self.nbytes)
            return
        for number, index in enumerate(np.ndindex(self.shape)):
            place = self.pointer + sum(i * stride for i, stride in zip(index, self.strides, strict=True))
            device.write(place, source.ctypes.data + number * source.itemsize, source.itemsize)

    def fetch(self, device: runtime.Device) -> np.ndarray:
        """Do what `to_numpy` does, without waiting; for jobs in companion threads."""
        low, high = self.extent
        if low == high:
            return np.empty(self.shape, self.dtype)
        host = np.empty(high - low, np.uint8)
        device.read(host.ctypes.data, self.memory.address + low, high - low)
        view = np.ndarray(self.shape, self.dtype, host, self.offset - low, self.strides)
        return view if self.is_contiguous else view.copy()

    def to_numpy(self) -> np.ndarray:
        """Wait for the device and copy the array to the host.

        Raises
        ------
        InvalidParameterError
            If the array was closed.
        NPURuntimeError
            If the copy failed, or the asynchronous call that was to write here.
        """
        device = runtime.get_device(self.device)
        self.check_open()

        def job(_: runtime.Companion) -> np.ndarray:
            device.synchronise()
            if self.memory.launched_at is not None:
                device.check(self.memory.launched_at)
                self.memory.launched_at = None
            return self.fetch(device)

        return device.run(job)

    def close(self) -> None:
        """Give the memory back now, for all arrays that view it; memory of other libraries is left to them."""
        self.memory.release()

    def __enter__(self) -> Self:
        """Begin a block at whose end the memory is given back."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the memory back."""
        self.close()

    @property
    def device(self) -> int:
        """Index of the device."""
        return self.memory.index

    @property
    def pointer(self) -> int:
        """Device address of the first element."""
        return self.memory.address + self.offset

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in one run in row-major order."""
        step = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return self.size == 0
            step *= length
        return True

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and end of the elements within the memory."""
        if self.size == 0:
            return self.offset, self.offset
        reach = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + reach + self.dtype.itemsize

    @property
    def addresses(self) -> np.ndarray:
        """A NumPy array over the device addresses, for questions of overlap. Its elements must never be read."""
        if self.size == 0:
            return np.empty(self.shape, self.dtype)  # NumPy 1 refuses a null address
        interface = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": self.strides,
            "version": 3,
        }
        return np.asarray(type("DeviceAddresses", (), {"__array_interface__": interface})())

    def check_open(self) -> None:
        """Raise `InvalidParameterError` after `close`."""
        if self.memory.released:
            message = "the NPUArray must be open, got one whose memory was given back"
            raise InvalidParameterError(message)

    def __getitem__(self, key: slice | tuple[slice, ...]) -> Self:
        """Return a view of some rows (and columns): slices with positive steps only."""
        key = key if isinstance(key, tuple) else (key,)
        if len(key) > self.ndim or not all(isinstance(part, slice) for part in key):
            raise wrong_type("key", f"at most {self.ndim} slices", key)
        shape, strides, offset = list(self.shape), list(self.strides), self.offset
        for axis, part in enumerate(key):
            start, stop, step = part.indices(shape[axis])
            if step < 0:
                raise wrong_value("key", "slices with positive steps", part)
            shape[axis] = len(range(start, stop, step))
            if shape[axis]:
                offset += start * strides[axis]
            strides[axis] *= step
        return type(self)(self.memory, tuple(shape), self.dtype, tuple(strides), offset)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def __repr__(self) -> str:
        """Return shape, dtype and device."""
        state = ", closed" if self.memory.released else ""
        return f"NPUArray(shape={self.shape}, dtype={self.dtype}, device={self.device}{state})"


def _supported(dtype: DTypeLike) -> np.dtype:
    """Return the native form of a dtype that an NPUArray can have."""
    dtype = np.dtype(dtype).newbyteorder("=")
    if dtype.name not in _DTYPES:
        raise wrong_dtype("dtype", f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}", dtype)
    return dtype


def _device_index(device: int) -> int:
    if isinstance(device, bool) or not isinstance(device, (int, np.integer)):
        raise wrong_type("device", "the index of an NPU", device)
    if device < 0:
        raise wrong_value("device", "the index of an NPU", device)
    return int(device)


# ---- tensors of torch_npu ---------------------------------------------------------------------------------------


def adopt(name: str, value: object) -> NPUArray | None:
    """Return the NPUArray that a value is, or a view of a torch_npu tensor; None for anything else.

    Nothing is imported to find out. A tensor's memory stays torch's and lives at least as long as the view.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    value : object

    Raises
    ------
    UnsupportedDtypeError
        If an NPU tensor has a dtype that the operator does not have.
    InvalidParameterError
        If an NPUArray was closed.
    """
    if isinstance(value, NPUArray):
        value.check_open()
        return value
    if getattr(getattr(value, "device", None), "type", None) != "npu" or not hasattr(value, "untyped_storage"):
        return None
    return _view_of_tensor(name, value)


def _view_of_tensor(name: str, tensor: Any) -> NPUArray:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in OPERATOR_DTYPES:
        raise wrong_dtype(name, f"{' or '.join(OPERATOR_DTYPES)} on an NPU", tensor.dtype)
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is not None and torch_npu.get_npu_format(tensor) != _FORMAT_ND:
        if name.startswith("out: "):
            raise bad_argument(name, "have the layout ND", torch_npu.get_npu_format(tensor))
        tensor = torch_npu.npu_format_cast(tensor, _FORMAT_ND)
    size = np.dtype(dtype).itemsize
    storage = tensor.untyped_storage()
    memory = runtime.Memory(tensor.device.index, storage.data_ptr(), storage.nbytes(), owner=tensor)
    strides = tuple(step * size for step in tensor.stride())
    return NPUArray(memory, tuple(tensor.shape), dtype, strides, tensor.storage_offset() * size)
