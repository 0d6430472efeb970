"""The operator as one writes it in NumPy: what the command line compares speed and accuracy with."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

__all__ = ["numpy_backward"]


def numpy_backward(
    grad_hy: Array, grad_cy: Array, cx: Array, cy: Array, gates: Array, out: tuple[Array, Array, Array]
) -> None:
    """Compute the operator with NumPy's functions, in the dtype of the arrays.

    Parameters
    ----------
    grad_hy, grad_cy, cx, cy : ndarray, shape (N, H)
    gates : ndarray, shape (N, 4*H)
        Activated gates, in the order i, f, g, o.
    out : tuple of ndarray
        (grad_gates, grad_cx, grad_bias); none of them may be an input.
    """
    grad_gates, grad_cx, grad_bias = out
    i, f, g, o = np.split(gates, 4, axis=1)
    d_i, d_f, d_g, d_o = np.split(grad_gates, 4, axis=1)
    t = np.tanh(cy)
    total = grad_hy * o * (1 - t * t) + grad_cy
    np.multiply(total, f, out=grad_cx)
    np.multiply(total * g, i * (1 - i), out=d_i)
    np.multiply(total * cx, f * (1 - f), out=d_f)
    np.multiply(total * i, 1 - g * g, out=d_g)
    np.multiply(grad_hy * t, o * (1 - o), out=d_o)
    np.sum(grad_gates, axis=0, out=grad_bias)
