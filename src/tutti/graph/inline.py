"""Write the graph of a Python function of tensors into another graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti import compat
from tutti.graph.step_graph import Spec


def inline(graph: fx.Graph, function: Callable, args: tuple, kwargs: dict, device: torch.device | str = "cpu"):
    """Record `function(*args, **kwargs)` at the graph's insertion point and return its result, nodes for tensors.

    The arguments may hold nodes of the graph (with a `Spec` in meta["val"]) wherever the function expects tensors.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def flat(*tensors):
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, fx.Node) else x for x in leaves], spec)
        return function(*args, **kwargs)

    with compat.fake_mode():
        fakes = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device=device) for n in nodes]
        traced = compat.trace(flat, *fakes)
    given, mapping = iter(nodes), {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], mapping.__getitem__)
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            mapping[node].meta = {"val": Spec.of(node.meta.get("val"))}
