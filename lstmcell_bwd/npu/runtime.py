"""pyACL: initialisation, devices, contexts, streams and memory, from any Python thread.

Nothing of CANN is touched before the first call that may need an NPU. From then on the rules are:

- ACL's current device and context belong to the operating-system thread, and no call unbinds a thread. So every Python
  thread that comes here gets a companion thread, and only companions call what depends on a context: the caller's
  device, context and stream cannot change, whatever fails.
- ACL is never finalised: that would take it away from everybody in the process.
- What must be given back is tried twice, and kept in a list for later where the runtime refuses both times.
- A forked child inherits no companions and no working ACL; there nothing of ACL is called.
- An exit hook releases everything; after it ACL is not called. Hooks run last in, first out, and this one is installed
  when ACL is first used, hence after those of a library that initialised ACL before.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import weakref
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from lstmcell_bwd import npu
from lstmcell_bwd.errors import LSTMCellError, NPURuntimeError, NPUUnavailableError, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lstmcell_bwd.npu.op import NPUExecutor
    from lstmcell_bwd.npu.opapi import Operators

__all__ = ["Acl", "Companion", "Device", "Memory", "describe", "get_device", "insist", "unavailable_reason"]

logger = logging.getLogger("lstmcell_bwd")

T = TypeVar("T")

_HUGE_PAGES_FIRST = 0
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3
_REPEAT_INITIALIZE = 100002
_STUB_MODE = 100039
_CONTEXT_NULL = 107002

# The bare name Ascend910B is the first-generation 910, which does not have the operator.
_SUPPORTED_CHIPS = re.compile(r"Ascend910B[1-4]|Ascend910_93")

_STATUS_NAMES = {
    100000: "ACL_ERROR_INVALID_PARAM",
    100001: "ACL_ERROR_UNINITIALIZE",
    100002: "ACL_ERROR_REPEAT_INITIALIZE",
    100003: "ACL_ERROR_INVALID_FILE",
    100037: "ACL_ERROR_REPEAT_FINALIZE",
    100039: "ACL_ERROR_COMPILING_STUB_MODE",
    107000: "ACL_ERROR_RT_PARAM_INVALID",
    107001: "ACL_ERROR_RT_INVALID_DEVICEID",
    107002: "ACL_ERROR_RT_CONTEXT_NULL",
    107003: "ACL_ERROR_RT_STREAM_CONTEXT",
    107008: "ACL_ERROR_RT_ADDR_UNALIGNED",
    107016: "ACL_ERROR_RT_INVALID_MEMORY_TYPE",
    107017: "ACL_ERROR_RT_INVALID_HANDLE",
    107018: "ACL_ERROR_RT_INVALID_MALLOC_TYPE",
    107019: "ACL_ERROR_RT_WAIT_TIMEOUT",
    107020: "ACL_ERROR_RT_TASK_TIMEOUT",
    107022: "ACL_ERROR_RT_DEVICE_TASK_ABORT",
    148049: "ACL_ERROR_INVALID_OPP_PATH",
    200000: "ACL_ERROR_BAD_ALLOC",
    200001: "ACL_ERROR_API_NOT_SUPPORT",
    200006: "ACL_ERROR_FEATURE_UNSUPPORTED",
    207000: "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
    207001: "ACL_ERROR_RT_MEMORY_ALLOCATION, out of device memory",
    207002: "ACL_ERROR_RT_MEMORY_FREE",
    207003: "ACL_ERROR_RT_AICORE_OVER_FLOW",
    207004: "ACL_ERROR_RT_NO_DEVICE",
    207005: "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL",
    207006: "ACL_ERROR_RT_NO_PERMISSION",
    207008: "ACL_ERROR_RT_NO_STREAM_RESOURCE",
    207018: "ACL_ERROR_RT_DEVICE_OOM",
    500000: "ACL_ERROR_INTERNAL_ERROR",
    500001: "ACL_ERROR_FAILURE",
    500003: "ACL_ERROR_RT_FAILURE",
    500004: "ACL_ERROR_DRV_FAILURE",
    507000: "ACL_ERROR_RT_INTERNAL_ERROR",
    507001: "ACL_ERROR_RT_TS_ERROR",
    507008: "ACL_ERROR_RT_SOC_VERSION",
    507010: "ACL_ERROR_RT_LOST_HEARTBEAT",
    507011: "ACL_ERROR_RT_MODEL_EXECUTE",
    507014: "ACL_ERROR_RT_AICORE_TIMEOUT",
    507015: "ACL_ERROR_RT_AICORE_EXCEPTION",
    507016: "ACL_ERROR_RT_AICORE_TRAP_EXCEPTION",
    507018: "ACL_ERROR_RT_AICPU_EXCEPTION",
    507033: "ACL_ERROR_RT_DEV_SETUP_ERROR",
    507034: "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
    507035: "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
    507036: "ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION",
    507044: "ACL_ERROR_RT_VECTOR_CORE_TRAP_READ_OVERFLOW",
    507045: "ACL_ERROR_RT_VECTOR_CORE_TRAP_WRITE_OVERFLOW",
    507046: "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
    507053: "ACL_ERROR_RT_DEVICE_MEM_ERROR",
    507054: "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
    507899: "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
    507901: "ACL_ERROR_RT_SOCKET_CLOSE",
}


def _status_name(code: int) -> str:
    try:
        return Status(code).name
    except ValueError:
        return _STATUS_NAMES.get(code, "a code that is not in the documentation")


# ---- one ACL per process ----------------------------------------------------------------------------------------

_lock = threading.Lock()
_state: Acl | str | None = None  # the opened ACL; why it cannot be used; None: nobody has asked yet
_thread = threading.local()  # .companion: what serves this thread; .serves: this thread is a companion itself


class Acl:
    """The initialised pyACL of this process and what it offers.

    Parameters
    ----------
    module : module
        pyACL.
    initialised_before : bool
        Whether another library had initialised ACL.
    chip : str
    device_count : int
    operators : Operators
    """

    def __init__(
        self, module: Any, initialised_before: bool, chip: str, device_count: int, operators: Operators
    ) -> None:
        self.module = module
        self.initialised_before = initialised_before
        self.chip = chip
        self.operators = operators
        self.devices = [Device(self, index) for index in range(device_count)]
        self.companions: set[Companion] = set()
        # Gives the devices back at exit; begun with the first device, because Python 3.12 starts no thread at exit.
        self.closer: Companion | None = None

    def call(self, function: str, *arguments: int) -> int:
        """Call a function of `acl.rt`; return its value, or raise `NPURuntimeError`."""
        result = getattr(self.module.rt, function)(*arguments)
        value: int
        value, code = result if isinstance(result, tuple) else (0, result)
        if code:
            raise failure(self.module, f"acl.rt.{function}", code)
        return value

    def companion(self) -> Companion:
        """Return the companion of the calling thread."""
        handle = getattr(_thread, "companion", None)
        if handle is None or handle.companion.acl is not self:
            handle = _thread.companion = _Handle(Companion(self))
        return handle.companion


def failure(module: Any, function: str, code: int) -> NPURuntimeError:
    """Make the exception for a code that a function of CANN returned to this thread, with the runtime's own message."""
    try:
        message = module.get_recent_err_msg() or ""
    except UnicodeDecodeError:  # pyACL decodes strictly
        message = ""
    return NPURuntimeError(function, code, _status_name(code), message.strip())


