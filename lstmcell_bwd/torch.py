"""An LSTM cell for PyTorch whose element-wise part is one fused, deterministic pass forward and one backward.

Needs PyTorch (extra `torch`); nothing else of this package imports it. The matrix products stay PyTorch's. What follows
them is an operator of its own, registered with `torch.library`: its forward is `lstmcell_bwd.lstm_cell_forward`, its
backward `lstmcell_bwd.lstm_cell_backward`. Tensors are passed by pointer, whatever their strides; kept for the backward
pass are cx, cy and the activated gates, beside the factors of the products.

An ordinary step on the CPU is one node of autograd, and the steps of a backward pass share the products that give the
gradients of the weights. Under modes, transforms, autocast, a compiler, or with subclasses of tensors, and with
create_graph=True, the products are PyTorch's own operations in the backward pass, too, and autograd does the sum.

    from lstmcell_bwd.torch import LSTMCell     # instead of: from torch.nn import LSTMCell

CPU tensors run the package's own kernel. Tensors of torch_npu are handed to the operators of Ascend CANN; that way was
tested with stand-ins for the tensors and a simulated CANN, never with torch_npu or a chip.
"""

# ruff: noqa: A001, A002, EM101 - PyTorch's name `input`; the literal is the name of the argument, which the error's text is
# made from
from __future__ import annotations

import functools
import importlib.util
import weakref
from typing import Any

from lstmcell_bwd import lstm_cell_backward, lstm_cell_forward
from lstmcell_bwd._api import choose_threads
from lstmcell_bwd._arguments import bad_argument, wrong_dtype, wrong_rank, wrong_shape, wrong_type
from lstmcell_bwd._exchange import Exchange
from lstmcell_bwd.errors import UnsupportedDtypeError

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError("lstmcell_bwd.torch needs PyTorch: pip install 'lstmcell_bwd[torch]'", name="torch")

import torch
from torch import Tensor, addmm, mm
from torch.nn.functional import linear

__all__ = ["LSTMCell", "lstm_cell"]

_DEVICES = ("cpu", "npu", "meta")


# ---- the operators' kernels -----------------------------------------------------------------------------------------


@functools.cache
def _bfloat16() -> Any:
    """Return NumPy's bfloat16."""
    try:
        from ml_dtypes import bfloat16
    except ModuleNotFoundError:
        message = "bfloat16 tensors need the package ml_dtypes: pip install 'lstmcell_bwd[bf16]'"
        raise UnsupportedDtypeError(message) from None
    return bfloat16


def _array_by_method(tensor: Tensor) -> Any:
    """Return the array that has the memory of a tensor, by the tensor's own means."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_bfloat16())
    return tensor.numpy()


_array_of = Exchange(Tensor, _array_by_method).array_of
_contiguous_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def _threads(cx: Tensor, forward: bool) -> int:
    """Return the threads for a call: what the work pays for, up to PyTorch's number."""
    batch, hidden = cx.shape
    return choose_threads(0, batch, hidden, torch.get_num_threads(), forward)


