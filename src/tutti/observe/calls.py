"""The calls of a Program whose times are recorded: all but views. A compiled function is one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.op_info import FLOPS
from tutti.lower.collectives import COLLECTIVES, wait
from tutti.lower.memory.transfers import TRANSFERS
from tutti.lower.program import Program

MATMULS, REST, WAIT = "matmuls", "rest", "wait"
TITLES = {MATMULS: "matmuls", REST: "other operators"}  # titles of the kinds of computation


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call.

    kind: `matmuls` for matrix products, alone or fused with others; `rest` for other computations; the kind of a
    collective or transfer; `wait` for the end of an asynchronous collective. axis: the mesh axis of a communication.
    flops, bytes: computed and sent by this rank. nodes: the number of calls of the uncompiled Program it stands for,
    with the views before it. ends: for a `wait`, the index of the call that started the collective.
    """

    label: str
    phase: str
    kind: str
    axis: str = ""
    flops: int = 0
    bytes: int = 0
    nodes: int = 1
    ends: int = -1

    @property
    def computes(self) -> bool:
        return self.kind in (MATMULS, REST)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value != getattr(RecordedCall, key, None)}


def calls_of(program: Program) -> dict[fx.Node, RecordedCall]:
    """The recorded calls of a Program as it runs, in order."""
    calls: dict[fx.Node, RecordedCall] = {}
    order: dict[fx.Node, int] = {}
    nodes = 0
    for node in program.graph.nodes:
        inside = node.meta.get("inside", [node])
        if node.op != "call_function" or _taken_out(node):
            continue
        nodes += len(inside)
        if node.target in FREE:
            continue
        order[node] = len(order)
        calls[node], nodes = _call(program, node, inside, nodes), 0
        if node.target is wait:
            calls[node] = replace(calls[node], ends=order[node.args[0]])
    return calls


def count(program: Program) -> int:
    """The number of calls of a Program before compilation."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and not _taken_out(node)]
    return sum(len(node.meta.get("inside", [node])) for node in calls)


def _call(program: Program, node: Any, inside: list[fx.Node], nodes: int) -> RecordedCall:
    label, phase = node.meta.get("label", node.name), node.meta.get("phase", "")
    if node.target in COLLECTIVES:
        collective = program.collective(node)
        return RecordedCall(collective.label, phase, collective.kind, collective.axis, 0, collective.bytes, nodes)
    if node.target is wait:
        return RecordedCall(label, phase, WAIT, nodes=nodes)
    if node.target in TRANSFERS:
        return RecordedCall(label, phase, TRANSFERS[node.target], nodes=nodes)
    if "inside" not in node.meta:
        flops = FLOPS[node.target](node) if node.target in FLOPS else 0
    else:
        flops = node.meta["flops"]
        first, last = (str(n.meta.get("label", n.name)) for n in (inside[0], inside[-1]))
        label, phase = f"{first} ... {last}", inside[-1].meta.get("phase", "")
    return RecordedCall(label, phase, MATMULS if flops else REST, "", flops, 0, nodes)


def _taken_out(node: fx.Node) -> bool:
    """Whether a node only takes one result out of what a compiled function returns."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and "inside" in source.meta and node.target in FREE