def _open() -> Acl | str:
    """Initialise ACL when first asked; afterwards give the same answer for the life of the process."""
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _try_to_open()
    return _state


def _try_to_open() -> Acl | str:
    if npu.forked_from_acl:
        return (
            "this process was forked from one that uses the NPU, whose state cannot be carried over; start it with "
            "multiprocessing's 'spawn' method"
        )
    try:
        import acl
    except Exception as error:  # an import of compiled code can fail in any way
        return (
            f"pyACL (`import acl`) cannot be imported: {type(error).__name__}: {error}; install CANN and source its "
            "set_env.sh before starting Python"
        )
    if not hasattr(acl, "init") or not hasattr(acl, "rt"):
        return (
            f"the module `acl` at {getattr(acl, '__file__', '?')} is not pyACL; put CANN's python/site-packages first"
        )
    code = acl.init()
    if code == _STUB_MODE:
        return "acl.init returned 100039: CANN's stub libraries were loaded, the NPU driver is missing; install it"
    if code not in (0, _REPEAT_INITIALIZE):
        return f"{failure(acl, 'acl.init', code)}; check the driver with npu-smi info"
    device_count, error_code = acl.rt.get_device_count()
    if error_code or not device_count:
        what = str(failure(acl, "acl.rt.get_device_count", error_code)) if error_code else "ACL sees no device"
        return f"{what}; check npu-smi info, ASCEND_RT_VISIBLE_DEVICES and the container's devices"
    chip = acl.get_soc_name()
    if not chip:
        return f"acl.get_soc_name gave no name: {acl.get_recent_err_msg() or 'no message'}; check npu-smi info"
    if not _SUPPORTED_CHIPS.match(chip):
        return f"the chip {chip} does not have the operator; Atlas A2 or A3 (Ascend910B1 to B4, Ascend910_93) has"
    from lstmcell_bwd.npu import opapi

    operators = opapi.load(acl)
    if isinstance(operators, str):
        return operators
    atexit.register(_close)
    return Acl(acl, code == _REPEAT_INITIALIZE, chip, device_count, operators)


