"""FLOPs and bytes of every node of a StepGraph, unsplit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod

import torch
from torch import fx

import tutti.nn.attention
import tutti.nn.ctc
import tutti.nn.experts
import tutti.nn.fused
import tutti.nn.grouped
import tutti.nn.lstm
import tutti.nn.ordered_mm  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call, Spec, StepGraph

aten = torch.ops.aten


def annotate_costs(step: StepGraph) -> None:
    """Write `flops` (a multiply-add counts two) and `bytes` (each input read and output written once)."""
    for node in step.graph.nodes:
        flops, moved = 0, 0
        if node.op == "call_function" and node.target not in FREE:
            operands = [n.meta["val"] for n in node.all_input_nodes]
            moved = sum(s.bytes for s in flat(operands)) + sum(s.bytes for s in flat(node.meta["val"]))
            formula = FLOPS.get(node.target)
            flops = formula(node) if formula else sum(s.numel for s in flat(node.meta["val"]))
        node.meta["flops"], node.meta["bytes"] = flops, moved


def flat(specs) -> list[Spec]:
    """The specs in a spec, a tuple of specs, or None."""
    if isinstance(specs, Spec):
        return [specs]
    return [s for part in specs or () for s in flat(part)]


def _shape(argument) -> tuple[int, ...]:
    return argument.meta["val"].shape


def _matmul(node: Call) -> int:
    *_, a, b = (x for x in node.args if isinstance(x, fx.Node))
    return 2 * prod(_shape(a)) * _shape(b)[-1]


def _attention(products: int, backward: bool, causal_at: int) -> Callable[[Call], int]:
    """`products` matrix products of (queries x keys) per head, half of each under a causal mask.

    causal_at: position of the `is_causal` argument.
    """

    def flops(node: Call) -> int:
        q, k, v = node.args[1:4] if backward else node.args[:3]
        batch, heads, queries, dim = _shape(q)
        keys, value_dim = _shape(k)[2], _shape(v)[3]
        causal = node.args[causal_at] if len(node.args) > causal_at else False
        return products * batch * heads * queries * keys * (dim + value_dim) // (2 if causal is True else 1)

    return flops


def _convolution(node: Call) -> int:
    """A multiply-add for each output element (input element if transposed) and element of its window."""
    x, w = node.args[:2]
    anchor = _shape(x) if node.args[6] else node.meta["val"].shape
    return 2 * prod(anchor) * prod(_shape(w)[1:])


def _convolution_backward(node: Call) -> int:
    """The FLOPs of the forward pass for each of the gradients of input and weight."""
    grad, x, w = node.args[:3]
    anchor = _shape(x) if node.args[7] else _shape(grad)
    return 2 * prod(anchor) * prod(_shape(w)[1:]) * sum(node.args[10][:2])


def _lstm(products: int) -> Callable[[Call], int]:
    """`products` times the matrix products of the forward pass: (input + state) x four gates, for each step."""

    def flops(node: Call) -> int:
        (time, batch, features), hidden = _shape(node.args[0]), _shape(node.args[5])[-1]
        return products * 2 * time * batch * (features + hidden) * 4 * hidden

    return flops


def _linear_logsumexp(node: Call) -> int:
    return 2 * prod(_shape(node.args[0])) * _shape(node.args[1])[0]


def _linear_logsumexp_backward(node: Call) -> int:
    """A product for each required gradient. The recomputed logits are not counted."""
    return 2 * prod(_shape(node.args[2])) * _shape(node.args[3])[0] * sum(node.args[-1][:2])


def _linear_logsumexp_with_gradients(node: Call) -> int:
    return 2 * prod(_shape(node.args[2])) * _shape(node.args[3])[0] * (1 + sum(node.args[-1][:2]))


def _experts(products: int, backward: bool = False) -> Callable[[Call], int]:
    """`products` times those of the forward pass: both matrices of an expert, for the average number of tokens routed
    to the local experts. The product that a backward pass recomputes is not counted."""

    def flops(node: Call) -> int:
        _, index, _, up, down, _, _, total = node.args[backward : 8 + backward]
        return products * 2 * prod(_shape(index)) * (prod(_shape(up)) + prod(_shape(down))) // total

    return flops


def _grouped(node: Call) -> int:
    """Rows outside all groups are counted. If the product contracts over the groups, each row is in one."""
    a, b = (_shape(x) for x in node.args[:2])
    return 2 * prod(a) * b[-1] if len(a) == 2 else 2 * prod(a[1:]) * b[-1]


def _ctc(passes: int) -> Callable[[Call], int]:
    """A logsumexp of three terms for each state of each step, `passes` times."""

    def flops(node: Call) -> int:
        log_probs, targets = node.args[passes - 1 : passes + 1]  # behind the gradient
        return passes * 8 * prod(_shape(log_probs)[:2]) * (2 * _shape(targets)[-1] + 1)

    return flops


# Views and renamings: no arithmetic, no bytes.
FREE = {
    operator.getitem,
    aten.reshape.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}

FLOPS: dict[object, Callable[[Call], int]] = {
    aten.mm.default: _matmul,
    aten.addmm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    torch.ops.tutti.ordered_mm.default: _matmul,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    torch.ops.tutti.lstm_layer.default: _lstm(1),
    torch.ops.tutti.lstm_layer_backward.default: _lstm(2),
    torch.ops.tutti.linear_logsumexp.default: _linear_logsumexp,
    torch.ops.tutti.linear_logsumexp_backward.default: _linear_logsumexp_backward,
    torch.ops.tutti.linear_logsumexp_with_gradients.default: _linear_logsumexp_with_gradients,
    torch.ops.tutti.experts.default: _experts(1),
    torch.ops.tutti.experts_training.default: _experts(1),
    torch.ops.tutti.experts_backward.default: _experts(2, backward=True),
    torch.ops.tutti.experts_backward_kept.default: _experts(2, backward=True),
    torch.ops.tutti.grouped_mm.default: _grouped,
    torch.ops.tutti.ctc_loss.default: _ctc(1),
    torch.ops.tutti.ctc_loss_backward.default: _ctc(2),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(2, False, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(5, True, 7),
    torch.ops.tutti.attention.default: _attention(2, False, 4),
    torch.ops.tutti.attention_backward.default: _attention(5, True, 7),
    aten._scaled_dot_product_flash_attention.default: _attention(2, False, 4),
    aten._scaled_dot_product_flash_attention_backward.default: _attention(5, True, 11),
    aten._scaled_dot_product_efficient_attention.default: _attention(2, False, 6),
    aten._scaled_dot_product_efficient_attention_backward.default: _attention(5, True, 11),
    aten._scaled_dot_product_cudnn_attention.default: _attention(2, False, 6),
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention(5, True, 14),
}
