"""Compute a loss and its gradients in one pass, if the gradient of the loss does not depend on the loss."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tutti.ir.losses import made_with
from tutti.ir.step_graph import Call, ancestors

ops = torch.ops.tutti


def make_losses_in_one_pass(graph: fx.Graph) -> None:
    """Make a linear layer's cross-entropy and its gradients share their logits, in place.

    Operands of the gradient, such as the number of labels, are moved before it.
    """
    forward: Call
    for forward in graph.find_nodes(op="call_function", target=ops.linear_logsumexp.default):
        node = made_with(forward)
        if node is None:
            continue
        *gradients, _, wanted = node.args
        for x in sorted(x for x in ancestors(gradients[:2]) if forward < x):
            forward.prepend(x)
        with graph.inserting_before(forward):
            call = graph.call_function(ops.linear_logsumexp_with_gradients.default, (*gradients, wanted))
        call.meta = {**forward.meta, "val": (*forward.meta["val"], *node.meta["val"])}
        for old, first in ((forward, 0), (node, len(forward.meta["val"]))):
            part: Call
            for part in list(old.users):
                if part.target is operator.getitem:
                    part.args = (call, part.args[1] + first)
                    call.append(part)
        graph.erase_node(node)
        graph.erase_node(forward)
