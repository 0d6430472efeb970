"""The same bits whatever may differ between two calls: threads, instruction set, layout, batch, bias, cut."""

import itertools

import numpy as np
import pytest
from strategies import (
    DTYPES,
    LAYOUTS,
    Inputs,
    arrays_of,
    assert_same_bits,
    bits,
    dtype_of,
    guard_inputs,
    make_inputs,
    plain_call,
)

import lstmcell_bwd
from lstmcell_bwd import BIAS_LEAF_ROWS, LSTMCellGradients, combine_bias, lstm_cell_backward, lstm_cell_backward_part

SHAPES = [(1, 1), (1, 700), (3, 17), (33, 65), (200, 31), (1000, 64)]
THREADS = [1, 2, 3, 7]


@pytest.fixture(params=DTYPES)
def dtype(request):
    """Every dtype, without a run per instruction set."""
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    return dtype_of(request.param)


def baseline_call(inputs, has_bias=True):
    """The result of the baseline instruction set on one thread."""
    chosen = lstmcell_bwd.get_isa()
    lstmcell_bwd.use_isa("baseline")
    try:
        return plain_call(inputs, has_bias)
    finally:
        lstmcell_bwd.use_isa(chosen)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_and_instruction_sets(backend, shape):
    inputs = make_inputs(*shape, backend, seed=1, kind="scaled")
    expected = baseline_call(inputs)
    for number in THREADS:
        assert_same_bits(lstm_cell_backward(*inputs, num_threads=number), expected)


@pytest.mark.parametrize("kind", ["saturated", "raw", "cancel"])
def test_many_elements_across_instruction_sets(backend, kind):
    """More than 10,000 elements of every kind."""
    inputs = make_inputs(160, 67, backend, seed=2, kind=kind)
    assert_same_bits(plain_call(inputs), baseline_call(inputs))


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_cell_states_across_instruction_sets(isa, name):
    """One level may fuse a product with a sum where another rounds it; not where that shows in any bit."""
    dtype = dtype_of(name)
    rng = np.random.default_rng(7)
    last = 46 if name == "float32" else 360
    sizes = np.concatenate([rng.uniform(0.1, last, 100_000), last * 2 ** rng.uniform(-160, 0, 50_000)])
    cy = (sizes * rng.choice([-1, 1], len(sizes))).astype(dtype).reshape(1, -1)
    ones, gates = np.ones_like(cy), np.full((1, 4 * cy.size), 0.5, dtype)
    inputs = Inputs(ones, np.zeros_like(cy), ones, cy, gates)
    assert_same_bits(plain_call(inputs), baseline_call(inputs))


def test_special_values_across_instruction_sets(backend):
    from strategies import special_values

    rng = np.random.default_rng(4)
    values = np.array(special_values(backend)).astype(backend)
    inputs = Inputs(*(rng.choice(values, (150, width)) for width in (70, 70, 70, 70, 280)))
    for nonfinite in ("nan", "ieee"):
        chosen = plain_call(inputs, nonfinite=nonfinite)
        lstmcell_bwd.use_isa("baseline")
        assert_same_bits(chosen, plain_call(inputs, nonfinite=nonfinite))


@pytest.mark.parametrize("rows", [1000, 4097])
def test_bias_from_run_to_run(backend, rows):
    """C28: gradients of very different size; threads 1, 2, 3, 4, 7; again and again."""
    inputs = make_inputs(rows, 16, backend, seed=5, kind="scaled")
    expected = bits(baseline_call(inputs).grad_bias)
    for number in (1, 2, 3, 4, 7):
        for _ in range(3):
            np.testing.assert_array_equal(bits(lstm_cell_backward(*inputs, num_threads=number).grad_bias), expected)


def test_finite_inputs_do_not_depend_on_the_rule(backend):
    inputs = make_inputs(40, 21, backend, seed=6, kind="saturated")
    inputs.cy[3] = 60  # takes the careful path
    assert_same_bits(lstm_cell_backward(*inputs, nonfinite="ieee"), lstm_cell_backward(*inputs, nonfinite="nan"))


def test_with_and_without_bias(backend):
    inputs = make_inputs(70, 37, backend, seed=7)
    with_bias = lstm_cell_backward(*inputs)
    without = lstm_cell_backward(*inputs, has_bias=False)
    assert without.grad_bias is None
    assert_same_bits(without, with_bias, ("grad_gates", "grad_cx"))