def unavailable_reason(index: int, operator: str | None = None) -> str | None:
    """Answer `lstmcell_bwd.npu.unavailable_reason`."""
    acl = _open()
    if isinstance(acl, str):
        return acl
    if index >= len(acl.devices):
        return f"there is no device {index}; use one of npu:0 to npu:{len(acl.devices) - 1}"
    return None if operator is None else acl.operators.missing.get(operator)


def get_device(index: int) -> Device:
    """Return a device of this process.

    Raises
    ------
    NPUUnavailableError
        If it cannot be used.
    """
    reason, acl = unavailable_reason(index), _open()
    if isinstance(acl, str) or reason is not None:
        message = f"npu:{index} cannot be used: {reason}"
        raise NPUUnavailableError(message)
    return acl.devices[index]


def describe() -> dict[str, Any]:
    """Answer `lstmcell_bwd.npu.describe`."""
    acl = _open()
    if isinstance(acl, str):
        return {"available": False, "reason": acl}
    *version, code = acl.module.get_version()
    report = {
        "available": True,
        "chip": acl.chip,
        "devices": len(acl.devices),
        "pyacl": acl.module.__file__,
        "acl version": ".".join(map(str, version)) if not code else "unknown",
        "operator library": acl.operators.libraries[npu.BACKWARD],
        "forward operator": acl.operators.libraries.get(npu.FORWARD) or acl.operators.missing[npu.FORWARD],
        "tensor library": acl.operators.tensor_library,
        "initialised by": "another library" if acl.initialised_before else "lstmcell_bwd",
    }
    if hasattr(acl.module, "get_cann_version"):
        package, code = acl.module.get_cann_version(0)
        report["cann version"] = package["version"] if not code else "unknown"
    return report


# ---- companion threads ------------------------------------------------------------------------------------------


class _Job:
    """A call that a companion makes for the thread that waits for it."""

    __slots__ = ("_done", "_error", "_function", "_value", "last")

    def __init__(self, function: Callable[[], Any], last: bool) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self.last = last

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # it belongs to the waiting thread, whatever it is
            self._error = error
        finally:
            del self._function  # the companion may hold this job until its next one
            self._done.release()

    def wait(self) -> Any:
        self._done.acquire()
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self._error = None  # an exception that holds its own traceback would keep arrays alive


