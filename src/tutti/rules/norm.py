"""Normalisations over the last dims, which stay whole."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import CONTIGUOUS, operands, rules

aten = torch.ops.aten


def _dims(node: Call, x: Call, normalized: int) -> tuple[str, str, str]:
    rank = len(x.meta["val"].shape)
    batch, rest = (
        list(ascii_lowercase[: rank - normalized]),
        [f"{c}!" for c in ascii_lowercase[rank - normalized : rank]],
    )
    return " ".join(batch + rest), " ".join(batch + ["1"] * normalized), " ".join(rest)


def _layer_norm(node: Call) -> str:
    x, statistics, weight = _dims(node, operands(node)[0], len(node.args[1]))
    weights = "".join(f", {weight}" for _ in operands(node)[1:])
    return f"{x}{weights} -> {x}, {statistics}, {statistics}"


def _layer_norm_backward(node: Call) -> str:
    x, statistics, weight = _dims(node, operands(node)[0], len(node.args[2]))
    weights = "".join(f", {weight}" for _ in operands(node)[4:])
    made: list[bool] = node.args[7]
    outputs = [text if m else "1" for text, m in zip((x, weight, weight), made, strict=True)]
    return f"{x}, {x}, {statistics}, {statistics}{weights} -> {', '.join(outputs)} | ~0"


rules(
    {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
    }
)

CONTIGUOUS[aten.native_layer_norm_backward.default] = (2, 3)  # mean and reciprocal deviation, on a CPU
