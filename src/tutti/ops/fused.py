"""Fused operators: rows, and other independent dims, can be split."""

from __future__ import annotations

from string import ascii_lowercase

import torch

import tutti.nn.fused  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call
from tutti.ops.pointwise import broadcast
from tutti.ops.registry import rules

ops = torch.ops.tutti


def _rows(x: Call) -> str:
    """All dims but the last."""
    return " ".join(ascii_lowercase[: len(x.meta["val"].shape) - 1])


def _rms_norm(node: Call) -> str:
    rows, weight = _rows(node.args[0]), ", h!" if node.args[1] is not None else ""
    return f"{rows} h!{weight} -> {rows} h!, {rows} 1"


def _rms_norm_backward(node: Call) -> str:
    _, x, weight, _, offset, _, wanted, *added = node.args
    rows, weight_dims = _rows(x), ", h!" if weight is not None else ""
    gx, gw = f"{rows} h!" if wanted[0] else "1", "h!" if weight_dims and wanted[1] else "1"
    if added:
        last = 3 + bool(weight_dims)
        return f"{rows} h!, {rows} h!{weight_dims}, {rows} 1, {rows} h! -> {gx}, {gw} | ~0{last}"
    linear = "~0 ~2" if weight_dims and gw == "1" and not offset else "~0"
    return f"{rows} h!, {rows} h!{weight_dims}, {rows} 1 -> {gx}, {gw} | {linear}"


def _rotary(node: Call) -> str:
    """Linear in x, and in both angles together."""
    x, *angles = ([*broadcast(n.meta["val"].shape, node.meta["val"].shape).split()[:-1], "d!"] for n in node.args)
    line = " ".join(x)
    return f"{line}, {', '.join(' '.join(dims) for dims in angles)} -> {line} | ~0 ~12"


def _glu(node: Call) -> str:
    line = " ".join(ascii_lowercase[: len(node.meta["val"].shape)])
    return f"{line}, {line} -> {line} | ~1"


def _glu_backward(node: Call) -> str:
    line = " ".join(ascii_lowercase[: len(node.args[0].meta["val"].shape)])
    return f"{line}, {line}, {line} -> {line}, {line} | ~0"


rules(
    {
        ops.rms_norm.default: _rms_norm,
        ops.rms_norm_backward.default: _rms_norm_backward,
        ops.rotary.default: _rotary,
        ops.rotary_backward.default: _rotary,
        ops.glu.default: _glu,
        ops.glu_backward.default: _glu_backward,
    }
)
