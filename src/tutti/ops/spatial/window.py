"""Windows over dims: unfold and its adjoint. Windows without overlaps and gaps are a factor of the dim."""

from __future__ import annotations

import torch

from tutti.ir.op_info import ARGUMENTS
from tutti.ir.step_graph import Call
from tutti.ops.registry import rules
from tutti.ops.view import letters, names, output_shape

aten = torch.ops.aten


def _windows(dims: list[str], rows: int, at: int, size: int, step: int) -> tuple[str, str, dict[str, int]]:
    """The dims of a tensor and of its windows, and the size of a window."""
    tiles = size == step and rows % size == 0
    before, after = dims.copy(), dims.copy()
    before[at], after[at] = ("(n s!)", "n") if tiles else ("x!", "n!")
    return " ".join(before), " ".join([*after, "s!"]), {"s": size}


def _unfold(node: Call):
    dims = letters(node)
    if not dims:
        return None
    at = node.args[1] % len(dims)
    before, after, sizes = _windows(dims, node.args[0].meta["val"].shape[at], at, *node.args[2:4])
    return f"{before} -> {after} | ~0", sizes


def _unfold_backward(node: Call):
    shape = node.meta["val"].shape
    if not shape:
        return None
    at = node.args[2] % len(shape)
    before, after, sizes = _windows(names(shape), shape[at], at, *node.args[3:5])
    return f"{after} -> {before} | ~0", sizes


def _patches(node: Call, image: Call, patches: Call, back: bool):
    """An image (batch, channels, h, w) and its patches (batch, channels x patch, positions)."""
    *batch, channels, _, _ = image.meta["val"].shape
    b = "b " if batch else ""
    lines = [f"{b}c h! w!", f"{b}(c p!) n!"]
    return f"{' -> '.join(reversed(lines) if back else lines)} | ~0", {"c": channels}


rules(
    {
        aten.unfold.default: _unfold,
        aten.unfold_backward.default: _unfold_backward,
        aten.im2col.default: lambda node: _patches(node, node.args[0], node, back=False),
        aten.col2im.default: lambda node: _patches(node, node, node.args[0], back=True),
    }
)

ARGUMENTS[aten.unfold_backward.default] = output_shape(1)
