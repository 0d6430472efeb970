"""Result types, in plain Python so that they pickle and type-check."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BiasPart", "LSTMCellGradients", "LSTMCellPart", "LSTMCellState"]


class LSTMCellGradients(NamedTuple):
    """Gradients of one LSTM cell.

    Attributes
    ----------
    grad_gates : ndarray, shape (N, 4*H)
        Gradient of the gate pre-activations, four blocks of H columns in the order i, f, g, o.
    grad_cx : ndarray, shape (N, H)
        Gradient of the cell state that entered the cell.
    grad_bias : ndarray of shape (4*H,) or None
        Gradient of the bias; None without bias.
    """

    grad_gates: np.ndarray
    grad_cx: np.ndarray
    grad_bias: np.ndarray | None


class LSTMCellState(NamedTuple):
    """What an LSTM cell's forward pass leaves.

    Attributes
    ----------
    hy : ndarray, shape (N, H)
        Hidden state that leaves the cell, its output.
    cy : ndarray, shape (N, H)
        Cell state that leaves it.
    gates : ndarray, shape (N, 4*H)
        Activated gates, four blocks of H columns in the order i, f, g, o: with `cy` the cache of the backward pass.
    """

    hy: np.ndarray
    cy: np.ndarray
    gates: np.ndarray


class BiasPart(NamedTuple):
    """One complete node of the bias tree: the wide sums of a run of rows. Small and picklable.

    Attributes
    ----------
    first_leaf : int
        Number of its first leaf in the whole batch; a leaf is a run of `BIAS_LEAF_ROWS` rows.
    level : int
        The node holds 2**level leaves (the last leaf of the batch may be short).
    rows : int
        Rows summed.
    sums : ndarray of float64, shape (1, 4*H), or (2, 4*H) for float64 data
        The sums; for float64 data the rounded sum and what rounding cut off.
    """

    first_leaf: int
    level: int
    rows: int
    sums: np.ndarray


class LSTMCellPart(NamedTuple):
    """Gradients of a run of rows of a larger batch.

    Attributes
    ----------
    grad_gates : ndarray, shape (rows, 4*H)
    grad_cx : ndarray, shape (rows, H)
    parts : list of BiasPart
        What `combine_bias` needs of this run, at most 2 log2(N) nodes; empty without bias.
    """

    grad_gates: np.ndarray
    grad_cx: np.ndarray
    parts: list[BiasPart]
