"""Dense sweeps: every binade of cy and of the gradients, saturation, subnormal and largest numbers."""

import numpy as np
import pytest
from strategies import Inputs, assert_same_bits, assert_within_bounds, make_inputs

from lstmcell_bwd import lstm_cell_backward, reference


def row(dtype, grad_hy=1, grad_cy=0, cx=0.5, cy=0, i=0.5, f=0.5, g=0.5, o=0.5):
    """Make a call of one row from numbers or rows of numbers."""
    columns = np.broadcast_arrays(*(np.atleast_1d(x) for x in (grad_hy, grad_cy, cx, cy, i, f, g, o)))
    with np.errstate(all="ignore"):
        states = [x[None].astype(dtype) for x in columns[:4]]
        return Inputs(*states, np.concatenate(columns[4:])[None].astype(dtype))


def binades(low, high, per_binade):
    """Numbers of every binade from 2^low on, evenly spaced in each."""
    return np.ldexp(1 + np.arange(per_binade) / per_binade, np.arange(low, high)[:, None]).ravel()


def exponents(dtype):
    """The lowest and highest exponent of a dtype, subnormal numbers included."""
    limit = reference.limits(dtype)
    return round(np.log2(limit.smallest_subnormal)), int(np.frexp(limit.largest)[1])


def last_cy(dtype):
    """The |cy| up to which E = exp(-2|cy|) is a normal number."""
    return -np.log(reference.limits(reference.arithmetic_dtype(dtype)).smallest_normal) / 2


@pytest.mark.parametrize("sign", [1, -1])
def test_every_binade_of_cy(backend, sign):
    cy = binades(exponents(backend)[0], 10, 1040 if backend.itemsize == 2 else 101)
    cy = cy[cy <= last_cy(backend)]
    inputs = row(backend, cy=sign * cy, f=1, o=1)
    assert reference.in_range(*inputs).grad_cx.mean() > 0.99
    result = lstm_cell_backward(*inputs)
    assert_within_bounds(result, inputs, most=4)


def test_dense_cy(backend):
    """Evenly spaced, across every boundary of the range reduction."""
    cy = np.linspace(-last_cy(backend), last_cy(backend), 40_001)
    inputs = row(backend, cy=cy)
    assert_within_bounds(lstm_cell_backward(*inputs), inputs, most=4)


@pytest.mark.parametrize("field", ["grad_hy", "grad_cy"])
def test_every_binade_of_a_gradient(backend, field):
    """Gradients from subnormal to largest; the other factors are powers of two, so nothing else rounds."""
    low, high = exponents(backend)
    values = binades(low, high, 1040 if backend.itemsize == 2 else 13)
    values = np.concatenate([values, -values, [reference.limits(backend).largest]])
    ones = dict.fromkeys("ifo", 1)
    for cy in (0, 0.75, 5):
        inputs = row(backend, **({"grad_hy": 0, "cy": cy} | ones | {field: values}))
        assert_within_bounds(lstm_cell_backward(*inputs), inputs, most=4)


def test_subnormal_gradients_are_exact(backend):
    """grad_hy missing, f = 1: grad_cx is grad_cy, to the last bit, for every subnormal and tiny number."""
    limit = reference.limits(backend)
    values = (limit.smallest_subnormal * np.arange(1, 5000)).astype(backend)
    inputs = row(backend, grad_hy=0, grad_cy=values, f=1, cy=0.3)
    np.testing.assert_array_equal(lstm_cell_backward(*inputs).grad_cx[0], values)


LOW = {"float32": 2.0**-63, "float64": 2.0**-511}  # below it, gradients are lifted (pyx/kernel.pxi, design note d)