@pytest.mark.parametrize("careful", [False, True], ids=["ordinary", "with a row past the plain range"])
def test_a_row_alone_and_in_a_batch(backend, careful):
    inputs = make_inputs(45, 29, backend, seed=8, kind="saturated")
    if careful:
        inputs.cy[20, 3] = 60
    whole = lstm_cell_backward(*inputs)
    for row in range(45):
        alone = lstm_cell_backward(*(x[row : row + 1] for x in inputs))
        np.testing.assert_array_equal(bits(alone.grad_gates[0]), bits(whole.grad_gates[row]))
        np.testing.assert_array_equal(bits(alone.grad_cx[0]), bits(whole.grad_cx[row]))


@pytest.mark.parametrize("width", range(1, 40))
def test_a_column_alone_and_in_a_row(dtype, width):
    """C25: the vector body and the remainder loop agree, for every remainder."""
    inputs = make_inputs(5, width, dtype, seed=width)
    whole = lstm_cell_backward(*inputs)
    column = width - 1
    blocks = [column + k * width for k in range(4)]
    alone = lstm_cell_backward(*(x[:, [column]] for x in inputs[:4]), inputs.gates[:, blocks])
    np.testing.assert_array_equal(bits(alone.grad_gates), bits(whole.grad_gates[:, blocks]))
    np.testing.assert_array_equal(bits(alone.grad_cx), bits(whole.grad_cx[:, [column]]))
    np.testing.assert_array_equal(bits(alone.grad_bias), bits(whole.grad_bias[blocks]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, layout):
    inputs = make_inputs(70, 37, backend, seed=9)
    guarded = guard_inputs(inputs, layout, offset=1)
    assert_same_bits(lstm_cell_backward(*arrays_of(guarded), num_threads=2), plain_call(inputs))


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bfloat16"])
def test_byte_order(isa, name):
    """NumPy has no byte-swapped bfloat16."""
    inputs = make_inputs(37, 21, np.dtype(name), seed=10, kind="scaled")
    expected = plain_call(inputs)
    swapped = Inputs(*(x.astype(x.dtype.newbyteorder()) for x in inputs))
    assert_same_bits(lstm_cell_backward(*swapped), expected)
    for field in Inputs._fields:
        result = lstm_cell_backward(*inputs._replace(**{field: getattr(swapped, field)}))
        assert_same_bits(result, expected)
        assert all(x.dtype.isnative for x in result)


@pytest.mark.parametrize("target", ["grad_hy", "grad_cy", "cx", "cy"])
@pytest.mark.parametrize("careful", [False, True], ids=["ordinary", "with a row past the plain range"])
def test_in_place(backend, target, careful):
    inputs = make_inputs(70, 37, backend, seed=11)
    if careful:
        inputs.cy[10, 5] = 60
    expected = plain_call(inputs)
    for number in (1, 3):
        copies = Inputs(*(x.copy() for x in inputs))
        out = copies.gates, getattr(copies, target), None
        result = lstm_cell_backward(*copies, out=out, num_threads=number)
        assert result.grad_gates is out[0]
        assert result.grad_cx is out[1]
        assert_same_bits(result, expected)


def test_past_the_cache(backend):
    """A call large enough for stores that bypass the cache has the bits of calls that are not."""
    rows = 48 * 1024 * 1024 // (13 * backend.itemsize) // 1000
    small = make_inputs(rows // 8 + 1, 1000, backend, seed=12)
    inputs = Inputs(*(np.tile(x, (8, 1))[:rows] for x in small))
    expected = plain_call(small)
    result = lstm_cell_backward(*inputs, num_threads=2)
    for k in (0, 1):
        np.testing.assert_array_equal(result[k].view(np.uint8), np.tile(expected[k], (8, 1))[:rows].view(np.uint8))
    assert_same_bits(plain_call(inputs), result)


# ---- parts ----------------------------------------------------------------------------------------------------------


def from_parts(inputs, cuts, **options):
    """Compute a batch in parts that end at the given rows."""
    gates, state, nodes = [], [], []
    for first, last in itertools.pairwise([0, *cuts, len(inputs.cx)]):
        part = lstm_cell_backward_part(
            *(None if x is None else x[first:last] for x in inputs), first_row=first, **options
        )
        gates.append(part.grad_gates)
        state.append(part.grad_cx)
        nodes.extend(part.parts)
    # Workers answer in any order.
    bias = combine_bias(nodes[::-1], inputs.cx.dtype)
    return LSTMCellGradients(np.concatenate(gates), np.concatenate(state), bias)


@pytest.mark.parametrize("rows", [1, BIAS_LEAF_ROWS, 5 * BIAS_LEAF_ROWS, 7 * BIAS_LEAF_ROWS + 3])
def test_every_pair_of_cuts(dtype, rows):
    """Every way to cut a batch into up to three parts at multiples of BIAS_LEAF_ROWS."""
    inputs = make_inputs(rows, 5, dtype, seed=13, kind="scaled")
    expected = plain_call(inputs)
    aligned = range(BIAS_LEAF_ROWS, rows, BIAS_LEAF_ROWS)
    for count in range(3):
        for cuts in itertools.combinations(aligned, count):
            assert_same_bits(from_parts(inputs, cuts), expected)


def test_one_leaf_per_part(backend):
    rows = 37 * BIAS_LEAF_ROWS - 5
    inputs = make_inputs(rows, 9, backend, seed=14, kind="scaled")
    result = from_parts(inputs, range(BIAS_LEAF_ROWS, rows, BIAS_LEAF_ROWS), num_threads=2)
    assert_same_bits(result, plain_call(inputs))


def test_parts_are_few_and_pickle(dtype):
    import pickle

    rows = 1000
    inputs = make_inputs(rows, 3, dtype)
    part = lstm_cell_backward_part(*(x[BIAS_LEAF_ROWS:] for x in inputs), first_row=BIAS_LEAF_ROWS)
    assert len(part.parts) <= 2 * np.log2(rows)
    assert sum(node.rows for node in part.parts) == rows - BIAS_LEAF_ROWS
    first = lstm_cell_backward_part(*(x[:BIAS_LEAF_ROWS] for x in inputs), first_row=0)
    again = pickle.loads(pickle.dumps([*first.parts, *part.parts]))
    np.testing.assert_array_equal(bits(combine_bias(again, dtype)), bits(plain_call(inputs).grad_bias))


def test_part_without_bias(dtype):
    inputs = make_inputs(40, 3, dtype)
    part = lstm_cell_backward_part(*inputs, has_bias=False, first_row=0)
    assert part.parts == []
    assert_same_bits(part, plain_call(inputs), ("grad_gates", "grad_cx"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nodes: [], "at least one row"),
        (lambda nodes: nodes[1:], r"begins at row 0, got one that begins at row \d+$"),
        (lambda nodes: [nodes[0], nodes[0], *nodes[1:]], "begins at row"),
        (lambda nodes: [nodes[0]._replace(rows=5), *nodes[1:]], "end at a multiple of BIAS_LEAF_ROWS = 32, got 5 rows"),
        (lambda nodes: [nodes[0]._replace(sums=nodes[0].sums[:, 1:]), *nodes[1:]], "sums of shape"),
    ],
    ids=["none", "gap", "twice", "short", "narrow"],
)
def test_parts_that_do_not_fit(change, message):
    inputs = make_inputs(3 * BIAS_LEAF_ROWS, 3)
    nodes = lstm_cell_backward_part(*inputs, first_row=0).parts
    assert len(nodes) > 1
    with pytest.raises(lstmcell_bwd.InvalidParameterError, match=message):
        combine_bias(change(nodes), np.float32)


def test_parts_of_another_dtype():
    nodes = lstm_cell_backward_part(*make_inputs(5, 3), first_row=0).parts
    with pytest.raises(ValueError, match="sums of shape"):
        combine_bias(nodes, np.float64)
    with pytest.raises(TypeError, match="`dtype` must have dtype"):
        combine_bias(nodes, np.int32)


@pytest.mark.parametrize("first_row", [-BIAS_LEAF_ROWS, 1, BIAS_LEAF_ROWS + 1])
def test_first_row_out_of_step(first_row):
    with pytest.raises(ValueError, match=rf"`first_row` must be a multiple of .* got {first_row}"):
        lstm_cell_backward_part(*make_inputs(5, 3), first_row=first_row)


@pytest.mark.parametrize("first_row", [0.0, True, "0", None])
def test_first_row_of_another_type(first_row):
    with pytest.raises(TypeError, match="`first_row` must be an integer multiple"):
        lstm_cell_backward_part(*make_inputs(5, 3), first_row=first_row)


def test_part_has_no_bias_output():
    inputs = make_inputs(5, 3)
    with pytest.raises(ValueError, match="`out: grad_bias` must be None for a part"):
        lstm_cell_backward_part(*inputs, first_row=0, out=(None, None, np.empty(12, np.float32)))
    out = np.empty((5, 12), np.float32), np.empty((5, 3), np.float32), None
    part = lstm_cell_backward_part(*inputs, first_row=0, out=out)
    assert part.grad_gates is out[0]
    assert part.grad_cx is out[1]
    assert_same_bits(part, plain_call(inputs), ("grad_gates", "grad_cx"))
