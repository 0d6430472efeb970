"""Simulated CANN: stands in for Huawei's NPU software so that an NPU backend can be proved without a chip.

Test equipment, not a product. It was written from public descriptions of CANN and has never been compared
with a chip. It imitates what a backend sees through ``import acl`` and ctypes, and is stricter than a chip
where a chip would crash, corrupt memory or be lucky: such things are recorded as *violations*.

Not simulated: events, ``acl.util`` and ``acl.op``, saturation mode, speed, the
bits of a chip's exponential, and the first beta of CANN 9, which had two more faults.

A test in this process::

    install = cann_sim.build(tmp_path)
    with install.active() as sim:       # environment and sys.path as after CANN's set_env.sh
        sim.fault("aclrtMalloc", nth=2, code=207001)
        ...                             # run the backend
        report = sim.report()
    assert report["violations"] == []

A test in a process of its own, for what happens at exit, after a fork, or before the first initialisation::

    environment = install.environment(CANN_SIM_REPORT=path, CANN_SIM_SOC="Ascend910B4")
    subprocess.run([sys.executable, "-c", ...], env=environment)

Handles and addresses from before a `Simulation.reset` are stale. A backend that keeps streams or memory
between calls therefore lives inside one ``active`` block, with `Simulation.forget` between its tests.

Environment variables, read when the library is loaded and at every `Simulation.reset`; most are also settings
of `Simulation.configure`, in lower case and without the prefix:

========================  ===================================================================================
``CANN_SIM_SOC``          chip name, default ``Ascend910B1``
``CANN_SIM_DEVICES``      number of devices, 0 to 8, default 1
``CANN_SIM_MEMORY``       bytes of memory per device, default 64 GiB
``CANN_SIM_DEFECT``       0: without the operator's wrong bias for batches of 4095 rows and more
``CANN_SIM_EAGER``        1: tasks run when they are launched (faults are still reported later)
``CANN_SIM_INITIALISED``  1: another library has initialised ACL before us
``CANN_SIM_FAULTS``       ``function:nth:code,...``; see `Simulation.fault`
``CANN_SIM_REPORT``       file to write the report to (JSON) when the process ends
========================  ===================================================================================
"""

import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys

__all__ = ["Installation", "Simulation", "build"]

_HERE = pathlib.Path(__file__).resolve().parent
_FLAGS = [
    "-std=gnu11",
    "-O2",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
]
# Siblings first; then the lib64 of the installation that a custom package five folders below belongs to.
_RPATH = "-Wl,-rpath,$ORIGIN:$ORIGIN/../../../../../lib64"


def _compile(source, target, links=(), defines=()):
    command = ["cc", *_FLAGS, *(f"-D{name}" for name in defines), str(_HERE / source), "-o", str(target)]
    command += [f"-Wl,-soname,{target.name}", f"-L{target.parent}", _RPATH, "-Wl,--no-as-needed"]
    subprocess.run([*command, *(f"-l{name}" for name in links), "-lm", "-lpthread", "-ldl"], check=True)


def build(directory, *, operators="libopapi_nn.so", missing=None, old_release=False, custom=None, share=None):
    """Compile the simulation into a directory laid out like an installation of CANN.

    Parameters
    ----------
    directory : path-like
        Where to build; becomes ``ASCEND_HOME_PATH``.
    operators : {"libopapi_nn.so", "libopapi.so", None}
        The library that holds the operators: split (CANN 9), in one library (older), or none at all.
    missing : {"phase one", "phase two", "both", "forward", None}
        Symbols of the backward operator that this library lacks, or the forward operator as a whole.
    old_release : bool
        Leave out ``aclDestroyAclOpExecutor`` and the newer names of pyACL.
    custom : {"default", "environment", None}
        Add a vendor's ``libcust_opapi.so`` with the operators, below ``opp/vendors`` or in a place of
        its own that ``ASCEND_CUSTOM_OPP_PATH`` names.
    share : Installation, optional
        Use the runtime of this installation, so that both can be used in one process.

    Returns
    -------
    Installation
    """
    home = pathlib.Path(directory).resolve()
    lib64, python = home / "lib64", home / "python" / "site-packages"
    for folder in (lib64, python, home / "opp" / "vendors"):
        folder.mkdir(parents=True)
    (python / "acl.py").symlink_to(_HERE / "acl.py")
    if share:  # one inode is one library to the loader, whatever it is called
        (lib64 / "libascendcl.so").symlink_to((share.home / "lib64" / "libascendcl.so").resolve())
    else:
        _compile("runtime.c", lib64 / "libascendcl.so")
    _compile("nnopbase.c", lib64 / "libnnopbase.so", ["ascendcl"], ["SIM_OLD_RELEASE"] if old_release else [])
    subprocess.run(["cc", "-shared", "-xc", "/dev/null", "-o", str(lib64 / "libopapi_math.so"),
                    "-Wl,-soname,libopapi_math.so"], check=True)  # fmt: skip
    links = ["ascendcl", "nnopbase", "opapi_math"]
    defines = {
        None: [],
        "phase one": ["SIM_WITHOUT_PHASE_ONE"],
        "phase two": ["SIM_WITHOUT_PHASE_TWO"],
        "both": ["SIM_WITHOUT_PHASE_ONE", "SIM_WITHOUT_PHASE_TWO"],
        "forward": ["SIM_WITHOUT_FORWARD"],
    }[missing]
    if operators:
        _compile("lstm_cell.c", lib64 / operators, links, defines)
    custom_home = None
    if custom:
        vendors = home / ("opp" if custom == "default" else "custom") / "vendors"
        package = vendors / "simulated" / "op_api" / "lib"
        package.mkdir(parents=True)
        (vendors / "config.ini").write_text("load_priority=simulated\n")
        _compile("lstm_cell.c", lib64 / "libcust_opapi.so", links)
        (lib64 / "libcust_opapi.so").rename(package / "libcust_opapi.so")
        custom_home = vendors / "simulated" if custom == "environment" else None
    return Installation(home, custom_home, old_release)


