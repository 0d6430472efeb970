"""The PyTorch cell: its derivatives, what it shares with torch.nn.LSTMCell, and that no tensor is copied."""

import contextlib
import copy
import importlib
import itertools
import json
import pickle
import re
import subprocess
import sys
import threading
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import simulation

import lstmcell_bwd

torch = pytest.importorskip("torch", reason="torch is not installed")

from lstmcell_bwd._exchange import Exchange  # noqa: E402
from lstmcell_bwd.torch import LSTMCell, lstm_cell  # noqa: E402

# PyTorch warns of what it calls itself.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
module = importlib.import_module("lstmcell_bwd.torch")
forward = torch.ops.lstmcell_bwd.lstm_cell_forward.default
backward = torch.ops.lstmcell_bwd.lstm_cell_backward.default

ROOT = Path(__file__).resolve().parents[1]
BATCH, INPUT, HIDDEN = 4, 3, 5
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Which of the two biases there are.
BIASES = list(itertools.product([True, False], repeat=2))


@pytest.fixture(autouse=True)
def seeded():
    """Make every test's numbers its own, and give PyTorch its threads back."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def arguments(dtype=torch.float64, biases=(True, True), batch=BATCH, hidden=HIDDEN, grad=True):
    """Return input, hx, cx, weight_ih, weight_hh, bias_ih, bias_hh."""
    shapes = [(batch, INPUT), (batch, hidden), (batch, hidden), (4 * hidden, INPUT), (4 * hidden, hidden)]
    tensors = [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in [*shapes, 4 * hidden, 4 * hidden]]
    return [*tensors[:5], *(bias if there else None for bias, there in zip(tensors[5:], biases, strict=True))]


def called(x, hx, cx, *parameters):
    """Call `lstm_cell` with its arguments in a row."""
    return lstm_cell(x, (hx, cx), *parameters)


def operands(dtype=torch.float32, batch=BATCH, hidden=HIDDEN, grad=True):
    """Return the arguments of the forward operator: both products, cx and both biases."""
    shapes = [(batch, 4 * hidden), (batch, 4 * hidden), (batch, hidden), (4 * hidden,), (4 * hidden,)]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def pair(dtype=torch.float32, **options):
    """Return PyTorch's cell and ours with the same parameters."""
    theirs = torch.nn.LSTMCell(INPUT, HIDDEN, dtype=dtype, **options)
    ours = LSTMCell(INPUT, HIDDEN, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def rolled_out(cell, xs, state=None):
    """Run a cell over a sequence; return a number that depends on all its outputs."""
    total = 0
    for x in xs:
        state = cell(x, state)
        total = total + (state[0] * 2 + state[1].square()).sum()
    return total


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of the package's own functions: name, positional and keyword arguments."""
    made = []

    def recorder(name, function):
        def record(*arrays, **keywords):
            made.append((name, arrays, keywords))
            return function(*arrays, **keywords)

        return record

    for name in ("lstm_cell_forward", "lstm_cell_backward"):
        monkeypatch.setattr(module, name, recorder(name, getattr(module, name)))
    return made


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", BIASES)
def test_gradcheck(biases):
    given = arguments(biases=biases)
    assert torch.autograd.gradcheck(called, given)
    assert torch.autograd.gradgradcheck(called, given)


@pytest.mark.parametrize("used", [0, 1])
def test_gradcheck_of_one_output(used):
    """The other output's gradient is missing."""
    assert torch.autograd.gradcheck(lambda *given: called(*given)[used], arguments())
    assert torch.autograd.gradgradcheck(lambda *given: called(*given)[used], arguments())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_gradcheck_of_the_module(bias, batched):
    cell = LSTMCell(INPUT, HIDDEN, bias, dtype=torch.float64)
    shape = (BATCH,) if batched else ()
    x = torch.randn(*shape, INPUT, dtype=torch.float64, requires_grad=True)
    state = [torch.randn(*shape, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda x, *state: cell(x, state), (x, *state))
    names, parameters = zip(*cell.named_parameters(), strict=True)

    def of_parameters(*values):
        return torch.func.functional_call(cell, dict(zip(names, values, strict=True)), (x, state))

    assert torch.autograd.gradcheck(of_parameters, parameters)


def test_gradients_that_nobody_wants(calls):
    """What requires no gradient has none, and the bias is not summed where no bias requires it."""
    for wanted in range(7):
        given = arguments(grad=False)
        given[wanted].requires_grad_()
        hy, cy = called(*given)
        (hy + cy).sum().backward()
        assert [tensor.grad is not None for tensor in given] == [k == wanted for k in range(7)]
        assert calls[-1][0] == "lstm_cell_backward"
        assert calls[-1][1][5] is (wanted >= 5)


def test_gradient_of_one_bias_is_that_of_the_other():
    given = arguments(torch.float32)
    called(*given)[0].sum().backward()
    assert torch.equal(given[5].grad, given[6].grad)


def test_second_derivatives_are_those_of_pytorch():
    theirs, ours = pair(torch.float64)
    x = torch.randn(BATCH, INPUT, dtype=torch.float64)
    results = []
    for cell in (theirs, ours):
        first = torch.autograd.grad(rolled_out(cell, [x, x]), list(cell.parameters()), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(cell.parameters())))
    for wanted, result in zip(*results, strict=True):
        torch.testing.assert_close(result, wanted)


def transforms():
    """Yield transforms of torch.func as functions of a cell."""
    x, state = torch.randn(BATCH, INPUT).double(), tuple(torch.randn(2, BATCH, HIDDEN).double())

    def loss(cell):
        return lambda x: cell(x, state)[0].square().sum()

    yield "grad", lambda cell: torch.func.grad(loss(cell))(x)
    yield "jacrev", lambda cell: torch.func.jacrev(lambda x: cell(x, state)[1])(x)
    yield "hessian", lambda cell: torch.func.hessian(loss(cell))(x)
    yield "jvp", lambda cell: torch.func.jvp(loss(cell), (x,), (x,))[1]


@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian", "jvp"])
def test_transforms(name):
    theirs, ours = pair(torch.float64)
    transform = dict(transforms())[name]
    torch.testing.assert_close(transform(ours), transform(theirs))


def test_vmap():
    """PyTorch's own cell has no rule for this."""
    given = arguments(grad=False)
    xs = torch.randn(3, BATCH, INPUT, dtype=torch.float64)
    results = torch.func.vmap(lambda x: called(x, *given[1:]))(xs)
    for x, hy, cy in zip(xs, *results, strict=True):
        torch.testing.assert_close((hy, cy), called(x, *given[1:]))


# ---- beside torch.nn.LSTMCell -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(dtype, bias):
    theirs, ours = pair(dtype, bias=bias)
    xs = torch.randn(3, BATCH, INPUT, dtype=dtype)
    results = []
    for cell in (theirs, ours):
        x = xs.clone().requires_grad_()
        total = rolled_out(cell, x)
        total.backward()
        results.append([total, x.grad, *(parameter.grad for parameter in cell.parameters())])
    # PyTorch rounds every operation to a half type, here only results are.
    tolerance = {} if dtype.itemsize > 2 else {"rtol": 0.1, "atol": 30 * torch.finfo(dtype).eps}
    for wanted, result in zip(*results, strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result, wanted, **tolerance)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_shapes(batched, with_state):
    theirs, ours = pair()
    shape = (BATCH,) if batched else ()
    state = tuple(torch.randn(2, *shape, HIDDEN)) if with_state else None
    x = torch.randn(*shape, INPUT)
    for wanted, result in zip(theirs(x, state), ours(x, state), strict=True):
        assert result.shape == wanted.shape == (*shape, HIDDEN)
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_goes_both_ways(bias):
    for source, target in (pair(bias=bias), reversed(pair(bias=bias))):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict())
        assert list(source.state_dict()) == list(target.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"dtype": torch.float64}, {"device": "meta"}])
