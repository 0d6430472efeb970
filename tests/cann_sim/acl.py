"""Stand-in for pyACL (``import acl``) over the simulated CANN. Test equipment, not a product.

The C functions do the work; this module reproduces how pyACL hands arguments and results across:

- value(s) first, return code last; a bare code where there is no value; no exception for an ACL failure;
- sizes and pointers are parsed as C ``unsigned long`` (format ``k``): real Python ints only, wrapped without
  a check;
- numbers, kinds and policies are parsed as C ``int`` (format ``i``);
- the GIL is released in the synchronising calls only.
"""

import ctypes
import functools
import operator
import os
import types

_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib64", "libascendcl.so")
_holding_gil = ctypes.PyDLL(_LIBRARY)
_releasing_gil = ctypes.CDLL(_LIBRARY)

# One letter per C parameter, in C order: k and i are arguments, capitals results (Pointer, Int, Unsigned).
_FUNCTIONS = {
    "finalize": ("aclFinalize", ""),
    "finalize_reference": ("aclFinalizeReference", "P"),
    "get_version": ("aclrtGetVersion", "III"),
    "rt.get_device_count": ("aclrtGetDeviceCount", "U"),
    "rt.set_device": ("aclrtSetDevice", "i"),
    "rt.reset_device": ("aclrtResetDevice", "i"),
    "rt.reset_device_force": ("aclrtResetDeviceForce", "i"),
    "rt.get_device": ("aclrtGetDevice", "I"),
    "rt.get_run_mode": ("aclrtGetRunMode", "I"),
    "rt.create_context": ("aclrtCreateContext", "Pi"),
    "rt.set_context": ("aclrtSetCurrentContext", "k"),
    "rt.destroy_context": ("aclrtDestroyContext", "k"),
    "rt.get_context": ("aclrtGetCurrentContext", "P"),
    "rt.create_stream": ("aclrtCreateStream", "P"),
    "rt.create_stream_with_config": ("aclrtCreateStreamWithConfig", "Pii"),
    "rt.destroy_stream": ("aclrtDestroyStream", "k"),
    "rt.synchronize_stream": ("aclrtSynchronizeStream", "k"),
    "rt.synchronize_stream_with_timeout": ("aclrtSynchronizeStreamWithTimeout", "ki"),
    "rt.synchronize_device": ("aclrtSynchronizeDevice", ""),
    "rt.ctx_get_current_default_stream": ("aclrtCtxGetCurrentDefaultStream", "P"),
    "rt.malloc": ("aclrtMalloc", "Pki"),
    "rt.malloc_align32": ("aclrtMallocAlign32", "Pki"),
    "rt.free": ("aclrtFree", "k"),
    "rt.malloc_host": ("aclrtMallocHost", "Pk"),
    "rt.free_host": ("aclrtFreeHost", "k"),
    "rt.memset": ("aclrtMemset", "kkik"),
    "rt.memcpy": ("aclrtMemcpy", "kkkki"),
    "rt.memcpy_async": ("aclrtMemcpyAsync", "kkkkik"),
    "rt.get_mem_info": ("aclrtGetMemInfo", "iPP"),
}
_NEWER = {
    "finalize_reference",
    "rt.reset_device_force",
    "rt.malloc_align32",
    "rt.ctx_get_current_default_stream",
}
_RESULTS = {"P": ctypes.c_uint64, "I": ctypes.c_int32, "U": ctypes.c_uint32}


def _parse_k(value):
    if not isinstance(value, int):  # a NumPy integer is no int, and None is no null pointer
        raise TypeError(f"must be int, not {type(value).__name__}")
    return ctypes.c_uint64(value & 0xFFFF_FFFF_FFFF_FFFF)


def _parse_i(value):
    number = operator.index(value)
    if not -(2**31) <= number < 2**31:
        raise OverflowError("signed integer does not fit a C int")
    return ctypes.c_int32(number)


def _bind(path, symbol, parameters):
    library = _releasing_gil if "synchronize" in path else _holding_gil
    function = getattr(library, symbol)
    parsers = [_parse_k if p == "k" else _parse_i for p in parameters if p in "ki"]

    @functools.wraps(function, assigned=())
    def call(*arguments):
        if len(arguments) != len(parsers):
            raise TypeError(f"{path} takes exactly {len(parsers)} arguments ({len(arguments)} given)")
        given = iter([parse(value) for parse, value in zip(parsers, arguments, strict=True)])
        results = [_RESULTS[p]() for p in parameters if p in _RESULTS]
        places = iter(results)
        code = function(*(next(given) if p in "ki" else ctypes.byref(next(places)) for p in parameters))
        return (*(result.value for result in results), code) if results else code

    call.__name__ = path.rpartition(".")[2]
    return call


def _text(symbol):
    function = getattr(_holding_gil, symbol)
    function.restype = ctypes.c_char_p

    def call():
        text = function()
        return None if text is None else text.decode()

    return call


def init(config_path=None, /):
    """Initialise ACL."""
    if config_path is not None and not isinstance(config_path, str):
        raise TypeError(f"argument 1 must be str, not {type(config_path).__name__}")
    return _holding_gil.aclInit(None if config_path is None else config_path.encode())


def get_cann_version(package, /):
    """Return the version of a package as a dict, and a code."""
    code = _holding_gil.aclsysGetCANNVersion(_parse_i(package))
    numbers = {"major_version": 9, "minor_version": 0, "release_version": 0, "patch_version": 0}
    return ({} if code else {"version": "9.0.0", **numbers, "reserved": ""}, code)


get_soc_name = _text("aclrtGetSocName")
get_recent_err_msg = _text("aclGetRecentErrMsg")
rt = types.ModuleType("acl.rt")
for _path, (_symbol, _parameters) in _FUNCTIONS.items():
    # An older release lacks the newer names.
    if not (_path in _NEWER and os.environ.get("CANN_SIM_OLD_RELEASE")):
        _function = _bind(_path, _symbol, _parameters)
        if _path.startswith("rt."):
            setattr(rt, _path[3:], _function)
        else:
            globals()[_path] = _function
