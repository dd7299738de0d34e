"""Where the inputs of layers can be scaled: by the norm or the layer that makes them.

A fold divides what a producer makes by a factor for each channel, and multiplies the weights that read it. What is
found by following tensors is tried: a fold after which the block gives other outputs is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tutti.compress import parallel
from tutti.compress.blocks import Walk, first
from tutti.compress.experts import Expert, ExpertLayers

PAIRS = {"v_proj": "o_proj", "up_proj": "down_proj"}  # the second is linear in what the first makes


@dataclass
class Fold:
    """A producer and what reads its outputs.

    producer: a norm with a weight (k), or a linear layer. consumers: the paths in the block of layers that are
    compressed. readers: all modules with a weight (n, k) that read its outputs. width: width of a head, where the
    outputs of a layer (groups, width) are read by several heads each.
    """

    producer: nn.Module
    consumers: list[str]
    readers: list[nn.Module]
    width: int = 0
    offset: float = field(init=False)

    def __post_init__(self) -> None:
        self.offset = offset_of(self.producer) if self.is_norm else 0.0

    @property
    def is_norm(self) -> bool:
        """Whether the producer is a norm."""
        return not isinstance(self.producer, nn.Linear)

    def tied(self, factors: Tensor) -> Tensor:
        """Factors (k) that a fold can have: heads that read the same outputs have the same, the geometric mean."""
        if not self.width:
            return factors
        groups = len(self.producer.weight) // self.width  # pyright: ignore
        of_heads = factors.view(groups, -1, self.width)
        return of_heads.log().mean(1, keepdim=True).exp().expand_as(of_heads).reshape(-1)

    def change(self, factors: Tensor) -> None:
        """Divide what is made by factors (k), and multiply what reads it."""
        divided = factors
        if self.width:
            groups = len(self.producer.weight) // self.width  # pyright: ignore
            divided = factors.view(groups, -1, self.width)[:, 0].reshape(-1)
        weight: Any = self.producer.weight.data
        if self.is_norm:
            weight.copy_((weight.float() + self.offset) / divided - self.offset)
        else:
            weight.copy_(weight.float() / divided.unsqueeze(1))
        if (bias := getattr(self.producer, "bias", None)) is not None:
            bias.data.copy_(bias.data.float() / divided)
        for reader in self.readers:
            reader.weight.data.copy_(reader.weight.data.float() * factors)  # pyright: ignore

    def apply(self, walk: Walk, i: int, factors: Tensor) -> bool:
        """Change the weights of block i. Whether it gives the outputs that it gave; otherwise nothing has changed."""
        if not bool(factors.isfinite().all()) or not bool((factors > 0).all()):
            return False
        changed = [self.producer, *self.readers]
        before = [[x.detach().clone() for x in m.parameters(recurse=False)] for m in changed]
        expected = outputs(walk, i)
        self.change(factors)
        if parallel.agreed(close(outputs(walk, i), expected)):
            return True
        for module, old in zip(changed, before, strict=True):
            for x, value in zip(module.parameters(recurse=False), old, strict=True):
                x.data.copy_(value)
        return False


def outputs(walk: Walk, i: int) -> Tensor:
    """The outputs of block i for the first batch."""
    args, kwargs = walk.arguments[0][i]
    return first(walk.blocks[i](walk.hidden[0], *args, **kwargs))


def close(actual: Tensor, expected: Tensor) -> bool:
    """Whether outputs agree within what rounding does."""
    bound = 1e-4 if expected.dtype == torch.float32 else 0.03
    return float((actual.float() - expected.float()).norm()) <= bound * float(expected.float().norm())


def offset_of(norm: nn.Module) -> float:
    """1 for a norm that multiplies by 1 + weight, else 0. Raises ValueError for other modules."""
    weight: Tensor = norm.weight.data  # pyright: ignore
    before = weight.clone()
    x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype).unsqueeze(0)
    weight.zero_()
    output, bias = norm(x), getattr(norm, "bias", None)
    weight.copy_(before)
    return float(bool((output != (0 if bias is None else bias)).any()))


def find(walk: Walk, i: int, layers: Mapping[str, nn.Linear]) -> list[Fold]:
    """The folds of block i whose consumers are compressed."""
    block = walk.blocks[i]
    paths = {x: path for path, x in layers.items()}
    makers: dict[tuple[int, int], nn.Module] = {}  # the norm that made a tensor, by its place in memory
    read: dict[nn.Module, list[nn.Module]] = {}
    inputs = []

    def key(x: Tensor) -> tuple[int, int]:
        return x.data_ptr(), x.numel()

    def of_norm(module: nn.Module, args: tuple, output: Tensor) -> None:
        inputs.append(output)
        makers[key(output)] = module

    def of_reader(module: nn.Module, args: tuple) -> None:
        if args and isinstance(args[0], Tensor) and (norm := makers.get(key(args[0]))) is not None:
            read.setdefault(norm, []).append(module)

    hooks = []
    for module in block.modules():
        if is_norm(module):
            hooks.append(module.register_forward_hook(of_norm))
        elif isinstance(module, ExpertLayers) or _reads(module):
            hooks.append(module.register_forward_pre_hook(of_reader))
    try:
        args, kwargs = walk.arguments[0][i]
        block(walk.hidden[0], *args, **kwargs)
    finally:
        for x in hooks:
            x.remove()
    folds = []
    for norm, modules in read.items():
        readers = [y for x in modules for y in _weights(x)]
        folds.append(Fold(norm, [paths[x] for x in readers if isinstance(x, nn.Linear) and x in paths], readers))
    inner = {x for module in block.modules() if isinstance(module, Expert) for x in module.modules()}
    for parent in block.modules():
        children = dict(parent.named_children())
        for first_name, second_name in PAIRS.items():
            one, two = children.get(first_name), children.get(second_name)
            if type(one) is nn.Linear and type(two) is nn.Linear and two in paths and two not in inner:
                width = 0
                if one.out_features != two.in_features:
                    width = int(getattr(parent, "head_dim", 0))
                    if not width or two.in_features % one.out_features or one.out_features % width:
                        continue
                folds.append(Fold(one, [paths[two]], [two], width))
    return [x for x in folds if x.consumers]


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with a weight of one dim."""
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and weight.ndim == 1


def _reads(module: nn.Module) -> bool:
    """Whether a module multiplies what it reads by a weight (n, k): a linear layer, or the router of a mixture."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _weights(module: nn.Module) -> list[nn.Module]:
    """The layers with weights (n, k) that read what a module reads."""
    if not isinstance(module, ExpertLayers):
        return [module]
    return [x for e in range(module.count) for x in (module[e].gate_proj, module[e].up_proj)]
