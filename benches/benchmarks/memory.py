"""Memory of a process that makes one call."""

from pathlib import Path

from .common import SkipNotImplemented, arrays, prepared


def peak():
    """Return the process's largest resident size so far, or since `forget_peak`, in MB; skip where it is not told."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        msg = "peak memory is read from /proc/self/status"
        raise SkipNotImplemented(msg) from None
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak():
    """Let the peak begin anew at what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise SkipNotImplemented(str(error)) from None


class PeakMemory:
    """The peak of a whole process, and by how much a call with `out=` raises it: its scratch memory."""

    params = (("256x1024", "4096x1024", "16384x256"), (1, 2))
    param_names = ("size", "threads")

    def setup(self, size, threads):
        arrays(size)

    def peakmem_backward(self, size, threads):
        prepared(size, threads=threads)()

    def track_growth_by_a_call(self, size, threads):
        call = prepared(size, threads=threads)
        forget_peak()
        before = peak()
        call()
        return peak() - before

    track_growth_by_a_call.unit = "MB"
