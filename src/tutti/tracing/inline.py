"""Write the graph of a Python function of tensors into another graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.tracing.simplify import as_reshape
from tutti.tracing.trace import trace


def inline(graph: fx.Graph, function: Callable, args: tuple, kwargs: dict, device: torch.device | str = "cpu"):
    """Record `function(*args, **kwargs)` at the graph's insertion point and return its result, nodes for tensors.

    The arguments may hold nodes of the graph (with a `Spec` in meta["val"]) wherever the function expects tensors.
    """
    return paste(graph, template(function, args, kwargs, device), args, kwargs)


def template(function: Callable, args: tuple, kwargs: dict, device: torch.device | str = "cpu") -> fx.Graph:
    """The graph of `function(*args, **kwargs)`, with a placeholder for each node in the arguments.

    It is traced for dense operands and holds for operands that lie otherwise in memory: its views are reshapes.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def flat(*tensors):
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return function(*args, **kwargs)

    with compat.fake_mode():
        specs = [n.meta["val"] for n in leaves if isinstance(n, fx.Node)]
        graph = trace(flat, *(torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs)).graph
    for node in graph.nodes:
        as_reshape(node)
    return graph


def paste(graph: fx.Graph, traced: fx.Graph, args: tuple, kwargs: dict):
    """Write a template at the graph's insertion point, on the nodes in these arguments; return its result."""
    given = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node))
    mapping = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            mapping[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], mapping.__getitem__)
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            mapping[node].meta = {"val": node.meta["val"]}
