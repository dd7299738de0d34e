"""Operators on planes or volumes: batch and channels can be split, the dims of a plane cannot.

Except those in `pool` and `resample`, which have local computations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tutti.ir.op_info import ARGUMENTS, CONTIGUOUS
from tutti.ir.step_graph import Call
from tutti.ops.registry import operands, rules, specs

aten = torch.ops.aten

# Dims of a plane; the mark of linear operands; and for gradients which argument is the shape of the result.
PLANES: dict[object, tuple[int, str]] = {
    aten.upsample_linear1d.default: (1, "~0"),
    aten.upsample_linear1d_backward.default: (1, "~0"),
    aten.upsample_trilinear3d.default: (3, "~0"),
    aten.upsample_trilinear3d_backward.default: (3, "~0"),
    aten.upsample_nearest3d.default: (3, "~0"),
    aten.upsample_nearest3d_backward.default: (3, "~0"),
    aten._upsample_nearest_exact1d.default: (1, "~0"),
    aten._upsample_nearest_exact1d_backward.default: (1, "~0"),
    aten._upsample_nearest_exact3d.default: (3, "~0"),
    aten._upsample_nearest_exact3d_backward.default: (3, "~0"),
    aten._upsample_bilinear2d_aa.default: (2, "~0"),
    aten._upsample_bilinear2d_aa_backward.default: (2, "~0"),
    aten._upsample_bicubic2d_aa.default: (2, "~0"),
    aten._upsample_bicubic2d_aa_backward.default: (2, "~0"),
    aten._adaptive_avg_pool3d.default: (3, "~0"),
    aten._adaptive_avg_pool3d_backward.default: (3, "~0"),
    aten.adaptive_max_pool3d.default: (3, ""),
    aten.adaptive_max_pool3d_backward.default: (3, "~0"),
    aten.max_pool3d_with_indices.default: (3, ""),
    aten.max_pool3d_with_indices_backward.default: (3, "~0"),
    aten.max_unpool2d.default: (2, "~0"),
    aten.max_unpool3d.default: (3, "~0"),
    aten.reflection_pad3d.default: (3, "~0"),
    aten.reflection_pad3d_backward.default: (3, "~0"),
    aten.replication_pad1d.default: (1, "~0"),
    aten.replication_pad1d_backward.default: (1, "~0"),
    aten.replication_pad3d.default: (3, "~0"),
    aten.replication_pad3d_backward.default: (3, "~0"),
}
SIZED = [target for target in PLANES if "upsample" in str(target) and "backward" in str(target)]


def _planes(dims: int, marks: str) -> Callable[[Call], str]:
    def notation(node: Call) -> str:
        before = "nc"[: len(operands(node)[0].meta["val"].shape) - dims]
        tensors = [*(x.meta["val"] for x in operands(node)), *specs(node)]
        lines = [
            " ".join([*before, *(f"p{i}{d}!" for d in range(len(x.shape) - len(before)))])
            for i, x in enumerate(tensors)
        ]
        inputs = len(operands(node))
        return f"{', '.join(lines[:inputs])} -> {', '.join(lines[inputs:])}" + (f" | {marks}" if marks else "")

    return notation


def _fractional(dims: int, gradient: bool) -> Callable[[Call], str]:
    """(x, kernel, size, samples): the samples are batch x channels x dims, also of one image."""

    def notation(node: Call) -> str:
        batch = ["n"] if len(operands(node)[0].meta["val"].shape) == dims + 2 else []
        x, y = (" ".join([*batch, "c", *(f"{name}{d}!" for d in range(dims))]) for name in "xy")
        return f"{y}, {x}, {y} -> {x} | ~0" if gradient else f"{x}, {'n' if batch else '1'} c r! -> {y}, {y}"

    return notation


def _affine_grid(node: Call) -> str:
    """(theta, size, align_corners) -> positions"""
    space = len(node.meta["val"].shape) - 2
    return f"n i! j! -> n {' '.join(f's{d}!' for d in range(space))} k! | ~0"


rules({target: _planes(dims, marks) for target, (dims, marks) in PLANES.items()})
rules(
    {
        aten.fractional_max_pool2d.default: _fractional(2, gradient=False),
        aten.fractional_max_pool2d_backward.default: _fractional(2, gradient=True),
        aten.fractional_max_pool3d.default: _fractional(3, gradient=False),
        aten.fractional_max_pool3d_backward.default: _fractional(3, gradient=True),
        aten.affine_grid_generator.default: _affine_grid,
    }
)


def _own_shape(args: tuple, shapes: list[tuple[int, ...]]) -> tuple:
    """The shape argument of a gradient is the local shape of the result."""
    return *args[:2], list(shapes[0]), *args[3:]


ARGUMENTS |= dict.fromkeys(SIZED, _own_shape)
ARGUMENTS[aten.affine_grid_generator.default] = lambda args, shapes: (
    args[0], [shapes[0][0], *args[1][1:]], *args[2:]
)  # fmt: skip
CONTIGUOUS |= dict.fromkeys(  # the kernels overlook the indices' strides
    (
        aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool2d_backward.default,
        aten.fractional_max_pool3d_backward.default,
    ),
    (2,),
)