def _forward_on_cpu(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    hy, cy, gates = results = _forward_shapes(input_gates, hidden_gates, cx, input_bias, hidden_bias)
    lstm_cell_forward(
        _array_of(input_gates),
        _array_of(hidden_gates),
        _array_of(cx),
        None if input_bias is None else _array_of(input_bias),
        None if hidden_bias is None else _array_of(hidden_bias),
        out=(_array_of(hy), _array_of(cy), _array_of(gates)),
        device="cpu",
        num_threads=_threads(cx, forward=True),
    )
    return results


def _forward_on_npu(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    hy, cy, gates = lstm_cell_forward(input_gates, hidden_gates, cx, input_bias, hidden_bias)
    return hy, cy, gates


def _forward_shapes(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of the forward operator: all that a tensor without memory needs."""
    return _contiguous_like(cx), _contiguous_like(cx), _contiguous_like(input_gates)


def _backward_on_cpu(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_gates, grad_cx, grad_bias = results = _backward_shapes(grad_hy, grad_cy, cx, cy, gates, has_bias)
    out = _array_of(grad_gates), _array_of(grad_cx), _array_of(grad_bias) if has_bias else None
    _run_backward(grad_hy, grad_cy, cx, cy, gates, has_bias, out)
    return results


def _run_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    gates: Tensor,
    has_bias: bool,
    out: tuple[Any, Any, Any],
) -> None:
    """Run the backward kernel on CPU tensors; its outputs are arrays."""
    lstm_cell_backward(
        None if grad_hy is None else _array_of(grad_hy),
        None if grad_cy is None else _array_of(grad_cy),
        _array_of(cx),
        _array_of(cy),
        _array_of(gates),
        has_bias,
        out=out,
        device="cpu",
        num_threads=_threads(cx, forward=False),
    )


def _backward_on_npu(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_gates, grad_cx, grad_bias = lstm_cell_backward(grad_hy, grad_cy, cx, cy, gates, has_bias)
    return grad_gates, grad_cx, grad_bias if has_bias else cx.new_empty(0)


def _backward_shapes(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of the backward operator; without bias its gradient is empty."""
    return _contiguous_like(gates), _contiguous_like(cx), cx.new_empty(gates.shape[1:] if has_bias else 0)


# ---- the operators --------------------------------------------------------------------------------------------------

# The low-level interface, and no detour through the dispatcher where it has nothing to decide: what runs in Python
# between two steps finds the caches full of the tensors of the last one, and takes as long as the kernels of a small
# cell. With `torch.library.custom_op` and `register_autograd` it takes twice as long.
_library = torch.library.Library("lstmcell_bwd", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library.define(
    "lstm_cell_forward(Tensor input_gates, Tensor hidden_gates, Tensor cx, Tensor? input_bias, Tensor? hidden_bias)"
    " -> (Tensor hy, Tensor cy, Tensor gates)",
    tags=_tags,
)
_library.define(
    "lstm_cell_backward(Tensor? grad_hy, Tensor? grad_cy, Tensor cx, Tensor cy, Tensor gates, bool has_bias)"
    " -> (Tensor grad_gates, Tensor grad_cx, Tensor grad_bias)",
    tags=_tags,
)
_library.impl("lstm_cell_forward", _forward_on_cpu, "CPU")
_library.impl("lstm_cell_backward", _backward_on_cpu, "CPU")
_library.impl("lstm_cell_forward", _forward_on_npu, "PrivateUse1")  # the dispatch key of torch_npu
_library.impl("lstm_cell_backward", _backward_on_npu, "PrivateUse1")
torch.library.register_fake("lstmcell_bwd::lstm_cell_forward", _forward_shapes, lib=_library)
torch.library.register_fake("lstmcell_bwd::lstm_cell_backward", _backward_shapes, lib=_library)
_modes, _recording = torch._C._len_torch_dispatch_stack, torch.is_grad_enabled
_transforming = torch._C._are_functorch_transforms_active
_forward = torch.ops.lstmcell_bwd.lstm_cell_forward.default
_backward = torch.ops.lstmcell_bwd.lstm_cell_backward.default


_TYPES = frozenset({Tensor, torch.nn.Parameter})


def _plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher would go straight to the CPU's kernel.

    That is where no mode wants to know, and tensors are no subclasses, on the CPU, and what their memory says.
    """
    if _modes():
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _TYPES or not tensor.is_cpu or tensor.is_neg() or tensor._is_zerotensor()
        ):
            return False
    return True


class _Cell(torch.autograd.Function):
    """Autograd of the element-wise part.

    `gates` is an output that nobody outside sees. It has a gradient of its own so that second derivatives, which reach
    the inputs through the saved gates, come out right.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: Tensor,
        hidden_gates: Tensor,
        cx: Tensor,
        input_bias: Tensor | None,
        hidden_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _plain(input_gates, hidden_gates, cx, input_bias, hidden_bias):
            hy, cy, gates = _forward_on_cpu(input_gates, hidden_gates, cx, input_bias, hidden_bias)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                hy, cy, gates = _forward(input_gates, hidden_gates, cx, input_bias, hidden_bias)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cx, cy, gates)
        return hy, cy, gates

    @staticmethod
    def backward(
        ctx: Any, grad_hy: Tensor | None, grad_cy: Tensor | None, grad_activated: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        cx, cy, gates = ctx.saved_tensors
        *_, input_bias, hidden_bias = ctx.needs_input_grad
        has_bias = input_bias or hidden_bias
        grad_gates, grad_cx, grad_bias = _differentiated(grad_hy, grad_cy, grad_activated, cx, cy, gates, has_bias)
        return (
            grad_gates,
            grad_gates,
            grad_cx,
            grad_bias if input_bias else None,
            grad_bias if hidden_bias else None,
        )


# Without the Python code of `Function.apply`.
_recorded_forward = super(torch.autograd.Function, _Cell).apply
_library.impl("lstm_cell_forward", _recorded_forward, "Autograd")


def _differentiated(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    grad_activated: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the gates before their activation, of cx and of a bias, as the call wants them made."""
    backward = _backward_on_cpu if _plain(grad_hy, grad_cy, cx, cy, gates) else _backward
    # PyTorch records only where the caller will differentiate the gradients (create_graph=True).
    if _recording() or _transforming():
        backward = _composite_backward
    grad_gates, grad_cx, grad_bias = backward(grad_hy, grad_cy, cx, cy, gates, has_bias)
    if grad_activated is not None:
        further = grad_activated * _slopes(gates)
        grad_gates = grad_gates + further
        grad_bias = grad_bias + further.sum(0) if has_bias else grad_bias
    return grad_gates, grad_cx, grad_bias


def _slopes(gates: Tensor) -> Tensor:
    """Return the derivatives of the activated gates with respect to their pre-activations."""
    i, f, g, o = gates.chunk(4, 1)
    return torch.cat([i * (1 - i), f * (1 - f), 1 - g * g, o * (1 - o)], 1)


def _composite_forward(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what the forward operator does, in operations that PyTorch can transform."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, -1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy


def _composite_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the backward operator does, in operations that PyTorch can differentiate."""
    i, f, g, o = gates.chunk(4, 1)
    t = cy.tanh()
    total = torch.zeros_like(cy) if grad_cy is None else grad_cy
    d_o = torch.zeros_like(cy)
    if grad_hy is not None:
        total = total + grad_hy * o * (1 - t * t)
        d_o = grad_hy * t
    grad_gates = torch.cat([total * g, total * cx, total * i, d_o], 1) * _slopes(gates)
    return grad_gates, total * f, grad_gates.sum(0) if has_bias else grad_gates.new_empty(0)


# ---- a step with its products ---------------------------------------------------------------------------------------

# PyTorch's own nodes make a gradient of the size of each weight in every step, and the engine adds it to that of the
# steps before; for a small batch this takes as long as all that is element-wise. Here the steps of a backward pass put
# the gradients of their gates below each other, and one product of many rows does the sum, too.

_ROWS = 512  # of one product; with more it is no faster
_current_pass = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # -1 outside of backward passes


class _Sums:
    """The gradients of a cell's parameters, summed over the steps of one backward pass.

    Parameters
    ----------
    wanted : tuple of bool
        Which of weight_ih, weight_hh, bias_ih and bias_hh have a gradient.
    steps : int
        How many steps are expected; there may be more.
    """

    def __init__(self, wanted: tuple[bool, ...], steps: int) -> None:
        self.wanted, self.steps = wanted, steps
        self.weights: list[Any] = [None, None]
        self.bias: Any = None
        self.shape: Any = None  # of the gates of one step
        self.room = 0  # for so many steps
        self.grad_gates: Any = None  # (steps, N, 4*H)
        self.grad_bias: Any = None  # (steps, 4*H)
        self.arrays: tuple[Any, ...] = ()  # of the same memory
        self.places: list[tuple[Any, ...]] = []  # what of them is one step's; made once, used again and again
        self.stacks: list[Any] = [None, None]  # (steps * N, I) and (steps * N, H), for the factors of a product
        self.factors: list[tuple[Tensor | None, ...]] = []  # input and hx of the steps whose products are still to come
        self.versions: list[tuple[int, ...]] = []

    def add(
        self,
        grad_hy: Tensor | None,
        grad_cy: Tensor | None,
        cx: Tensor,
        cy: Tensor,
        gates: Tensor,
        factors: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor]:
        """Run the kernel for a step; return the gradients of its gates and of cx."""
        number, has_bias = len(self.factors), self.wanted[2] or self.wanted[3]
        if self.shape != gates.shape or number == self.room:
            self._multiply()
            number = 0
            if self.shape != gates.shape:
                self.shape, self.places, self.stacks = gates.shape, [], [None, None]
                self.room = max(1, min(self.steps, _ROWS // max(1, self.shape[0])))
                self.grad_gates = gates.new_empty(self.room, *self.shape)
                self.grad_bias = gates.new_empty(self.room, self.shape[1])
                self.arrays = _array_of(self.grad_gates), _array_of(self.grad_bias)
        if number == len(self.places):
            self.places.append((self.grad_gates[number], *(block[number] for block in self.arrays)))
        grad_gates, of_gates, of_bias = self.places[number]
        grad_cx = _contiguous_like(cx)
        out = of_gates, _array_of(grad_cx), of_bias if has_bias else None
        _run_backward(grad_hy, grad_cy, cx, cy, gates, has_bias, out)
        self.factors.append(factors)
        self.versions.append(_versions(*factors))
        return grad_gates, grad_cx

    def _multiply(self) -> None:
        """Add what the steps have left to the gradients of the parameters."""
        steps = len(self.factors)
        if not steps:
            return
        if self.versions != [_versions(*factors) for factors in self.factors]:
            msg = "an input or a hidden state was changed in place while the backward pass still needed it"
            raise RuntimeError(msg)
        grad_gates = self.grad_gates[:steps].flatten(0, 1).t()
        for k, factors in enumerate(zip(*self.factors, strict=True)):
            if self.wanted[k]:
                if self.stacks[k] is None:
                    self.stacks[k] = factors[0].new_empty(self.room * self.shape[0], factors[0].shape[1])
                factor = torch.cat(factors, out=self.stacks[k][: steps * self.shape[0]])
                total = self.weights[k]
                if total is None:
                    self.weights[k] = mm(grad_gates, factor, out=factor.new_empty(grad_gates.shape[0], factor.shape[1]))
                else:
                    addmm(total, grad_gates, factor, out=total)
        if self.wanted[2] or self.wanted[3]:  # one after the other: the same bits for every number of threads
            for grad_bias in self.grad_bias[:steps]:
                self.bias = grad_bias.clone() if self.bias is None else self.bias.add_(grad_bias)
        self.factors.clear()
        self.versions.clear()

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of all four parameters."""
        self._multiply()
        return (*self.weights, *(self.bias if wanted else None for wanted in self.wanted[2:]))


def _versions(input: Tensor | None, hx: Tensor | None) -> tuple[int, int]:
    """Return the numbers that tell whether a tensor was changed in place."""
    return -1 if input is None else input._version, -1 if hx is None else hx._version


class _Total(torch.autograd.Function):
    """The node that gives a cell's parameters their gradients when all steps of the pass went through.

    Its output is an empty tensor, an input of every step. The first step of a pass gives it a gradient, likewise empty,
    that owns the `_Sums`. So autograd holds the sums until this node has run, not at all where no parameter is asked
    for, and no longer than a pass that fails.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        return next(parameter for parameter in parameters if parameter is not None).new_empty(0)

    @staticmethod
    def backward(ctx: Any, owner: Any) -> tuple[Tensor | None, ...]:
        return (None,) * 4 if owner is None else owner.sums.finish()


_recorded_total = super(torch.autograd.Function, _Total).apply


class _Shared:
    """What steps with the same parameters share, for as long as their graph lives."""

    def __init__(self, parameters: tuple[Tensor | None, ...]) -> None:
        self.parameters = parameters  # so that their ids stay theirs
        self.wanted = tuple(parameter is not None and parameter.requires_grad for parameter in parameters)
        self.total = _recorded_total(*parameters)
        self.steps = 0
        self.passes: weakref.WeakValueDictionary[int, _Sums] = weakref.WeakValueDictionary()

    def sums(self) -> tuple[_Sums, Any]:
        """Return the sums of this backward pass and, for its first step, the gradient of `total`."""
        number = _current_pass()
        sums, owner = self.passes.get(number), None
        if sums is None:
            sums = self.passes[number] = _Sums(self.wanted, self.steps)
            owner = self.total.new_empty(0)
            owner.sums = sums
        return sums, owner


_shared: weakref.WeakValueDictionary[Any, _Shared] = weakref.WeakValueDictionary()


def _share(*parameters: Tensor | None) -> _Shared | None:
    """Return what steps with these parameters share, None where none of them has a gradient.

    A tensor that was changed in place may have another node, and so may one whose dtype was changed.
    """
    key = tuple([p is not None and p.requires_grad and (id(p), p._version, p.dtype) for p in parameters])
    shared = _shared.get(key)
    if shared is None and any(key):
        shared = _shared[key] = _Shared(parameters)
    if shared is not None:
        shared.steps += 1
    return shared


class _Step(torch.autograd.Function):
    """Autograd of a whole step on plain CPU tensors.

    `gates` is an output for the reason given at `_Cell`. `total` is `shared.total`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shared: _Shared | None,
        total: Tensor | None,
        input: Tensor,
        hx: Tensor,
        cx: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None,
        bias_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        input_gates, hidden_gates = linear(input, weight_ih), linear(hx, weight_hh)
        _, cy, gates = results = _forward_on_cpu(input_gates, hidden_gates, cx, bias_ih, bias_hh)
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        _, _, of_input, of_hx, _, of_weight_ih, of_weight_hh, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            input if of_weight_ih else None,
            hx if of_weight_hh else None,
            weight_ih if of_input else None,
            weight_hh if of_hx else None,
            cx,
            cy,
            gates,
        )
        return results

    @staticmethod
    def backward(
        ctx: Any, grad_hy: Tensor | None, grad_cy: Tensor | None, grad_activated: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        input, hx, weight_ih, weight_hh, cx, cy, gates = ctx.saved_tensors
        _, of_total, of_input, of_hx, _, of_weight_ih, of_weight_hh, of_bias_ih, of_bias_hh = ctx.needs_input_grad
        has_bias = of_bias_ih or of_bias_hh
        owner = grad_weight_ih = grad_weight_hh = grad_bias_ih = grad_bias_hh = None
        if (
            of_total
            and ctx.shared.steps > 1  # a single step has nothing to share
            and grad_activated is None
            and not _recording()
            and not _transforming()
            and _plain(grad_hy, grad_cy, cx, cy, gates)  # what was saved may have been changed by hooks
            and _current_pass() >= 0
        ):
            sums, owner = ctx.shared.sums()
            grad_gates, grad_cx = sums.add(grad_hy, grad_cy, cx, cy, gates, (input, hx))
        else:
            grad_gates, grad_cx, grad_bias = _differentiated(grad_hy, grad_cy, grad_activated, cx, cy, gates, has_bias)
            grad_weight_ih = grad_gates.t().mm(input) if of_weight_ih else None
            grad_weight_hh = grad_gates.t().mm(hx) if of_weight_hh else None
            grad_bias_ih = grad_bias if of_bias_ih else None
            grad_bias_hh = grad_bias if of_bias_hh else None
        grad_input = mm(grad_gates, weight_ih) if of_input else None
        grad_hx = mm(grad_gates, weight_hh) if of_hx else None
        return (
            None, owner, grad_input, grad_hx, grad_cx, grad_weight_ih, grad_weight_hh, grad_bias_ih, grad_bias_hh
        )  # fmt: skip


_recorded_step = super(torch.autograd.Function, _Step).apply


# ---- the cell -------------------------------------------------------------------------------------------------------


def _check(
    input: Tensor,
    hx: Tensor,
    cx: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> None:
    """Raise the package's errors for tensors of the wrong type, device, dtype or shape; cx sets what is right."""
    if not isinstance(cx, Tensor):
        raise wrong_type("cx", "a torch.Tensor", cx)
    dtype, device = cx.dtype, cx.device
    if device.type not in _DEVICES:
        raise bad_argument("cx", "be on the CPU or on an NPU", device)
    if cx.dim() != 2:
        raise wrong_rank("cx", tuple(cx.shape))
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    batch, hidden = cx.shape
    width = 4 * hidden
    size = input.shape[-1:] if isinstance(input, Tensor) else ()
    for name, tensor, symbols, shape in (
        ("hx", hx, "(N, H)", (batch, hidden)),
        ("input", input, "(N, I)", (batch, *size)),
        ("weight_ih", weight_ih, "(4*H, I)", (width, *size)),
        ("weight_hh", weight_hh, "(4*H, H)", (width, hidden)),
        ("bias_ih", bias_ih, "(4*H,)", (width,)),
        ("bias_hh", bias_hh, "(4*H,)", (width,)),
    ):
        if tensor is None and name in ("bias_ih", "bias_hh"):
            continue
        if not isinstance(tensor, Tensor):
            raise wrong_type(name, "a torch.Tensor", tensor)
        if tensor.device != device:
            raise bad_argument(name, f"be on {device} like `cx`", tensor.device)
        if tensor.dtype is not dtype and not (autocast and tensor.is_floating_point()):
            raise wrong_dtype(name, f"{_dtype_name(cx)} like `cx`", _dtype_name(tensor))
        if tensor.shape != shape:
            other, like = ("input", input) if name == "weight_ih" else ("cx", cx)
            raise wrong_shape(name, symbols, shape, other, tuple(like.shape), tuple(tensor.shape))


def _dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype as NumPy has it."""
    return str(tensor.dtype).removeprefix("torch.")


def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of an LSTM cell: what `torch.nn.LSTMCell` computes.

    Parameters
    ----------
    input : Tensor, shape (N, I)
    hx : tuple of Tensor, each of shape (N, H)
        Hidden state and cell state (cx) that enter the cell.
    weight_ih : Tensor, shape (4*H, I)
        Four blocks of H rows in the order i, f, g, o, like all that has 4*H rows.
    weight_hh : Tensor, shape (4*H, H)
    bias_ih, bias_hh : Tensor of shape (4*H,), optional

    Returns
    -------
    hy, cy : Tensor, shape (N, H)
        Hidden state and cell state that leave the cell, of cx's dtype.

    Raises
    ------
    UnsupportedDtypeError
        If a dtype is not float32, float64, float16 or bfloat16, or not that of cx; if an argument is not a tensor
        (also a TypeError).
    InvalidParameterError
        If a rank or shape is wrong, or a tensor is on another device than cx, or on one that is neither the CPU nor
        an NPU (also a ValueError).

    Notes
    -----
    All tensors have one dtype, except under autocast: there the matrix products have autocast's, and the rest of the
    cell is computed in that of cx, so a float32 state stays float32 as with `torch.nn.LSTMCell`.

    The gradients of the gates, of cx and of the biases have the same bits for every number of threads; both biases
    have the same gradient. Threads are PyTorch's (`torch.set_num_threads`), fewer where the work is small. An input or
    a hidden state that is changed in place during the backward pass, while the gradient of a weight still needs it,
    raises a RuntimeError. A second derivative (create_graph=True) is computed by PyTorch's own operations, and so is
    everything under a transform of `torch.func`. `torch.compile` keeps the two operators as they are and fuses around
    them. Forward-mode derivatives of `torch.autograd.forward_ad`, gradients in batches (is_grads_batched) and PyTorch's
    compiled autograd are not supported.
    """
    state, cx = hx
    compiling = torch.compiler.is_compiling()
    if (
        not compiling
        and {type(input), type(state), type(cx), type(weight_ih), type(weight_hh)} <= _TYPES
        and input.is_cpu and state.is_cpu and weight_ih.is_cpu and weight_hh.is_cpu
        and state.shape == cx.shape
        and _plain(cx, bias_ih, bias_hh)
        and not _transforming()
        and not torch.is_autocast_enabled("cpu")
    ):  # fmt: skip
        try:
            shared = _share(weight_ih, weight_hh, bias_ih, bias_hh) if _recording() else None
            total = None if shared is None else shared.total
            hy, cy, _ = _recorded_step(shared, total, input, state, cx, weight_ih, weight_hh, bias_ih, bias_hh)
        except Exception:  # what does not fit is looked for only now: that takes as long as much of the rest
            _check(input, state, cx, weight_ih, weight_hh, bias_ih, bias_hh)
            raise
        return hy, cy
    _check(input, state, cx, weight_ih, weight_hh, bias_ih, bias_hh)
    input_gates = linear(input, weight_ih).to(cx.dtype)  # as autocast wants the products
    hidden_gates = linear(state, weight_hh).to(cx.dtype)
    bias_ih, bias_hh = (bias if bias is None else bias.to(cx.dtype) for bias in (bias_ih, bias_hh))
    if compiling:
        hy, cy, _ = _forward(input_gates, hidden_gates, cx, bias_ih, bias_hh)
    elif _transforming():
        hy, cy = _composite_forward(input_gates, hidden_gates, cx, bias_ih, bias_hh)
    else:  # what the dispatcher would come to
        hy, cy, _ = _recorded_forward(input_gates, hidden_gates, cx, bias_ih, bias_hh)
    return hy, cy


class LSTMCell(torch.nn.LSTMCell):
    """`torch.nn.LSTMCell` on `lstm_cell`: the same arguments, parameters, initial values and state_dict.

    Parameters
    ----------
    input_size, hidden_size : int
        I and H.
    bias : bool, default True
        Whether there are `bias_ih` and `bias_hh`.
    device, dtype : optional
        Of the parameters.
    """

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Compute one step.

        Parameters
        ----------
        input : Tensor, shape (N, I) or (I,)
        hx : tuple of Tensor, each of shape (N, H) or (H,), optional
            Hidden state and cell state; zeros by default.

        Returns
        -------
        hy, cy : Tensor, shape (N, H) or (H,)
        """
        batched = input.dim() != 1
        if not batched:
            input = input.unsqueeze(0)
        if hx is None:
            zeros = input.new_zeros((len(input), self.hidden_size))
            hx = zeros, zeros
        elif not batched:
            hx = hx[0].unsqueeze(0), hx[1].unsqueeze(0)
        hy, cy = lstm_cell(input, hx, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return (hy, cy) if batched else (hy.squeeze(0), cy.squeeze(0))
