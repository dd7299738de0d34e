"""Random operators become functions of (seed, step, position of the element in the whole tensor).

So every plan draws the same numbers, on any number of devices, and a resumed run draws what an unbroken one would.
Each operator has a salt of its own: its ordinal in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import pi, prod

import torch
from torch import Tensor, fx

import tutti.nn.random  # noqa: F401  (registers tutti::uniform)
from tutti.graph.inline import inline

aten = torch.ops.aten
Draw = Callable[[Tensor], Tensor]  # uniform numbers in [0, 1), float32, of the shape of the argument


def make_reproducible(graph: fx.Graph, seed: fx.Node, step: fx.Node, device: torch.device) -> None:
    """Replace, in place, every random operator of the table by its counter-based form."""
    salts = count()
    for node in [n for n in graph.nodes if n.target in REPLACEMENTS]:

        def replacement(seed, step, *args, formula=REPLACEMENTS[node.target], **kwargs):
            def draw(like: Tensor) -> Tensor:
                shape, n = list(like.shape), prod(like.shape)
                return torch.ops.tutti.uniform(seed, step, next(salts), shape, [n], [1], 0, device=device)

            return formula(draw, *args, **kwargs)

        with graph.inserting_before(node):
            result = inline(graph, replacement, (seed, step, *node.args), node.kwargs, device)
        new = result if isinstance(result, (tuple, list)) else [result]
        for n in graph.nodes:
            if "phase" not in n.meta:
                n.meta |= {"phase": node.meta["phase"], "path": node.meta["path"]}
        if isinstance(result, fx.Node):
            node.replace_all_uses_with(result)
        else:
            for user in list(node.users):
                user.replace_all_uses_with(new[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)


def _bernoulli(draw: Draw, x: Tensor, p: float = 0.5, **_) -> Tensor:
    return (draw(x) < p).to(x.dtype)


def _bernoulli_of(draw: Draw, x: Tensor, **_) -> Tensor:
    return (draw(x) < x).to(x.dtype)


def _dropout(draw: Draw, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    keep = draw(x) < 1 - p
    return x * keep * (1 / (1 - p)), keep


def _uniform_like(draw: Draw, x: Tensor, *, dtype=None, **_) -> Tensor:
    return draw(x).to(dtype or x.dtype)


def _uniform_between(draw: Draw, x: Tensor, low: float = 0.0, high: float = 1.0, **_) -> Tensor:
    return (low + (high - low) * draw(x)).to(x.dtype)


def _normal_like(draw: Draw, x: Tensor, *, dtype=None, **_) -> Tensor:
    """Box and Muller (1958), from two uniform draws."""
    radius = (-2 * (1 - draw(x)).log()).sqrt()
    return (radius * (2 * pi * draw(x)).cos()).to(dtype or x.dtype)


def _normal(draw: Draw, x: Tensor, mean: float = 0.0, std: float = 1.0, **_) -> Tensor:
    return (mean + std * _normal_like(draw, x)).to(x.dtype)


def _of_shape(like: Callable) -> Callable:
    def formula(draw: Draw, shape, *, dtype=None, **_) -> Tensor:
        return like(draw, torch.empty(shape), dtype=dtype or torch.get_default_dtype())

    return formula


REPLACEMENTS: dict[object, Callable] = {
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.default: _bernoulli_of,
    aten.native_dropout.default: _dropout,
    aten.rand.default: _of_shape(_uniform_like),
    aten.rand_like.default: _uniform_like,
    aten.uniform.default: _uniform_between,
    aten.randn.default: _of_shape(_normal_like),
    aten.randn_like.default: _normal_like,
    aten.normal_functional.default: _normal,
}
