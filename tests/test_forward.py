"""The forward pass: values, special values, bits, memory, bad arguments, and the backward pass on its cache."""

import functools
import itertools
import math
import re
import threading
from decimal import Decimal, localcontext
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import LAYOUTS, Guarded, arrays_of, assert_same_bits, bits, dtype_of, special_values

import lstmcell_bwd
from lstmcell_bwd import (
    InvalidParameterError,
    LSTMCellState,
    NullPointerError,
    UnsupportedDtypeError,
    _api,
    _features,
    choose_forward_device,
    lstm_cell_backward,
    lstm_cell_forward,
    reference,
)

NAMES = ("input_gates", "hidden_gates", "cx", "input_bias", "hidden_bias")
OUTPUTS = LSTMCellState._fields
BIASES = {"none": (), "input": (3,), "hidden": (4,), "both": (3, 4)}
KINDS = ("ordinary", "wide", "cancel", "saturated", "cell cancels")
same = functools.partial(assert_same_bits, outputs=OUTPUTS)
np_quiet = functools.partial(np.errstate, all="ignore")


def input_shapes(batch, hidden):
    """Return the shapes of the five inputs."""
    return (batch, 4 * hidden), (batch, 4 * hidden), (batch, hidden), (4 * hidden,), (4 * hidden,)


def output_shapes(batch, hidden):
    """Return the shapes of hy, cy and gates."""
    return (batch, hidden), (batch, hidden), (batch, 4 * hidden)


def make_inputs(batch, hidden, dtype=np.float32, seed=0, kind="ordinary", biases="both"):
    """Make the arrays of a call, None for a missing bias.

    The kinds: a few units; over eight orders of magnitude; with sums that cancel to anything from nothing to all; with
    sums down to where sigmoid underflows; with the two terms of cy cancelling.
    """
    rng = np.random.default_rng(seed)
    x, y, cx, *bias = (rng.normal(size=shape) for shape in input_shapes(batch, hidden))
    if kind == "wide":
        x, y = (a * 10 ** rng.uniform(-6, 2, a.shape) for a in (x, y))
    elif kind == "saturated":
        x = x * (300 if np.dtype(dtype).itemsize == 8 else 40)
    with np_quiet():
        x, cx, bias = x.astype(dtype), cx.astype(dtype), [b.astype(dtype) for b in bias]
    bias = [b if k + 3 in BIASES[biases] else None for k, b in enumerate(bias)]
    if kind == "cancel":
        rest = sum((b.astype(float) for b in bias if b is not None), start=x.astype(float))
        y = -rest * (1 + rng.choice([0, 1e-12, 1e-7, 1e-4], rest.shape) * rng.normal(size=rest.shape))
    y = y.astype(dtype)
    if kind == "cell cancels":
        i, f, g, _ = np.split(reference.lstm_cell_forward(x, y, cx, *bias).gates, 4, axis=1)
        cx = (-i * g / f).astype(dtype)
    return [x, y, cx, *bias]


def plain_call(inputs):
    """Call with contiguous arrays on one thread: what every other way of calling must equal bit by bit."""
    arrays = [None if x is None else np.ascontiguousarray(x, np.dtype(x.dtype).newbyteorder("=")) for x in inputs]
    return lstm_cell_forward(*arrays, num_threads=1)


def baseline_call(inputs):
    """The result of the baseline instruction set on one thread."""
    chosen = lstmcell_bwd.get_isa()
    lstmcell_bwd.use_isa("baseline")
    try:
        return plain_call(inputs)
    finally:
        lstmcell_bwd.use_isa(chosen)


def assert_within_bounds(result, inputs, most=1.0):
    """Compare with the reference, as shares of the allowed error."""
    for name, share in zip(OUTPUTS, reference.forward_errors(result, *inputs), strict=True):
        assert share.max(initial=0) <= most, name


def guarded_inputs(inputs, layouts, offset=0):
    """Put each array of a call into a guarded buffer; `layouts` is one name or one per array."""
    layouts = [layouts] * 5 if isinstance(layouts, str) else layouts
    return [
        None if x is None else Guarded(x.shape, x.dtype, layout, x, offset)
        for x, layout in zip(inputs, layouts, strict=True)
    ]


def guarded_outputs(batch, hidden, dtype, layouts="contiguous", offset=0):
    """Make guarded outputs full of NaN; `layouts` is one name or three."""
    layouts = [layouts] * 3 if isinstance(layouts, str) else layouts
    shapes = output_shapes(batch, hidden)
    return [Guarded(shape, dtype, layout, None, offset) for shape, layout in zip(shapes, layouts, strict=True)]


# ---- the reference --------------------------------------------------------------------------------------------------


def test_the_references_sum_is_exact():
    """Against rational arithmetic, for three and four terms that cancel down to the last bits of the smallest."""
    rng = np.random.default_rng(1)
    x, y, a = rng.normal(size=(3, 2000)) * 2.0 ** rng.integers(-60, 60, (3, 2000))
    terms = [x, y, -(x + y), a]
    for count in (2, 3, 4):
        total = reference.exact_sum(terms[:count])
        for k in range(0, 2000, 7):
            exact = sum(Fraction(float(term[k])) for term in terms[:count])
            assert abs(Fraction(float(total[k])) - exact) <= abs(exact) * Fraction(2) ** -52
    assert np.signbit(reference.exact_sum([np.array([-0.0])] * 3))
    assert reference.exact_sum([np.array([x]) for x in (math.inf, -1.0, 3.0)]) == math.inf


