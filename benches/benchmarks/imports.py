"""Import times, each sample in a fresh interpreter."""

import statistics
import subprocess
import sys

TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


class Import:
    """The package, with NumPy, which it needs; and what it adds to NumPy's own import."""

    rounds = 1
    repeat = (3, 5, 5.0)

    def timeraw_package(self):
        return "import lstmcell_bwd"

    def timeraw_numpy_alone(self):
        return "import numpy"

    def track_package_after_numpy(self):
        return statistics.median(seconds_after("import numpy", "import lstmcell_bwd") for _ in range(7)) * 1000

    track_package_after_numpy.unit = "ms"


def seconds_after(before, statement):
    """Time a statement in a fresh interpreter that has run another one."""
    program = f"{before}; {TIMED.format(statement)}"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
