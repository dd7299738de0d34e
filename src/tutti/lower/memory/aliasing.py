"""Tables of calls that write into operands, and of calls that return views of their operands."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

from tutti.ir.costs import FREE
from tutti.lower.memory.transfers import store
from tutti.lower.shard import dense
from tutti.nn.adam import IN_PLACE
from tutti.nn.attention import paged_write

aten = torch.ops.aten

# operator -> the operator that writes the same rows into its first operand
ROWS = {**paged_write.IN_PLACE, aten.index_put.default: aten.index_put_.default}

# operator -> positions of the tensors, or lists of tensors, it writes
WRITES: dict[Any, tuple[int, ...]] = {
    **{in_place: positions for in_place, _, positions in IN_PLACE.values()},
    **dict.fromkeys(ROWS.values(), (0,)),
    aten.copy_.default: (0,),
    aten.add_.Tensor: (0,),
    store: (0,),
}
TURNING = {aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default}  # views with permuted strides


def looks(node: fx.Node) -> bool:
    """Return whether a call may return a view of its first operand. A reshape may."""
    return node.op == "call_function" and bool(node.all_input_nodes) and _looks(node.target)


@cache
def _looks(target: Any) -> bool:
    if target in FREE or target is dense:
        return True
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(x.alias_info is not None and not x.alias_info.is_write for x in returns)


def overwritten(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that a call writes into, fully or partly."""
    places: list[fx.Node] = []
    for at in WRITES.get(node.target, ()):
        place: Any = node.args[at]
        places += place if isinstance(place, list) else [place]
    return [root for root in map(root_of, places) if root.op == "placeholder"]


def root_of(node: fx.Node) -> fx.Node:
    """Return the base of a view, also of one output of a split; the node itself if it is not a view."""
    while looks(node):
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not looks(source):
            return node
        node = source
    return node


def behind_views(node: fx.Node) -> set[fx.Node]:
    """Return all readers of a value, directly or through views. Views are not included."""
    readers: set[fx.Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if looks(user):
                todo.append(user)
            else:
                readers.add(user)
    return readers
