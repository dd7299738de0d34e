"""Replace an occurrence of one traced function by another function."""

from __future__ import annotations

from typing import Any

from torch import fx

from tutti.ir.costs import FREE
from tutti.ir.op_info import FLOPS
from tutti.ir.step_graph import BACKWARD, FORWARD, ancestors
from tutti.tracing.rewrite.match import SubgraphMatcher
from tutti.tracing.trace.joint import Joint

Pairs = list[tuple[fx.Node, fx.Node]]  # (output of the occurrence, its replacement)


def rewrite(graph: fx.Graph, reference: Joint, new: Joint, search: SubgraphMatcher) -> bool:
    """Replace an occurrence of `reference` by `new`, in place.

    Returns False, and changes nothing, if other nodes read its intermediate values, or if an operand is computed only
    after a result is read.
    """
    mapping = search.mapping
    pairs: Pairs = [
        (mapping[a], b) for a, b in zip(reference.outputs, new.outputs, strict=True) if a in mapping and b is not None
    ]
    inputs = {b: mapping[a] for a, b in zip(reference.inputs, new.inputs, strict=True) if a in mapping}
    if any(x in search.taken for x in inputs.values()) or _is_read(search.taken, {old for old, _ in pairs}):
        return False
    needed = ancestors([b for _, b in pairs])
    places: dict[str, tuple[fx.Node, bool]] = {}
    for phase in (FORWARD, BACKWARD):
        calls = [n for n in needed if n.meta["phase"] == phase]
        if calls:
            reads = {x for n in calls for x in n.all_input_nodes if x.op == "placeholder"}
            if not reads <= inputs.keys():
                return False
            outputs = [old for old, _ in pairs if old.meta["phase"] == phase]
            place = _place([inputs[x] for x in reads], outputs, search.taken)
            if place is None:
                return False
            places[phase] = place
    for phase, (at, before) in places.items():
        outputs = [(old, b) for old, b in pairs if old.meta["phase"] == phase]
        taken = [n for n in sorted(search.taken) if n.meta.get("phase") == phase]
        origin = {"path": _path(taken, outputs[0][0])}
        if regions := [n.meta["checkpoint"] for n in taken if "checkpoint" in n.meta]:
            origin["checkpoint"] = regions[0]
        with graph.inserting_before(at) if before else graph.inserting_after(at):
            for node in new.graph.nodes:
                if node in needed and node.meta["phase"] == phase:
                    inputs[node] = graph.node_copy(node, inputs.__getitem__)
                    inputs[node].meta = {**node.meta, **origin}
        for old, b in outputs:
            old.replace_all_uses_with(inputs[b])
    for node in sorted(search.taken, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return True


def _path(taken: list[fx.Node], output: fx.Node) -> str:
    """Return the module path of the replaced nodes: that of the matrix product, if there is one."""
    return next((n for n in taken if n.target in FLOPS), output).meta["path"]


def _is_read(taken: set[fx.Node], outputs: set[fx.Node]) -> bool:
    """Return whether other nodes read an intermediate value. Views of operands do not count, as they may stay."""
    return any(not taken.issuperset(node.users) for node in taken - outputs if not _looks(node, taken))


def _looks(node: fx.Node, taken: set[fx.Node]) -> bool:
    return node.target in FREE and all(x not in taken or _looks(x, taken) for x in node.all_input_nodes)


def _place(reads: list[fx.Node], outputs: list[fx.Node], taken: set[fx.Node]) -> tuple[fx.Node, bool] | None:
    """Return an insertion point at which all operands are computed and no result is read, and whether it is before the
    node."""
    if not outputs:
        return None
    first: Any = min(outputs)
    last: Any = max(reads, default=first)
    if not first < last:
        return first, True
    readers = (user for old in outputs for user in old.users if user not in taken)
    return (last, False) if all(last < user for user in readers) else None
