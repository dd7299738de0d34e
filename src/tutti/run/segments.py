"""Segments: what a Program computes between two collectives, compiled as one function each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

from tutti import compat
from tutti.graph.costs import FLOPS
from tutti.graph.inline import inline
from tutti.graph.labels import layer_of
from tutti.graph.step_graph import Spec
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.inplace import written
from tutti.lower.transfers import TRANSFERS
from tutti.lower.workspace import KEEPING
from tutti.nn import random
from tutti.nn.adam import IN_PLACE
from tutti.run.position import HERE

SMALLEST = 3  # operators: what is smaller costs less to run than to call

# Compiled functions by the structure of their segment: shared by layers, by ranks and by Programs of this process.
COMPILED: dict[str, Callable] = {}

# What layers hand their backward passes has no shape that a compiler could know.
BREAKS = {*COLLECTIVES, wait, *TRANSFERS, *KEEPING, written, *(in_place for in_place, *_ in IN_PLACE.values())}


def inline_random(graph: fx.Graph) -> None:
    """Write out the random operator as arithmetic, so that the compiler fuses it with what uses it."""
    for node in [n for n in graph.nodes if n.target is torch.ops.tutti.uniform.default]:
        with graph.inserting_before(node):
            device = node.kwargs["device"]
            new = inline(graph, random.uniform, node.args, node.kwargs, device)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def compile_segments(graph: fx.Graph) -> None:
    """Replace each segment by a call of its compiled function, in place."""
    compat.tell_of_compilation(HERE.compiles)
    users = {n: set(n.users) for n in graph.nodes}
    for segment in list(segments(graph)):
        if len(segment) < SMALLEST:
            continue
        inside = set(segment)
        inputs = list(dict.fromkeys(x for n in segment for x in n.all_input_nodes if x not in inside))
        outputs = [n for n in segment if users[n] - inside and not isinstance(n.meta["val"], tuple)]
        part = _extract(segment, inputs, outputs)
        key = _structure(part, inputs)
        if key not in COMPILED:
            COMPILED[key] = torch.compile(fx.GraphModule({}, part), dynamic=False, fullgraph=True)
        _replace(graph, segment, COMPILED[key], inputs, outputs)


def segments(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The calls between two that break a compiled function, in order; where the graph was ordered by units
    (`run.overlap`), of one unit.

    With what is computed again of a layer a segment begins: in one with the forward pass the compiler would compute it
    there already, beside what reads the same, and keep it.
    """
    segment: list[fx.Node] = []
    layer = None  # of what was computed again last
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        ends = node.op == "output" or node.target in BREAKS or "host" in node.meta
        again = layer_of(node.meta["path"]) if "again" in node.meta else layer
        if ends or again != layer or (segment and segment[-1].meta.get("unit") != node.meta.get("unit")):
            layer = again
            yield segment
            segment = []
        if not ends:
            segment.append(node)


def _extract(segment: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    """The segment as a graph of its own, whose names depend on its structure alone."""
    part, mapping = fx.Graph(), {}
    for i, node in enumerate(inputs):
        mapping[node] = part.placeholder(f"in_{i}")
    for i, node in enumerate(segment):
        mapping[node] = part.node_copy(node, mapping.__getitem__)
        mapping[node].name = f"n_{i}"
        mapping[node].meta = {}
    part.output(tuple(mapping[n] for n in outputs))
    return part


def _structure(part: fx.Graph, inputs: list[fx.Node]) -> str:
    specs: list[Spec] = [n.meta["val"] for n in inputs]
    nodes = [(n.name, str(n.target), str(n.args), str(n.kwargs)) for n in part.nodes]
    return repr((specs, nodes))


def _replace(graph: fx.Graph, segment: list[fx.Node], function: Callable, inputs, outputs) -> None:
    last = segment[-1]
    with graph.inserting_after(last):
        call = graph.create_node("call_function", function, tuple(inputs), name="segment")
    flops = sum(FLOPS[n.target](n) for n in segment if n.target in FLOPS)  # pyright: ignore[reportArgumentType]
    call.meta = {"val": tuple(n.meta["val"] for n in outputs), "label": "segment", "inside": segment, "flops": flops}
    for i, node in reversed(list(enumerate(outputs))):
        with graph.inserting_after(call):
            part = graph.call_function(operator.getitem, (call, i))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
    for node in reversed(segment):
        graph.erase_node(node)
