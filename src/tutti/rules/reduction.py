"""Reductions: a reduced dim that is split leaves a partial result."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import rules

aten = torch.ops.aten


def _reduce(operation: str, linear: bool) -> Callable[[Call], str]:
    def notation(node: Call) -> str:
        rank = len(node.args[0].meta["val"].shape)
        dims = node.args[1] if len(node.args) > 1 and node.args[1] not in (None, []) else list(range(rank))
        dims = {d % rank for d in ([dims] if isinstance(dims, int) else dims)} if rank else set()
        keep = len(node.args) > 2 and node.args[2]
        left = [f"{c}:{operation}" if i in dims else c for i, c in enumerate(ascii_lowercase[:rank])]
        right = ["1" if i in dims else c for i, c in enumerate(ascii_lowercase[:rank]) if keep or i not in dims]
        return f"{' '.join(left)} -> {' '.join(right)}" + (" | ~0" if linear else "")

    return notation


rules(
    {
        aten.sum.default: _reduce("sum", linear=True),
        aten.sum.dim_IntList: _reduce("sum", linear=True),
        aten.mean.default: _reduce("avg", linear=True),
        aten.mean.dim: _reduce("avg", linear=True),
        aten.amax.default: _reduce("max", linear=False),
        aten.amin.default: _reduce("min", linear=False),
    }
)