def test_constructor(options):
    """The same arguments give the same parameters, initial values and text."""
    torch.manual_seed(7)
    theirs = torch.nn.LSTMCell(INPUT, HIDDEN, **options)
    torch.manual_seed(7)
    ours = LSTMCell(INPUT, HIDDEN, **options)
    assert isinstance(ours, torch.nn.LSTMCell)
    assert repr(ours) == repr(theirs)
    for (name, a), (other_name, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other_name and a.dtype == b.dtype and a.device == b.device and a.shape == b.shape
        assert a.is_meta or torch.equal(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_copies(copied):
    cell = LSTMCell(INPUT, HIDDEN)
    twin = copied(cell)
    x = torch.randn(BATCH, INPUT)
    assert type(twin) is LSTMCell
    assert all(torch.equal(a, b) for a, b in zip(cell(x), twin(x), strict=True))
    assert twin.weight_hh is not cell.weight_hh


def test_training():
    """Fifty updates: the same losses as with PyTorch's cell, which fall."""
    sequences = torch.randn(50, 6, BATCH, INPUT)
    losses = []
    for cell in pair():
        head = torch.nn.Linear(HIDDEN, 1)
        torch.nn.init.constant_(head.weight, 0.3)
        torch.nn.init.zeros_(head.bias)
        optimiser = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
        run = []
        for xs in sequences:
            state = None
            for x in xs:
                state = cell(x, state)
            loss = (head(state[0])[:, 0] - xs[-1, :, 0]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            run.append(loss.item())
        losses.append(run)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert np.mean(losses[1][-10:]) < 0.8 * np.mean(losses[1][:10])


def test_less_is_kept():
    """Bytes that autograd keeps of a sequence, by storage."""
    theirs, ours = pair()
    xs = torch.randn(8, BATCH, INPUT)
    kept = []
    for cell in (theirs, ours):
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            rolled_out(cell, xs)
        kept.append(sum(storages.values()))
    assert kept[1] < kept[0]


# ---- the parameters' gradients over several steps ------------------------------------------------------------------


@pytest.fixture
def summed(monkeypatch):
    """Record the gradients that sums over the steps of a pass have given to autograd."""
    finish, seen = module._Sums.finish, []

    def record(self):
        results = finish(self)
        seen.append([None if result is None else result.data_ptr() for result in results])
        return results

    monkeypatch.setattr(module._Sums, "finish", record)
    return seen


def gradients(cell, xs=None, state=None):
    """Return the gradients of a cell's parameters, for a sequence of three steps unless it is given."""
    xs = torch.randn(3, BATCH, INPUT, generator=torch.Generator().manual_seed(5)).double() if xs is None else xs
    parameters = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    return torch.autograd.grad(rolled_out(cell, xs, state), parameters)


def shared_by(cell):
    """Return what the living graphs of a cell share."""
    return [shared for shared in module._shared.values() if shared.parameters[0] is cell.weight_ih]


def hooked(cell, hook):
    """Return what `gradients` differentiates, with a hook in the middle of its backward pass, and the hook's handle."""
    xs = torch.randn(3, BATCH, INPUT, generator=torch.Generator().manual_seed(5)).double()
    state = cell(xs[0])

    def run(_):
        hook()

    handle = state[0].register_hook(run)
    return (state[0] * 2 + state[1].square()).sum() + rolled_out(cell, xs[1:], state), handle


def assert_same(results, wanted):
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("rows", [1, 8, 10, 512])
@pytest.mark.parametrize("bias", [True, False])
def test_sums_over_steps(monkeypatch, summed, rows, bias):
    """However many steps fit into one product; as PyTorch's cell, and as the way that leaves the sums to autograd."""
    monkeypatch.setattr(module, "_ROWS", rows)
    theirs, ours = pair(torch.float64, bias=bias)
    wanted = gradients(theirs)
    assert_same(gradients(ours), wanted)
    assert len(summed) == 1
    monkeypatch.setattr(module, "_current_pass", lambda: -1)
    assert_same(gradients(ours), wanted)
    assert len(summed) == 1


def test_single_step_has_no_sums(summed):
    """Then there is nothing to add, and room for more steps would be wasted."""
    theirs, ours = pair(torch.float64)
    xs = torch.randn(1, BATCH, INPUT).double()
    assert_same(gradients(ours, xs), gradients(theirs, xs))
    assert not summed


@pytest.mark.parametrize("batches", [(4, 3, 3, 1), (9, 2, 2), (3, 0, 0), (0,)])
def test_batches_that_shrink(monkeypatch, batches):
    """As those of sequences of several lengths do; also past the rows of one product."""
    monkeypatch.setattr(module, "_ROWS", 6)
    xs = torch.randn(len(batches), max(batches), INPUT).double()
    results = []
    for cell in pair(torch.float64):
        total, state = 0, tuple(torch.ones(2, max(batches), HIDDEN).double())
        for x, batch in zip(xs, batches, strict=True):
            state = cell(x[:batch], tuple(part[:batch] for part in state))
            total = total + (state[0] * 2 + state[1].square()).sum()
        results.append(torch.autograd.grad(total, list(cell.parameters())))
    assert_same(*results)


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=4)))
def test_frozen_parameters(wanted):
    results = []
    for cell in pair(torch.float64):
        x = torch.randn(BATCH, INPUT, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        for parameter, needed in zip(cell.parameters(), wanted, strict=True):
            parameter.requires_grad_(needed)
        rolled_out(cell, [x, x, x]).backward()
        assert [parameter.grad is not None for parameter in cell.parameters()] == list(wanted)
        results.append([x.grad, *(parameter.grad for parameter in cell.parameters() if parameter.requires_grad)])
    assert_same(*results)


def test_parameter_frozen_between_steps():
    results = []
    x = torch.randn(BATCH, INPUT).double()
    for cell in pair(torch.float64):
        first = cell(x)
        cell.weight_hh.requires_grad_(False)
        second = cell(x, first)
        cell.weight_hh.requires_grad_()
        rolled_out(cell, [x], second).backward()
        results.append([parameter.grad for parameter in cell.parameters()])
    assert_same(*results)


@pytest.mark.parametrize("together", [True, False])
def test_several_graphs_of_one_cell(summed, together):
    results = []
    xs, ys = torch.randn(2, 3, BATCH, INPUT).double()
    for cell in pair(torch.float64):
        losses = rolled_out(cell, xs), rolled_out(cell, ys)
        if together:
            torch.autograd.backward(losses)
        else:
            for loss in losses:
                loss.backward()
        results.append([parameter.grad for parameter in cell.parameters()])
    assert_same(*results)
    assert len(summed) == (1 if together else 2)


def test_backward_twice():
    cell = LSTMCell(INPUT, HIDDEN)
    loss = rolled_out(cell, torch.randn(3, BATCH, INPUT))
    first = torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
    assert_same(torch.autograd.grad(loss, list(cell.parameters())), first)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("wanted", [*itertools.combinations(range(6), 1), (0, 2), (1, 3, 5)])
def test_gradients_of_some(monkeypatch, wanted):
    """The same as when all are asked for; no product of the weights where none of them is; nothing is left behind."""
    cell = LSTMCell(INPUT, HIDDEN)
    x, hx, cx = arguments(torch.float32)[:3]
    asked = [x, hx, *cell.parameters()]
    loss = rolled_out(cell, [x, x, x], (hx, cx))
    full = torch.autograd.grad(loss, asked, retain_graph=True)
    monkeypatch.setattr(module, "_ROWS", 4)
    multiply, products = module._Sums._multiply, []
    monkeypatch.setattr(module._Sums, "_multiply", lambda self: (products.append(len(self.factors)), multiply(self)))
    results = torch.autograd.grad(loss, [asked[k] for k in wanted], retain_graph=True)
    assert_same(results, [full[k] for k in wanted])
    assert any(products) == (max(wanted) >= 2)
    (shared,) = shared_by(cell)
    assert not shared.passes
    del loss, shared
    assert not shared_by(cell)


def test_pass_that_fails():
    """What the steps before the failure have left has no part in the next pass."""
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    wanted = gradients(cell)
    loss, handle = hooked(cell, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
    (shared,) = shared_by(cell)
    assert not shared.passes
    handle.remove()
    assert_same(torch.autograd.grad(loss, list(cell.parameters())), wanted)


@pytest.mark.parametrize("graphs", [1, 2])
def test_passes_in_two_threads(graphs):
    """At once, over one graph or two of the same cell: each thread waits for the other in the middle of its pass."""
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    wanted = gradients(cell)
    barrier = threading.Barrier(2, timeout=30)
    losses = [hooked(cell, barrier.wait)[0] for _ in range(graphs)]
    results = [None, None]

    def run(k):
        results[k] = torch.autograd.grad(losses[k % graphs], list(cell.parameters()), retain_graph=True)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_same(result, wanted)


def test_pass_within_a_pass():
    """A hook that computes other gradients of the same cell takes nothing from the pass that it is in."""
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    wanted = gradients(cell)
    inner = []
    loss, _ = hooked(cell, lambda: inner.append(torch.enable_grad()(gradients)(cell)))
    assert_same(torch.autograd.grad(loss, list(cell.parameters())), wanted)
    assert_same(inner[0], wanted)


def test_hooks_see_the_sum_once():
    """Those of a weight, of its accumulation (as in data-parallel training), and of a hidden state."""
    runs = []
    xs = torch.randn(3, BATCH, INPUT).double()
    for cell in pair(torch.float64):
        seen = []
        accumulation = cell.weight_ih.expand_as(cell.weight_ih).grad_fn.next_functions[0][0]
        accumulation.register_hook(lambda *_, seen=seen: seen.append(torch.ones(1)))
        cell.weight_hh.register_hook(lambda gradient, seen=seen: seen.append(gradient) or gradient * 2)
        cell.bias_ih.register_post_accumulate_grad_hook(lambda bias, seen=seen: seen.append(bias.grad.clone()))
        state = cell(xs[0])
        state[0].register_hook(lambda gradient: gradient * 3)
        rolled_out(cell, xs[1:], state).backward()
        assert len(seen) == 3
        runs.append([*(parameter.grad for parameter in cell.parameters()), *sorted(seen, key=len)])
    assert_same(*runs)


def test_gradients_are_handed_over(summed):
    """Autograd takes the weights' gradients as they are: a copy would cost what the sum saves."""
    cell = LSTMCell(INPUT, HIDDEN)
    rolled_out(cell, torch.randn(3, BATCH, INPUT)).backward()
    assert summed[0][:2] == [cell.weight_ih.grad.data_ptr(), cell.weight_hh.grad.data_ptr()]


@pytest.mark.parametrize("name", ["weight_ih", "weight_hh", "input", "hx"])
def test_changed_in_place_before_the_pass(name):
    given = dict(zip(NAMES, arguments(torch.float32), strict=True))
    values = {key: tensor * 1 for key, tensor in given.items()}
    hy, _ = called(*values.values())
    with torch.no_grad():
        values[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hy.sum().backward()


def test_changed_in_place_during_the_pass():
    """A step that went through still needs its input for the product."""
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    x = torch.randn(BATCH, INPUT).double()
    loss, _ = hooked(lambda y, state=None: cell(y if state is None else x, state), lambda: x.zero_())
    with pytest.raises(RuntimeError, match="changed in place while the backward pass still needed it"):
        loss.backward()


def test_weights_changed_between_updates():
    """By an optimiser while an older graph still lives: the new graph has the new values, the old one refuses."""
    theirs, ours = pair(torch.float64)
    x = torch.randn(BATCH, INPUT).double()
    old = rolled_out(ours, [x, x])
    for cell in (theirs, ours):
        with torch.no_grad():
            for parameter in cell.parameters():
                parameter.mul_(0.5)
    assert_same(gradients(ours), gradients(theirs))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_dtype_changed_while_a_graph_lives():
    theirs, ours = pair(torch.float32)
    graph = rolled_out(ours, torch.randn(2, BATCH, INPUT))
    assert_same(gradients(ours.double()), gradients(theirs.double()))
    del graph


@pytest.mark.parametrize("how", ["products", "views", "changed in place"])
def test_weights_that_are_computed(how):
    """Also changed in place while a graph with the old values lives."""
    given = arguments(torch.float64)
    results = []
    for step in (called, lambda x, hx, cx, *parameters: torch.lstm_cell(x, (hx, cx), *parameters)):
        x, hx, cx, weight_ih, weight_hh, *biases = given
        weight_ih, weight_hh = (weight_ih[:], weight_hh[:]) if how == "views" else (weight_ih * 2, weight_hh.sin())
        old, _ = step(x, hx, cx, weight_ih, weight_hh, *biases)
        if how == "changed in place":
            weight_hh.mul_(0.5)
        for _ in range(3):
            hx, cx = step(x, hx, cx, weight_ih, weight_hh, *biases)
        results.append(torch.autograd.grad((hx * cx).sum(), given))
        del old
    assert_same(*results)


@pytest.mark.parametrize("cached", [True, False])
def test_parametrised_weights(cached):
    from torch.nn.utils import parametrize
    from torch.nn.utils.parametrizations import weight_norm

    results = []
    for cell in pair(torch.float64):
        weight_norm(cell, "weight_hh")
        with parametrize.cached() if cached else contextlib.nullcontext():
            results.append(dict(zip(dict(cell.named_parameters()), gradients(cell), strict=True)))
    assert results[0].keys() == results[1].keys()
    assert_same(results[1].values(), results[0].values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    from torch.utils.checkpoint import checkpoint

    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    xs = torch.randn(4, BATCH, INPUT).double().requires_grad_()
    wanted = torch.autograd.grad(rolled_out(cell, xs), [xs, *cell.parameters()])
    total, state = 0, tuple(torch.zeros(2, BATCH, HIDDEN).double())

    def two_steps(x, y, hx, cx):
        first = cell(x, (hx, cx))
        second = cell(y, first)
        return (first[0] * 2 + first[1].square() + second[0] * 2 + second[1].square()).sum(), *second

    for k in (0, 2):
        part, *state = checkpoint(two_steps, xs[k], xs[k + 1], *state, use_reentrant=reentrant)
        total = total + part
    total.backward()
    assert_same([xs.grad, *(parameter.grad for parameter in cell.parameters())], wanted)


def test_gradcheck_of_several_steps():
    """Weights that all steps share, in first and second derivatives."""

    def steps(x, hx, cx, *parameters):
        for _ in range(2):
            hx, cx = lstm_cell(x, (hx, cx), *parameters)
        return hx, cx

    given = arguments(batch=2, hidden=2)
    assert torch.autograd.gradcheck(steps, given)
    assert torch.autograd.gradgradcheck(steps, given)


def test_weights_shared_by_two_modules():
    results = []
    xs = torch.randn(2, BATCH, INPUT).double()
    for first in pair(torch.float64):
        second = type(first)(INPUT, HIDDEN, dtype=torch.float64)
        second.load_state_dict(first.state_dict())
        second.weight_hh, second.bias_ih = first.weight_hh, first.bias_ih
        (rolled_out(first, xs) + rolled_out(second, xs.flip(0)) + second.weight_hh.square().sum()).backward()
        results.append([parameter.grad for parameter in (*first.parameters(), second.weight_ih, second.bias_hh)])
    assert_same(*results)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_copies_while_a_graph_lives(copied):
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    graph = rolled_out(cell, torch.randn(2, BATCH, INPUT).double())
    assert_same(gradients(copied(cell)), gradients(cell))
    del graph


@pytest.mark.parametrize("rows", [1, 512])
def test_backward_under_autocast(monkeypatch, rows):
    """The sums keep their precision."""
    monkeypatch.setattr(module, "_ROWS", rows)
    cell = LSTMCell(INPUT, HIDDEN)
    xs = torch.randn(3, BATCH, INPUT)
    loss = sum(cell(x)[0].sum() for x in xs)
    wanted = torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = torch.autograd.grad(loss, list(cell.parameters()))
    assert all(torch.equal(result, expected) for result, expected in zip(results, wanted, strict=True))


def test_anomaly_detection():
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    wanted = gradients(cell)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert_same(gradients(cell), wanted)


def test_saved_tensors_elsewhere():
    """As where they are kept on a disk between the passes."""
    cell = LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    wanted = gradients(cell)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy):
        assert_same(gradients(cell), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit_of_a_sequence(monkeypatch, dtype):
    """Given the products, whose bits are PyTorch's affair."""
    given = arguments(dtype, batch=96, hidden=512)
    products = [torch.randn(96, 2048).to(dtype) for _ in range(2)]
    runs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        source = itertools.cycle(products)
        monkeypatch.setattr(module, "linear", lambda *_, source=source: next(source))
        x, hx, cx, *parameters = given
        for _ in range(8):
            hy, cx = lstm_cell(x, (hx, cx), *parameters)
        runs.append(torch.autograd.grad((hy + cx).sum(), [given[2], *given[5:]]))
    for results in zip(*runs, strict=True):
        assert all(torch.equal(result, results[0]) for result in results)


# ---- pointers, layouts, threads -----------------------------------------------------------------------------------


def place_of(array):
    """Return address and strides in bytes."""
    return array.__array_interface__["data"][0], array.strides


def place_of_tensor(tensor):
    return tensor.data_ptr(), tuple(step * tensor.element_size() for step in tensor.stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tensor_is_copied(calls, dtype):
    """The arrays that the kernels get have the tensors' memory and strides; results are where the kernels wrote."""
    given = operands(dtype, grad=False)
    given[0] = torch.randn(4 * HIDDEN, BATCH).to(dtype).t()
    given[2] = torch.randn(1, HIDDEN).to(dtype).expand(BATCH, HIDDEN)
    given[3] = torch.randn(8 * HIDDEN).to(dtype)[::2]
    results = forward(*given)
    gradients = [torch.randn(HIDDEN).to(dtype).expand(BATCH, HIDDEN), torch.randn(HIDDEN, BATCH).to(dtype).t()]
    results_back = backward(*gradients, given[2], *results[1:], True)
    (_, arrays, keywords), (_, arrays_back, keywords_back) = calls
    assert [place_of(array) for array in arrays] == [place_of_tensor(tensor) for tensor in given]
    assert [place_of(array) for array in keywords["out"]] == [place_of_tensor(tensor) for tensor in results]
    wanted = [*gradients, given[2], *results[1:]]
    assert [place_of(array) for array in arrays_back[:5]] == [place_of_tensor(tensor) for tensor in wanted]
    assert [place_of(array) for array in keywords_back["out"]] == [place_of_tensor(tensor) for tensor in results_back]


def in_layout(tensor, layout):
    """Return equal values in another layout."""
    if layout == "transposed":
        return tensor.mT.contiguous().mT if tensor.dim() == 2 else torch.stack([tensor, tensor], 1)[:, 0]
    if layout == "sliced":
        wide = tensor.new_zeros([2 * length + 1 for length in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    return tensor[..., :1].expand_as(tensor)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_have_the_same_bits(dtype, layout):
    results = []
    given = [in_layout(tensor.detach(), layout) for tensor in operands(dtype)]
    gradients = [in_layout(torch.randn(BATCH, HIDDEN).to(dtype), layout) for _ in range(2)]
    assert not any(tensor.is_contiguous() for tensor in (*given, *gradients))
    for view in (lambda tensor: tensor, torch.Tensor.contiguous):
        leaves = [view(tensor).detach().requires_grad_() for tensor in given]
        hy, cy, _ = forward(*leaves)
        results.append([hy, cy, *torch.autograd.grad((hy, cy), leaves, [view(gradient) for gradient in gradients])])
    for wanted, result in zip(*results, strict=True):
        assert torch.equal(wanted, result)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_are_not_finite_do_not_warn(dtype):
    """Of gradients of both infinities, and of some that overflow, over the steps of a pass."""
    given = arguments(dtype)
    x, hx, cx, *parameters = given
    first = lstm_cell(x, (hx, cx), *parameters)
    second = lstm_cell(x, (hx, cx), *parameters)
    large = torch.finfo(dtype).max
    of_first = torch.full((BATCH, HIDDEN), large, dtype=dtype)
    of_second = of_first.clone()
    of_first[:, 0], of_second[:, 0] = torch.inf, -torch.inf
    results = torch.autograd.grad([*first, *second], parameters, [of_first, of_first, of_second, of_second])
    assert results[2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_by_the_tensors_own_method(monkeypatch, calls, dtype):
    """As with an older PyTorch, which has no table of C functions: the same arrays, the same results."""

    class NoTable:
        """A type without one."""

    given = operands(dtype)
    gradients = torch.randn(2, BATCH, HIDDEN).to(dtype).unbind()
    by_method = unittest.mock.Mock(wraps=module._array_by_method)
    runs = []
    for kind in (torch.Tensor, NoTable):
        by_method.reset_mock()
        monkeypatch.setattr(module, "_array_of", Exchange(kind, by_method).array_of)
        hy, cy, _ = forward(*given)
        runs.append([hy, cy, *torch.autograd.grad((hy, cy), given, gradients)])
    assert by_method.call_count == 16
    places = [[place_of(array) for array in arrays if isinstance(array, np.ndarray)] for _, arrays, _ in calls]
    assert places[0] == places[2]
    assert places[1][2] == places[3][2]
    for wanted, result in zip(*runs, strict=True):
        assert torch.equal(wanted, result)


def negated(tensor):
    """Return equal values whose memory has them with the other sign."""
    result = torch.imag(torch.complex(torch.zeros_like(tensor), -tensor).conj())
    assert result.is_neg()
    return result


# What a tensor's memory does not say: that its numbers have the other sign, or that they are all 0 and there is none.
@pytest.mark.parametrize(
    "name", ["input", "hx", "cx", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "grad_hy", "grad_cy"]
)
@pytest.mark.parametrize("kind", ["negated", "zeros"])
@pytest.mark.parametrize("operators", [True, False], ids=["operators", "cell"])
def test_tensors_that_are_not_what_their_memory_says(operators, kind, name):
    names = ["input", "hx", "cx", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "grad_hy", "grad_cy"]
    given = [*(tensor.detach() for tensor in arguments(torch.float32)), *torch.randn(2, BATCH, HIDDEN).unbind()]
    k = names.index(name)
    results = []
    for plain in (True, False):
        values = list(given)
        if kind == "zeros":
            values[k] = torch.zeros_like(given[k]) if plain else torch._efficientzerotensor(given[k].shape)
        elif not plain:
            values[k] = negated(given[k])
        leaves = [value.requires_grad_() if value.is_leaf else value for value in values[:7]]
        if operators:
            products = [torch.nn.functional.linear(values[j], values[j + 3]) for j in (0, 1)]
            hy, cy, _ = forward(*products, values[2], *values[5:7])
        else:
            hy, cy = called(*values[:7])
        wanted = [leaf for j, leaf in enumerate(leaves) if j != k]
        results.append([hy, cy, *torch.autograd.grad((hy, cy), wanted, values[7:])])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("steps", [1, 3])
def test_saved_tensors_that_are_not_what_their_memory_says(steps):
    """Hooks may hand back other tensors than were saved."""
    given = arguments(torch.float32)
    x, hx, cx, *parameters = given
    runs = []
    for hooks in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, negated) if hooks else contextlib.nullcontext():
            hy, cy = hx, cx
            for _ in range(steps):
                hy, cy = lstm_cell(x, (hy, cy), *parameters)
        runs.append(torch.autograd.grad((hy + cy).sum(), given))
    for expected, result in zip(*runs, strict=True):
        torch.testing.assert_close(result, expected)


def test_values_are_those_of_the_package():
    """The operators add nothing to the NumPy functions, autograd nothing to the operators."""
    given = operands()
    hy, cy, gates = forward(*given)
    gradients = torch.randn(2, BATCH, HIDDEN).unbind()
    results = torch.autograd.grad((hy, cy), given, gradients)
    arrays = [tensor.detach().numpy() for tensor in given]
    state = lstmcell_bwd.lstm_cell_forward(*arrays)
    for result, wanted in zip((hy, cy, gates), state, strict=True):
        np.testing.assert_array_equal(result.detach().numpy(), wanted)
    wanted = lstmcell_bwd.lstm_cell_backward(*(g.numpy() for g in gradients), arrays[2], state.cy, state.gates)
    for result, k in zip(results, (0, 0, 1, 2, 2), strict=True):
        np.testing.assert_array_equal(result.numpy(), wanted[k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(calls, dtype):
    """Every gradient that is ours; each call has PyTorch's number of threads."""
    given = operands(dtype, batch=96, hidden=512)
    gradients = torch.randn(2, 96, 512).to(dtype).unbind()
    runs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        calls.clear()
        hy, cy, _ = forward(*given)
        runs.append([hy, cy, *torch.autograd.grad((hy, cy), given, gradients)])
        assert [(name, keywords["num_threads"]) for name, _, keywords in calls] == [
            ("lstm_cell_forward", threads),
            ("lstm_cell_backward", threads),
        ]
    for results in zip(*runs, strict=True):
        assert all(torch.equal(result, results[0]) for result in results)


def test_small_work_has_one_thread(calls):
    torch.set_num_threads(2)
    forward(*operands())
    assert calls[0][2]["num_threads"] == 1


# ---- compiling, modes ---------------------------------------------------------------------------------------------


def test_operators_are_registered_as_pytorch_wants():
    given = operands()
    torch.library.opcheck(forward, given)
    torch.library.opcheck(forward, [*given[:3], None, None])
    hy, cy, gates = (tensor.detach() for tensor in forward(*given))
    for grad_hy, grad_cy, has_bias in itertools.product([hy, None], [cy, None], [True, False]):
        torch.library.opcheck(backward, (grad_hy, grad_cy, hy, cy, gates, has_bias))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Forget what was compiled, and compile into a folder of the test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


def test_compiled_graphs_hold_the_operators(compiler):
    """One graph forward and one backward, with an operator of ours for each step."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def keep(graph, _):
        seen.append([str(node.target) for node in graph.graph.nodes if "lstmcell_bwd" in str(node.target)])
        return make_boxed_func(graph)

    cell = LSTMCell(INPUT, HIDDEN)
    xs = torch.randn(3, BATCH, INPUT)
    wanted = torch.autograd.grad(rolled_out(cell, xs), list(cell.parameters()))
    compiled = compiler(rolled_out, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    results = torch.autograd.grad(compiled(cell, xs), list(cell.parameters()))
    assert seen == [3 * ["lstmcell_bwd.lstm_cell_forward.default"], 3 * ["lstmcell_bwd.lstm_cell_backward.default"]]
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected)


def test_compiled_by_inductor(compiler):
    cell = LSTMCell(INPUT, HIDDEN)
    x = torch.randn(BATCH, INPUT)

    def function(cell, x):
        hy, cy = cell(x * 2)
        return (hy * cy).sum()

    wanted = torch.autograd.grad(function(cell, x), list(cell.parameters()))
    results = torch.autograd.grad(compiler(function, fullgraph=True)(cell, x), list(cell.parameters()))
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected)


def test_modes_see_the_operators():
    """Those that record and those that compute no values, also in the backward pass."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradient(*given):
        return torch.autograd.grad(called(*given)[0].sum(), given[2])[0]

    given = arguments(torch.float32)
    targets = [str(node.target) for node in make_fx(gradient)(*given).graph.nodes]
    assert {"lstmcell_bwd.lstm_cell_forward.default", "lstmcell_bwd.lstm_cell_backward.default"} < set(targets)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in given]
        assert gradient(*fakes).shape == (BATCH, HIDDEN)


def test_export(tmp_path):
    cell = LSTMCell(INPUT, HIDDEN)
    x, state = torch.randn(BATCH, INPUT), tuple(torch.randn(2, BATCH, HIDDEN))
    exported = torch.export.export(cell, (x, state))
    assert "lstmcell_bwd.lstm_cell_forward.default" in exported.graph_module.code
    for result, wanted in zip(exported.module()(x, state), cell(x, state), strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_recording(mode):
    given = arguments(torch.float32)
    wanted = called(*given)
    with mode():
        results = called(*given)
    for result, expected in zip(results, wanted, strict=True):
        assert expected.requires_grad and not result.requires_grad
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype):
    """Results have the state's dtype, as with PyTorch's cell; parameters and their gradients stay float32."""
    theirs, ours = pair()
    x = torch.randn(BATCH, INPUT)
    state = tuple(torch.randn(2, BATCH, HIDDEN).to(dtype))
    results = []
    for cell in (theirs, ours):
        with torch.autocast("cpu", torch.bfloat16):
            hy, cy = cell(x, state)
        (hy.float() * cy).sum().backward()
        results.append([hy, cy, *(parameter.grad for parameter in cell.parameters())])
    for wanted, result in zip(*results, strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result, wanted, rtol=0.05, atol=0.05)


def test_meta_tensors():
    cell = LSTMCell(INPUT, HIDDEN, device="meta")
    hy, cy = cell(torch.randn(BATCH, INPUT, device="meta"))
    assert hy.is_meta and cy.is_meta and hy.shape == cy.shape == (BATCH, HIDDEN)
    (hy + cy).sum().backward()
    assert cell.weight_hh.grad.shape == cell.weight_hh.shape


# ---- NPU ----------------------------------------------------------------------------------------------------------


def test_npu_tensors_have_kernels():
    """Those of torch_npu's dispatch key, which the next test calls: PyTorch here knows no such tensors."""
    for name in ("lstm_cell_forward", "lstm_cell_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lstmcell_bwd::{name}", "PrivateUse1")


@pytest.fixture
def torch_npu(monkeypatch):
    """Stand in for torch_npu over the simulated CANN."""
    with simulation.backend() as sim:
        assert lstmcell_bwd.npu.is_available()
        acl = sys.modules["acl"]
        context, code = acl.rt.create_context(0)
        assert code == 0
        stand_in = simulation.TorchNpu(acl)
        monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
        yield stand_in
        stand_in.close()
        assert acl.rt.destroy_context(context) == 0
        assert sim.report()["violations"] == []


@pytest.mark.parametrize("biases", BIASES)
def test_npu_forward(torch_npu, biases):
    """The kernel runs CANN's operator on the tensors, and returns tensors."""
    rng = np.random.default_rng(0)
    shapes = [(5, 28), (5, 28), (5, 7), *((28,) if there else None for there in biases)]
    arrays = [None if shape is None else rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    results = module._forward_on_npu(*(None if array is None else torch_npu.tensor(array) for array in arrays))
    for result, wanted in zip(results, lstmcell_bwd.reference.lstm_cell_forward(*arrays), strict=True):
        assert isinstance(result, simulation.FakeNpuTensor)
        np.testing.assert_allclose(torch_npu.to_numpy(result), wanted, rtol=2**-10, atol=2**-16)


@pytest.mark.parametrize("has_bias", [True, False])
def test_npu_backward(torch_npu, has_bias):
    inputs = simulation.make_inputs(5, 7, missing=(1,))
    tensors = [None if array is None else torch_npu.tensor(array) for array in inputs]
    results = module._backward_on_npu(*tensors, has_bias)
    assert all(isinstance(result, simulation.FakeNpuTensor) for result in results)
    simulation.assert_right([*results[:2], results[2] if has_bias else None], inputs, has_bias, torch_npu)


# ---- errors -------------------------------------------------------------------------------------------------------

OF_CX, OF_INPUT = "to match `cx` of shape (4, 5), got ", "to match `input` of shape (4, 3), got "
ERRORS = [
    ("input", np.zeros((4, 3)), TypeError, "`input` must be a torch.Tensor, got ndarray"),
    ("cx", None, TypeError, "`cx` must be a torch.Tensor, got NoneType"),
    ("bias_ih", 1.0, TypeError, "`bias_ih` must be a torch.Tensor, got float"),
    ("cx", torch.zeros(5), ValueError, "`cx` must have shape (N, H), got (5,)"),
    ("hx", torch.zeros(4, 6), ValueError, f"`hx` must have shape (N, H) = (4, 5) {OF_CX}(4, 6)"),
    ("input", torch.zeros(3), ValueError, f"`input` must have shape (N, I) = (4, 3) {OF_CX}(3,)"),
    ("input", torch.zeros(2, 3), ValueError, f"`input` must have shape (N, I) = (4, 3) {OF_CX}(2, 3)"),
    ("weight_ih", torch.zeros(20, 4), ValueError, f"`weight_ih` must have shape (4*H, I) = (20, 3) {OF_INPUT}(20, 4)"),
    ("weight_ih", torch.zeros(3, 20), ValueError, f"`weight_ih` must have shape (4*H, I) = (20, 3) {OF_INPUT}(3, 20)"),
    ("weight_hh", torch.zeros(20, 4), ValueError, f"`weight_hh` must have shape (4*H, H) = (20, 5) {OF_CX}(20, 4)"),
    ("bias_hh", torch.zeros(5), ValueError, f"`bias_hh` must have shape (4*H,) = (20,) {OF_CX}(5,)"),
    ("hx", torch.zeros(4, 5).double(), TypeError, "`hx` must have dtype float32 like `cx`, got float64"),
    ("bias_hh", torch.zeros(20).half(), TypeError, "`bias_hh` must have dtype float32 like `cx`, got float16"),
    ("weight_hh", torch.zeros(20, 5, device="meta"), ValueError, "`weight_hh` must be on cpu like `cx`, got meta"),
]
NAMES = ("input", "hx", "cx", "weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.mark.parametrize(("name", "value", "kind", "text"), ERRORS)
def test_errors(name, value, kind, text):
    given = dict(zip(NAMES, arguments(torch.float32), strict=True)) | {name: value}
    with pytest.raises(lstmcell_bwd.LSTMCellError) as raised:
        called(*given.values())
    assert isinstance(raised.value, kind)
    assert str(raised.value) == text


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_dtypes_that_are_not_supported(dtype):
    given = [torch.zeros(tensor.shape, dtype=dtype) for tensor in arguments()]
    with pytest.raises(lstmcell_bwd.UnsupportedDtypeError, match="`cx` must have dtype float32, float64,"):
        called(*given)


def test_other_devices(monkeypatch):
    """What a GPU's tensors meet; there is none here, so the meta device stands for it."""
    monkeypatch.setattr(module, "_DEVICES", ("cpu", "npu"))
    given = [tensor.to("meta") for tensor in arguments()]
    with pytest.raises(lstmcell_bwd.InvalidParameterError, match="`cx` must be on the CPU or on an NPU, got meta"):
        called(*given)


def test_bfloat16_without_ml_dtypes():
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import torch, lstmcell_bwd.torch as ours\n"
        "cell = ours.LSTMCell(3, 5, dtype=torch.bfloat16)\n"
        "try: cell(torch.zeros(4, 3, dtype=torch.bfloat16))\n"
        "except TypeError as error: print(error)"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert text == "bfloat16 tensors need the package ml_dtypes: pip install 'lstmcell_bwd[bf16]'\n"


def test_without_pytorch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try: import lstmcell_bwd.torch\n"
        "except ModuleNotFoundError as error: print(error.name, error)"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert text == "torch lstmcell_bwd.torch needs PyTorch: pip install 'lstmcell_bwd[torch]'\n"


# ---- README, example, benchmark ------------------------------------------------------------------------------------


def test_readme():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [code for code in blocks if "lstmcell_bwd.torch" in code]
    assert len(example.splitlines()) <= 10
    names = {}
    exec(example, names)
    assert type(names["cell"]) is LSTMCell
    assert all(parameter.grad.abs().sum() > 0 for parameter in names["cell"].parameters())


def test_example_with_one_line_changed():
    """The same losses with PyTorch's cell; they fall."""
    source = (ROOT / "examples" / "character_lstm.py").read_text()
    (line,) = re.findall(
        r"^from lstmcell_bwd\.torch import LSTMCell.*: (from torch\.nn import LSTMCell)$", source, re.M
    )
    theirs = re.sub(r"^from lstmcell_bwd\.torch import LSTMCell.*$", line, source, flags=re.M)
    runs = []
    for code in (source, theirs):
        names = {"__name__": "example"}
        exec(compile(code, "character_lstm.py", "exec"), names)
        runs.append(list(names["train"](names["Settings"](hidden=32, batch=16, steps=8, updates=25))))
    assert names["LSTMCell"] is torch.nn.LSTMCell
    np.testing.assert_allclose(*runs, rtol=1e-3)
    assert runs[0][-1] < runs[0][0] - 1


def test_benchmark(monkeypatch):
    """Both cells are measured on the same work, and lost cases stay in the table."""
    monkeypatch.syspath_prepend(ROOT)
    from benches import measure, torch_cell

    monkeypatch.setattr(measure, "take_turns", lambda turns: take_turns(turns, 1))
    take_turns = measure._rule.take_turns
    row = torch_cell.measure_size([2, 3, 5, 4])
    plane = (
        4 * 2 * 5
    )  # bytes of N x H numbers; of four steps: gates 4 x 4, hy 3, cy 4 or cy 3 and tanh(cy) 4, first state 1
    assert row["kept"] == {"PyTorch": 27 * plane, "lstmcell_bwd": 24 * plane}
    row |= {"size": "2x3x5x4", "threads": 1}
    row["whole step"] = {"seconds": {"PyTorch": [1e-3, 1e-3], "lstmcell_bwd": [2e-3, 2e-3]}, "ratio": [0.4, 0.5]}
    results = {"facts": torch_cell.facts(), "versions": {"torch": "2"}, "missing": {}, "rows": [row]}
    line = torch_cell.table(results).splitlines()[2]
    assert line.startswith("| 2, 3, 5, 4 | 1 | ") and "| 1 ms | 2 ms | **0.50 (0.40)** |" in line
    page = "a\n<!-- torch-cell:begin old -->\ntable\n<!-- torch-cell:end -->\nb\n"
    assert torch_cell.replaced(page, "new", "other") == page.replace("old", "new").replace("table", "other")
    with pytest.raises(ValueError, match="once"):
        torch_cell.replaced("nothing", "new", "other")


def test_readme_says_what_its_results_file_does(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benches import torch_cell

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (name,) = torch_cell.MARKED.findall(text)
    results = json.loads((torch_cell.RESULTS / f"{name}.json").read_text())
    assert torch_cell.replaced(text, name, torch_cell.table(results)) == text
