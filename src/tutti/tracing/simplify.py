"""Remove redundant nodes of a trace: identities, checks, empty concatenations, common subexpressions."""

from __future__ import annotations

import operator
from itertools import takewhile

import torch
from torch import fx

from tutti.ir.step_graph import Call

aten = torch.ops.aten

# The result is the first argument: the graph is functional.
IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}

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