def test_the_reference_against_decimals():
    """All formulas in fifty digits, in both working precisions."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=(40, 5)) * 3
    inputs = [np.repeat(values[:, [k]], 4, axis=1) if k < 2 else values[:, [2]] for k in range(3)]
    with localcontext() as context:
        context.prec = 50
        for dtype in (np.float64, np.longdouble):
            result = reference.lstm_cell_forward(*inputs, dtype=dtype)
            assert result.hy.dtype == dtype
            for row, (x, y, cx, *_) in enumerate(values):
                a, cx = Decimal(float(x)) + Decimal(float(y)), Decimal(float(cx))
                gate, g = 1 / (1 + (-a).exp()), 1 - 2 / (1 + (2 * a).exp())
                cy = gate * cx + gate * g
                wanted = [gate, gate, g, gate, cy, gate * (1 - 2 / (1 + (2 * cy).exp()))]
                got = [*result.gates[row], result.cy[row, 0], result.hy[row, 0]]
                for value, exact in zip(got, wanted, strict=True):
                    error = abs(Decimal(np.format_float_positional(value, trim="-")) - exact)
                    assert error <= Decimal("1e-14") * (abs(exact) + abs(cx * gate))


def test_the_measure_can_fail():
    """A result that is four times the allowed error away is seen, in every output."""
    inputs = make_inputs(5, 7)
    exact = reference.lstm_cell_forward(*inputs)
    sums = 1 + sum(np.abs(x) for x in (*inputs[:2], inputs[3], inputs[4]))
    for k in range(3):
        state = [x.astype(np.float32) for x in exact]
        state[k] = (state[k] * (1 + 64 * np.finfo(np.float32).eps * sums.max())).astype(np.float32)
        shares = reference.forward_errors(LSTMCellState(*state), *inputs)
        assert [share.max() > 1 for share in shares] == [j == k for j in range(3)]


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biases", BIASES)
def test_accuracy(backend, kind, biases):
    """The promised bound, on more than 10,000 elements of every kind."""
    inputs = make_inputs(60, 179, backend, 3, kind, biases)
    result = lstm_cell_forward(*inputs)
    assert isinstance(result, LSTMCellState)
    assert [x.dtype for x in result] == [backend] * 3
    assert [x.shape for x in result] == list(output_shapes(60, 179))
    assert_within_bounds(result, inputs)
    if backend.itemsize > 2:
        assert_within_bounds(result, inputs, most=0.75)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_terms_that_cancel_keep_the_digits(isa, name):
    """Where plain addition has nothing left: 1 + small - 1, in every order of the four terms."""
    dtype = np.dtype(name)
    eps = np.finfo(dtype).eps
    small = (eps * np.linspace(0.01, 3, 500)).astype(dtype)
    one = np.ones_like(small)
    lost = False
    for order in itertools.permutations([one, small, -one, -small / 3]):
        x, y, b1, b2 = order
        inputs = [np.tile(x, 4)[None], np.tile(y, 4)[None], np.zeros((1, 500), dtype), np.tile(b1, 4), np.tile(b2, 4)]
        result = lstm_cell_forward(*inputs)
        assert_within_bounds(result, inputs)
        plain = np.tanh(((x + y) + b1) + b2)
        lost |= bool((np.abs(plain - result.gates[0, 1000:1500]) > 0.1 * np.abs(plain)).any())
    assert lost


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("gate", ["i", "f"])
def test_a_gate_below_the_normal_numbers_beside_a_large_factor(isa, name, gate):
    """A large cx brings to light the digits that an underflowed f lost; g is never large."""
    dtype = np.dtype(name)
    limit = reference.limits(dtype)
    a = np.linspace(math.log(limit.smallest_normal) + 5, math.log(limit.smallest_subnormal) - 1, 997)
    products = np.zeros((4, 1, 997), dtype)
    products["if".index(gate)] = a
    products[1 - "if".index(gate)] = -1000  # the other one is 0
    products[2] = np.linspace(-3, 3, 997)
    inputs = [np.concatenate(products, axis=1), np.zeros((1, 4 * 997), dtype), None, None, None]
    for decades in (0, 4, 12, 30):
        inputs[2] = np.full((1, 997), 10.0**decades, dtype)
        result = lstm_cell_forward(*inputs)
        assert_within_bounds(result, inputs)
        assert (result.cy[0, :100] != 0).any()


@pytest.mark.parametrize("scale", [1, -1])
def test_every_binade(backend, scale):
    """Sums of every size: tanh of tiny numbers, sigmoid down to underflow and up to 1."""
    limit = reference.limits(backend)
    low = round(math.log2(limit.smallest_subnormal))
    a = np.ldexp(1 + np.arange(64) / 64, np.arange(low, 11)[:, None]).ravel() * scale
    a = np.concatenate([a, scale * np.linspace(80, 110, 3001), scale * np.linspace(700, 760, 3001)])
    a = a[None].astype(backend)
    inputs = [np.tile(a, 4), np.zeros_like(np.tile(a, 4)), np.full_like(a, 0.5), None, None]
    result = lstm_cell_forward(*inputs)
    assert_within_bounds(result, inputs)
    i, _, g, _ = np.split(result.gates[0], 4)
    far = np.abs(a[0].astype(float)) > 50
    assert (g[far] == scale).all()
    if scale > 0:
        assert (i[far] == 1).all()
    # Relative accuracy as far down as there are normal numbers.
    with np_quiet():
        exact = np.exp(-np.log1p(np.exp(-a[0].astype(np.longdouble))))
    normal = exact >= limit.smallest_normal
    assert normal.sum() > 1000
    error = np.abs(i[normal] - exact[normal]) / exact[normal]
    arithmetic = reference.limits(reference.arithmetic_dtype(backend)).eps
    allowed = 4 * arithmetic + 0.51 * (limit.eps if backend.itemsize == 2 else 0)
    assert (error <= allowed).all()


def test_special_values(backend):
    """The limits of sigmoid and tanh, IEEE arithmetic otherwise, the sign of zero, and NaN that does not spread."""
    inf, nan = math.inf, math.nan
    #        a      sigmoid  tanh
    table = [
        (inf, 1, 1),
        (-inf, 0, -1),
        (nan, nan, nan),
        (0.0, 0.5, 0.0),
        (-0.0, 0.5, -0.0),
        (30000, 1, 1),
        (-30000, 0, -1),
    ]
    a, sigmoid, tanh = np.array(table).T.astype(backend)
    width = len(a)
    for minus_zero in (None, -np.zeros(4 * width, backend)):
        x, y = np.tile(a, 4)[None], -np.zeros((1, 4 * width), backend)
        for products in ((x, y), (y, x)):
            for biases in ((minus_zero, None), (None, minus_zero), (minus_zero, minus_zero)):
                hy, cy, gates = lstm_cell_forward(*products, np.zeros((1, width), backend), *biases)
                wanted = np.concatenate([sigmoid, sigmoid, tanh, sigmoid])
                np.testing.assert_array_equal(bits(gates[0]), bits(wanted))
                np.testing.assert_array_equal(np.isnan(hy[0]), np.isnan(a))
                with np_quiet():
                    np.testing.assert_array_equal(bits(cy[0]), bits(sigmoid * 0 + sigmoid * tanh))
    # Inf in one term and large numbers in others; opposite Infs; Inf * 0.
    one = np.zeros((1, 4), backend)
    terms = [np.array(values).astype(backend) for values in ([inf, inf, -inf, 1], [1, -inf, -1, inf])]
    gates = lstm_cell_forward(one, one, one[:, :1], *terms).gates[0]
    np.testing.assert_array_equal(gates.astype(float), [1, nan, -1, 1])
    hy, cy, _ = lstm_cell_forward(np.full_like(one, -30000), one, np.full((1, 1), inf, backend))
    assert np.isnan(cy).all()
    assert np.isnan(hy).all()
    hy, cy, _ = lstm_cell_forward(np.full_like(one, 30000), one, np.full((1, 1), -inf, backend))
    assert (cy == -inf).all()
    assert (hy == -1).all()


def test_overflow_of_a_partial_sum(backend):
    """As IEEE addition in the documented order; finite sums of large numbers stay finite."""
    large = reference.limits(reference.arithmetic_dtype(backend)).largest
    if backend.itemsize == 2 and large > reference.limits(backend).largest:
        large = reference.limits(backend).largest  # float16: sums in float32 cannot overflow
    big = np.full((1, 4), large, backend)
    bias = np.full(4, -large, backend)
    zero = np.zeros((1, 1), backend)
    overflows = backend != np.float16
    gates = lstm_cell_forward(big, big, zero, bias, bias).gates[0]
    wanted = [math.nan] * 4 if overflows else [0.5, 0.5, 0, 0.5]
    np.testing.assert_array_equal(gates.astype(float), wanted)
    gates = lstm_cell_forward(big, -big, zero, bias, -bias).gates[0]
    np.testing.assert_array_equal(gates.astype(float), [0.5, 0.5, 0, 0.5])
    gates = lstm_cell_forward(big, -big / 2, zero, bias / 2, None).gates[0]
    np.testing.assert_array_equal(gates.astype(float), [0.5, 0.5, 0, 0.5])


def test_hy_comes_from_the_unrounded_cell_state():
    """float16: hy is the rounding of the float32 result, not o * tanh(rounded cy)."""
    inputs = make_inputs(60, 179, np.float16, 5)
    result = lstm_cell_forward(*inputs)
    wide = lstm_cell_forward(*(x.astype(np.float32) for x in inputs))
    for got, wanted in zip(result, wide, strict=True):
        np.testing.assert_array_equal(bits(got), bits(wanted.astype(np.float16)))
    o = wide.gates[:, -179:]
    assert ((o * np.tanh(result.cy.astype(np.float32))).astype(np.float16) != result.hy).any()


@pytest.mark.parametrize(("batch", "hidden"), [(0, 3), (2, 0), (0, 0)])
def test_empty(backend, batch, hidden):
    inputs = make_inputs(batch, hidden, backend)
    result = lstm_cell_forward(*inputs)
    assert [x.shape for x in result] == list(output_shapes(batch, hidden))
    out = [np.empty(shape, backend) for shape in output_shapes(batch, hidden)]
    assert all(a is b for a, b in zip(lstm_cell_forward(*inputs, out=out), out, strict=True))


# ---- the backward pass on the cache ---------------------------------------------------------------------------------


def test_finite_differences(isa):
    """float64: the backward pass of the forward pass's cache is the derivative of the forward pass."""
    inputs = make_inputs(3, 2, np.float64, 8)
    rng = np.random.default_rng(9)
    grad_hy, grad_cy = rng.normal(size=(2, 3, 2))

    def loss(arrays):
        hy, cy, _ = lstm_cell_forward(*arrays)
        return (hy * grad_hy).sum() + (cy * grad_cy).sum()

    _, cy, gates = lstm_cell_forward(*inputs)
    gradients = lstm_cell_backward(grad_hy, grad_cy, inputs[2], cy, gates)
    wanted = [gradients.grad_gates, gradients.grad_gates, gradients.grad_cx, gradients.grad_bias, gradients.grad_bias]
    weights = {1: 2 / 3, -1: -2 / 3, 2: -1 / 12, -2: 1 / 12}
    for k, array in enumerate(inputs):
        numeric = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            for distance, weight in weights.items():
                moved = [x.copy() for x in inputs]
                moved[k][place] += distance * 1e-3
                numeric[place] += weight * loss(moved) / 1e-3
        np.testing.assert_allclose(numeric, wanted[k], rtol=0, atol=1e-10)


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (3, 17), (33, 65), (200, 31), (1000, 64)], ids=str)
@pytest.mark.parametrize("kind", ["wide", "saturated"])
def test_threads_and_instruction_sets(backend, shape, kind):
    inputs = make_inputs(*shape, backend, 1, kind)
    expected = baseline_call(inputs)
    for number in (1, 2, 3, 7):
        same(lstm_cell_forward(*inputs, num_threads=number), expected)


