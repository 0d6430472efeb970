"""The forward pass: values, special values, bits, memory, bad arguments, and the backward pass on its cache."""

import numpy as np
import pytest
from strategies import bits

import lstmcell_bwd
from lstmcell_bwd import lstm_cell_forward, reference


def make_forward_inputs(batch, hidden, dtype, seed=0):
    """Make the arrays of a call."""
    rng = np.random.default_rng(seed)
    shapes = (batch, 4 * hidden), (batch, 4 * hidden), (batch, hidden), (4 * hidden,), (4 * hidden,)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("shape", [(1, 1), (5, 19), (33, 65), (3, 1500)], ids=str)
@pytest.mark.parametrize("biases", [(), (3,), (4,), (3, 4)], ids=["none", "input", "hidden", "both"])
def test_values_and_bits(backend, shape, biases):
    arrays = make_forward_inputs(*shape, backend)
    arrays = [x if k < 3 or k in biases else None for k, x in enumerate(arrays)]
    result = lstm_cell_forward(*arrays, num_threads=1)
    exact = reference.lstm_cell_forward(*arrays)
    for got, wanted in zip(result, exact, strict=True):
        assert got.dtype == backend
        np.testing.assert_allclose(got.astype(float), wanted, 4 * reference.limits(backend).eps, 1e-6)
    lstmcell_bwd.use_isa("baseline")
    for a, b in zip(result, lstm_cell_forward(*arrays, num_threads=3), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