@pytest.mark.parametrize("name", LOW)
def test_low_gradients_keep_their_digits(isa, name):
    """Down to the last number above 0: rounded as ordinary gradients are, and once to a multiple of that number."""
    dtype = np.dtype(name)
    limit = reference.limits(dtype)
    rng = np.random.default_rng(5)
    low, high = exponents(dtype)[0], np.log2(LOW[name])
    grad_hy, grad_cy = rng.choice([-1, 1], (2, 20_000)) * 2.0 ** rng.uniform(low, high, (2, 20_000))
    gates = rng.uniform(0.01, 0.99, (4, 20_000))
    inputs = row(dtype, grad_hy, grad_cy, rng.normal(size=20_000), rng.normal(size=20_000), *gates)
    exact = reference.lstm_cell_backward(*inputs, dtype=np.longdouble)
    scales = reference.scales(*inputs, dtype=np.longdouble)
    result = lstm_cell_backward(*inputs)
    for field in ("grad_gates", "grad_cx"):
        error = np.abs(getattr(result, field) - getattr(exact, field))
        allowed = 4 * limit.eps * getattr(scales, field) + 0.5 * np.longdouble(limit.smallest_subnormal)
        assert (error <= allowed).all()


@pytest.mark.parametrize("nonfinite", ["nan", "ieee"])
@pytest.mark.parametrize("name", LOW)
def test_low_gradients_have_the_same_bits_in_any_company(isa, name, nonfinite):
    """Beside ordinary, large, Inf and NaN elements of their row, and on either side of what makes them low."""
    dtype = np.dtype(name)
    limit = reference.limits(dtype)
    edges = np.array([LOW[name], 2.0**20], dtype)
    gradients = [0, limit.smallest_subnormal, limit.smallest_normal, edges[0], np.nextafter(edges[0], 0), 3e-7, np.inf]
    factors = [0.3, -0.7, edges[1], np.nextafter(edges[1], 0), limit.largest, np.nan]
    rng = np.random.default_rng(6)
    fields = [
        rng.choice([-1, 1], 700) * rng.choice(gradients, 700, p=[0.1, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]) for _ in range(2)
    ]
    fields += [rng.choice(factors, 700, p=[0.5, 0.3, 0.05, 0.05, 0.05, 0.05]) for _ in range(6)]
    together = lstm_cell_backward(*row(dtype, *fields), nonfinite=nonfinite)
    alone = [lstm_cell_backward(*row(dtype, *numbers), nonfinite=nonfinite) for numbers in zip(*fields, strict=True)]
    grad_cx = np.concatenate([x.grad_cx for x in alone], 1)
    grad_gates = np.stack([x.grad_gates[0] for x in alone], 1).reshape(1, -1)
    apart = together._replace(grad_cx=grad_cx, grad_gates=grad_gates)
    assert_same_bits(together, apart, ("grad_cx", "grad_gates"))


@pytest.mark.parametrize("kind", ["ordinary", "saturated", "scaled", "cancel", "raw"])
@pytest.mark.parametrize("seed", range(3))
def test_random_batches(backend, kind, seed):
    inputs = make_inputs(150, 67, backend, seed=100 + seed, kind=kind)
    assert_within_bounds(lstm_cell_backward(*inputs), inputs, most=4)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_saturated_cy_with_a_large_gradient_keeps_digits(isa, name):
    """operator.md 5: where E is subnormal but grad_hy * o * E is not, E's power of two is applied last."""
    dtype = np.dtype(name)
    limit = reference.limits(dtype)
    cy = np.linspace(last_cy(dtype), last_cy(dtype) * 1.37, 4001).astype(dtype)
    grad_hy = np.exp(np.minimum(2 * cy.astype(np.longdouble) - 2, np.log(np.longdouble(limit.largest)) - 1))
    inputs = row(dtype, grad_hy=grad_hy, cy=cy, f=1, o=1)
    exact = reference.lstm_cell_backward(*inputs, dtype=np.longdouble).grad_cx[0]
    normal = np.abs(exact) >= limit.smallest_normal
    assert normal.sum() > 3000
    error = np.abs(lstm_cell_backward(*inputs).grad_cx[0] - exact)[normal] / (limit.eps * np.abs(exact[normal]))
    assert error.max() <= 8
    # The plain formula has nothing left there.
    with np.errstate(under="ignore"):
        assert (1 - np.tanh(inputs.cy) ** 2 == 0).all()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_far_past_the_range(isa, name):
    """|cy| beyond any gradient's reach: s is 0, t is 1, whatever the gradient."""
    dtype = np.dtype(name)
    cy = np.array([1e3, 1e10, 1e30, reference.limits(dtype).largest])
    inputs = row(dtype, grad_hy=[[1], [1e30]][0], cy=np.concatenate([cy, -cy]), grad_cy=0.25, f=1, o=0.5)
    result = lstm_cell_backward(*inputs)
    np.testing.assert_array_equal(result.grad_cx, 0.25)
    np.testing.assert_array_equal(result.grad_gates[0, -8:], np.repeat([0.25, -0.25], 4))