def test_special_values_across_instruction_sets(backend):
    rng = np.random.default_rng(4)
    values = np.array(special_values(backend)).astype(backend)
    inputs = [rng.choice(values, shape) for shape in input_shapes(150, 70)]
    same(plain_call(inputs), baseline_call(inputs))
    same(plain_call([*inputs[:3], None, None]), baseline_call([*inputs[:3], None, None]))


@pytest.mark.parametrize("careful", [False, True], ids=["ordinary", "with a row that is computed again"])
@pytest.mark.parametrize("biases", BIASES)
def test_a_row_alone_and_in_a_batch(backend, careful, biases):
    inputs = make_inputs(45, 29, backend, 8, biases=biases)
    if careful:
        inputs[0][20, 3] = -200
        inputs[1][21, 40] = np.nan
    whole = lstm_cell_forward(*inputs)
    for row in range(45):
        alone = lstm_cell_forward(*(x[row : row + 1] for x in inputs[:3]), *inputs[3:])
        same(alone, LSTMCellState(*(x[row : row + 1] for x in whole)))


@pytest.mark.parametrize("biases", BIASES)
def test_one_value_that_needs_care_changes_no_other(backend, biases):
    """The careful row gives the bits of the fast one wherever that is valid."""
    inputs = make_inputs(3, 150, backend, 9, "wide", biases)
    before = lstm_cell_forward(*inputs)
    for k in range(4):
        for value in (-500, np.nan, np.inf):
            changed = [None if x is None else x.copy() for x in inputs]
            changed[0][1, k * 150 + 70] = value
            after = lstm_cell_forward(*changed)
            for a, b in zip(after, before, strict=True):
                others = np.ones(a.shape, bool)
                others[1, 70::150] = False
                np.testing.assert_array_equal(bits(a)[others], bits(b)[others])


