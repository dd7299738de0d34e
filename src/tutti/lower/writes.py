"""Who writes into what: calls that change their operands, and who else reads these."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tutti.graph.costs import FREE
from tutti.lower.transfers import store
from tutti.nn.adam import IN_PLACE

aten = torch.ops.aten

# operator -> positions of the tensors, or lists of tensors, that it writes into
WRITES: dict[Any, tuple[int, ...]] = {
    **{in_place: positions for in_place, _, positions in IN_PLACE.values()},
    aten.copy_.default: (0,),
    store: (0,),
}
TURNING = {aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default}  # views in another order


def overwritten(node: fx.Node) -> list[fx.Node]:
    """The inputs that a call writes into, or into parts of."""
    places: list[fx.Node] = []
    for at in WRITES.get(node.target, ()):
        place: Any = node.args[at]
        places += place if isinstance(place, list) else [place]
    return [root for root in map(root_of, places) if root.op == "placeholder"]


def root_of(node: fx.Node) -> fx.Node:
    """What a view looks at; itself of all else."""
    while node.op == "call_function" and node.target in FREE and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    return node


def behind_views(node: fx.Node) -> set[fx.Node]:
    """All that reads a value, itself or a view of it; views are not among them."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.target in FREE:
                todo.append(user)
            else:
                found.add(user)
    return found
