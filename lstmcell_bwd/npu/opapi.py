"""The operator's C interface through ctypes: aclTensor descriptors and the two phases.

pyACL has no binding of aclnn operators. Libraries are opened by absolute path with local binding (with global binding
the C++ symbols of several such libraries interpose, which has ended in double frees) and are never closed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lstmcell_bwd.npu import BACKWARD, FORWARD
from lstmcell_bwd.npu.runtime import failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lstmcell_bwd.npu.array import NPUArray

__all__ = ["Operators", "load"]

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
}

# Phase one's flags between its five inputs and three outputs.
_FLAGS: dict[str, list[Any]] = {BACKWARD: [ctypes.c_bool], FORWARD: []}
for _name, _flags in _FLAGS.items():
    _PROTOTYPES[f"{_name}GetWorkspaceSize"] = (
        _status,
        [*[_handle] * 5, *_flags, *[_handle] * 3, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(_handle)],
    )
    _PROTOTYPES[_name] = (_status, [ctypes.c_void_p, ctypes.c_uint64, _handle, ctypes.c_void_p])


class Operators:
    """The functions of the installed operator packages.

    Parameters
    ----------
    acl : module
        pyACL, for the runtime's messages.
    tensor_library : ctypes.CDLL
        libnnopbase.so.
    libraries : dict
        For each operator the library that has both of its phases, or why there is none.

    Attributes
    ----------
    tensor_library : str
        Path.
    libraries, missing : dict of str
        Path of the library of each operator that is there; for the others what is missing and what to do.
    """

    def __init__(self, acl: Any, tensor_library: ctypes.CDLL, libraries: dict[str, ctypes.CDLL | str]) -> None:
        self.tensor_library: str = tensor_library._name
        self.libraries: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._phases: dict[str, tuple[Any, Any]] = {}
        self._acl = acl
        for operator, library in libraries.items():
            if isinstance(library, str):
                self.missing[operator] = library
            else:
                self.libraries[operator] = library._name
                self._phases[operator] = (
                    _function(library, f"{operator}GetWorkspaceSize"),
                    _function(library, operator),
                )
        self._create_tensor = _function(tensor_library, "aclCreateTensor")
        self._destroy_tensor = _function(tensor_library, "aclDestroyTensor")
        self._destroy_executor = None
        if hasattr(tensor_library, "aclDestroyAclOpExecutor"):
            self._destroy_executor = _function(tensor_library, "aclDestroyAclOpExecutor")

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

    def phase_one(self, operator: str, tensors: Sequence[int], flags: Sequence[bool]) -> tuple[int, int]:
        """Check the arguments; return the workspace's size in bytes and the executor's handle."""
        workspace_size, executor = ctypes.c_uint64(0), _handle(None)
        status = self._phases[operator][0](
            *tensors[:5], *flags, *tensors[5:], ctypes.byref(workspace_size), ctypes.byref(executor)
        )
        self._check(f"{operator}GetWorkspaceSize", status)
        return workspace_size.value, executor.value or 0

    def phase_two(self, operator: str, workspace: int, workspace_size: int, executor: int | None, stream: int) -> None:
        """Launch the operator. The executor is gone afterwards, also on failure."""
        self._check(operator, self._phases[operator][1](workspace, workspace_size, executor, stream))

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
    libraries: dict[str, ctypes.CDLL | str] = {}
    for operator in _FLAGS:
        library, notes = _first(candidates, (f"{operator}GetWorkspaceSize", operator))
        libraries[operator] = library or f"the operator {operator} was not found ({notes}); {advice}"
    backward = libraries[BACKWARD]
    return backward if isinstance(backward, str) else Operators(acl, tensor_library, libraries)


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