@pytest.mark.parametrize("width", range(1, 40))
def test_a_column_alone_and_in_a_row(dtype, width):
    """The vector body and the remainder agree, for every remainder."""
    inputs = make_inputs(5, width, dtype, width)
    whole = lstm_cell_forward(*inputs)
    blocks = [width - 1 + k * width for k in range(4)]
    columns = (np.s_[:, blocks], np.s_[:, blocks], np.s_[:, width - 1 :], np.s_[blocks], np.s_[blocks])
    alone = lstm_cell_forward(*(x[part] for x, part in zip(inputs, columns, strict=True)))
    same(alone, LSTMCellState(whole.hy[:, width - 1 :], whole.cy[:, width - 1 :], whole.gates[:, blocks]))


def test_a_missing_bias_is_one_of_zeros(backend):
    for biases in BIASES:
        inputs = make_inputs(9, 37, backend, 6, biases=biases)
        zeros = [np.zeros(148, backend) if x is None else x for x in inputs]
        same(lstm_cell_forward(*inputs), lstm_cell_forward(*zeros))


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
@pytest.mark.parametrize("width", [333, 4100])
@pytest.mark.parametrize(
    ("layout", "offset"), [("contiguous", 0), ("contiguous", 1), ("slice_of_wider", 4), ("fortran", 0)]
)
def test_large_outputs_that_bypass_the_cache(isa, name, width, layout, offset):
    """Whole lines are written past the cache; their ragged ends must be right and nothing beside them written."""
    dtype = np.dtype(name)
    inputs = make_inputs(3, width, dtype, 34)
    rows = 34 * 1024 * 1024 // (15 * dtype.itemsize * width) + 1
    expected = plain_call(inputs)
    inputs = [np.resize(x, (rows, x.shape[1])) if x.ndim == 2 else x for x in inputs]
    for number in (1, 2):
        outputs = guarded_outputs(rows, width, dtype, layout, offset)
        result = lstm_cell_forward(*inputs, out=tuple(arrays_of(outputs)), num_threads=number)
        for a, b in zip(result, expected, strict=True):
            assert np.ascontiguousarray(a).tobytes() == np.resize(b, a.shape).tobytes()
        for guarded in outputs:
            guarded.assert_guards_intact()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("number", [2, 3, 7])
