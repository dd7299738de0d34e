"""Matrix products."""

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import operands, rules

aten = torch.ops.aten


def _addmm(node: Call) -> str | None:
    m, n = node.meta["val"].shape
    added = {(n,): "n", (1, n): "1 n", (m, n): "m n"}.get(operands(node)[0].meta["val"].shape)
    return added and f"+{added}, m k, k n -> m n | ~01 ~02"


rules(
    {
        aten.mm.default: "m k, k n -> m n | ~0 ~1",
        aten.bmm.default: "b m k, b k n -> b m n | ~0 ~1",
        aten.addmm.default: _addmm,
        aten.mv.default: "m k, k -> m | ~0 ~1",
        aten.dot.default: "k, k -> | ~0 ~1",
    }
)
