"""Join small calls of a decoding step for a GPU, where a launch takes as long as a row: see `tutti.nn.rows_joined`."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import fx

import tutti.nn.rows_joined  # noqa: F401  (registers the operators)
from tutti.ir.step_graph import replace_uses
from tutti.lower.memory.aliasing import behind_views, root_of
from tutti.lower.memory.inplace import written
from tutti.nn.linear import linears_rows

aten, ops = torch.ops.aten, torch.ops.tutti
rotary_rows = ops.rotary_rows.default


def use(graph: fx.Graph) -> None:
    """Join calls of a graph that `tutti.nn.rows.use` and `tutti.nn.linear.linear_rows.use` have changed, in place."""
    for node in graph.find_nodes(op="call_function", target=ops.norm_rows.default):
        _join_addition(graph, node)
    for node in graph.find_nodes(op="call_function", target=ops.paged_attention.default):
        _join_writes(graph, node)
    for node in graph.find_nodes(op="call_function", target=ops.glu_rows.default):
        _join_gate(graph, node)
    layers = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=ops.linear_rows.default):
        x, _, bias = node.args
        layers[x, bias is None].append(node)
    for together in layers.values():
        _join_layers(graph, together)


def _join_addition(graph: fx.Graph, norm: Any) -> None:
    """Join a norm with the addition in place that computes its operand."""
    total, *rest = norm.args
    if total.target is not aten.add.out or total.kwargs.keys() != {"out"}:
        return
    x, added = total.args
    if total.kwargs["out"] is not x or not isinstance(added, fx.Node) or not _alike(x, added):
        return
    if any(reader < norm for reader in total.users) or _is_used(x, total, norm) or _is_used(added, total, norm):
        return
    with graph.inserting_before(norm):
        joined = graph.call_function(ops.add_norm_rows.default, (x, added, *rest))
        after = graph.call_function(written, (joined, x))
    joined.meta, after.meta = dict(norm.meta), dict(total.meta)
    _replace({total: after, norm: joined}, (norm, total))


def _is_used(x: fx.Node, first: fx.Node, last: fx.Node, but: Container[fx.Node] = ()) -> bool:
    """Whether a call between two others uses the memory of x, and so may overwrite it. but: calls that are joined."""
    return any(first < reader < last and reader not in but for reader in behind_views(root_of(x)))


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype


def _join_writes(graph: fx.Graph, attention: Any) -> None:
    """Join the rotary embeddings of an attention's queries and keys with the writes of its keys and values."""
    turned, *caches = attention.args[:3]
    if any(x.target is not written or x.args[0].target is not ops.paged_write_.default for x in caches):
        return
    writes = [x.args[0] for x in caches]
    (keys, k, slots), (values, v, slots_of_values) = (x.args for x in writes)
    rotations = [_rotation(x) for x in (turned, k)]
    if None in rotations or rotations[0].args[1:] != rotations[1].args[1:] or slots is not slots_of_values:
        return
    cos, sin = rotations[0].args[1:]
    tokens, width = rotations[0].meta["val"].shape[2:]
    if any(tuple(x.meta["val"].shape) != (1, 1, tokens, width) for x in (cos, sin)):
        return
    together, first, last = {*rotations, *writes}, min(rotations), max(writes)
    if any(_is_used(x, first, last, together) for x in (*(node.args[0] for node in rotations), v)):
        return
    with graph.inserting_before(last):
        inputs = *(x.args[0] for x in rotations), v, cos, sin, keys, values, slots
        joined = turned_again = graph.call_function(ops.rotary_write.default, inputs)
        joined.meta = dict(rotations[0].meta)
        after = [graph.call_function(written, (joined, x)) for x in (keys, values)]
        for view in (turned.args[0], turned):
            turned_again = graph.call_function(view.target, (turned_again, *view.args[1:]))
            turned_again.meta = dict(view.meta)
    for old, new in zip(caches, after, strict=True):
        new.meta = dict(old.meta)
    chains = [[x, x.args[0], rotation] for x, rotation in zip((turned, k), rotations, strict=True)]
    _replace(dict(zip(caches, after, strict=True)) | {turned: turned_again}, [*caches, *writes, *chains[0], *chains[1]])


def _join_gate(graph: fx.Graph, glu: Any) -> None:
    """Join a gated unit with the layers that compute its gate and its other factor."""
    gate, up, activation = glu.args
    chains = [_layer(gate), _layer(up)]
    if None in chains or gate is up:
        return
    layers = [chain[-1] for chain in chains]
    (x, w, no_bias), (x_too, w_too, no_bias_too) = (node.args for node in layers)
    if x is not x_too or no_bias is not None or no_bias_too is not None or not _alike(*layers):
        return
    if _is_used(x, min(layers), glu, {*layers}):
        return
    with graph.inserting_before(glu):
        joined = graph.call_function(ops.gated_rows.default, (x, w, w_too, activation))
        shaped = graph.call_function(aten.reshape.default, (joined, list(glu.meta["val"].shape)))
    joined.meta, shaped.meta = dict(layers[0].meta), dict(glu.meta)
    _replace({glu: shaped}, [glu, *chains[0], *chains[1]])


def _layer(x: Any) -> Any:
    """The layer of which x is the result, behind the reshapes of it, if nothing else reads these."""
    chain = [x]
    while chain[-1].target is aten.reshape.default and len(chain[-1].users) == 1:
        chain.append(chain[-1].args[0])
    return chain if chain[-1].target is ops.linear_rows.default and len(chain[-1].users) == 1 else None


def _join_layers(graph: fx.Graph, layers: list[Any]) -> None:
    """Join layers of the same x."""
    for first in range(0, len(layers), linears_rows.MOST):
        together = layers[first : first + linears_rows.MOST]
        if len(together) == 1:
            continue
        x, (_, weights, biases) = together[0].args[0], zip(*(node.args for node in together), strict=True)
        with graph.inserting_before(together[0]):
            joined = graph.call_function(ops.linears_rows.default, (x, [*weights], [*biases]))
            parts = [graph.call_function(operator.getitem, (joined, i)) for i in range(len(together))]
        joined.meta = {**together[0].meta, "val": tuple(node.meta["val"] for node in together)}
        for part, node in zip(parts, together, strict=True):
            part.meta = dict(node.meta)
        _replace(dict(zip(together, parts, strict=True)), together)


def _replace(results: dict[fx.Node, fx.Node], calls: Iterable[fx.Node]) -> None:
    """Use other results, and erase calls, of which each reads later ones at most."""
    replace_uses(results)
    for node in calls:
        node.graph.erase_node(node)


def _rotation(x: Any) -> Any:
    """The rotary embedding of which x (tokens, heads, width) is a view, if only x reads it, else None."""
    for target, args in ((aten.transpose.int, (0, 1)), (aten.select.int, (0, 0))):
        if x.target is not target or x.args[1:] != args or len(x.users) > 1:
            return None
        x = x.args[0]
    return x if x.target is rotary_rows and len(x.users) == 1 and x.meta["val"].shape[0] == 1 else None