@pytest.mark.parametrize("shape", [(3, 1024), (33, 512), (70, 384), (2, 9000)], ids=str)
def test_what_threads_share(dtype, shape, number, offset):
    """Shares of rows, and of columns, which begin on a line of the outputs, wherever those begin."""
    inputs = make_inputs(*shape, dtype, 36)
    outputs = guarded_outputs(*shape, dtype, "contiguous", offset * dtype.itemsize)
    same(lstm_cell_forward(*inputs, out=tuple(arrays_of(outputs)), num_threads=number), plain_call(inputs))
    for guarded in outputs:
        guarded.assert_guards_intact()


def test_a_foreign_floating_point_state_changes_no_bit(isa):
    """Flush-to-zero on the calling thread and on its team."""
    from test_fpu import FOREIGN, MACHINE, ForeignState

    if MACHINE is None:
        pytest.skip("no knowledge of this processor's floating-point state")
    inputs = make_inputs(70, 40, np.float32, 1, "saturated")
    inputs[2][::2] *= np.float32(1e-38)
    inputs[0][1] *= np.float32(1e-40)
    expected = plain_call(inputs)
    for state in FOREIGN:
        results = []

        def run(state=state, results=results):
            with ForeignState(state):
                before = _features.fp_state()
                results.append(lstm_cell_forward(*inputs, num_threads=3))
                assert _features.fp_state() == before

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        same(results[0], expected)


# ---- memory ---------------------------------------------------------------------------------------------------------


def check(inputs_guarded, outputs_guarded, expected, **options):
    """Call, then compare the bits and look at every byte that no output owns."""
    out = tuple(arrays_of(outputs_guarded))
    result = lstm_cell_forward(*arrays_of(inputs_guarded), out=out, **options)
    assert all(a is b for a, b in zip(result, out, strict=True))
    same(result, expected)
    for guarded in inputs_guarded:
        if guarded is not None:
            guarded.assert_unchanged()
    for guarded in outputs_guarded:
        guarded.assert_guards_intact()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 1, 4])
class TestEveryLayout:
    """Each argument alone, then all at once, misaligned by 0, 1 and 4 bytes."""

    @pytest.mark.parametrize("name", NAMES)
    def test_one_input(self, dtype, layout, offset, name):
        inputs = make_inputs(5, 19, dtype, 1)
        layouts = [layout if field == name else "contiguous" for field in NAMES]
        check(guarded_inputs(inputs, layouts, offset), guarded_outputs(5, 19, dtype), plain_call(inputs))

    @pytest.mark.parametrize("name", OUTPUTS)
    def test_one_output(self, dtype, layout, offset, name):
        inputs = make_inputs(5, 19, dtype, 2)
        layouts = [layout if field == name else "contiguous" for field in OUTPUTS]
        outputs = guarded_outputs(5, 19, dtype, layouts, offset)
        check(guarded_inputs(inputs, "contiguous"), outputs, plain_call(inputs))

    def test_all_at_once(self, backend, layout, offset):
        for shape in ((5, 19), (1, 33), (37, 1), (70, 140)):
            for biases in ("none", "both"):
                inputs = make_inputs(*shape, backend, 3, biases=biases)
                outputs = guarded_outputs(*shape, backend, layout, offset)
                check(guarded_inputs(inputs, layout, offset), outputs, plain_call(inputs), num_threads=2)


def test_mixed_layouts(backend):
    """Every argument in another layout than its neighbour, over all rotations."""
    inputs = make_inputs(23, 37, backend, 5)
    expected = plain_call(inputs)
    names = list(LAYOUTS)
    for k in range(len(names)):
        turned = names[k:] + names[:k]
        outputs = guarded_outputs(23, 37, backend, turned[5:8])
        check(guarded_inputs(inputs, turned[:5], k % 3), outputs, expected, num_threads=3)


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_byte_order(isa, name):
    inputs = make_inputs(37, 21, np.dtype(name), 10, "wide")
    expected = plain_call(inputs)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in inputs]
    for k in (*range(5), None):
        mixed = swapped if k is None else [*inputs[:k], swapped[k], *inputs[k + 1 :]]
        result = lstm_cell_forward(*mixed)
        same(result, expected)
        assert all(x.dtype.isnative for x in result)


