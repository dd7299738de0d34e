"""Optimizer updates in place: all parameters of a kind in one call, without a second copy of parameters and state."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from tutti.lower.order import sort
from tutti.nn.adam import IN_PLACE


def written(call: None, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, after the call that has written into it."""
    return tensor


def update_in_place(graph: fx.Graph) -> None:
    """Replace updates of inputs that nobody else reads from then on by one call for all of them."""
    last = {x: node for node in graph.nodes for x in node.all_input_nodes}
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in IN_PLACE:
            _, lists, targets = IN_PLACE[node.target]
            if all(node.args[i].op == "placeholder" and last[node.args[i]] is node for i in targets):
                groups[node.target, node.args[lists:], tuple(node.kwargs.items())].append(node)
    for (target, numbers, hyper), nodes in groups.items():
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
                new.meta = dict(part.meta)
                part.replace_all_uses_with(new)
                graph.erase_node(part)
            graph.erase_node(node)
    if groups:
        sort(graph)
