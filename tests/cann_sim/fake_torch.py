"""Stand-ins for torch_npu and its tensors over the simulated CANN. Test equipment, not a product.

Only what a library that takes foreign tensors may look at: pointer, storage, strides, type, device, format,
and the current stream. torch itself is not imitated.
"""

import types

import numpy as np


class _Storage:
    def __init__(self, pointer, nbytes):
        self._pointer, self._nbytes = pointer, nbytes

    def data_ptr(self):
        return self._pointer

    def nbytes(self):
        return self._nbytes


class FakeNpuTensor:
    """A tensor of torch_npu as others see it: a strided view of a storage on the device.

    Parameters
    ----------
    storage : _Storage
        The storage; shared by views.
    shape, stride : tuple of int
        In elements.
    offset : int
        In elements. `data_ptr` contains it already.
    dtype : numpy.dtype
        The element type; `dtype` of the tensor prints like torch's ("torch.float32").
    device : int
        The device index.
    npu_format : int
        2 is ND; 29 is a private layout (FRACTAL_NZ).
    """

    def __init__(self, storage, shape, stride, offset, dtype, device, npu_format=2):
        self._storage, self._stride, self._offset = storage, tuple(stride), offset
        self._numpy_dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        self.dtype = _Dtype(self._numpy_dtype.name)
        self.device = types.SimpleNamespace(type="npu", index=device)
        self.npu_format = npu_format
        self.recorded_streams = []

    def data_ptr(self):
        return self._storage.data_ptr() + self._offset * self.element_size()

    def untyped_storage(self):
        return self._storage

    def storage_offset(self):
        return self._offset

    def stride(self):
        return self._stride

    def element_size(self):
        return self._numpy_dtype.itemsize

    def dim(self):
        return len(self.shape)

    def record_stream(self, stream):
        self.recorded_streams.append(stream)


class _Dtype:
    def __init__(self, name):
        self._name = name

    def __repr__(self):
        return f"torch.{self._name}"

    def __eq__(self, other):
        return repr(self) == repr(other)

    def __hash__(self):
        return hash(repr(self))


FakeNpuTensor.__module__ = _Dtype.__module__ = "torch"


class FakeTorchNpu(types.ModuleType):
    """The module ``torch_npu``: put it into ``sys.modules`` under that name. ACL must be initialised.

    CANN fact: torch_npu keeps launched work in a queue on the host, and reading ``npu_stream`` is what drains
    it. A backend that keeps the number of an earlier reading overtakes that work.

    Attributes
    ----------
    stream_reads : int
        How often ``npu_stream`` was read.
    """

    def __init__(self, acl):
        super().__init__("torch_npu")
        self._acl, self._streams, self._queue, self._tensors = acl, {}, [], []
        self.stream_reads = 0
        module = self

        class Stream:
            @property
            def npu_stream(self):
                module.stream_reads += 1
                return module._drain()

        self.npu = types.SimpleNamespace(current_stream=lambda device=None: Stream(), Stream=Stream)

    def _check(self, result):
        *values, code = result if isinstance(result, tuple) else (result,)
        if code:
            raise RuntimeError(f"fake torch_npu: ACL returned {code}")
        return values[0] if values else None

    def _drain(self):
        device = self._check(self._acl.rt.get_device())
        if device not in self._streams:
            self._streams[device] = self._check(self._acl.rt.create_stream())
        while self._queue:
            self._queue.pop(0)(self._streams[device])
        return self._streams[device]

    def tensor(self, array, *, strides=None, offset=0, storage_elements=None, npu_format=2):
        """Return a tensor on the current device whose contents still wait in the host queue.

        Parameters
        ----------
        array : numpy.ndarray
            The values.
        strides : tuple of int, optional
            In elements; default row-major.
        offset, storage_elements : int, optional
            Where the view begins in its storage, and how large that is.
        npu_format : int
            What `get_npu_format` tells.
        """
        array = np.asarray(array)
        if strides is None:
            strides = tuple(s // array.itemsize for s in np.empty(array.shape, array.dtype).strides)
        used = offset + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) + 1
        host = np.zeros(max(used, storage_elements or 0), array.dtype)
        steps = tuple(s * array.itemsize for s in strides)
        np.lib.stride_tricks.as_strided(host[offset:], array.shape, steps)[...] = array
        pointer = self._check(self._acl.rt.malloc(host.nbytes, 0))
        device = self._check(self._acl.rt.get_device())

        def fill(stream, host=host):
            copy = (pointer, host.nbytes, host.ctypes.data, host.nbytes, 1, stream)
            self._check(self._acl.rt.memcpy_async(*copy))

        self._queue.append(fill)
        storage = _Storage(pointer, host.nbytes)
        self._tensors.append(storage)
        return FakeNpuTensor(storage, array.shape, strides, offset, array.dtype, device, npu_format)

    def to_numpy(self, tensor):
        """Synchronise and copy a tensor of this module back, without counting a stream reading."""
        self._check(self._acl.rt.synchronize_stream(self._drain()))
        storage = tensor.untyped_storage()
        host = np.empty(storage.nbytes(), np.uint8)
        copy = (host.ctypes.data, host.nbytes, storage.data_ptr(), host.nbytes, 2)
        self._check(self._acl.rt.memcpy(*copy))
        elements = host.view(repr(tensor.dtype).removeprefix("torch."))[tensor.storage_offset() :]
        steps = tuple(s * tensor.element_size() for s in tensor.stride())
        return np.lib.stride_tricks.as_strided(elements, tensor.shape, steps).copy()

    def get_npu_format(self, tensor):
        """Return the layout number of a tensor."""
        return tensor.npu_format

    def npu_format_cast(self, tensor, npu_format):
        """Return the tensor in another layout (the simulation keeps all layouts as ND)."""
        view = (tensor._storage, tensor.shape, tensor.stride(), tensor.storage_offset())
        return FakeNpuTensor(*view, tensor._numpy_dtype, tensor.device.index, npu_format)

    def close(self):
        """Free the memory of all tensors and destroy the streams, as the end of a torch process would."""
        for stream in self._streams.values():
            self._check(self._acl.rt.synchronize_stream(stream))
            self._check(self._acl.rt.destroy_stream(stream))
        for storage in self._tensors:
            self._check(self._acl.rt.free(storage.data_ptr()))
        self._streams, self._queue, self._tensors = {}, [], []
