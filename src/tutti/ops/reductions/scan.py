"""Scans along a dim: each rank scans its part and combines it with the totals of the parts before it."""

from __future__ import annotations

import torch

from tutti.ir.op_info import LOCAL, SENDS
from tutti.ir.step_graph import Call
from tutti.ops.registry import Cut, rules, specs
from tutti.ops.view import letters

aten = torch.ops.aten

# scan -> (scan of the own part, totals of the parts before it: (parts, ..., 1, ...)) -> scan of the whole dim
TOTALS = {
    aten.cumsum.default: lambda own, before: own + before.sum(0, dtype=own.dtype),
    aten.cumprod.default: lambda own, before: own * before.prod(0, dtype=own.dtype),
    aten.logcumsumexp.default: lambda own, before: torch.logaddexp(own, before.logsumexp(0)),
}


def _scan(mark: str, linear: str = ""):
    def notation(node: Call) -> str | None:
        dims = letters(node)
        if not dims:
            return None
        dims[node.args[1] % len(dims)] = f"z{mark}"
        line = " ".join(dims)
        return f"{line} -> {', '.join([line] * len(specs(node)))}{linear}"

    return notation


rules(
    {
        aten.cumsum.default: _scan("*", " | ~0"),
        aten.cumprod.default: _scan("*"),
        aten.logcumsumexp.default: _scan("*"),
        aten.cummax.default: _scan("!"),
        aten.cummin.default: _scan("!"),
    }
)


def _over_parts(scan, total):
    def local(here, x, dim, **kwargs):
        own = scan(x, dim, **kwargs)
        parts = here.all_gather(own.narrow(dim, own.shape[dim] - 1, 1), "z")
        return total(own, parts[: here.part("z")])  # the first part has none before it

    return local


def _sends(cut: Cut) -> list[tuple[str, int]]:
    out = cut.outputs[0]
    return [("all_gather", out.bytes // out.shape[cut.dim(0)])]


LOCAL |= {scan: _over_parts(scan, total) for scan, total in TOTALS.items()}
SENDS |= dict.fromkeys(TOTALS, _sends)
