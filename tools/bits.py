"""Print the bits that the installed package computes, for comparison between machines.

    python tools/bits.py [--isa LEVEL] > here.txt

Without a level every instruction set of the machine must give the same bits. One line for each dtype, kind of input and
rule for Inf and NaN, and for the forward pass: the number of elements, a digest of the inputs and one of each output.
Two machines agree when their lines are equal; the first line, which names the machine, is a comment. The inputs are
made from integers by exact operations alone, so that no mathematical library has a say in them.
"""

import argparse
import hashlib
import platform
import sys

import numpy as np

import lstmcell_bwd
from lstmcell_bwd import _api, _features

BATCH, HIDDEN = 133, 77  # five leaves, an odd number of columns: 10241 cells, five results of each
KINDS = ("ordinary", "saturated", "any bits")


def dtypes():
    """Return the dtypes to compute with; bfloat16 where ml_dtypes is installed."""
    found = [np.dtype(name) for name in ("float32", "float64", "float16")]
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return found
    return [*found, np.dtype(ml_dtypes.bfloat16)]


def make_inputs(dtype, kind, seed):
    """Make grad_hy, grad_cy, cx, cy and gates.

    Parameters
    ----------
    dtype : dtype
    kind : {"ordinary", "saturated", "any bits"}
        As a forward pass leaves them; with |cy| up to 60 and gradients from 2^-12 to 2^12; any bits there are,
        Inf, NaN and subnormal numbers included.
    seed : int

    Returns
    -------
    list of ndarray
    """
    random = np.random.Generator(np.random.PCG64(seed))
    shapes = [(BATCH, HIDDEN)] * 4 + [(BATCH, 4 * HIDDEN)]
    if kind == "any bits":
        arrays = [random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0] for shape in shapes]
        for array in arrays:
            array[random.random(array.shape) < 1 / 64] = np.inf
            array[random.random(array.shape) < 1 / 64] = -np.inf
        return arrays
    arrays = [random.random(shape) * 4 - 2 for shape in shapes]
    if kind == "saturated":
        arrays[0] *= np.ldexp(1.0, random.integers(-12, 13, shapes[0]))
        arrays[1] *= np.ldexp(1.0, random.integers(-12, 13, shapes[1]))
        arrays[3] *= 30
    gates = arrays[4] / 4 + 0.5
    gates[:, 2 * HIDDEN : 3 * HIDDEN] = gates[:, 2 * HIDDEN : 3 * HIDDEN] * 2 - 1
    return [array.astype(dtype) for array in (*arrays[:4], gates)]


def digest(*arrays):
    """Return a digest of the arrays' bits, in which every NaN is the same."""
    total = hashlib.sha256()
    for array in arrays:
        unsigned = array.view(f"u{array.dtype.itemsize}").copy()
        unsigned[np.isnan(array)] = np.iinfo(unsigned.dtype).max
        total.update(unsigned.tobytes())
    return total.hexdigest()[:16]


def lines(isa):
    """Compute with one instruction set; returns what is printed."""
    lstmcell_bwd.use_isa(isa)
    found = []
    for dtype in dtypes():
        for kind in KINDS:
            for nonfinite in ("nan", "ieee"):
                inputs = make_inputs(dtype, kind, seed=20)
                result = lstmcell_bwd.lstm_cell_backward(*inputs, nonfinite=nonfinite, num_threads=2)
                names = [f"{name}={digest(array)}" for name, array in result._asdict().items()]
                elements = sum(array.size for array in result)
                read = f"inputs={digest(*inputs)}"
                found.append("; ".join([dtype.name, kind, nonfinite, f"{elements} elements", read, *names]))
            *_, cx, _, gates = inputs
            with np.errstate(over="ignore"):
                products = gates * dtype.type(16)  # exact; into saturation
            result = lstmcell_bwd.lstm_cell_forward(products, gates[::-1], cx, gates[0], num_threads=2)
            names = [f"{name}={digest(array)}" for name, array in result._asdict().items()]
            found.append("; ".join([dtype.name, kind, "forward", f"{sum(x.size for x in result)} elements", *names]))
    return found


def main():
    """Print the lines; exits with 1 where two instruction sets differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=_features.ISAS, help="this instruction set alone")
    only = parser.parse_args().isa
    np.seterr(invalid="ignore")  # ml_dtypes' isnan sets the flag on a signalling NaN
    isas = [isa for isa in _api.built_isas() if isa in _features.runnable_isas() and only in (None, isa)]
    print(f"# {platform.machine()}, {' '.join(isas)}, NumPy {np.__version__}")
    results = [lines(isa) for isa in isas]
    print(*results[0], sep="\n")
    if any(result != results[0] for result in results):
        sys.exit(f"{isas} differ")


if __name__ == "__main__":
    main()
