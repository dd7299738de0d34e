"""Layer skipping: early training steps leave out some layers, forward and backward; late ones use all of them.

A run of n steps begins with `stages` stages of equal length, which end after `until` n steps. Of L layers, each step of
stage s (from 0) leaves out

    k = min(L - 2, round(share L (stages - s) / stages))

layers, never the first or the last one: the input of a layer that is left out is its output. After the stages, and in
evaluation, all layers are used. The k layers are the first in an order drawn at random, so that one that has joined
stays. Each set of layers is a graph of its own, which is captured and compiled once. So only `patterns` orders are
drawn, of which each step takes one: at most stages x patterns + 1 graphs.

Panigrahi et al., "Efficient stagewise pretraining via progressive subnetworks" (2024), for subnetworks of random layers
that grow in stages. Stochastic depth (Huang et al., 2016) and progressive layer dropping (Zhang and He, 2020) leave out
layers until the end of training instead.

Steps of the stages are cheaper by the share of the layers, but more steps are needed. The paper has gains of up to 33 %
for BERT and UL2; on a CPU, a small causal language model gained up to 15 % at the levels O1 to O3, and a small vision
Transformer lost up to 9 % (docs/guide/boost.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from tutti.tracing.batch import Batch
from tutti.train.boost.algorithm import Algorithm, Loss, NothingToDo
from tutti.train.values import Outputs

if TYPE_CHECKING:
    from tutti.api.step import Step


@dataclass
class LayerSkip(Algorithm):
    """Train with some of the layers first, and with more of them stage by stage.

    share: fraction of all layers that are left out in the first stage; at least 0 and less than 1.
    stages: number of stages with fewer layers each.
    until: share of the steps of the run after which all layers are used, more than 0 and at most 1.
    patterns: number of sets of layers in each stage. Each is captured and compiled once.
    seed: random seed of the orders and of the choice among them, a function of the step's number.
    steps: number of steps of the run; None: what `prepare_model` is told.

    The layers are those of the longest `nn.ModuleList` whose modules map a tensor to one of the same shape. It is meant
    for training from random weights: a pretrained model first loses what the layers that are left out have learned.
    `prepare_model` raises NothingToDo if there are fewer than 3 layers, or if the number of steps is not known.
    """

    share: float = 0.67
    stages: int = 2
    until: float = 0.4
    patterns: int = 1
    seed: int = 0
    steps: int | None = None
    _layers: list[nn.Module] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self):
        if not 0 <= self.share < 1:
            raise ValueError(f"share is {self.share!r}; it must be at least 0 and less than 1")
        if not 0 < self.until <= 1:
            raise ValueError(f"until is {self.until!r}; it must be more than 0 and at most 1")
        if self.patterns < 1 or self.stages < 1:
            raise ValueError(f"patterns={self.patterns!r} and stages={self.stages!r} must be at least 1")

    def prepare_model(self, model: nn.Module, batch: Batch, loss: Loss, steps: int | None = None) -> None:
        self.steps = self.steps or steps
        if not self.steps:
            raise NothingToDo("layer_skip needs the number of steps of the run, as in prepare_model(..., steps=1000)")
        kinds = layers_of(model, batch, loss)
        if len(kinds) < 3:
            raise NothingToDo(f"layer_skip keeps the first and the last layer, and {type(model).__name__} has "
                              f"{len(kinds)}")  # fmt: skip
        self._layers = list(kinds)
        for layer, in_tuple in kinds.items():
            layer.in_tuple = in_tuple  # pyright: ignore[reportArgumentType]
            cls = type(layer)
            layer.__class__ = type(cls.__name__, (_Skippable, cls), {"__module__": cls.__module__})
            layer.skipped = False  # pyright: ignore[reportArgumentType]

    def classes(self, model: nn.Module) -> Mapping[str, int]:
        """Layers that the same sets leave out have the same class."""
        sets = [self._left_out(stage, pattern) for stage in range(self.stages) for pattern in range(self.patterns)]
        apart = [tuple(i in left_out for left_out in sets) for i in range(len(self._layers))]
        number = {kind: i for i, kind in enumerate(sorted({(False,) * len(sets), *apart}))}
        own = {p: number[kind] for layer, kind in zip(self._layers, apart, strict=True) for p in layer.parameters()}
        return {name: own[p] for name, p in model.named_parameters() if own.get(p)}

    def skipped(self, number: int) -> list[int]:
        """The indices of the layers that a step leaves out, in order. Steps are numbered from 0."""
        assert self.steps
        pattern = np.random.RandomState([self.seed, number]).randint(self.patterns)
        return self._left_out(int(self.stages * number / (self.until * self.steps)), pattern)

    def _left_out(self, stage: int, pattern: int) -> list[int]:
        count = len(self._layers)
        left_out = min(count - 2, round(self.share * count * (self.stages - stage) / self.stages))
        order = 1 + np.random.RandomState([self.seed, pattern]).permutation(count - 2)
        return sorted(order[: max(left_out, 0)].tolist())

    def before(self, step: Step, number: int) -> None:
        for i in self.skipped(number):
            self._layers[i].skipped = True  # pyright: ignore[reportArgumentType]

    def after(self, step: Step, batch: Batch) -> None:
        for layer in self._layers:
            layer.skipped = False  # pyright: ignore[reportArgumentType]


class _Skippable(nn.Module):
    """A layer that returns its first argument while it is `skipped`."""

    skipped: bool = False
    in_tuple: bool = False

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> Outputs:
        if self.skipped:
            return (x,) if self.in_tuple else x
        return super().forward(x, *args, **kwargs)


def layers_of(model: nn.Module, batch: Batch, loss: Loss, who: str = "layer_skip") -> dict[nn.Module, bool]:
    """The modules of the longest list of layers that map a tensor to one of the same shape, and whether each returns it
    in a tuple. `loss(model, batch)` runs once. Raises NothingToDo, in the name of `who`, if there is no such list."""
    kinds: dict[nn.Module, bool] = {}

    def see(layer: nn.Module, args: tuple, output: Outputs) -> None:
        value = output[0] if isinstance(output, tuple) and len(output) == 1 else output
        first_argument = args[0] if args else None
        if (
            isinstance(value, torch.Tensor)
            and isinstance(first_argument, torch.Tensor)
            and value.shape == first_argument.shape
        ):
            kinds[layer] = isinstance(output, tuple)

    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    with ExitStack() as stack, torch.no_grad():
        for layer in {layer for layers in lists for layer in layers}:
            stack.callback(layer.register_forward_hook(see).remove)
        loss(model, batch)
    usable = [list(layers) for layers in lists if len(layers) and all(layer in kinds for layer in layers)]
    if not usable:
        raise NothingToDo(f"{who} found no nn.ModuleList in {type(model).__name__} whose modules map a tensor to "
                          "one of the same shape")  # fmt: skip
    longest = max(usable, key=len)
    return {layer: kinds[layer] for layer in longest}
