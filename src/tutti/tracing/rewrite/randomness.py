"""Rewrite random operators as functions of (seed, step, position of the element in the unsplit tensor).

So every plan draws the same numbers on any number of devices, and a resumed run draws what an uninterrupted one would.
Each operator has its own salt: its ordinal in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from math import prod

import torch
from torch import Tensor, fx

from tutti.ir.step_graph import BACKWARD
from tutti.nn import random
from tutti.tracing.trace.inline import inline

aten = torch.ops.aten
Draw = Callable[[Tensor], Tensor]  # uniform numbers in [0, 1), float32, of the shape of the argument


def make_reproducible(graph: fx.Graph, seed: fx.Node, step: fx.Node, device: torch.device) -> None:
    """Replace every random operator of the table by its counter-based form, in place.

    Raises ValueError for other random operators: each device would draw different numbers.
    """
    for node in graph.nodes:
        if node.target not in REPLACEMENTS and _is_random(node):
            raise ValueError(
                f"the model calls {node.target} ({node.meta['path'] or 'outside of any module'}), whose random numbers "
                "would depend on the device; draw with torch.rand, randn, randint, randperm, bernoulli, multinomial or "
                "exponential_ instead, or pass the numbers with the batch"
            )
    salts = count()
    for node in [n for n in graph.nodes if n.target in REPLACEMENTS]:
        if node.meta["phase"] == BACKWARD:
            raise ValueError(
                f"{node.target} draws random numbers in the backward pass of {node.meta['path'] or 'the model'}, not "
                "those of the forward pass. Draw them in forward; torch.utils.checkpoint repeats them"
            )

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
                n.meta |= {key: node.meta[key] for key in ("phase", "path", "checkpoint") if key in node.meta}
        if isinstance(result, fx.Node):
            node.replace_all_uses_with(result)
        else:
            for user in list(node.users):
                user.replace_all_uses_with(new[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)


def _is_random(node: fx.Node) -> bool:
    """Return whether torch draws numbers for this node. Attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    return bool(node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0))


def _bernoulli(draw: Draw, x: Tensor, p: float = 0.5, **_) -> Tensor:
    return random.bernoulli(draw(x), p).to(x.dtype)


def _bernoulli_of(draw: Draw, x: Tensor, **_) -> Tensor:
    return random.bernoulli(draw(x), x).to(x.dtype)


def _dropout(draw: Draw, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    keep = draw(x) < 1 - p
    return x * keep * (1 / (1 - p)), keep


def _uniform_like(draw: Draw, x: Tensor, *, dtype=None, **_) -> Tensor:
    return _below_one(draw(x), dtype or x.dtype)


def _below_one(u: Tensor, dtype: torch.dtype) -> Tensor:
    """Round down, so that 1 is not reached in low-precision dtypes either."""
    steps = min(1 / torch.finfo(dtype).eps, 1 << 24)
    return ((u * steps).floor() / steps).to(dtype)


def _uniform_between(draw: Draw, x: Tensor, low: float = 0.0, high: float = 1.0, **_) -> Tensor:
    return random.between(_below_one(draw(x), x.dtype), low, high)


def _normal_like(draw: Draw, x: Tensor, *, dtype=None, **_) -> Tensor:
    return random.standard_normal(draw(x)).to(dtype or x.dtype)


def _normal(draw: Draw, x: Tensor, mean: float = 0.0, std: float = 1.0, **_) -> Tensor:
    return (mean + std * _normal_like(draw, x)).to(x.dtype)


def _integers(draw: Draw, low: int, high: int, shape, *, dtype=None, **_) -> Tensor:
    """Integers from low up to, not including, high."""
    if high - low > 1 << 24:
        raise ValueError(f"randint({low}, {high}) has a range of more than 2^24 numbers, which is not supported")
    return (low + (draw(torch.empty(shape)) * (high - low)).floor()).to(dtype or torch.int64)


def _permutation(draw: Draw, n: int, *, dtype=None, **_) -> Tensor:
    """The order of random keys of 48 bits: two of a million are equal with a probability of 0.2 %."""
    high, low = ((draw(torch.empty(n)) * (1 << 24)).to(torch.int64) for _ in range(2))
    return ((high << 24) + low).argsort().to(dtype or torch.int64)


def _exponential(draw: Draw, x: Tensor, lambd: float = 1.0, **_) -> Tensor:
    """Positive numbers: Gumbel noise is the negative logarithm of them."""
    return ((-torch.log1p(-draw(x))).clamp_min(torch.finfo(torch.float32).tiny) / lambd).to(x.dtype)


def _cauchy(draw: Draw, x: Tensor, median: float = 0.0, sigma: float = 1.0, **_) -> Tensor:
    return (median + sigma * torch.tan(torch.pi * (draw(x) - 0.5))).to(x.dtype)


def _geometric(draw: Draw, x: Tensor, p: float, **_) -> Tensor:
    return (torch.log1p(-draw(x)) / math.log1p(-p)).floor().add(1).to(x.dtype) if p < 1 else torch.ones_like(x)


def _normal_of(draw: Draw, mean: Tensor | float, std: Tensor | float = 1.0, **_) -> Tensor:
    """The distributions of `torch.normal` with a tensor of means, of deviations, or both."""
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    like = torch.empty(torch.broadcast_shapes(*(x.shape for x in tensors)), dtype=tensors[0].dtype)
    return mean + std * _normal_like(draw, like)


def _multinomial(draw: Draw, weights: Tensor, num_samples: int, replacement: bool = False, **_) -> Tensor:
    """Categories with probabilities proportional to weights: the first of exponential races (Efraimidis and Spirakis,
    2006). Where torch raises because no category with a positive weight is left, the category is out of range."""
    if not replacement:
        best = (weights / _exponential(draw, weights)).topk(num_samples, -1)
    else:
        shape = (*weights.shape[:-1], num_samples, weights.shape[-1])
        best = (weights.unsqueeze(-2) / _exponential(draw, torch.empty(shape, dtype=weights.dtype))).max(-1)
    return torch.where(best.values > 0, best.indices, weights.shape[-1])


def _of_shape(like: Callable) -> Callable:
    def formula(draw: Draw, shape, *, dtype=None, **_) -> Tensor:
        return like(draw, torch.empty(shape), dtype=dtype or torch.get_default_dtype())

    return formula


REPLACEMENTS: dict[object, Callable] = {
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.default: _bernoulli_of,
    aten.native_dropout.default: _dropout,
    aten.cauchy.default: _cauchy,
    aten.exponential.default: _exponential,
    aten.geometric.default: _geometric,
    aten.log_normal.default: lambda draw, x, mean=1.0, std=2.0, **_: _normal(draw, x, mean, std).exp(),
    aten.multinomial.default: _multinomial,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.randperm.default: _permutation,
    aten.rand.default: _of_shape(_uniform_like),
    aten.rand_like.default: _uniform_like,
    aten.uniform.default: _uniform_between,
    aten.randint.default: lambda draw, high, shape, **options: _integers(draw, 0, high, shape, **options),
    aten.randint.low: _integers,
    aten.randn.default: _of_shape(_normal_like),
    aten.randn_like.default: _normal_like,
    aten.normal_functional.default: _normal,
}
