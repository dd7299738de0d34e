"""Matrix products."""

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import operands, rules

aten = torch.ops.aten


def _addmm(node: Call) -> str | None:
    bias = operands(node)[0].meta["val"].shape
    rows = "m n" if len(bias) == 2 and bias[0] != 1 else "1 n" if len(bias) == 2 else "n"
    return f"+{rows}, m k, k n -> m n | ~01 ~02"


rules(
    {
        aten.mm.default: "m k, k n -> m n | ~0 ~1",
        aten.bmm.default: "b m k, b k n -> b m n | ~0 ~1",
        aten.addmm.default: _addmm,
        aten.mv.default: "m k, k -> m | ~0 ~1",
        aten.dot.default: "k, k -> | ~0 ~1",
    }
)
