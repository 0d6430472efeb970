"""The contenders: the full operator, bias included, as the users of each system write it.

Each entry of `CONTENDERS` is a function `prepare(inputs, threads) -> (runs, results)`, called in its system's process:
`runs` maps names to functions that run a given number of times, `results()` returns (grad_gates, grad_cx, grad_bias) of
the last run as arrays for the check, with None for what the system does not compute. Inputs are converted to the
system's own arrays beforehand, outputs are preallocated where the system can use them, compilation is not timed.
"""

from __future__ import annotations

import functools

import numpy as np

from benches import data, limit, measure

__all__ = ["CONTENDERS", "VERSIONS_OF"]


def lstmcell_bwd(inputs, threads):
    """Run this package, with `out=`; like the others it may use fewer threads than allowed where the work is small."""
    import lstmcell_bwd

    lstmcell_bwd.set_num_threads(threads)
    out = data.outputs(*inputs.cx.shape)
    run = measure.repeat(lstmcell_bwd.lstm_cell_backward, *inputs, out=out)
    return {"lstmcell_bwd": run}, lambda: out


def same_bytes(inputs, threads):
    """Move the same bytes: the limit. There is no result to check."""
    grad_gates, grad_cx, _ = data.outputs(*inputs.cx.shape)
    return limit.contenders(*inputs, grad_gates, grad_cx, num_threads=threads), None


def numpy(inputs, threads):
    """Run the NumPy expression, which knows one thread only."""
    out = data.outputs(*inputs.cx.shape)
    return {"NumPy": measure.repeat(data.numpy_backward, *inputs, out=out)}, lambda: out


def numexpr(inputs, threads):
    """Run numexpr, one evaluation for each plane, tanh and total kept."""
    import numexpr as ne

    ne.set_num_threads(threads)
    out = data.outputs(*inputs.cx.shape)
    grad_gates, grad_cx, grad_bias = out
    grad_hy, grad_cy, cx, cy, gates = inputs
    i, f, g, o = np.split(gates, 4, axis=1)
    d_i, d_f, d_g, d_o = np.split(grad_gates, 4, axis=1)
    t, total = np.empty_like(cx), np.empty_like(cx)
    names = {"grad_hy": grad_hy, "grad_cy": grad_cy, "cx": cx, "cy": cy, "i": i, "f": f, "g": g, "o": o}
    names |= {"t": t, "total": total}
    # Integer constants: numexpr would take 1.0 for float64.
    steps = [
        ("tanh(cy)", t),
        ("grad_hy * o * (1 - t * t) + grad_cy", total),
        ("total * f", grad_cx),
        ("total * g * i * (1 - i)", d_i),
        ("total * cx * f * (1 - f)", d_f),
        ("total * i * (1 - g * g)", d_g),
        ("grad_hy * t * o * (1 - o)", d_o),
    ]

    def backward():
        for expression, target in steps:
            ne.evaluate(expression, local_dict=names, global_dict={}, out=target)
        np.sum(grad_gates, axis=0, out=grad_bias)

    return {"numexpr": measure.repeat(backward)}, lambda: out


