"""Fused attention: split over batch and heads; with grouped queries over groups or within each group."""

from __future__ import annotations

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import operands, rules

aten = torch.ops.aten


def _heads(q: Call, k: Call, causal: bool) -> tuple[str, str, str, str, dict[str, int]]:
    """Dims of q, k, v and the row statistics; g groups of r query heads share a key head."""
    rows = "s!" if causal else "s"
    groups = k.meta["val"].shape[1]
    sizes = {"g": groups, "r": q.meta["val"].shape[1] // groups}
    return f"b (g r) {rows} d!", "b g t! d!", "b g t! e!", f"b (g r) {rows}", sizes


def _mask(mask: Call, causal: bool) -> str:
    names = ["b", "(g r)", "s!" if causal else "s", "t!"]
    shape = mask.meta["val"].shape
    return " ".join("1" if n == 1 else c for c, n in zip(names[4 - len(shape) :], shape, strict=True))


def _attention(node: Call):
    q, k = operands(node)[:2]
    causal = len(node.args) > 4 and node.args[4] is True
    dims_q, dims_k, dims_v, rows, sizes = _heads(q, k, causal)
    mask = "".join(f", {_mask(m, causal)}" for m in operands(node)[3:])
    out = dims_q.replace("d!", "e!")
    return f"{dims_q}, {dims_k}, {dims_v}{mask} -> {out}, {rows}", sizes


def _attention_backward(node: Call):
    q, k = operands(node)[1:3]
    causal = node.args[7] is True
    dims_q, dims_k, dims_v, rows, sizes = _heads(q, k, causal)
    out = dims_q.replace("d!", "e!")
    mask = "".join(f", {_mask(m, causal)}" for m in operands(node)[6:])
    return (
        f"{out}, {dims_q}, {dims_k}, {dims_v}, {out}, {rows}{mask} -> {dims_q}, {dims_k}, {dims_v} | ~0",
        sizes,
    )


rules(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    }
)