@pytest.mark.parametrize("k", range(5))
def test_read_only_and_broadcast_inputs(backend, k):
    inputs = make_inputs(13, 21, backend, 8)
    inputs[k].flags.writeable = False
    same(lstm_cell_forward(*inputs), plain_call(inputs))
    for part in (np.s_[:1],) if k > 2 else (np.s_[:1, :1], np.s_[:1, :], np.s_[:, :1]):
        changed = [*inputs[:k], np.broadcast_to(inputs[k][part], inputs[k].shape), *inputs[k + 1 :]]
        same(lstm_cell_forward(*changed, num_threads=2), plain_call(changed))


def assert_as_if_copied(inputs, out, **options):
    """Call with outputs that overlap inputs; compare with a call on copies made before."""
    expected = plain_call([None if x is None else x.copy() for x in inputs])
    result = lstm_cell_forward(*inputs, out=out, **options)
    for given, got in zip(out, result, strict=True):
        assert given is None or given is got
    same(result, expected)


@pytest.mark.parametrize("number", [1, 3])
class TestOverlap:
    """Outputs that are inputs, or lie across them."""

    @pytest.mark.parametrize("state", ["hy", "cy"])
    @pytest.mark.parametrize("product", [0, 1])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_in_place(self, dtype, number, layout, product, state):
        inputs = make_inputs(40, 21, dtype, 14)
        inputs[0][7, 5] = -200  # a row that is computed again
        guarded = guarded_inputs(inputs, layout, 1)
        arrays = arrays_of(guarded)
        out = [arrays[2] if name == state else None for name in ("hy", "cy")]
        assert_as_if_copied(arrays, (*out, arrays[product]), num_threads=number)
        for k, one in enumerate(guarded):
            one.assert_guards_intact() if k in (2, product) else one.assert_unchanged()

    @pytest.mark.parametrize("shift", [1, 21, -1, -21, 20, 22, 21 * 20])
    @pytest.mark.parametrize("state", [0, 1])
    def test_state_shifted(self, dtype, number, shift, state):
        inputs = make_inputs(40, 21, dtype, 16)
        buffer = np.zeros(40 * 21 * 3, dtype)
        first = 40 * 21
        view = buffer[first : 2 * first].reshape(40, 21)
        view[...] = inputs[2]
        out = [None, None, None]
        out[state] = buffer[first + shift : 2 * first + shift].reshape(40, 21)
        assert_as_if_copied([*inputs[:2], view, *inputs[3:]], out, num_threads=number)

    @pytest.mark.parametrize("shift", [1, 84, -84, -1, 21])
    @pytest.mark.parametrize("product", [0, 1])
    def test_gates_shifted(self, dtype, number, shift, product):
        inputs = make_inputs(40, 21, dtype, 22)
        size = inputs[0].size
        buffer = np.zeros(3 * size, dtype)
        view = buffer[size : 2 * size].reshape(40, 84)
        view[...] = inputs[product]
        inputs[product] = view
        out = buffer[size + shift : 2 * size + shift].reshape(40, 84)
        assert_as_if_copied(inputs, (None, None, out), num_threads=number)

    def test_across_shapes(self, dtype, number):
        """A state inside a product, gates over the state, outputs inside the biases."""
        inputs = make_inputs(40, 21, dtype, 23)
        assert_as_if_copied(inputs, (inputs[0][:, 42:63], inputs[1][:, :21], None), num_threads=number)
        inputs = make_inputs(40, 21, dtype, 24)
        gates = np.zeros((40, 84), dtype)
        gates[:, 21:42] = inputs[2]
        inputs[2] = gates[:, 21:42]
        assert_as_if_copied(inputs, (None, None, gates), num_threads=number)
        inputs = make_inputs(4, 21, dtype, 25)
        biases = np.concatenate(inputs[3:])
        inputs[3:] = biases[:84], biases[84:]
        assert_as_if_copied(inputs, (biases[40:124].reshape(4, 21), None, None), num_threads=number)

    @pytest.mark.parametrize("shape", [(4, 21), (3, 600), (1, 9000)], ids=str)
    @pytest.mark.parametrize("position", range(3))
    def test_over_a_bias(self, dtype, number, shape, position):
        """Also where some outputs are ready before all of the biases is read."""
        shift = shape[1] // 6
        for bias in (3, 4):
            inputs = make_inputs(*shape, dtype, 26)
            wanted = output_shapes(*shape)[position]
            size = wanted[0] * wanted[1]
            buffer = np.zeros(shift + max(4 * shape[1], size), dtype)
            buffer[: 4 * shape[1]] = inputs[bias]
            inputs[bias] = buffer[: 4 * shape[1]]
            out = [None] * 3
            out[position] = buffer[shift : shift + size].reshape(wanted)
            assert_as_if_copied(inputs, out, num_threads=number)

    def test_one_array_is_several_inputs(self, dtype, number):
        inputs = make_inputs(40, 21, dtype, 27)
        inputs[1] = inputs[0]
        inputs[4] = inputs[3]
        assert_as_if_copied(inputs, (None, inputs[2], inputs[0]), num_threads=number)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(range(3), 2)))
