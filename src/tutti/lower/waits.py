"""Waits: a collective is begun where it stands, and waited for where something needs that it is over."""

from __future__ import annotations

from torch import fx

from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.units import Unit, overwritten


def insert_waits(graph: fx.Graph, units: list[Unit]) -> None:
    """Wait for each collective in front of the unit that reads its result first, or overwrites what it sends; in place.

    units: those of the graph, in its order. What nobody reads is waited for at the end.
    """
    output = graph.output_node()
    of = {node: unit for unit in units for node in unit}
    at = {node: i for i, node in enumerate(graph.nodes)}
    overwriting = {place: node for node in graph.nodes for place in overwritten(node)}
    for node in [n for n in graph.nodes if n.target in COLLECTIVES]:
        readers = list(node.users)
        ends = [*readers, *(overwriting[x] for x in _looks_at(node) if x in overwriting)]
        first = min((n for n in ends if at[n] > at[node]), key=at.__getitem__, default=output)
        before = of[first][0] if first in of else first
        with graph.inserting_before(before):
            over = graph.call_function(wait, (node,))
        over.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, over)


def _looks_at(collective: fx.Node) -> list[fx.Node]:
    """The inputs in whose memory a collective's operand may lie."""
    found, todo = [], [collective.all_input_nodes[0]]
    while todo:
        x = todo.pop()
        if x.op == "placeholder":
            found.append(x)
        elif x.target not in COLLECTIVES and len(x.all_input_nodes) == 1:  # perhaps a view
            todo += x.all_input_nodes
    return found
