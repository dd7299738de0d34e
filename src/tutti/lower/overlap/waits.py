"""Waits: start a collective where it stands, and await it where its completion is needed."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.memory.aliasing import overwritten
from tutti.lower.memory.inplace import written
from tutti.lower.overlap.compute_units import Unit

UNDER_WAY = 8  # collectives on an axis: about those of one layer. Earlier ones are awaited, so that their operands go


def insert_waits(graph: fx.Graph, units: list[Unit]) -> None:
    """Await each collective in front of the unit that first reads its result or overwrites its operand, in place.

    units: units of the graph, in its order. A collective whose result is returned and not read is awaited when
    `UNDER_WAY` others have begun on its axis behind it, at the latest at the end.
    """
    output = graph.output_node()
    of = {node: unit for unit in units for node in unit}
    at = {node: i for i, node in enumerate(graph.nodes)}
    overwriting: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for place in overwritten(node):
            overwriting[place].append(node)
    collectives = [n for n in graph.nodes if n.target in COLLECTIVES]
    later = _later(collectives)
    for node in collectives:
        readers = list(node.users)
        ends = [*readers, *(write for x in _looks_at(node) for write in overwriting[x])]
        first = min((n for n in ends if at[n] > at[node]), key=at.__getitem__, default=output)
        if first is output:
            first = later.get(node, output)
        before = of[first][0] if first in of else first
        with graph.inserting_before(before):
            over = graph.call_function(wait, (node,))
        over.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, over)


def _later(collectives: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return for each collective the one that begins `UNDER_WAY` places behind it on its axis, if there is one."""
    by_axis: dict[str, list[fx.Node]] = defaultdict(list)
    for node in collectives:
        by_axis[str(node.args[1])].append(node)
    return {a: b for line in by_axis.values() for a, b in zip(line, line[UNDER_WAY:], strict=False)}


def _looks_at(collective: fx.Node) -> list[fx.Node]:
    """Return the inputs whose memory the operand of a collective may share."""
    inputs, todo = [], [collective.all_input_nodes[0]]
    while todo:
        x = todo.pop()
        if x.op == "placeholder":
            inputs.append(x)
        elif x.target is written:
            todo.append(x.args[1])  # pyright: ignore[reportArgumentType]
        elif x.target not in COLLECTIVES and len(x.all_input_nodes) == 1:  # perhaps a view
            todo += x.all_input_nodes
    return inputs