class Companion(threading.Thread):
    """A thread of ours that calls ACL for one Python thread, with that thread's own stream and workspace per device.

    Parameters
    ----------
    acl : Acl

    Raises
    ------
    NPUUnavailableError
        If no thread can be started.

    Attributes
    ----------
    streams : dict
        Device index to stream handle.
    workspaces : dict
        Device index to (address, bytes): the one block of device memory that is kept between calls.
    """

    def __init__(self, acl: Acl) -> None:
        super().__init__(name="lstmcell_bwd-acl", daemon=True)
        self.acl = acl
        self.streams: dict[int, int] = {}
        self.workspaces: dict[int, tuple[int, int]] = {}
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        try:
            self.start()
        except RuntimeError as error:  # at exit, or no more threads
            message = f"the NPU cannot be used: {error}"
            raise NPUUnavailableError(message) from error
        acl.companions.add(self)

    def run(self) -> None:
        """Serve until the last job."""
        _thread.serves = True
        last = False
        while not last:
            job = self._jobs.get()
            last = job.last
            job.run()
            del job  # with the arrays in its result

    def submit(self, function: Callable[[], T], last: bool = False) -> T:
        """Call a function in this thread; return its value or raise its exception."""
        job = _Job(function, last)
        self._jobs.put(job)
        value: T = job.wait()
        return value

    def stop(self) -> None:
        """Give back streams and workspaces, and end the thread."""
        self.submit(self._release, last=True)
        self.acl.companions.discard(self)

    def _release(self) -> None:
        for index in {*self.streams, *self.workspaces}:
            device = self.acl.devices[index]
            stream, workspace = self.streams.pop(index, 0), self.workspaces.pop(index, (0, 0))
            insist(device.bind)
            device.release([workspace[0]] if workspace[0] else [])
            if stream:
                insist(self.acl.call, "destroy_stream", stream)


class _Handle:
    """Kept by the thread that a companion serves; ends the companion with that thread."""

    def __init__(self, companion: Companion) -> None:
        self.companion = companion

    def __del__(self) -> None:
        if self.companion.acl is _state:
            self.companion.stop()


def insist(function: Callable[..., Any], *arguments: Any) -> tuple[bool, NPURuntimeError | None]:
    """Make a call that gives something back, twice if the first attempt fails.

    Returns
    -------
    done : bool
    error : NPURuntimeError or None
        What the first attempt raised.
    """
    try:
        function(*arguments)
    except NPURuntimeError as first:
        try:
            function(*arguments)
        except NPURuntimeError as second:
            logger.warning("%s, twice", str(second))
            return False, first
        return True, first
    return True, None


# ---- devices ------------------------------------------------------------------------------------------------------


