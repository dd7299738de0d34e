"""Waits: start a collective where it stands, and await it where its completion is needed."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.inplace import written
from tutti.lower.units import Unit
from tutti.lower.writes import overwritten


def insert_waits(graph: fx.Graph, units: list[Unit]) -> None:
    """Await each collective in front of the unit that first reads its result or overwrites its operand, in place.

    units: of the graph, in its order. A collective whose result is not read is awaited at the end.
    """
    output = graph.output_node()
    of = {node: unit for unit in units for node in unit}
    at = {node: i for i, node in enumerate(graph.nodes)}
    overwriting: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for place in overwritten(node):
            overwriting[place].append(node)
    for node in [n for n in graph.nodes if n.target in COLLECTIVES]:
        readers = list(node.users)
        ends = [*readers, *(write for x in _looks_at(node) for write in overwriting[x])]
        first = min((n for n in ends if at[n] > at[node]), key=at.__getitem__, default=output)
        before = of[first][0] if first in of else first
        with graph.inserting_before(before):
            over = graph.call_function(wait, (node,))
        over.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, over)


def _looks_at(collective: fx.Node) -> list[fx.Node]:
    """The inputs in whose memory a collective's operand may be."""
    found, todo = [], [collective.all_input_nodes[0]]
    while todo:
        x = todo.pop()
        if x.op == "placeholder":
            found.append(x)
        elif x.target is written:
            todo.append(x.args[1])  # pyright: ignore[reportArgumentType]
        elif x.target not in COLLECTIVES and len(x.all_input_nodes) == 1:  # perhaps a view
            todo += x.all_input_nodes
    return found
