"""Remove what a trace holds and nobody needs: identities, checks, empty concatenations, repeated subexpressions."""

from __future__ import annotations

import operator
from itertools import takewhile

import torch
from torch import fx

from tutti.ir.step_graph import Call

aten = torch.ops.aten

# The result is the first argument, whatever the others are: the graph is functional.
IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}

# These only move the view of a tensor; a reshape does the same and never fails on a non-contiguous local part.
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}

# What becomes of a number that the model wrote as one, where autograd treats it as a tensor.
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
    """An operator that returns nothing can only look at values and raise, as that behind `torch.linalg.solve` does."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns


def _simpler(node: Call) -> fx.Node | int | float | complex | None:
    """A node with the same value as this one, or a number, if there is one."""
    if node.target in OF_NUMBERS and isinstance(node.args[0], NUMBERS):
        return OF_NUMBERS[node.target](node.args[0])
    if node.args and isinstance(node.args[0], NUMBERS):
        return None
    if node.target in IDENTITIES:
        return node.args[0]
    as_reshape(node)
    if node.target in (aten.reshape.default, aten.expand.default, aten.slice.Tensor):
        return node.args[0] if node.args[0].meta["val"].shape == node.meta["val"].shape else None
    if node.target is aten._to_copy.default:
        return node.args[0] if node.args[0].meta["val"] == node.meta["val"] else None
    if node.target is aten.clone.default:
        return node.args[0]
    if node.target is operator.getitem and node.args[0].target is aten.split_with_sizes.default:
        return _joined(node)
    if node.target is aten.cat.default:  # legacy: a 1-d empty tensor may be concatenated with anything
        parts = [n for n in node.args[0] if n.meta["val"].shape != (0,) or node.meta["val"].shape == (0,)]
        node.args = (parts, *node.args[1:])
        return parts[0] if len(parts) == 1 else None
    return None


def _joined(piece: Call) -> fx.Node | None:
    """What a piece of a split is, where that is one of the parts of which the whole was concatenated."""
    split, index = piece.args
    whole, sizes, *dim = split.args
    if whole.target is not aten.cat.default:
        return None
    parts, *along = whole.args
    d, e = ((axis or [0])[0] % len(whole.meta["val"].shape) for axis in (dim, along))
    same = d == e and [part.meta["val"].shape[e] for part in parts] == list(sizes)
    return parts[index] if same and parts[index].meta["val"] == piece.meta["val"] else None  # in its dtype


def _merge_equal(graph: fx.Graph) -> None:
    """Common subexpressions are computed once: operators of a functional graph have no effects."""
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
            first.meta["path"] = _common(first.meta["path"], node.meta["path"])  # it belongs to neither layer alone
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _common(a: str, b: str) -> str:
    """The innermost module that holds both."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
