"""Peak memory of a process that makes one call. asv counts what `setup` took, hence the figure without a call."""

from .common import arrays, prepared


class PeakMemory:
    """Peak with the inputs and outputs alone, and with a call; the difference is scratch memory."""

    params = (("256x1024", "4096x1024", "16384x256"), (1, 2))
    param_names = ("size", "threads")

    def setup(self, size, threads):
        arrays(size)

    def peakmem_arrays_alone(self, size, threads):
        arrays(size)

    def peakmem_backward(self, size, threads):
        prepared(size, threads=threads)()
