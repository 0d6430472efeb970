"""The NPU backend over the simulated CANN: one installation per process, inputs, comparison, and what must hold."""

import atexit
import contextlib
import functools
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import cann_sim
import numpy as np
from cann_sim.fake_torch import FakeNpuTensor, FakeTorchNpu

from lstmcell_bwd import reference
from lstmcell_bwd.npu import NPUArray, runtime

__all__ = ["FakeNpuTensor"]

# CANN's published tolerance, as (relative, absolute).
TOLERANCE = {"float32": (2**-10, 2**-16), "float16": (2**-9, 2**-9)}


@functools.cache
def installation():
    """Build the simulation; one per process, because the loader takes equally named libraries for one."""
    folder = tempfile.mkdtemp(prefix="cann_sim")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return cann_sim.build(pathlib.Path(folder) / "home")


@contextlib.contextmanager
def backend(**settings):
    """Let the backend open the simulation in this process, and forget it again; nothing may be left then.

    Parameters
    ----------
    **settings
        For `cann_sim.Simulation.configure`.
    """
    with installation().active() as simulation:
        simulation.configure(**settings)
        runtime._state = None
        try:
            yield simulation
            gc.collect()
            runtime._close()
            assert simulation.report()["violations"] == []
            assert left_over(simulation.report()) == {}
        finally:
            runtime._state = None


def left_over(report):
    """Return what is alive, without the counts that are 0."""
    leaks = {name: found for name, found in report["leaks"].items() if found}
    if not any(leaks.get("set_device", ())):
        leaks.pop("set_device", None)
    return leaks


def beyond_the_kept(report, threads=1, devices=1):
    """Return what is alive beyond one workspace and one stream per (thread, device)."""
    leaks = left_over(report)
    leaks.pop("set_device", None)
    kept = threads * devices
    if len(leaks.get("device_memory", ())) <= kept:
        leaks.pop("device_memory", None)
    if leaks.get("streams", 0) <= kept:
        leaks.pop("streams", None)
    return leaks


def python(code, path_first="", **environment):
    """Run a program in a process of its own, with a folder first on its path; return what it printed."""
    paths = os.pathsep.join(path for path in [path_first, *sys.path] if path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def make_inputs(batch, hidden, dtype="float32", seed=0, missing=()):
    """Return the five arrays of a call, None for those whose number is in `missing`."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((batch, hidden)).astype(dtype) for _ in range(4)]
    arrays.append(rng.uniform(-0.95, 0.95, (batch, 4 * hidden)).astype(dtype))
    return [None if k in missing else array for k, array in enumerate(arrays)]


def output_shapes(batch, hidden):
    """Return the shapes of the three outputs."""
    return (batch, 4 * hidden), (batch, hidden), (4 * hidden,)


def to_host(tensor, torch_npu=None):
    """Return any kind of result as an ndarray."""
    if tensor is None or isinstance(tensor, np.ndarray):
        return tensor
    return tensor.to_numpy() if isinstance(tensor, NPUArray) else torch_npu.to_numpy(tensor)


def assert_right(results, inputs, has_bias=True, torch_npu=None):
    """Compare with the reference under CANN's tolerance; the bias in units of its column's magnitude."""
    exact = reference.lstm_cell_backward(*inputs, has_bias=has_bias)
    dtype = inputs[2].dtype
    relative, absolute = TOLERANCE[dtype.name]
    for k, (result, wanted) in enumerate(zip(results, exact, strict=True)):
        if wanted is None:
            assert result is None
            continue
        result = to_host(result, torch_npu)
        assert result.dtype == dtype
        scale = np.abs(exact[0]).sum(axis=0) if k == 2 else np.abs(wanted)
        assert np.all(np.abs(result - wanted) <= absolute + relative * scale), ("grad_gates", "grad_cx", "grad_bias")[k]


class TorchNpu(FakeTorchNpu):
    """The stand-in for torch_npu, with the method of tensors that makes new ones."""

    def tensor(self, array, **layout):
        """Return a tensor on the current device."""
        return self._with_new_empty(super().tensor(array, **layout))

    def npu_format_cast(self, tensor, npu_format):
        """Return the tensor in another layout."""
        return self._with_new_empty(super().npu_format_cast(tensor, npu_format))

    def _with_new_empty(self, tensor):
        tensor.new_empty = lambda shape: self.tensor(np.full(shape, np.nan, tensor._numpy_dtype))
        return tensor