@functools.cache
def _numba_backward():
    """Compile the loop for Numba, once for all sizes."""
    import math

    import numba as nb

    @nb.njit(parallel=True, fastmath=True, error_model="numpy")
    def backward(grad_hy, grad_cy, cx, cy, gates, grad_gates, grad_cx, grad_bias, blocks):
        batch, hidden = cx.shape
        sums = np.zeros((blocks, 4 * hidden), np.float32)
        one = np.float32(1)
        for block in nb.prange(blocks):
            for r in range(batch * block // blocks, batch * (block + 1) // blocks):
                for j in range(hidden):
                    i, f = gates[r, j], gates[r, hidden + j]
                    g, o = gates[r, 2 * hidden + j], gates[r, 3 * hidden + j]
                    t = math.tanh(cy[r, j])
                    total = grad_hy[r, j] * o * (one - t * t) + grad_cy[r, j]
                    d_i = total * g * i * (one - i)
                    d_f = total * cx[r, j] * f * (one - f)
                    d_g = total * i * (one - g * g)
                    d_o = grad_hy[r, j] * t * o * (one - o)
                    grad_cx[r, j] = total * f
                    grad_gates[r, j] = d_i
                    grad_gates[r, hidden + j] = d_f
                    grad_gates[r, 2 * hidden + j] = d_g
                    grad_gates[r, 3 * hidden + j] = d_o
                    sums[block, j] += d_i
                    sums[block, hidden + j] += d_f
                    sums[block, 2 * hidden + j] += d_g
                    sums[block, 3 * hidden + j] += d_o
        for j in range(4 * hidden):
            column = np.float32(0)
            for block in range(blocks):
                column += sums[block, j]
            grad_bias[j] = column

    return backward


def numba(inputs, threads):
    """Run Numba: one loop, blocks of rows in parallel, the bias summed for each block on the way."""
    import numba as nb

    nb.set_num_threads(threads)
    out = data.outputs(*inputs.cx.shape)
    return {"Numba": measure.repeat(_numba_backward(), *inputs, *out, threads)}, lambda: out


def jax(inputs, threads):
    """Run JAX, jitted; it allocates its results."""
    import jax
    from jax import numpy as jnp

    @jax.jit
    def backward(grad_hy, grad_cy, cx, cy, gates):
        i, f, g, o = jnp.split(gates, 4, axis=1)
        t = jnp.tanh(cy)
        total = grad_hy * o * (1 - t * t) + grad_cy
        grad_gates = jnp.concatenate(
            [total * g * i * (1 - i), total * cx * f * (1 - f), total * i * (1 - g * g), grad_hy * t * o * (1 - o)],
            axis=1,
        )
        return grad_gates, total * f, grad_gates.sum(axis=0)

    arrays = [jax.device_put(array) for array in inputs]
    latest = []

    def step():
        latest[:] = jax.block_until_ready(backward(*arrays))

    return {"JAX jit": measure.repeat(step)}, lambda: [np.asarray(array) for array in latest]


def _torch_tensors(inputs, threads):
    import torch

    torch.set_num_threads(threads)
    return torch, [torch.from_numpy(array) for array in inputs]


def _torch_backward(torch):
    """Return the operator in PyTorch, written into given outputs."""

    def backward(grad_hy, grad_cy, cx, cy, gates, grad_gates, grad_cx, grad_bias):
        i, f, g, o = gates.chunk(4, 1)
        d_i, d_f, d_g, d_o = grad_gates.chunk(4, 1)
        t = torch.tanh(cy)
        total = grad_hy * o * (1 - t * t) + grad_cy
        torch.mul(total, f, out=grad_cx)
        d_i.copy_(total * g * i * (1 - i))
        d_f.copy_(total * cx * f * (1 - f))
        d_g.copy_(total * i * (1 - g * g))
        d_o.copy_(grad_hy * t * o * (1 - o))
        torch.sum(grad_gates, 0, out=grad_bias)

    return backward


def torch_eager(inputs, threads):
    """Run PyTorch eagerly, without recording gradients."""
    torch, tensors = _torch_tensors(inputs, threads)
    out = data.outputs(*inputs.cx.shape)
    backward = torch.inference_mode()(_torch_backward(torch))
    run = measure.repeat(backward, *tensors, *(torch.from_numpy(array) for array in out))
    return {"PyTorch eager": run}, lambda: out


def torch_compile(inputs, threads):
    """Run torch.compile on a function that returns its results; it fuses them and allocates them."""
    torch, tensors = _torch_tensors(inputs, threads)

    @torch.compile(dynamic=False)
    def backward(grad_hy, grad_cy, cx, cy, gates):
        i, f, g, o = gates.chunk(4, 1)
        t = torch.tanh(cy)
        total = grad_hy * o * (1 - t * t) + grad_cy
        grad_gates = torch.cat(
            [total * g * i * (1 - i), total * cx * f * (1 - f), total * i * (1 - g * g), grad_hy * t * o * (1 - o)], 1
        )
        return grad_gates, total * f, grad_gates.sum(0)

    latest = []

    def step():
        with torch.inference_mode():
            latest[:] = backward(*tensors)

    return {"torch.compile": measure.repeat(step)}, lambda: [tensor.numpy() for tensor in latest]


def _pre_activations(gates):
    """Return what the gates are the sigmoid and tanh of, in float32."""
    i, f, g, o = np.split(gates.astype(np.float64), 4, axis=1)
    g = np.clip(g, -1 + 2.0**-25, 1 - 2.0**-25)
    return np.concatenate(
        [np.log(i / (1 - i)), np.log(f / (1 - f)), np.arctanh(g), np.log(o / (1 - o))], axis=1
    ).astype(np.float32)


def torch_operator(inputs, threads):
    """Run the backward formula of PyTorch's own LSTM cell, which starts from the pre-activations."""
    torch, (grad_hy, grad_cy, cx, cy, gates) = _torch_tensors(inputs, threads)
    pre_activations = torch.from_numpy(_pre_activations(inputs.gates))
    hidden_gates, bias = torch.zeros_like(gates), torch.zeros(gates.shape[1])
    operator = torch.ops.aten._thnn_differentiable_lstm_cell_backward
    latest = []

    def step():
        with torch.inference_mode():
            latest[:] = operator(grad_hy, grad_cy, pre_activations, hidden_gates, bias, bias, cx, cy)

    def results():
        grad_gates, _, grad_cx, grad_bias, _ = latest
        return [tensor.numpy() for tensor in (grad_gates, grad_cx, grad_bias)]

    return {"PyTorch cell backward": measure.repeat(step)}, results


def torch_autograd(inputs, threads):
    """Run the backward pass that PyTorch records for the cell's forward pass; the forward pass is not timed."""
    torch, (grad_hy, grad_cy, cx, _, _) = _torch_tensors(inputs, threads)
    pre_activations = torch.from_numpy(_pre_activations(inputs.gates)).requires_grad_()
    bias = torch.zeros(pre_activations.shape[1], requires_grad=True)
    cx = cx.clone().requires_grad_()
    a_i, a_f, a_g, a_o = (pre_activations + bias).chunk(4, 1)
    cy = torch.sigmoid(a_f) * cx + torch.sigmoid(a_i) * torch.tanh(a_g)
    hy = torch.sigmoid(a_o) * torch.tanh(cy)
    latest = []

    def step():
        latest[:] = torch.autograd.grad((hy, cy), (pre_activations, cx, bias), (grad_hy, grad_cy), retain_graph=True)

    return {"PyTorch autograd": measure.repeat(step)}, lambda: [tensor.numpy() for tensor in latest]


def tensorflow(inputs, threads):
    """Run TensorFlow's LSTMBlockCellGrad: a fused kernel, which is given tanh(cy) and leaves the bias out."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    grad_hy, grad_cy, cx, cy, _ = (tf.constant(array) for array in inputs)
    i, f, g, o = (tf.constant(np.ascontiguousarray(block)) for block in np.split(inputs.gates, 4, axis=1))
    batch, hidden = inputs.cx.shape
    # The layer's input and weights are looked at for their shapes only.
    x, h, peephole = tf.zeros((batch, 1)), tf.zeros((batch, hidden)), tf.zeros(hidden)
    weights, bias, t = tf.zeros((1 + hidden, 4 * hidden)), tf.zeros(4 * hidden), tf.constant(np.tanh(inputs.cy))

    @tf.function
    def backward():
        return tf.raw_ops.LSTMBlockCellGrad(
            x=x, cs_prev=cx, h_prev=h, w=weights, wci=peephole, wcf=peephole, wco=peephole, b=bias, i=i, cs=cy, f=f,
            o=o, ci=g, co=t, cs_grad=grad_cy, h_grad=grad_hy, use_peephole=False,
        )[:2]  # fmt: skip

    latest = []

    def step():
        latest[:] = backward()

    def results():
        grad_cx, grad_gates = (tensor.numpy() for tensor in latest)
        d_i, d_g, d_f, d_o = np.split(grad_gates, 4, axis=1)
        return np.concatenate([d_i, d_f, d_g, d_o], axis=1), grad_cx, None

    return {"TensorFlow, no bias": measure.repeat(step)}, results


CONTENDERS = {
    "lstmcell_bwd": lstmcell_bwd,
    "limit": same_bytes,
    "numpy": numpy,
    "numexpr": numexpr,
    "numba": numba,
    "jax": jax,
    "torch_eager": torch_eager,
    "torch_compile": torch_compile,
    "torch_operator": torch_operator,
    "torch_autograd": torch_autograd,
    "tensorflow": tensorflow,
}

# The packages whose versions a contender's figures depend on.
VERSIONS_OF = {
    "lstmcell_bwd": ("numpy",),
    "limit": (),
    "numpy": ("numpy",),
    "numexpr": ("numexpr",),
    "numba": ("numba", "llvmlite"),
    "jax": ("jax", "jaxlib"),
    "torch_eager": ("torch",),
    "torch_compile": ("torch",),
    "torch_operator": ("torch",),
    "torch_autograd": ("torch",),
    "tensorflow": ("tensorflow",),
}
