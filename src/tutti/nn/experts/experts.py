"""Dropless mixtures of experts: every token passes through each of its k experts, as one operator over flat tokens.

    y[t] = sum_j weight[t, j] (down[e] a(t, e) + down_bias[e]),    e = index[t, j]
    a(t, e) = gate(up[e] x[t] + up_bias[e])      e.g. SwiGLU: silu(first half) * second half (Shazeer 2020)

The gates are those of `tutti.nn.experts.gate`, by name.

| operand | shape | |
|---|---|---|
| x | (T, H) | tokens |
| index | (T, k) int64 | of `total` experts, those of each token |
| weight | (T, k) | any floating dtype |
| up | (E, 2F, H), or (E, F, H) without a gate | of experts `first` to `first + E - 1` |
| down | (E, H, F) | |
| up_bias, down_bias | (E, 2F) or (E, F), and (E, H) | both or neither |

Tokens of experts outside `first` to `first + E - 1` add nothing. A number of `total` or more is an error on a CPU. Rows
are sorted by expert, so that each expert has one product for all of its tokens; nothing of size tokens x experts is
allocated. Sums over experts are accumulated in float32 or wider, in an order that depends only on the operands.

matmul: a format of `tutti.nn.linear.scaled_mm` for all products, or "". x and grad are then rounded to it first, along
H.
filled: -1, or the number of rows of x, on average, that come before the last token of a local expert. Results for rows
behind that token are undefined then, and take no time.

`experts_backward` recomputes the first product. If both passes run on the same tensors, `experts_training` and
`experts_backward_kept` pass its result on: a row of 2F (F) elements for each token and choice, sorted by expert (see
`tutti.lower.memory.workspace`). In plain PyTorch they always do.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tutti.nn.experts import experts_grouped, experts_loop
from tutti.nn.experts.gate import gate_of
from tutti.nn.once import differentiable_once

TENSORS = "Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias"
OPTIONS = "str activation, int first, int total, str matmul, int filled"

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(f"experts({TENSORS}, {OPTIONS}) -> Tensor")
_library.define(f"experts_training({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)")
_library.define(f"experts_backward(Tensor grad, {TENSORS}, {OPTIONS}) -> Tensor[]")
_library.define(f"experts_backward_kept(Tensor grad, {TENSORS}, {OPTIONS}, Tensor rows) -> Tensor[]")
ops = torch.ops.tutti


def experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The mixture of all experts, differentiable in all but the index. Shapes as above.

    x is computed in the dtype of the experts, or under autocast in autocast's; the result has the dtype of x. Raises
    ValueError if shapes do not fit, or for an unknown activation.
    """
    wide = up.shape[1] // max(1, down.shape[-1])
    if wide not in (1, 2) or up.shape[1] != wide * down.shape[-1] or up.shape[::2] != down.shape[:2]:
        raise ValueError(
            f"experts: up {tuple(up.shape)} and down {tuple(down.shape)} do not fit together: expected (E, 2F, H) with "
            "a gate or (E, F, H) without, and (E, H, F)"
        )
    if gate_of(activation).interleaved and wide == 1:
        raise ValueError(f"experts: {activation!r} needs gate and up, but up {tuple(up.shape)} has no gate")
    if x.ndim != 2 or x.shape[1] != up.shape[2] or index.shape != weight.shape or index.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"experts: expected tokens (T, {up.shape[2]}) with index and weight (T, k), found {tuple(x.shape)}, "
            f"{tuple(index.shape)} and {tuple(weight.shape)}"
        )
    biases = [None if b is None else tuple(b.shape) for b in (up_bias, down_bias)]
    if biases not in ([None, None], [up.shape[:2], down.shape[:2]]):
        raise ValueError(
            f"experts: expected both biases, {tuple(up.shape[:2])} and {tuple(down.shape[:2])}, or neither; found "
            f"{biases[0]} and {biases[1]}"
        )
    kind, dtype = x.device.type, up.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    matrices = (t if t is None else t.to(dtype) for t in (up, down, up_bias, down_bias))
    operands = (x.to(dtype), index, weight, *matrices)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if learns:
        return ops.experts_training(*operands, activation, 0, up.shape[0], "", -1)[0].to(x.dtype)
    return ops.experts(*operands, activation, 0, up.shape[0], "", -1).to(x.dtype)


def kept_rows(index: Tensor, up: Tensor, total: int) -> int:
    """The number of rows kept for the backward pass, on average: as many as the local experts' share of all choices. A
    routing that favours them keeps more."""
    return -(-index.numel() * up.shape[0] // total)


def _register(kernels: ModuleType, device: str) -> None:
    def experts(*args):
        return kernels.forward(*args, keep=False)[0]

    def backward(grad, *args):
        return kernels.backward(grad, *args, kernels.forward(*args, keep=True, only_rows=True)[1])

    _library.impl("experts", experts, device)
    _library.impl("experts_training", lambda *args: kernels.forward(*args, keep=True), device)
    _library.impl("experts_backward", backward, device)
    _library.impl("experts_backward_kept", kernels.backward, device)


_register(experts_loop, "CPU")
_register(experts_grouped, "CUDA")


def _fake(x, *rest):
    return x.new_empty(x.shape)


def _fake_training(x, index, weight, up, down, up_bias, down_bias, activation, first, total, *options):
    return x.new_empty(x.shape), x.new_empty((kept_rows(index, up, total), up.shape[1]))


def _fake_backward(grad, x, index, weight, *rest):
    return [t.new_empty(t.shape) for t in (x, weight, *rest[:4]) if t is not None]


torch.library.register_fake("tutti::experts", _fake)
torch.library.register_fake("tutti::experts_training", _fake_training)
torch.library.register_fake("tutti::experts_backward", _fake_backward)
torch.library.register_fake("tutti::experts_backward_kept", _fake_backward)
differentiable_once("experts", "experts_backward", "experts_backward_kept")


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    tensors, ctx.options = inputs[:7], inputs[7:]
    rows = output[1:] if isinstance(output, tuple) else ()
    ctx.save_for_backward(*tensors, *rows)


def _gradients(ctx, grad, *others):
    """Gradients of all operands; None for the index and the options."""
    if grad is None:
        return (None,) * 12
    tensors, rows = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    backward = ops.experts_backward_kept if rows else ops.experts_backward
    gx, gweight, gup, gdown, *biases = backward(grad, *tensors, *ctx.options, *rows)
    return gx, None, gweight, gup, gdown, *(biases or (None, None)), *(None,) * 5


for _name in ("experts", "experts_training"):
    torch.library.register_autograd(f"tutti::{_name}", _gradients, setup_context=_save)
