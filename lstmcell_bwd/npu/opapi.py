"""The operator's C interface through ctypes: aclTensor descriptors and the two phases.

pyACL has no binding of aclnn operators. Libraries are opened by absolute path with local binding (with global binding
the C++ symbols of several such libraries interpose, which has ended in double frees) and are never closed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lstmcell_bwd.npu.runtime import failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lstmcell_bwd.npu.array import NPUArray

__all__ = ["Operators", "load"]

_PHASE_TWO = "aclnnThnnFusedLstmCellBackward"
_PHASE_ONE = f"{_PHASE_TWO}GetWorkspaceSize"
_DATA_TYPES = {"float32": 0, "float16": 1}  # aclDataType
_FORMAT_ND = 2
_ERR_INNER = 561000

_handle = ctypes.c_void_p
_status = ctypes.c_int32
_int64s = ctypes.POINTER(ctypes.c_int64)

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "aclCreateTensor": (
        _handle,
        [
            *(_int64s, ctypes.c_uint64, ctypes.c_int32),  # the view's dimensions and the data type
            *(_int64s, ctypes.c_int64, ctypes.c_int32),  # strides, offset and format
            *(_int64s, ctypes.c_uint64, ctypes.c_void_p),  # the storage's dimensions and address
        ],
    ),
    "aclDestroyTensor": (_status, [_handle]),
    "aclDestroyAclOpExecutor": (_status, [_handle]),
    _PHASE_ONE: (
        _status,
        [*[_handle] * 5, ctypes.c_bool, *[_handle] * 3, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(_handle)],
    ),
    _PHASE_TWO: (_status, [ctypes.c_void_p, ctypes.c_uint64, _handle, ctypes.c_void_p]),
}


class Operators:
    """The functions of one installed operator package.

    Parameters
    ----------
    acl : module
        pyACL, for the runtime's messages.
    tensor_library, operator_library : ctypes.CDLL
        libnnopbase.so, and the library that has both phases.
    """

    def __init__(self, acl: Any, tensor_library: ctypes.CDLL, operator_library: ctypes.CDLL) -> None:
        self.tensor_library = tensor_library._name
        self.operator_library = operator_library._name
        self._acl = acl
        self._create_tensor = _function(tensor_library, "aclCreateTensor")
        self._destroy_tensor = _function(tensor_library, "aclDestroyTensor")
        self._destroy_executor = None
        if hasattr(tensor_library, "aclDestroyAclOpExecutor"):
            self._destroy_executor = _function(tensor_library, "aclDestroyAclOpExecutor")
        self._phase_one = _function(operator_library, _PHASE_ONE)
        self._phase_two = _function(operator_library, _PHASE_TWO)

    def create_tensor(self, array: NPUArray) -> int:
        """Make a descriptor of an array; it records the address and owns nothing."""
        size = array.dtype.itemsize
        shape = _int64_array(array.shape)
        strides = _int64_array([stride // size for stride in array.strides])
        whole = array.is_contiguous and array.offset == 0
        storage = shape if whole else _int64_array([array.memory.nbytes // size])
        handle: int | None = self._create_tensor(
            shape, len(shape), _DATA_TYPES[array.dtype.name], strides, array.offset // size, _FORMAT_ND,
            storage, len(storage), array.memory.address,
        )  # fmt: skip
        if not handle:
            raise failure(self._acl, "aclCreateTensor", _ERR_INNER)
        return handle

    def destroy_tensor(self, handle: int) -> None:
        """Destroy a descriptor."""
        self._check("aclDestroyTensor", self._destroy_tensor(handle))

    def phase_one(self, tensors: Sequence[int], has_bias: bool) -> tuple[int, int]:
        """Check the arguments; return the workspace's size in bytes and the executor's handle."""
        workspace_size, executor = ctypes.c_uint64(0), _handle(None)
        status = self._phase_one(
            *tensors[:5], has_bias, *tensors[5:], ctypes.byref(workspace_size), ctypes.byref(executor)
        )
        self._check(_PHASE_ONE, status)
        return workspace_size.value, executor.value or 0

    def phase_two(self, workspace: int, workspace_size: int, executor: int | None, stream: int) -> None:
        """Launch the operator. The executor is gone afterwards, also on failure."""
        self._check(_PHASE_TWO, self._phase_two(workspace, workspace_size, executor, stream))

    def destroy_executor(self, executor: int) -> None:
        """Destroy an executor that phase two never saw; older releases cannot, and leak it."""
        if self._destroy_executor is not None:
            self._check("aclDestroyAclOpExecutor", self._destroy_executor(executor))

    def _check(self, function: str, status: int) -> None:
        if status:
            raise failure(self._acl, function, status)


def _int64_array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _function(library: ctypes.CDLL, name: str) -> Any:
    """Return a function of a library with its prototype; without one ctypes would cut handles to 32 bits."""
    function = getattr(library, name)
    function.restype, function.argtypes = _PROTOTYPES[name]
    return function


# ---- finding the libraries ----------------------------------------------------------------------------------------


def load(acl: Any) -> Operators | str:
    """Open the libraries of the installation that the environment names.

    Custom operator packages come first, then the split libraries of CANN 9, then the one library of older releases.

    Parameters
    ----------
    acl : module
        pyACL.

    Returns
    -------
    Operators or str
        The functions, or what is missing and what to do.
    """
    folders = _library_folders()
    advice = "install CANN 9.0 or later with its ops packages and source its set_env.sh before starting Python"
    tensor_library, notes = _first([folder / "libnnopbase.so" for folder in folders], ("aclCreateTensor",))
    if tensor_library is None:
        return f"aclCreateTensor was not found ({notes}); {advice}"
    candidates = list(_custom_packages())
    candidates += [folder / name for name in ("libopapi_nn.so", "libopapi.so") for folder in folders]
    operator_library, notes = _first(candidates, (_PHASE_ONE, _PHASE_TWO))
    if operator_library is None:
        return f"the operator {_PHASE_TWO} was not found ({notes}); {advice}"
    return Operators(acl, tensor_library, operator_library)


def _library_folders() -> list[Path]:
    """List the folders where CANN's libraries may be."""
    homes = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")]
    folders = [Path(home, "lib64") for home in homes if home]
    folders += [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    return list(dict.fromkeys([*folders, Path("/usr/local/Ascend/cann/lib64")]))


def _custom_packages() -> Iterator[Path]:
    """Yield the libraries of custom operator packages, in the order in which CANN prefers them."""
    library = Path("op_api", "lib", "libcust_opapi.so")
    for folder in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder) / library
    if os.environ.get("ASCEND_OPP_PATH"):
        vendors = Path(os.environ["ASCEND_OPP_PATH"], "vendors")
        try:
            lines = (vendors / "config.ini").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            key, _, names = line.partition("=")
            if key.strip() == "load_priority":
                yield from (vendors / name.strip() / library for name in names.split(",") if name.strip())


def _first(paths: Sequence[Path], symbols: tuple[str, ...]) -> tuple[ctypes.CDLL | None, str]:
    """Open the first library that has all symbols itself, and note what is wrong with those before it."""
    notes = []
    for path in paths:
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path.absolute()))
        except OSError as error:
            notes.append(f"{path} does not load: {error}")
            continue
        missing = [symbol for symbol in symbols if not hasattr(library, symbol)]
        if missing:
            notes.append(f"{path} has no {' and no '.join(missing)}")
        elif len({_home_of(getattr(library, symbol)) for symbol in symbols}) > 1:
            notes.append(f"{path} has only one of {' and '.join(symbols)} itself")
        else:
            return library, ""
    folders = dict.fromkeys(str(path.parent) for path in paths)
    return None, "; ".join(notes) or f"no such library in {', '.join(folders)}"


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of dladdr."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def _home_of(function: Any) -> int | None:
    """Find where the library that defines a symbol is loaded; a look-up also finds symbols of dependencies."""
    info: Any = _SymbolInfo()
    locate = ctypes.CDLL(None).dladdr
    locate.argtypes = [ctypes.c_void_p, ctypes.POINTER(_SymbolInfo)]
    locate(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    base: int | None = info.dli_fbase
    return base