def test_outputs_that_overlap_each_other(dtype, one, other):
    inputs = make_inputs(4, 21, dtype)
    buffer = np.full(4 * 84 + 10, 7, dtype)
    out = [np.full(shape, 7, dtype) for shape in output_shapes(4, 21)]
    for k in (one, other):
        size = out[k].size
        out[k] = buffer[k : k + size].reshape(out[k].shape)
    message = rf"`out: {OUTPUTS[other]}` must not share memory with `out: {OUTPUTS[one]}`"
    with pytest.raises(InvalidParameterError, match=message):
        lstm_cell_forward(*inputs, out=out)
    assert (buffer == 7).all()
    assert all((x == 7).all() for x in out)


def test_new_outputs_begin_on_64_bytes():
    for _ in range(5):
        result = lstm_cell_forward(*make_inputs(70, 70))
        assert all(x.ctypes.data % 64 == 0 and x.flags.c_contiguous and x.flags.writeable for x in result)


class Subclass(np.ndarray):
    """A plain subclass of ndarray."""


def test_what_numpy_can_view(isa):
    inputs = make_inputs(3, 4, np.float64, 2)
    expected = plain_call(inputs)
    for view in (memoryview, np.ndarray.tolist, lambda x: x.view(Subclass)):
        result = lstm_cell_forward(*(view(x) for x in inputs))
        same(result, expected)
        assert all(type(x) is np.ndarray for x in result)
    out = tuple(np.zeros(shape).view(Subclass) for shape in output_shapes(3, 4))
    assert all(a is b for a, b in zip(lstm_cell_forward(*inputs, out=out), out, strict=True))


# ---- bad arguments --------------------------------------------------------------------------------------------------

N, H = 3, 4


def refuse(error, name, wanted, got, inputs=None, **options):
    """Call with good outputs unless told otherwise; the call must raise and leave every byte of them alone."""
    outputs = guarded_outputs(N, H, np.float32)
    options.setdefault("out", tuple(arrays_of(outputs)))
    with pytest.raises(error) as raised:
        lstm_cell_forward(*(inputs or make_inputs(N, H)), **options)
    message = str(raised.value)
    assert f"`{name}`" in message
    assert wanted in message
    assert re.search(rf"got .*{got}", message), message
    for guarded in outputs:
        guarded.assert_unchanged()


def replaced(k, value):
    """Make inputs of which one is another."""
    inputs = make_inputs(N, H)
    inputs[k] = value
    return inputs


@pytest.mark.parametrize("k", range(3))
def test_missing(k):
    refuse(NullPointerError, NAMES[k], "an array", "None", replaced(k, None))


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3), (N + 1, H), (N, 4 * H + 1), (4 * H + 1,), (0, H)], ids=str)
@pytest.mark.parametrize("k", range(5))
def test_wrong_shape(k, shape):
    inputs = replaced(k, np.zeros(shape, np.float32))
    if k == 2 and len(shape) == 2:  # cx sets the size, so the others are at fault
        refuse(InvalidParameterError, "input_gates", "to match `cx`", "16", inputs)
    else:
        wanted = {0: "(N, 4*H) = (3, 16)", 1: "(N, 4*H) = (3, 16)", 2: "(N, H)"}.get(k, "(4*H,) = (16,)")
        refuse(InvalidParameterError, NAMES[k], wanted, re.escape(str(shape)), inputs)


@pytest.mark.parametrize("wrong", ["int32", "bool", "complex64", "object", "longdouble", "U1"])
@pytest.mark.parametrize("k", range(5))
def test_wrong_dtype(k, wrong):
    array = np.zeros(input_shapes(N, H)[k], wrong)
    refuse(UnsupportedDtypeError, NAMES[k], "float32", re.escape(str(array.dtype)), replaced(k, array))


@pytest.mark.parametrize("other", ["float64", "float16", ">f8"])
@pytest.mark.parametrize("k", range(5))
def test_mixed_dtypes(k, other):
    inputs = make_inputs(N, H)
    inputs[k] = inputs[k].astype(other)
    if k == 2:
        refuse(
            UnsupportedDtypeError, "input_gates", f"{np.dtype(other).newbyteorder('=')} like `cx`", "float32", inputs
        )
    else:
        refuse(UnsupportedDtypeError, NAMES[k], "float32 like `cx`", re.escape(str(np.dtype(other))), inputs)


@pytest.mark.parametrize("value", ["abc", 3, {}, [[1.0], [1.0, 2.0]], np.ma.masked_array([1.0])], ids=repr)
@pytest.mark.parametrize("k", range(5))
def test_wrong_type(k, value):
    refuse(lstmcell_bwd.LSTMCellError, NAMES[k], "must", "", replaced(k, value))