class Installation:
    """A built simulation on disk.

    Attributes
    ----------
    home : pathlib.Path
        The directory that ``ASCEND_HOME_PATH`` names.
    """

    def __init__(self, home, custom, old_release):
        self.home = home
        self._custom = custom
        self._old_release = old_release

    def variables(self):
        """Return the variables that CANN's ``set_env.sh`` would set, without the search paths."""
        home = str(self.home)
        variables = {
            "ASCEND_HOME_PATH": home,
            "ASCEND_TOOLKIT_HOME": home,
            "ASCEND_OPP_PATH": f"{home}/opp",
        }
        if self._custom:
            variables["ASCEND_CUSTOM_OPP_PATH"] = str(self._custom)
        if self._old_release:
            variables["CANN_SIM_OLD_RELEASE"] = "1"
        return variables

    def environment(self, **extra):
        """Return the environment for a new process: the present one, ours, and `extra` variables."""
        environment = {**os.environ, **self.variables(), **extra}
        for name, folder in (("PYTHONPATH", "python/site-packages"), ("LD_LIBRARY_PATH", "lib64")):
            paths = [str(self.home / folder), environment.get(name)]
            environment[name] = os.pathsep.join(path for path in paths if path)
        return environment

    @contextlib.contextmanager
    def active(self):
        """Make this process find the installation, freshly reset; undo that at the end.

        Yields
        ------
        Simulation
        """
        names = {*self.variables(), "ASCEND_CUSTOM_OPP_PATH", "CANN_SIM_OLD_RELEASE"}
        before = {name: os.environ.pop(name, None) for name in names}
        os.environ.update(self.variables())
        path = str(self.home / "python" / "site-packages")
        sys.path.insert(0, path)
        simulation = Simulation(self)
        simulation.reset()
        try:
            yield simulation
        finally:
            simulation.reset()
            sys.path.remove(path)
            sys.modules.pop("acl", None)
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


class Simulation:
    """Control over the simulation that runs in this process.

    Parameters
    ----------
    installation : Installation
        The installation whose runtime is, or will be, loaded.
    """

    def __init__(self, installation):
        self._library = ctypes.CDLL(str(installation.home / "lib64" / "libascendcl.so"))
        self._library.sim_report.restype = ctypes.c_void_p

    def reset(self):
        """Return to the state after loading. Every handle and address that was given out before is stale."""
        self._library.sim_reset()

    def forget(self):
        """Start counts, violations and faults anew; keep devices, objects and memory as they are."""
        self._library.sim_forget()

    def configure(self, **settings):
        """Set ``soc``, ``devices``, ``memory``, ``defect``, ``eager`` or ``initialised``."""
        for name, value in settings.items():
            text = str(int(value) if isinstance(value, bool) else value)
            if not self._library.sim_configure(name.upper().encode(), text.encode()):
                raise ValueError(f"unknown setting {name!r}")

    def fault(self, function, nth=1, code=500001):
        """Make a call fail, without any other effect.

        Parameters
        ----------
        function : str
            Name of the C function (``"aclrtMalloc"`` for ``acl.rt.malloc``; every exported one can fail), or
            ``"kernel"`` for the task itself: it writes nothing, and the next synchronise or copy on the
            device returns the code.
        nth : int
            Which call from now on; -1 means all of them, 0 disarms.
        code : int
            What it returns. `aclCreateTensor`, `get_soc_name` and `get_recent_err_msg` return null instead.
        """
        self._library.sim_arm_fault(function.encode(), ctypes.c_int64(nth), code)

    def thread_state(self):
        """Return the calling thread's device and context, or ``(None, None)``; not counted as a call."""
        context = ctypes.c_uint64()
        device = self._library.sim_thread_state(ctypes.byref(context))
        return (None, None) if device < 0 else (device, context.value)

    def report(self):
        """Return what has happened since the last `reset` or `forget`.

        Returns
        -------
        dict
            ``violations`` (sentences), ``calls`` (by C function; ``kernel`` for tasks that ran), ``counters``
            (``h2d_bytes`` and so on, ``cache_hits``), ``leaks`` (what is alive now: ``device_memory`` and
            ``host_memory`` blocks, numbers of ``contexts``, ``streams``, ``tensors``, ``executors`` and
            ``waiting_tasks``, and ``set_device`` calls not undone, by device), ``acl_references``.
        """
        address = self._library.sim_report()
        try:
            return json.loads(ctypes.string_at(address))
        finally:
            self._library.sim_free(ctypes.c_void_p(address))
