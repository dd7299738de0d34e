"""Where an LSTM layer's forward and backward pass run on the same tensors, the second need not repeat the first."""

from __future__ import annotations

import operator

import torch
from torch import fx

import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.graph.step_graph import Call

ops = torch.ops.tutti


def keep_workspaces(graph: fx.Graph) -> None:
    """Hand the forward pass' results and workspace to the backward pass, in place."""
    layers = {n.args: n for n in graph.nodes if n.target is ops.lstm_layer.default}
    node: Call
    for node in [n for n in graph.nodes if n.target is ops.lstm_layer_backward.default]:
        forward = layers.get((*node.args[:7], *node.args[10:]))
        if forward is None:
            continue
        forward.target = ops.lstm_layer_training.default
        with graph.inserting_before(node):
            kept = [graph.call_function(operator.getitem, (forward, i)) for i in range(4)]
        for n in kept:
            n.meta = {key: node.meta[key] for key in ("phase", "path", "label")} | {"val": None}
        node.target, node.args = ops.lstm_layer_backward_kept.default, (*node.args, *kept)
