"""Functionalization: in-place operators of a traced graph become pure ones."""

from __future__ import annotations

import torch
from torch import fx

from tutti import compat


def functionalize(traced: fx.GraphModule, fakes: list[torch.Tensor]) -> fx.GraphModule:
    """An equal graph without mutation. A second trace is paid only where there is something to remove.

    fakes: fake inputs of the graph, in order; their mode must be active. Nodes keep `phase` and `path`.
    """
    if not any(_mutates(node) for node in traced.graph.nodes):
        return traced
    return compat.trace(torch.func.functionalize(_Signing(traced).run), *fakes)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Signing(fx.Interpreter):
    """Runs a graph while another is traced, and signs the new nodes with the phase and path of the old."""

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        for node in reversed(compat.graph_being_traced().nodes):
            if "phase" in node.meta:
                break
            node.meta |= {key: n.meta[key] for key in ("phase", "path") if key in n.meta}
        return result
