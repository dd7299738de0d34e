"""In-place updates: no second copy of parameters and optimizer state.

Parameters of a kind are updated by calls that write into many of them. A rank that updates its shard of a parameter
which it stores unsharded writes into that slice, or into a copy if the slice is not contiguous; shards gathered from
all ranks are then written into the parameter, bucket by bucket. Results of other optimizers are copied into their
inputs as soon as they are computed. Rows of a paged cache or a replay are written into it.

If nothing couples all gradients, such as their global norm, updates run in pieces during the backward pass: each piece
when its gradients are ready and the old parameters are no longer read, so gradients are freed before others are made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti.ir.costs import FREE
from tutti.ir.step_graph import UPDATE, Call, replace_uses
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.memory.aliasing import ROWS, WRITES, behind_views, looks, overwritten, root_of
from tutti.lower.memory.early_updates import early
from tutti.lower.memory.transfers import TRANSFERS, store
from tutti.lower.overlap.order import ARRANGING, advance, sort
from tutti.nn.adam import IN_PLACE
from tutti.plan.layouts.price import PIECE

aten = torch.ops.aten
GRADIENT = 1  # index of the gradient among the operands of an update


def written(call: None, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, after a call that wrote into it."""
    return tensor


def update_in_place(graph: fx.Graph) -> None:
    """Make updates write into the inputs that they replace, if nothing reads these afterwards."""
    _write_rows(graph)
    _update_together(graph)
    _write_back(graph)
    _let_go(graph)


def _write_rows(graph: fx.Graph) -> None:
    """Write rows into the input that the result replaces instead of copying the input."""
    *_, output = graph.nodes
    last = _last_reads(graph)
    names = dict(zip(output.args[0], output.meta.get("names", ()), strict=False))
    for target, in_place in ROWS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            old = node.args[0]
            if last.get(old) is not node or not _may_go(old) or names.get(node) != old.meta.get("input"):
                continue
            sources = [root_of(x) for x in pytree.tree_leaves(node.args[1:]) if isinstance(x, fx.Node)]
            if old in sources or [root_of(x) for x in output.args[0]].count(node) > 1:
                continue  # rows that overlap their source, or a result that the next call would overwrite
            with graph.inserting_before(node):
                call = graph.call_function(in_place, node.args)
                new = graph.call_function(written, (call, old))
            call.meta = {key: node.meta[key] for key in ("phase", "path", "label")}
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _update_together(graph: fx.Graph) -> None:
    """Merge all updates of a kind in a piece into one call."""
    updates = _updates(graph)
    last, ready, used = _last_reads(graph), _ready(graph, updates), _used(graph, updates)
    at = {node: i for i, node in enumerate(graph.nodes)}
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in IN_PLACE:
            _, lists, targets = IN_PLACE[node.target]
            writable = [node.args[i] for i in targets if _may_go(node.args[i])]
            if writable and all(last[x] is node for x in writable):
                _copy_parts(graph, node, targets, last)
                groups[node.target, node.args[lists:], tuple(node.kwargs.items())].append(node)
    pieces = [(key, piece) for key, nodes in groups.items() for piece in _pieces(nodes, ready, used)]
    replaced: dict[fx.Node, fx.Node] = {}
    for (target, numbers, hyper), nodes in pieces:
        nodes.sort(key=at.__getitem__)
        in_place, lists, targets = IN_PLACE[target]
        columns = [list(column) for column in zip(*(n.args[:lists] for n in nodes), strict=True)]
        with graph.inserting_after(nodes[-1]):
            call = graph.call_function(in_place, (*columns, *numbers), dict(hyper))
        call.meta = {key: nodes[-1].meta[key] for key in ("phase", "path", "label")}
        for node in nodes:
            for part in list(node.users):  # getitem
                old = node.args[targets[part.args[1]]]
                with graph.inserting_after(call):
                    new = graph.call_function(written, (call, old))
                new.meta, replaced[part] = dict(part.meta), new
    replace_uses(replaced)
    for node in [*replaced, *(node for _, nodes in pieces for node in nodes)]:
        graph.erase_node(node)
    if groups:
        sort(graph)


def _may_go(node: fx.Node) -> bool:
    """Return whether it is an input that this graph may write into."""
    return node.op == "placeholder" and "read_later" not in node.meta


def _pieces(nodes: list[fx.Node], ready: dict[fx.Node, int], used: dict[fx.Node, int]) -> Iterator[list[fx.Node]]:
    """Updates that become one call: those ready at the same time, and more until the piece is large enough.

    Calls that an update waits for do not use results of its piece, so the merged calls have an order. Between the
    updates of a piece, nothing reads what another update overwrites: those of an optimizer's step lie together.
    """
    piece: list[fx.Node] = []
    size = first_use = 0
    for node in sorted(nodes, key=ready.__getitem__):
        is_full = size >= PIECE and ready[piece[-1]] < ready[node]
        if piece and (is_full or first_use <= ready[node]):
            yield piece
            piece, size = [], 0
        first_use = min(first_use, used[node]) if piece else used[node]
        size += _gradient_bytes(node)
        piece.append(node)
    yield piece


