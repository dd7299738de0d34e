"""Layers whose forward pass can pass a workspace on to the backward pass, which would otherwise compute it again.

The backward pass must run on the same tensors. Tensors computed alike count as the same: a parameter gathered for the
forward pass and again for the backward pass is one tensor here. If the backward pass recomputes an operand, nothing is
kept: to keep a workspace would need more memory than the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

import tutti.nn.experts.experts
import tutti.nn.lstm  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import Call
from tutti.ops.recurrent import lstm_workspace
from tutti.ops.registry import operands, shape_of

ops = torch.ops.tutti


@dataclass(frozen=True)
class WorkspaceRule:
    """Replacements for a forward operator and the backward operator that repeats it.

    gradients: positions of gradients among the backward operator's arguments; the others are those of the forward
    operator. outputs: the outputs of `training` that `backward` needs. multiple_outputs: whether the original forward
    operator has several outputs. size: bytes of the workspace of a call of the forward operator.
    """

    repeating: Any
    gradients: slice
    training: Any
    backward: Any
    outputs: tuple[int, ...]
    multiple_outputs: bool
    size: Callable[[Call], int]


def _lstm_bytes(forward: Call) -> int:
    x, _, recurrent_weight = operands(forward)[:3]
    return lstm_workspace(shape_of(x), shape_of(recurrent_weight)[-1])


def _experts_bytes(forward: Call) -> int:
    """The rows of the first product: one for each token and choice."""
    x, index, _, up = operands(forward)[:4]
    return prod(shape_of(index)) * shape_of(up)[1] * x.meta["val"].dtype.itemsize


LAYERS: dict[Any, WorkspaceRule] = {
    ops.lstm_layer.default: WorkspaceRule(
        ops.lstm_layer_backward.default, slice(7, 10),
        ops.lstm_layer_training.default, ops.lstm_layer_backward_kept.default, (0, 1, 2, 3), multiple_outputs=True,
        size=_lstm_bytes,
    ),
    ops.experts.default: WorkspaceRule(
        ops.experts_backward.default, slice(0, 1),
        ops.experts_training.default, ops.experts_backward_kept.default, (1,), multiple_outputs=False,
        size=_experts_bytes,
    ),
}  # fmt: skip
KEEPING = {target for rule in LAYERS.values() for target in (rule.training, rule.backward)}
FORWARD_OF = {rule.repeating: target for target, rule in LAYERS.items()}


def workspace_pairs(graph: fx.Graph) -> Iterator[tuple[Call, Call, WorkspaceRule]]:
    """Calls of the forward pass, the calls of the backward pass that can use their workspaces, and their rules."""
    if not any(node.target in FORWARD_OF for node in graph.nodes):
        return
    numbers, recomputed = _numbered(graph), _recomputed(graph)
    layers: dict[tuple, Call] = {(n.target, _key(n.args, numbers)): n for n in graph.nodes if n.target in LAYERS}
    for node in [n for n in graph.nodes if n.target in FORWARD_OF]:
        target = FORWARD_OF[node.target]
        rule, args = LAYERS[target], list(node.args)
        del args[rule.gradients]
        forward = layers.get((target, _key(tuple(args), numbers)))
        repeated = any(recomputed[x] for x in node.all_input_nodes if x not in node.args[rule.gradients])
        if forward is not None and not repeated:
            yield forward, node, rule


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