def test_largest_numbers(backend):
    """Largest finite gradients, states and gates in every combination that stays in range."""
    limit = reference.limits(backend)
    values = np.array([limit.largest, limit.largest / 2, -limit.largest, 1, limit.smallest_normal, 0])
    grid = np.meshgrid(values, values, values, indexing="ij")
    grad_hy, grad_cy, cx = (x.ravel() for x in grid)
    for gate in (0.5, 2.0**-10, 1):
        inputs = row(backend, grad_hy=grad_hy, grad_cy=grad_cy, cx=cx, cy=0.25, i=gate, f=gate, g=gate, o=gate)
        assert_within_bounds(lstm_cell_backward(*inputs), inputs)


def test_gates_near_their_ends(backend):
    """1 - i, 1 - g and 1 + g keep their digits next to 0 and 1, and beyond."""
    limit = reference.limits(backend)
    near = np.concatenate([limit.eps * np.arange(1, 200), 2.0 ** np.arange(-20, -1)])
    values = np.concatenate([near, 1 - near, 1 + near, -near, near - 1, -1 - near])
    for names in ("i", "f", "g", "o", "ifgo"):
        inputs = row(backend, cy=0.7, grad_cy=0.3, **dict.fromkeys(names, values))
        assert_within_bounds(lstm_cell_backward(*inputs), inputs, most=4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 31, 33, 1000])
def test_bias_over_many_magnitudes(backend, rows):
    """Terms of one sign, of both, and that cancel in pairs."""
    inputs = make_inputs(rows, 70, backend, seed=rows, kind="scaled")
    for changed in (
        inputs,
        Inputs(*(np.abs(x) for x in inputs)),
        Inputs(*(np.concatenate([x, -x if k < 2 else x]) for k, x in enumerate(inputs))),
    ):
        assert_within_bounds(lstm_cell_backward(*changed), changed)


# What tools/search_worst_error.py found.
WORST = {
    "float32": {
        "grad_hy": "-0x1.8601260000000p+13",
        "grad_cy": "0x1.dfe4000000000p-1",
        "cx": "0x1.4817380000000p+0",
        "cy": "0x1.03c5ce0000000p+1",
        "i": "0x1.f378fe0000000p-2",
        "f": "0x1.37ebb80000000p-91",
        "g": "-0x1.c88a800000000p-2",
        "o": "0x1.6a8d980000000p-1",
    },
    "float64": {
        "grad_hy": "-0x1.1340fd7384e3dp-27",
        "grad_cy": "0x1.8400cb4314023p+0",
        "cx": "-0x1.f86c612ea7ffcp-801",
        "cy": "-0x1.361111e93d026p+2",
        "i": "0x1.354ec01a918f0p-2",
        "f": "0x1.f54eda5e6b219p-2",
        "g": "-0x1.af9491d31017ep-1",
        "o": "-0x1.eee947094dd91p+85",
    },
}


@pytest.mark.parametrize("name", WORST)
def test_worst_inputs_found(isa, name):
    """The promised 8 units hold where hill climbing found the largest errors; they are far above what is ordinary."""
    inputs = row(np.dtype(name), **{field: float.fromhex(text) for field, text in WORST[name].items()})
    result = lstm_cell_backward(*inputs)
    assert_within_bounds(result, inputs)
    assert reference.error_in_units(result, *inputs).grad_gates > 4
