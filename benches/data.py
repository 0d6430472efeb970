"""Arrays for benchmarks: seeded, every operand on its own, the same on every machine.

Published figures depend on this data. Kinds may be appended, never changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benches import read

__all__ = ["DTYPES", "KINDS", "SIZES", "Inputs", "inputs", "numpy_backward", "outputs", "shape"]

# Batch x hidden size. The first two live in the core's caches, the next two in the last level, the rest in memory.
SIZES = ("32x128", "64x512", "256x1024", "1024x256", "4096x1000", "4096x1024", "16384x256")
DTYPES = ("float32", "float64", "float16", "bfloat16")
KINDS = ("ordinary", "nan", "subnormal", "large_cell", "saturated")
SEED = 20240229

# The operator as one writes it in NumPy; takes the five inputs and `out`, as (grad_gates, grad_cx, grad_bias).
numpy_backward = read("_expression").numpy_backward


class Inputs(NamedTuple):
    """The operator's five inputs."""

    grad_hy: np.ndarray
    grad_cy: np.ndarray
    cx: np.ndarray
    cy: np.ndarray
    gates: np.ndarray


def shape(size: str) -> tuple[int, int]:
    """Return batch and hidden size of a size's name."""
    batch, hidden = size.split("x")
    return int(batch), int(hidden)


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def inputs(batch: int, hidden: int, dtype: str = "float32", kind: str = "ordinary") -> Inputs:
    """Make inputs as a forward pass leaves them: sigmoid and tanh gates, cell states of a few units, small gradients.

    Parameters
    ----------
    batch, hidden : int
    dtype : str
        One of `DTYPES`; bfloat16 needs ml_dtypes.
    kind : str
        "ordinary"; "nan": one NaN in every row of grad_hy; "subnormal": gradients so small that every product with
        them is a subnormal number; "large_cell": |cy| of 50, where exp(-2|cy|) is subnormal in float32; "saturated":
        |cy| from 9 to 20, where 1 - tanh(cy)^2 by subtraction has no digits left in float32.

    Raises
    ------
    ValueError
        For an unknown dtype or kind.
    """
    for name, value, allowed in (("dtype", dtype, DTYPES), ("kind", kind, KINDS)):
        if value not in allowed:
            msg = f"`{name}` must be one of {allowed}, got {value!r}"
            raise ValueError(msg)
    rng = np.random.default_rng(SEED)

    def normal(columns: int) -> np.ndarray:
        return rng.standard_normal((batch, columns), np.float32)

    gates = normal(4 * hidden)
    i_f, g, o = gates[:, : 2 * hidden], gates[:, 2 * hidden : 3 * hidden], gates[:, 3 * hidden :]
    np.tanh(g, out=g)
    for part in (i_f, o):
        np.multiply(part, np.float32(0.5), out=part)
        np.tanh(part, out=part)
        np.multiply(part, np.float32(0.5), out=part)
        np.add(part, np.float32(0.5), out=part)
    cx = normal(hidden)
    cy = gates[:, hidden : 2 * hidden] * cx + gates[:, :hidden] * g
    grad_hy, grad_cy = normal(hidden), normal(hidden)
    if kind == "nan" and hidden:
        grad_hy[np.arange(batch), rng.integers(0, hidden, batch)] = np.nan
    if kind == "large_cell":
        cy = np.where(cy < 0, np.float32(-50), np.float32(50))
    if kind == "saturated":
        cy = np.copysign(rng.uniform(9, 20, cy.shape), cy)
    target = _dtype(dtype)
    arrays = [array.astype(target) for array in (grad_hy, grad_cy, cx, cy, gates)]
    if kind == "subnormal":
        smallest = {"float32": 2.0**-149, "float64": 2.0**-1074, "float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype]
        for k in (0, 1):
            steps = np.rint(arrays[k].astype(np.float64) * 16)
            arrays[k] = (steps * smallest).astype(target)
    return Inputs(*arrays)


def outputs(batch: int, hidden: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Allocate outputs as `out=` takes them, every page of them touched."""
    shapes = ((batch, 4 * hidden), (batch, hidden), (4 * hidden,))
    grad_gates, grad_cx, grad_bias = (np.ones(shape, _dtype(dtype)) for shape in shapes)
    return grad_gates, grad_cx, grad_bias
