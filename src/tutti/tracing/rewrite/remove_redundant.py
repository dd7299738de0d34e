"""Remove redundant nodes of a trace: identities, checks, empty concatenations, common subexpressions.

An uninitialized tensor that assignments to its slices fill (`x[..., :8] = a; x[..., 8:] = b`) becomes a concatenation.
Parts of concatenations without elements vanish, and zeros that the backward pass adds to a gradient. A gradient of -0.0
then stays what it is, where the sum would be 0.0.
"""

from __future__ import annotations

import operator
from functools import reduce
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import fx

from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, Call

aten = torch.ops.aten

# The result is the first argument: the graph is functional.
IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}

EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.new_empty_strided.default,
         aten.empty_strided.default}  # fmt: skip

# Views. A reshape is equivalent and also works on a non-contiguous shard.
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}

# Operators on a Python number that autograd treats as a tensor.
NUMBERS = (int, float, complex)
OF_NUMBERS = {
    aten._conj.default: lambda number: number.conjugate(),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, *IDENTITIES), lambda number: number),
}


def simplify(graph: fx.Graph) -> None:
    """Simplify in place."""
    for node in [n for n in graph.nodes if _is_check(n)]:
        graph.erase_node(node)
    for node in list(graph.nodes):
        replacement = _simpler(node)
        if isinstance(replacement, NUMBERS):
            for user in list(node.users):
                user.args, user.kwargs = fx.map_arg(
                    (user.args, user.kwargs), lambda x, node=node, number=replacement: number if x is node else x
                )
            graph.erase_node(node)
        elif replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    _merge_equal(graph)
    graph.eliminate_dead_code()


def as_reshape(node: Call) -> None:
    """Make a view a reshape, in place."""
    if node.target in RESHAPES:
        node.target, node.args = aten.reshape.default, (node.args[0], list(node.meta["val"].shape))


def _is_check(node: Call) -> bool:
    """An operator without results can only check values and raise, such as the one behind `torch.linalg.solve`."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns


def _simpler(node: Call) -> fx.Node | int | float | complex | None:
    """An equivalent, earlier node or a number, or None."""
    if node.target in OF_NUMBERS and isinstance(node.args[0], NUMBERS):
        return OF_NUMBERS[node.target](node.args[0])
    if node.args and isinstance(node.args[0], NUMBERS):
        return None
    if node.target in IDENTITIES:
        return node.args[0]
    as_reshape(node)
    if node.target is aten.copy.default:
        return node.args[1] if _alike(node.args[1], node) else None
    if node.target is aten.slice_scatter.default:
        return node.args[1] if _alike(node.args[1], node) else _concatenation(node)
    if node.target is aten.slice.Tensor and (unwritten := _unwritten(node)) is not None:
        return unwritten
    if node.target in (aten.reshape.default, aten.expand.default, aten.slice.Tensor):
        return node.args[0] if node.args[0].meta["val"].shape == node.meta["val"].shape else None
    if node.target is aten._to_copy.default:
        return node.args[0] if node.args[0].meta["val"] == node.meta["val"] else None
    if node.target is aten.clone.default:
        return node.args[0]
    if node.target is operator.getitem and node.args[0].target is aten.split_with_sizes.default:
        return _joined(node)
    if node.target is aten.cat.default:
        parts = _filled(node)
        node.args = (parts, *node.args[1:])
        return parts[0] if len(parts) == 1 and _alike(parts[0], node) else None
    if node.target is aten.add.Tensor and node.meta["phase"] == BACKWARD and len(node.args) == 2 and not node.kwargs:
        for summand, other in (node.args, node.args[::-1]):
            if _is_zeros(other) and isinstance(summand, fx.Node) and _alike(summand, node):
                return summand
    return None


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two tensors have equal shapes and dtypes."""
    return a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].dtype == b.meta["val"].dtype


