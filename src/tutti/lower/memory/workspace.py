"""Keep workspaces of forward passes whose backward pass would otherwise repeat them.

The backward pass must run on the same tensors. Tensors computed alike count as the same: a parameter gathered for the
forward pass and again for the backward pass is one tensor here. If the backward pass recomputes an operand, nothing is
kept: to keep a workspace would need more memory than the operand.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import tutti.nn.experts.experts
import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call

ops = torch.ops.tutti


@dataclass(frozen=True)
class WorkspaceRule:
    """Replacements for a forward operator and the backward operator that repeats it.

    gradients: positions of gradients among the backward operator's arguments; the others are those of the forward
    operator. outputs: the outputs of `training` that `backward` needs. multiple_outputs: whether the original forward
    operator has several outputs.
    """

    repeating: Any
    gradients: slice
    training: Any
    backward: Any
    outputs: tuple[int, ...]
    multiple_outputs: bool


LAYERS: dict[Any, WorkspaceRule] = {
    ops.lstm_layer.default: WorkspaceRule(
        ops.lstm_layer_backward.default, slice(7, 10),
        ops.lstm_layer_training.default, ops.lstm_layer_backward_kept.default, (0, 1, 2, 3), multiple_outputs=True,
    ),
    ops.experts.default: WorkspaceRule(
        ops.experts_backward.default, slice(0, 1),
        ops.experts_training.default, ops.experts_backward_kept.default, (1,), multiple_outputs=False,
    ),
}  # fmt: skip
KEEPING = {target for rule in LAYERS.values() for target in (rule.training, rule.backward)}
FORWARD_OF = {rule.repeating: target for target, rule in LAYERS.items()}


def keep_workspaces(graph: fx.Graph) -> None:
    """Pass intermediate values of forward passes to their backward passes, in place."""
    numbers, recomputed = _numbered(graph), _recomputed(graph)
    layers: dict[tuple, Call] = {(n.target, _key(n.args, numbers)): n for n in graph.nodes if n.target in LAYERS}
    for node in [n for n in graph.nodes if n.target in FORWARD_OF]:
        target = FORWARD_OF[node.target]
        rule, args = LAYERS[target], list(node.args)
        del args[rule.gradients]
        forward = layers.get((target, _key(tuple(args), numbers)))
        if forward is None or any(recomputed[x] for x in node.all_input_nodes if x not in node.args[rule.gradients]):
            continue
        if forward.target is target:
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


def _numbered(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number values: nodes that compute the same value have the same number, as operators have no side effects."""
    numbers: dict[fx.Node, int] = {}
    number_of: dict[tuple, int] = {}
    for node in graph.nodes:
        key = (
            (node,)
            if node.op != "call_function"
            else (node.target, _key(node.args, numbers), _key(node.kwargs, numbers))
        )
        numbers[node] = number_of.setdefault(key, len(number_of))
    return numbers


def _recomputed(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Return whether each node repeats a forward call, or is computed from such nodes."""
    recomputed: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        recomputed[node] = "recompute" in node.meta or any(recomputed[x] for x in node.all_input_nodes)
    return recomputed


def _key(arguments: Any, numbers: dict[fx.Node, int]) -> str:
    return repr(fx.map_arg(arguments, lambda n: ("node", numbers[n])))  # pyright: ignore[reportArgumentType]
