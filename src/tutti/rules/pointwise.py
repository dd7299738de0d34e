"""Elementwise operators, with broadcasting: whatever torch tags as pointwise, and what the table adds."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import operands, rules, specs

aten = torch.ops.aten


def pointwise(node: Call) -> str:
    """Dims are aligned from the right; a dim of size one is broadcast."""
    out = specs(node)[0].shape
    letters = ascii_lowercase[: len(out)]

    def dims(shape: tuple[int, ...]) -> str:
        aligned = zip(letters[len(out) - len(shape) :], shape, out[len(out) - len(shape) :], strict=True)
        return " ".join("1" if size == 1 and whole != 1 else letter for letter, size, whole in aligned)

    left = ", ".join(dims(n.meta["val"].shape) for n in operands(node))
    right = ", ".join(dims(s.shape) for s in specs(node))
    return f"{left} -> {right}" + _linearity(node)


def _linearity(node: Call) -> str:
    tensors = operands(node)
    marks = LINEAR.get(node.target, "")
    if node.target is aten._to_copy.default and not specs(node)[0].dtype.is_floating_point:  # it truncates
        return ""
    if marks == "~01" and len(tensors) == 1:  # x + number is not linear
        return ""
    if marks == "~0 ~1" and len(tensors) == 1:
        marks = "~0"
    if marks == "~0" and node.args[0] is not tensors[0]:  # number / x
        return ""
    return f" | {marks}" if marks else ""


LINEAR = {
    aten.add.Tensor: "~01",
    aten.sub.Tensor: "~01",
    aten.mul.Tensor: "~0 ~1",
    aten.mul.Scalar: "~0",
    aten.div.Tensor: "~0",
    aten.div.Scalar: "~0",
    aten.neg.default: "~0",
    aten._to_copy.default: "~0",
    aten.clone.default: "~0",
    aten.silu_backward.default: "~0",
    aten.gelu_backward.default: "~0",
    aten.tanh_backward.default: "~0",
    aten.sigmoid_backward.default: "~0",
    aten.threshold_backward.default: "~0",
}

rules(
    dict.fromkeys(
        [
            aten._to_copy.default,
            aten.clone.default,
            aten.copy.default,
            aten.where.self,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.silu_backward.default,
            aten.gelu_backward.default,
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.threshold_backward.default,
            aten.ones_like.default,
            aten.zeros_like.default,
            aten.full_like.default,
            aten.empty_like.default,
            torch.Tag.pointwise,  # every operator that torch tags so and that has no line of its own
        ],
        pointwise,
    )
)
