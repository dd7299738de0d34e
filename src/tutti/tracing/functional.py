"""Functionalization: in-place operators of a traced graph become pure ones."""

from __future__ import annotations

import torch
from torch import fx

from tutti.ir.step_graph import FORWARD
from tutti.tracing.trace import Traced, sign, trace


def functionalize(traced: Traced, fakes: list[torch.Tensor]) -> Traced:
    """An equal graph without mutation. Traces again only if there are mutations to remove.

    fakes: fake inputs of the graph, in order; their mode must be active. Nodes keep `phase` and `path`.
    """
    if not any(_mutates(node) for node in traced.graph.nodes):
        return traced
    again = _Signing(fx.GraphModule(traced.constants, traced.graph))
    return trace(torch.func.functionalize(again.run), *fakes)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Signing(fx.Interpreter):
    """Runs a graph under tracing, and gives the new nodes the marks of the old ones."""

    def run_node(self, n: fx.Node):
        if n.op == "call_function":
            kept = {key: n.meta[key] for key in ("path", "checkpoint", "grad", "differentiable") if key in n.meta}
            sign(
                **{
                    "path": "",
                    "checkpoint": None,
                    "differentiable": False,
                    "phase": n.meta.get("phase", FORWARD),
                    **kept,
                }
            )
        return super().run_node(n)
