"""Replace segments by calls of compiled functions; each kind is compiled once."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from tutti.analysis.segments import Segment, part_of, segments
from tutti.compile.compiled import Compiled
from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import replace_uses

# Compiled functions by the structure of their segment, shared by layers, ranks and Programs of this process.
COMPILED: dict[str, Compiled] = {}


def compile_segments(graph: fx.Graph, level: str) -> None:
    """Replace each segment by a call of its compiled function, in place."""
    replaced: dict[fx.Node, fx.Node] = {}
    parts = [part_of(calls) for calls in segments(graph, level)]
    for part in parts:
        replaced |= _called(part, COMPILED.setdefault(part.structure, Compiled(part.graph)))
    replace_uses(replaced)
    for part in parts:
        for node in reversed(part.calls):
            graph.erase_node(node)


def _called(part: Segment, function: Callable) -> dict[fx.Node, fx.Node]:
    """Call a function after the calls that it replaces. Returns the new value of each result."""
    graph, results = part.calls[0].graph, {}
    with graph.inserting_after(part.calls[-1]):
        call = graph.create_node("call_function", function, tuple(part.inputs), name="segment")
    flops = sum(FLOPS[n.target](n) for n in part.calls if n.target in FLOPS)  # pyright: ignore[reportArgumentType]
    specs = tuple(n.meta["val"] for n in part.outputs)
    call.meta = {"val": specs, "label": "segment", "inside": part.calls, "flops": flops}
    for i, node in reversed(list(enumerate(part.outputs))):
        with graph.inserting_after(call):
            result = graph.call_function(operator.getitem, (call, i))
        result.meta, results[node] = dict(node.meta), result
    return results
