"""Small Programs written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import FORWARD
from tutti.lower.program import Program
from tutti.plan.layouts.layout import Layout, Mesh

Shape = tuple[int, ...]


class Calls:
    """Appends calls to a graph, each with its local spec, a label and a phase."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.phase = graph, FORWARD

    def __call__(self, target, args: tuple, shape: Shape, dtype: torch.dtype = torch.float32, label: str = ""):
        node = self.graph.call_function(target, args)
        node.meta = {"val": Spec(shape, dtype), "label": label or node.name, "phase": self.phase, "path": ""}
        return node


def program(
    build: Callable[..., tuple], inputs: Mapping[str, Shape], mesh: Mesh, rank: int = 0, dtype=torch.float32
) -> Program:
    """The Program of `build(calls, *inputs) -> outputs`. inputs: name ("param:w") -> local shape."""
    graph, nodes = fx.Graph(), []
    for name, shape in inputs.items():
        node = graph.placeholder(name.replace(":", "_"))
        node.meta = {"val": Spec(shape, dtype), "label": name, "input": name, "phase": FORWARD, "path": ""}
        nodes.append(node)
    graph.output(build(Calls(graph), *nodes))
    return Program(graph, mesh, rank, {n: (Layout(), Spec(s, dtype)) for n, s in inputs.items()}, {})