def _filled(node: Call) -> list[fx.Node]:
    """The parts of a concatenation that have elements, which is of the same dtype as with the others."""
    shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
    parts = [part for part in node.args[0] if prod(part.meta["val"].shape)]
    if not parts:  # legacy: a 1-d empty tensor may be concatenated with anything
        return [part for part in node.args[0] if len(part.meta["val"].shape) == len(shape)]
    if reduce(torch.promote_types, [part.meta["val"].dtype for part in parts]) != dtype:
        with node.graph.inserting_before(node):
            first = node.graph.call_function(aten._to_copy.default, (parts[0],), {"dtype": dtype})
        first.meta = {**node.meta, "val": Spec(parts[0].meta["val"].shape, dtype)}
        parts[0] = first
    return parts


def _is_zeros(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and node.args[1] in (0, 0.0, False)


def _range(node: Call) -> tuple[int, int, int] | None:
    """(dim, start, stop) of a slice or of an assignment to one; None if it has a step."""
    source, place = node.args[0], node.args[2 if node.target is aten.slice_scatter.default else 1 :]
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, stop, step = (*place, *defaults[len(place) :])
    if step != 1:
        return None
    dim %= len(source.meta["val"].shape)
    start, stop, _ = slice(start, stop).indices(source.meta["val"].shape[dim])
    return dim, start, stop


def _concatenation(node: Call) -> fx.Node | None:
    """The concatenation that assignments to slices of an empty tensor add up to, if they cover it without overlap."""
    pieces: dict[int, tuple[int, fx.Node]] = {}  # by start: stop and source
    base, dims = node, set()
    while base.target is aten.slice_scatter.default and (place := _range(base)):
        dim, start, stop = place
        dims.add(dim)
        if start in pieces:
            return None
        pieces[start] = stop, base.args[1]
        base = base.args[0]
    if base.target not in EMPTY or len(dims) != 1 or any(x.meta["val"].dtype != node.meta["val"].dtype
                                                         for _, x in pieces.values()):  # fmt: skip
        return None
    (dim,), end, parts = dims, 0, []
    while end in pieces:
        end, part = pieces.pop(end)
        parts.append(part)
    if pieces or end != node.meta["val"].shape[dim]:
        return None
    with node.graph.inserting_before(node):
        joined = node.graph.call_function(aten.cat.default, (parts, dim))
    joined.meta = dict(node.meta)
    return joined


def _unwritten(node: Call) -> fx.Node | None:
    """The slice of a tensor that an assignment wrote as a whole (its source) or left as it was (a slice of that)."""
    whole, place = node.args[0], _range(node)
    if whole.target is not aten.slice_scatter.default or place is None or (written := _range(whole)) is None:
        return None
    if place == written:
        return whole.args[1] if _alike(whole.args[1], node) else None
    if place[0] == written[0] and (place[2] <= written[1] or written[2] <= place[1]):
        node.args = (whole.args[0], *node.args[1:])
    return None


def _joined(piece: Call) -> fx.Node | None:
    """If a split undoes a concatenation, the part that a piece of it equals."""
    split, index = piece.args
    whole, sizes, *dim = split.args
    if whole.target is not aten.cat.default:
        return None
    parts, *along = whole.args
    d, e = ((axis or [0])[0] % len(whole.meta["val"].shape) for axis in (dim, along))
    same = d == e and [part.meta["val"].shape[e] for part in parts] == list(sizes)
    return parts[index] if same and parts[index].meta["val"] == piece.meta["val"] else None  # also of equal dtype


def _merge_equal(graph: fx.Graph) -> None:
    """Common subexpression elimination: operators of a functional graph have no side effects."""
    seen: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            key = (node.target, node.args)
        else:
            key = (node.target, repr(node.args), repr(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node and first.meta["phase"] == node.meta["phase"]:
            first.meta["path"] = _common(first.meta["path"], node.meta["path"])  # it is shared by both layers
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _common(a: str, b: str) -> str:
    """The innermost module that contains both."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