def _gradient_bytes(update: Call) -> int:
    return update.args[GRADIENT].meta["val"].bytes


def _updates(graph: fx.Graph) -> set[fx.Node]:
    """Return the update calls on the device, and the calls that only prepare gradients for them."""
    calls: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target in COLLECTIVES or node.target in TRANSFERS or "host" in node.meta:
            continue
        arranges = node.target in ARRANGING and node.users and all(user in calls for user in node.users)
        if node.meta.get("phase") == UPDATE or arranges:
            calls.add(node)
    return calls


def _ready(graph: fx.Graph, updates: Collection[fx.Node]) -> dict[fx.Node, int]:
    """For each call, the index of the last call outside any update that must precede it."""
    ready: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        before = [ready[x] for x in node.all_input_nodes]
        if node.target in IN_PLACE:
            homes = [node.args[place] for place in IN_PLACE[node.target][2]]
        else:
            homes = overwritten(node)
        before += [ready[x] for home in homes for x in behind_views(home) if x in ready]
        ready[node] = max(before, default=-1) if node in updates else -1 if node.op == "placeholder" else i
    return ready


def _used(graph: fx.Graph, updates: Collection[fx.Node]) -> dict[fx.Node, int]:
    """For each call, the index of the first call outside any update that depends on it."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    used: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        used[node] = min((used[user] if user in updates else at[user] for user in node.users), default=len(at))
    return used


def _let_go(graph: fx.Graph) -> None:
    """Move updates that do not depend on the last gradient forward, with all that they need."""
    updates = _updates(graph)
    ready = _ready(graph, updates)
    writes = [node for node in graph.nodes if node in updates and node.target in WRITES]
    end = max((ready[node] for node in writes), default=-1)
    moved = {node for node in writes if ready[node] < end}
    for node in reversed(graph.nodes):
        if node in moved:
            moved.update(updates.intersection(node.all_input_nodes))
    if moved:
        early(graph, moved)


def _last_reads(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last reader of each input, directly or through a view."""
    roots: dict[fx.Node, list[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            roots[node] = [node]
        looked_at = [x for read in node.all_input_nodes for x in roots.get(read, ())]
        last.update((x, node) for x in looked_at)
        if looks(node):
            roots[node] = looked_at
    return last


def _copy_parts(graph: fx.Graph, node: fx.Node, targets: Sequence[int], last: dict[fx.Node, fx.Node]) -> None:
    """Make a call write into copies of targets that are neither inputs nor contiguous slices read by it alone."""
    for i in targets:
        part: Any = node.args[i]
        run = part.target is aten.slice.Tensor and part.args[1] == 0 and last.get(part.args[0]) is node
        if not _may_go(part) and not (run and "read_later" not in part.args[0].meta):
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
            copy.meta = {**node.meta, "val": part.meta["val"]}
            node.args = (*node.args[:i], copy, *node.args[i + 1 :])


def _write_back(graph: fx.Graph) -> None:
    """Copy results of updates into the inputs that they replace, as soon as they are computed."""
    *_, output = graph.nodes
    at, last = {node: i for i, node in enumerate(graph.nodes)}, _last_reads(graph)
    inputs = {node.meta["input"]: node for node in graph.nodes if node.op == "placeholder" and "input" in node.meta}
    results, gathered, dead = list(output.args[0]), [], []
    for i, (name, value) in enumerate(zip(output.meta.get("names", ()), results, strict=False)):
        old = inputs.get(name)
        if old is None or not _may_go(old) or value.meta.get("phase") != UPDATE or value.target in (written, store):
            continue  # a pipeline's backward pass may still read the old value
        if old in last and at[last[old]] > at[_base_call(_uncast(value))]:
            continue
        call = _written_into(graph, old, value)
        with graph.inserting_before(output):
            results[i] = graph.call_function(written, (call, old))
        results[i].meta = {**value.meta, "val": old.meta["val"]}
        if value.target in FREE:
            gathered.append(call)
        dead.append(value)
    output.args = (tuple(results),)
    advance(graph, gathered)
    for value in dead:
        if not value.users:
            graph.erase_node(value)


def _base_call(value: Any) -> fx.Node:
    """Return the call whose result a value is a view of."""
    while looks(value) and value.args[0].op == "call_function":
        value = value.args[0]
    return value


def _uncast(value: Any) -> Any:
    """The value before a cast that only this reader uses."""
    return value.args[0] if value.target is aten._to_copy.default and len(value.users) == 1 else value


def _written_into(graph: fx.Graph, old: fx.Node, value: Any) -> fx.Node:
    """A call that copies a value into an input. Skips casts and reshapes of the value, which would copy."""
    value = _uncast(value)
    with graph.inserting_after(value):
        if value.target is aten.reshape.default and len(value.users) == 1:
            value = value.args[0]
            place = graph.call_function(aten.reshape.default, (old, list(value.meta["val"].shape)))
            place.meta = {**value.meta}
        else:
            place = old
    with graph.inserting_after(place if place is not old else value):
        call = graph.call_function(aten.copy_.default, (place, value))
    call.meta = dict(value.meta)
    return call