def read_only(array):
    """Return a read-only array."""
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (read_only, "be writeable"),
        (lambda x: x.astype(">f4"), "have native byte order"),
        (lambda x: np.broadcast_to(x[:1], x.shape).copy()[:, :-1], "have shape"),
        (lambda x: x.astype(np.float64), "have dtype float32"),
        (lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (4, 4)), "no two elements that share memory"),
        (lambda x: x.tolist(), "a NumPy array, an NPUArray or an NPU tensor"),
    ],
    ids=["read-only", "byte order", "shape", "dtype", "overlaps itself", "list"],
)
def test_wrong_output(k, make, wanted):
    out = [np.full(shape, 7, np.float32) for shape in output_shapes(N, H)]
    good = [x for j, x in enumerate(out) if j != k]
    out[k] = make(out[k])
    with pytest.raises(lstmcell_bwd.LSTMCellError, match=f"`out: {OUTPUTS[k]}` must") as raised:
        lstm_cell_forward(*make_inputs(N, H), out=out)
    assert wanted in str(raised.value)
    assert all((x == 7).all() for x in good)


def test_wrong_options():
    refuse(UnsupportedDtypeError, "out", "a triple (hy, cy, gates)", "int", out=3)
    refuse(InvalidParameterError, "out", "a triple (hy, cy, gates)", "2 entries", out=(None, None))
    refuse(InvalidParameterError, "num_threads", "at least 1", "0", num_threads=0)
    refuse(UnsupportedDtypeError, "num_threads", "an integer", "float", num_threads=1.5)
    refuse(InvalidParameterError, "device", "'npu:<index>'", "'npu:x'", device="npu:x")
    refuse(UnsupportedDtypeError, "device", "a string", "int", device=3)
    with pytest.raises(TypeError):
        lstm_cell_forward(*make_inputs(N, H), None)


def test_choose_forward_device_checks_alike():
    assert choose_forward_device(*make_inputs(N, H)).device == "cpu"
    with pytest.raises(InvalidParameterError, match="`num_threads`"):
        choose_forward_device(*make_inputs(N, H), num_threads=0)
    with pytest.raises(NullPointerError, match="`cx`"):
        choose_forward_device(*make_inputs(N, H)[:2], None)


def test_forward_executor_is_used_once():
    """The internal interface that the two-phase form is built on."""
    from lstmcell_bwd._arguments import check_forward_arguments

    inputs = make_inputs(N, H)
    outputs = tuple(np.empty(shape, np.float32) for shape in output_shapes(N, H))
    executor = _api.prepare(check_forward_arguments(*inputs, None), outputs)
    assert executor.threads == 1
    with pytest.raises(InvalidParameterError, match="`workspace`"):
        executor.run(bytearray(executor.workspace_size - 1))
    executor.run(bytearray(executor.workspace_size))
    same(LSTMCellState(*outputs), plain_call(inputs))
    with pytest.raises(InvalidParameterError, match="`executor`"):
        executor.run(bytearray(executor.workspace_size))


# ---- any call -------------------------------------------------------------------------------------------------------

USABLE = [isa for isa in _api.built_isas() if isa in _features.runnable_isas()]


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_any_call(name, data):
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    dtype = dtype_of(name)
    batch = data.draw(st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 65])), label="batch")
    hidden = data.draw(st.one_of(st.integers(0, 19), st.sampled_from([31, 33, 65, 130])), label="hidden")
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    biases = data.draw(st.sampled_from(list(BIASES)), label="biases")
    inputs = make_inputs(batch, hidden, dtype, data.draw(st.integers(0, 2**16), label="seed"), kind, biases)
    for array in inputs:
        if array is not None and array.size:
            for value in data.draw(st.lists(st.sampled_from(special_values(dtype)), max_size=2), label="special"):
                array.flat[data.draw(st.integers(0, array.size - 1), label="place")] = value
    layouts = st.sampled_from(list(LAYOUTS))
    offset = data.draw(st.integers(0, 8), label="offset")
    given_inputs = guarded_inputs(inputs, [data.draw(layouts, label=name) for name in NAMES], offset)
    given_outputs = guarded_outputs(batch, hidden, dtype, [data.draw(layouts, label=name) for name in OUTPUTS], offset)
    targets = list(given_outputs)
    state = data.draw(st.sampled_from([None, None, 0, 1]), label="the state that is cx")
    if state is not None:
        targets[state] = given_inputs[2]
    product = data.draw(st.sampled_from([None, None, 0, 1]), label="the product that gates is")
    if product is not None:
        targets[2] = given_inputs[product]
    allocated = data.draw(st.lists(st.integers(0, 2)), label="allocated")
    targets = [None if k in allocated else target for k, target in enumerate(targets)]
    out = tuple(arrays_of(targets))
    try:
        lstmcell_bwd.use_isa("baseline")
        expected = plain_call(inputs)
        lstmcell_bwd.use_isa(data.draw(st.sampled_from(USABLE), label="isa"))
        number = data.draw(st.sampled_from([None, 1, 2, 3, 7]), label="num_threads")
        result = lstm_cell_forward(*arrays_of(given_inputs), out=out, num_threads=number)
    finally:
        lstmcell_bwd.use_isa("auto")
    for given, got in zip(out, result, strict=True):
        assert given is None or given is got
    same(result, expected)
    assert_within_bounds(result, inputs)
    for guarded in given_inputs:
        if guarded is not None and all(guarded is not target for target in targets):
            guarded.assert_unchanged()
    for target in targets:
        if target is not None:
            target.assert_guards_intact()
