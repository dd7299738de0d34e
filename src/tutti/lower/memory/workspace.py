"""Keep workspaces of forward passes whose backward pass would otherwise repeat them (`tutti.ops.workspaces`)."""

from __future__ import annotations

import operator

from torch import fx

from tutti.ops.workspaces import workspace_pairs


def keep_workspaces(graph: fx.Graph) -> None:
    """Pass intermediate values of forward passes to their backward passes, in place."""
    for forward, node, rule in list(workspace_pairs(graph)):
        if forward.target is not rule.training:
            forward.target = rule.training
            if not rule.multiple_outputs:
                _take_first(forward)
        with graph.inserting_before(node):
            parts = [graph.call_function(operator.getitem, (forward, i)) for i in rule.outputs]
        for n in parts:
            n.meta = {key: node.meta[key] for key in ("phase", "path", "label")} | {"val": None}
        node.target, node.args = rule.backward, (*node.args, *parts)


def _take_first(call: fx.Node) -> None:
    """Make readers of a call's result read its first output."""
    with call.graph.inserting_after(call):
        first = call.graph.call_function(operator.getitem, (call, 0))
    first.meta = dict(call.meta)
    call.meta["val"] = (call.meta["val"],)  # the workspace has no description
    call.replace_all_uses_with(first, lambda user: user is not first)