class Device:
    """One NPU. Its methods, but for `run`, `soon` and `caller_context`, are for jobs in companion threads.

    Parameters
    ----------
    acl : Acl
    index : int

    Attributes
    ----------
    faults : int
        How many failures of the device itself have been reported so far. A kernel's failure is reported once, to
        whoever asks next, so every call compares this number from its launch with that after its wait.
    executors : WeakSet of NPUExecutor
        Those alive.
    """

    def __init__(self, acl: Acl, index: int) -> None:
        self.acl = acl
        self.index = index
        self.faults = 0
        self.executors: weakref.WeakSet[NPUExecutor] = weakref.WeakSet()
        self._last_fault = "", 0, "", ""  # not the exception: its traceback would keep arrays alive
        self._context = 0
        self._allocated: set[int] = set()
        self._later: deque[Callable[[], Any]] = deque()  # refused by the runtime, or dropped in the middle of a job
        self._opening = threading.Lock()
        self._asking = threading.Lock()

    def run(self, function: Callable[[Companion], T], context: int = 0) -> T:
        """Call a function in the companion of the calling thread, bound to this device.

        Parameters
        ----------
        function : callable
            Its argument is the companion.
        context : int
            The context to bind; 0 is the device's default one.
        """
        if self.acl is not _state:
            message = f"npu:{self.index} cannot be used: {unavailable_reason(self.index)}"
            raise NPUUnavailableError(message)
        companion = self.acl.companion()

        def job() -> T:
            self.bind(context)
            self._clean_up()
            try:
                return function(companion)
            finally:
                self._clean_up()

        return companion.submit(job)

    def bind(self, context: int = 0) -> None:
        """Bind the thread to the device; open the device once per process."""
        with self._opening:
            if not self._context:
                with _lock:
                    self.acl.closer = self.acl.closer or Companion(self.acl)
                self.acl.call("set_device", self.index)
                try:
                    self._context = self.acl.call("get_context")
                except NPURuntimeError:
                    insist(self.acl.call, "reset_device", self.index)
                    raise
        self.acl.call("set_context", context or self._context)

    def caller_context(self) -> int:
        """Return the context of the calling thread where it is one of this device, else 0."""
        context, code = self.acl.module.rt.get_context()
        if code == _CONTEXT_NULL:
            return 0
        if code:
            raise failure(self.acl.module, "acl.rt.get_context", code)
        return context if self.acl.call("get_device") == self.index else 0

    # -- waiting and copying: the calls that may be told of a failed kernel

    def _ask(self, function: str, *arguments: int) -> None:
        # Under the lock, or another thread could find its own wait successful and `faults` not counted up yet.
        with self._asking:
            try:
                self.acl.call(function, *arguments)
            except NPURuntimeError as error:
                self.faults += 1
                self._last_fault = error.function, error.status, error.name, error.detail
                raise

    def synchronise(self, stream: int | None = None) -> None:
        """Wait for a stream, or for everything on the device."""
        if stream is None:
            self._ask("synchronize_device")
        else:
            self._ask("synchronize_stream", stream)

    def check(self, faults: int) -> None:
        """Raise the last failure of the device if there was one since `faults` was read."""
        with self._asking:
            if self.faults != faults:
                raise NPURuntimeError(*self._last_fault)

    def write(self, address: int, source: int, nbytes: int) -> None:
        """Copy from the host."""
        self._ask("memcpy", address, nbytes, source, nbytes, _HOST_TO_DEVICE)

    def read(self, target: int, address: int, nbytes: int) -> None:
        """Copy to the host; does not wait for any stream."""
        self._ask("memcpy", target, nbytes, address, nbytes, _DEVICE_TO_HOST)

    def copy_later(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy within the device, in the order of a stream."""
        self.acl.call("memcpy_async", target, nbytes, source, nbytes, _DEVICE_TO_DEVICE, stream)

    # -- memory and streams

    def allocate(self, nbytes: int, fill_with_zeros: bool = False) -> Memory:
        """Make new device memory."""
        if nbytes == 0:
            return Memory(self.index, 0, 0)
        address = self.acl.call("malloc", nbytes, _HUGE_PAGES_FIRST)
        self._allocated.add(address)
        memory = Memory(self.index, address, nbytes, self)
        if fill_with_zeros:
            try:
                self.acl.call("memset", address, nbytes, 0, nbytes)
            except NPURuntimeError:
                self.release([memory.disown()], idle=True)
                raise
        return memory

    def release(self, addresses: Iterable[int], idle: bool = False) -> NPURuntimeError | None:
        """Free memory, after waiting for the device unless that is known to be idle; return the first failure."""
        addresses = [address for address in addresses if address]
        first = None
        if addresses and not idle:
            idle, first = insist(self.synchronise)
            if not idle:
                self._later.append(partial(self.release, addresses))
                return first
        for address in addresses:
            done, error = insist(self.acl.call, "free", address)
            if done:
                self._allocated.discard(address)
            else:
                self._later.append(partial(self.release, [address]))
            first = first or error
        return first

    def abandon(self, companion: Companion, addresses: list[int]) -> None:
        """Clean up after a failure: nothing is freed or used again before the device has stopped using it."""
        idle, _ = insist(self.synchronise)
        if not idle:
            addresses.append(companion.workspaces.pop(self.index, (0, 0))[0])
        self.release(addresses, idle)

    def soon(self, function: Callable[[], NPURuntimeError | None]) -> NPURuntimeError | None:
        """Give something back from any thread: now, or with the next job where nothing can be called now."""
        if self.acl is not _state:
            return None
        if getattr(_thread, "serves", False):  # the garbage collector struck in the middle of a job
            self._later.append(function)
            return None
        try:
            return self.run(lambda _: function())
        except NPURuntimeError as error:
            self._later.append(function)
            return error

    def _clean_up(self) -> None:
        for _ in range(len(self._later)):
            self._later.popleft()()

    def own_stream(self, companion: Companion) -> int:
        """Return the stream of the thread that a companion serves."""
        if self.index not in companion.streams:
            companion.streams[self.index] = self.acl.call("create_stream")
        return companion.streams[self.index]

    def workspace(self, companion: Companion, nbytes: int, stream: int) -> int:
        """Return the companion's workspace, grown where it is too small; earlier work of `stream` may still use it."""
        address, size = companion.workspaces.get(self.index, (0, 0))
        if size < nbytes:
            if address:
                self.synchronise(stream)
                del companion.workspaces[self.index]
                error = self.release([address], idle=True)
                if error is not None:
                    raise error
            address = self.allocate(nbytes).disown()
            companion.workspaces[self.index] = address, nbytes
        return address

    def close(self) -> None:
        """Free all that is left and give the device back."""
        if self._context:
            insist(self.bind)
            self._clean_up()
            for executor in list(self.executors):
                executor.discard()
            self.release(list(self._allocated))
            insist(self.acl.call, "reset_device", self.index)


class Memory:
    """A run of device memory. Ours is freed with the last array that views it; somebody else's is kept alive.

    Parameters
    ----------
    index : int
        The device's.
    address, nbytes : int
    device : Device, optional
        Where to free it; None: it is somebody else's, or empty.
    owner : object, optional
        Whose it is.

    Attributes
    ----------
    launched_at : int or None
        `Device.faults` when the last asynchronous call that writes here was launched; None after it was awaited.
    """

    __slots__ = ("__weakref__", "_device", "address", "index", "launched_at", "nbytes", "owner")

    def __init__(
        self, index: int, address: int, nbytes: int, device: Device | None = None, owner: object = None
    ) -> None:
        self.index = index
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self.launched_at: int | None = None
        self._device = device

    @property
    def released(self) -> bool:
        """Whether the memory was given back before its end."""
        return self.address == 0 and self.nbytes > 0

    def disown(self) -> int:
        """Hand the address to somebody who will free it."""
        address, self.address, self._device = self.address, 0, None
        return address

    def release(self) -> None:
        """Free the memory, after waiting for the device."""
        device = self._device
        if device is not None:
            error = device.soon(partial(device.release, [self.disown()]))
            if error is not None:
                raise error

    def __del__(self) -> None:
        """Free the memory; a failure can only be logged."""
        try:
            self.release()
        except LSTMCellError as error:
            logger.warning("releasing memory of npu:%d: %s", self.index, str(error))


# ---- fork and exit -------------------------------------------------------------------------------------------------


def _in_forked_child() -> None:
    """Forget the parent's ACL; a lock that another thread of the parent held is replaced."""
    global _state, _lock
    _lock = threading.Lock()
    if isinstance(_state, Acl):
        _state = None


os.register_at_fork(after_in_child=_in_forked_child)


def _close() -> None:
    """Give everything back while ACL can still be called."""
    global _state
    acl = _state
    if not isinstance(acl, Acl):
        return
    for companion in acl.companions - {acl.closer}:
        companion.stop()
    if acl.closer is not None:
        for device in acl.devices:
            acl.closer.submit(device.close)
        acl.closer.stop()
    _state = "the interpreter is exiting"
