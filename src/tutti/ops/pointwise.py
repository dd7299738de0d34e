"""Elementwise operators, with broadcasting: whatever torch tags as pointwise, and what the table adds."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase

import torch

from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules, specs

aten = torch.ops.aten


def broadcast(shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """The names of a tensor's dims among those of the broadcast shape, aligned from the right; 1 for broadcast dims."""
    if shape == (0,) != whole:
        return "1"  # an operand or output that some devices omit
    names = ascii_lowercase[len(whole) - len(shape) : len(whole)]
    pairs = zip(names, shape, whole[len(whole) - len(shape) :], strict=True)
    return " ".join("1" if size == 1 and n != 1 else name for name, size, n in pairs)


def pointwise(node: Call) -> str:
    out = specs(node)[0].shape
    left = ", ".join(broadcast(n.meta["val"].shape, out) for n in operands(node))
    right = ", ".join(broadcast(s.shape, out) for s in specs(node))
    marks = LINEAR.get(node.target, "")
    marks = marks if isinstance(marks, str) else marks(node)
    return f"{left} -> {right}" + (f" | {marks}" if marks else "")


def _together(node: Call) -> str:
    """x + y; x + number is not linear."""
    return "~01" if len(operands(node)) == 2 else ""


def _each(node: Call) -> str:
    return "~0 ~1" if len(operands(node)) == 2 else "~0"


def _first(node: Call) -> str:
    """x / y, but not number / y."""
    return "~0" if node.args[0] is operands(node)[0] else ""


def _where_zero(value_at: int) -> Callable[[Call], str]:
    """Linear where the number that is filled in is zero."""
    return lambda node: "~0" if node.args[value_at] == 0 else ""


def _cast(node: Call) -> str:
    """To integers is to truncate."""
    return "~0" if specs(node)[0].dtype.is_floating_point or specs(node)[0].dtype.is_complex else ""


GRADIENTS = [  # of activations: linear in the gradient that comes in
    aten.silu_backward.default,
    aten.gelu_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.softplus_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.mish_backward.default,
    aten.logit_backward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel_backward.default,
    aten.native_dropout_backward.default,
    aten.rrelu_with_noise_backward.default,
]

LINEAR: dict[object, str | Callable[[Call], str]] = {
    aten.add.Tensor: _together,
    aten.sub.Tensor: _together,
    aten.lerp.Scalar: "~01",
    aten.lerp.Tensor: "~01",
    aten.addcmul.default: "~01 ~02",
    aten.addcdiv.default: "~01",
    aten.where.self: "~12",
    aten.masked_fill.Tensor: "~02",
    aten.masked_fill.Scalar: _where_zero(2),
    aten.fill.Scalar: _where_zero(1),
    aten.full_like.default: _where_zero(1),
    aten.zeros_like.default: "~0",
    aten.empty_like.default: "~0",
    aten.fill.Tensor: "~1",
    aten.copy.default: lambda node: _cast(node).replace("0", "1"),
    aten._to_copy.default: _cast,
    aten.mul.Tensor: _each,
    aten.mul.Scalar: "~0",
    aten.div.Tensor: _first,
    aten.true_divide.Tensor: _first,
    aten.div.Scalar: "~0",
    aten.ldexp.Tensor: "~0",
    aten.neg.default: "~0",
    aten.positive.default: "~0",
    aten.deg2rad.default: "~0",
    aten.rad2deg.default: "~0",
    aten.conj_physical.default: "~0",
    aten._conj.default: "~0",
    aten.clone.default: "~0",
    aten.polar.default: "~0",
    aten.complex.default: "~01",
    **dict.fromkeys(GRADIENTS, "~0"),
}

rules(
    dict.fromkeys(
        [
            *GRADIENTS,
            aten._to_copy.default,
            aten._conj.default,
            aten.clone.default,
            aten.copy.default,
            aten.where.self,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.fill.Scalar,
            aten.fill.Tensor,
            aten.ones_like.default,
            aten.zeros_like.default,
            aten.full_like.default,
            aten.empty_like.default,
            aten.floor_divide.default,
            aten.hardswish.default,
            aten.log_sigmoid_forward.default,
            aten.polar.default,
            aten.complex.default,
            aten._prelu_kernel.default,
            aten.leaky_relu.default,  # not tagged by torch 2.11
            torch.Tag.pointwise,  # every tagged operator without an entry above
        ],
        pointwise,
    )
)


def _halves(whole: Call, dim: int) -> tuple[str, str, dict[str, int]]:
    """A gated unit's dims: one of them has values and gates."""
    shape = whole.meta["val"].shape
    dims = ["1" if n == 1 else c for c, n in zip(ascii_lowercase, shape, strict=False)]
    both, one = dims.copy(), dims.copy()
    both[dim], one[dim] = "(y! z)", "z"
    return " ".join(both), " ".join(one), {"z": shape[dim] // 2}


def _glu(node: Call):
    both, one, sizes = _halves(node.args[0], node.args[1] if len(node.args) > 1 else -1)
    return f"{both} -> {one}", sizes


def _glu_backward(node: Call):
    both, one, sizes = _halves(node.args[1], node.args[2])
    return f"{one}, {both} -> {both} | ~0", sizes


rules({aten.glu.default: _glu, aten.glu_backward.default: _glu_backward})
