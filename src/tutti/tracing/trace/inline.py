"""Trace a Python function of tensors into an existing graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.tracing.rewrite.remove_redundant import as_reshape
from tutti.tracing.trace.trace import trace


def inline(graph: fx.Graph, function: Callable, args: tuple, kwargs: dict, device: torch.device | str = "cpu"):
    """Trace `function(*args, **kwargs)` at the graph's insertion point. Returns its result, with nodes for tensors.

    The arguments may contain nodes of the graph (with a `Spec` in meta["val"]) for tensors.
    """
    return paste(graph, template(function, args, kwargs, device), args, kwargs)


def template(function: Callable, args: tuple, kwargs: dict, device: torch.device | str = "cpu") -> fx.Graph:
    """Trace `function(*args, **kwargs)`, with a placeholder for each node in the arguments.

    It is traced for dense operands, but valid for any strides: its views are reshapes.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def flat(*tensors):
        operands = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(operands) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return function(*args, **kwargs)

    with compat.fake_mode():
        specs = [n.meta["val"] for n in leaves if isinstance(n, fx.Node)]
        graph = trace(flat, *(torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs)).graph
    for node in graph.nodes:
        as_reshape(node)
    return graph


def paste(graph: fx.Graph, traced: fx.Graph, args: tuple, kwargs: dict):
    """Insert a template at the graph's insertion point, with these arguments. Returns its result."""
    operands = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node))
    mapping = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            mapping[node] = next(operands)
        elif node.op == "output":
            return fx.map_arg(node.args[0], mapping.__getitem__)
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            mapping[node].meta = {"val": node.meta["val"]}
