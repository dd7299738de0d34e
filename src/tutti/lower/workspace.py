"""Where a layer's forward and backward pass run on the same tensors, the second need not repeat the first."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import tutti.nn.experts
import tutti.nn.lstm  # noqa: F401  (registers the operators)

ops = torch.ops.tutti


@dataclass(frozen=True)
class Kept:
    """training: the forward pass that returns what the backward pass of this name wants, as these outputs of so many.

    same: of the backward pass' arguments, those of the forward pass.
    """

    training: Any
    backward: Any
    outputs: tuple[int, ...]
    several: bool  # whether the forward pass that keeps nothing has several outputs too
    same: Callable[[tuple], tuple]


# forward pass -> backward pass that repeats it, and what to put in their places
PAIRS: dict[Any, tuple[Any, Kept]] = {
    ops.lstm_layer.default: (
        ops.lstm_layer_backward.default,
        Kept(ops.lstm_layer_training.default, ops.lstm_layer_backward_kept.default, (0, 1, 2, 3), True,
             lambda args: (*args[:7], *args[10:])),
    ),
    ops.experts.default: (
        ops.experts_backward.default,
        Kept(ops.experts_training.default, ops.experts_backward_kept.default, (1,), False, lambda args: args[1:]),
    ),
}  # fmt: skip
KEEPING = {target for _, kept in PAIRS.values() for target in (kept.training, kept.backward)}


def keep_workspaces(graph: fx.Graph) -> None:
    """Hand what the forward pass has in its hands to the backward pass, in place."""
    layers = {(n.target, n.args): n for n in graph.nodes if n.target in PAIRS}
    backwards = {backward: (forward, kept) for forward, (backward, kept) in PAIRS.items()}
    for node in [n for n in graph.nodes if n.target in backwards]:
        target, kept = backwards[node.target]
        forward = layers.get((target, kept.same(node.args)))
        if forward is None:
            continue
        if forward.target is target and not kept.several:
            with graph.inserting_after(forward):
                result = graph.call_function(operator.getitem, (forward, 0))
            forward.replace_all_uses_with(result, lambda user, result=result: user is not result)
            result.meta = dict(forward.meta)
        forward.target = kept.training
        with graph.inserting_before(node):
            parts = [graph.call_function(operator.getitem, (forward, i)) for i in kept.outputs]
        for n in parts:
            n.meta = {key: node.meta[key] for key in ("phase", "path", "label")} | {"val": None}
        node.target, node.args = kept.backward, (*node.args, *parts)
