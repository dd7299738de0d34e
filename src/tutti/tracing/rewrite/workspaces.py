"""Rewrite LSTM layers and experts as functions of their inputs only, like everything in a StepGraph."""

from __future__ import annotations

import operator

import torch
from torch import fx

import tutti.nn.experts.experts
import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call

aten, ops = torch.ops.aten, torch.ops.tutti


def without_workspaces(graph: fx.Graph) -> None:
    """Replace, in place, layers that save a workspace for their backward pass, and that pass, by ones that do not.

    torch's fused LSTM layers: see `tutti.nn.lstm`. Experts: see `tutti.nn.experts.experts`.
    """
    node: Call
    for node in list(graph.nodes):
        if node.target is aten.mkldnn_rnn_layer.default:
            node.target, node.args = ops.lstm_layer.default, node.args[:15]
            node.meta["val"] = node.meta["val"][:3]
        elif node.target is aten.mkldnn_rnn_layer_backward.default:
            *tensors, reverse, mode, hidden, layers, biases, _, both, sizes, first, _ = node.args
            options = (reverse, sizes, mode, hidden, layers, biases, both, first)
            node.target, node.args = ops.lstm_layer_backward.default, (*tensors[:7], *tensors[10:], *options)
        elif node.target is ops.experts_training.default:
            node.target, node.meta["val"] = ops.experts.default, node.meta["val"][0]
            for part in [n for n in node.users if n.args[1] == 0]:
                part.replace_all_uses_with(node)
                graph.erase_node(part)
        elif node.target is ops.experts_backward_kept.default:
            node.target, node.args = ops.experts_backward.default, node.args[:-1]
    for node in [n for n in graph.nodes if n.target is operator.getitem and not n.users]:  # the workspaces
        graph.erase_node(node)
