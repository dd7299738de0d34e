"""Layer skipping: some training steps leave out some layers, forward and backward.

Of L layers, layer l (from 1) is left out with the probability l / L `rate`: the input of a skipped layer is its output.
All layers are used in evaluation. To keep the number of compiled graphs small, `patterns` sets of layers are drawn once
with these probabilities, and each step takes one of them at random.

Huang et al., "Deep networks with stochastic depth" (2016), for the probabilities; Fan et al., "Reducing transformer
depth on demand with structured dropout" (2020), who do not rescale outputs either.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tutti.train.boost.algorithm import Algorithm, Loss, NothingToDo


@dataclass
class LayerSkip(Algorithm):
    """Leave out some layers in each training step.

    rate: probability of the last layer, at least 0 and less than 1.
    patterns: number of sets of layers, each of which is captured and compiled once.
    seed: of the sets and of the choice among them, a function of the step's number.

    The layers are those of the longest `nn.ModuleList` whose modules map a tensor to one of the same shape.
    `prepare_model` raises NothingToDo if there is none.
    """

    rate: float = 0.2
    patterns: int = 4
    seed: int = 0
    _layers: list[nn.Module] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate is {self.rate!r}; it must be at least 0 and less than 1")
        if self.patterns < 1:
            raise ValueError(f"patterns is {self.patterns!r}; layer_skip needs at least 1")

    def prepare_model(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        kinds = layers_of(model, batch, loss)
        self._layers = list(kinds)
        for layer, in_tuple in kinds.items():
            layer.in_tuple = in_tuple  # pyright: ignore[reportArgumentType]
            cls = type(layer)
            layer.__class__ = type(cls.__name__, (_Skippable, cls), {"__module__": cls.__module__})
            layer.skipped = False  # pyright: ignore[reportArgumentType]

    def classes(self, model: nn.Module) -> Mapping[str, int]:
        own = {p: i for i, layer in enumerate(self._layers, start=1) for p in layer.parameters()}
        return {name: own[p] for name, p in model.named_parameters() if p in own}

    def skipped(self, number: int) -> list[int]:
        """The indices of the layers that a step leaves out."""
        count = len(self._layers)
        odds = self.rate * np.arange(1, count + 1) / max(count, 1)
        sets = np.random.RandomState(self.seed).random_sample((self.patterns, count)) < odds
        chosen = np.random.RandomState([self.seed, number]).randint(self.patterns)
        return np.flatnonzero(sets[chosen]).tolist()

    def before(self, step: Any, number: int) -> None:
        for i in self.skipped(number):
            self._layers[i].skipped = True  # pyright: ignore[reportArgumentType]

    def after(self, step: Any, batch: Any) -> None:
        for layer in self._layers:
            layer.skipped = False  # pyright: ignore[reportArgumentType]


class _Skippable(nn.Module):
    """A layer that returns its first argument while it is `skipped`."""

    skipped: Any = False
    in_tuple: Any = False

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.skipped:
            return (x,) if self.in_tuple else x
        return super().forward(x, *args, **kwargs)


def layers_of(model: nn.Module, batch: Any, loss: Loss, who: str = "layer_skip") -> dict[nn.Module, bool]:
    """The modules of the longest list of layers that map a tensor to one of the same shape, and whether each returns it
    in a tuple. `loss(model, batch)` runs once. Raises NothingToDo, in the name of `who`, if there is no such list."""
    kinds: dict[nn.Module, bool] = {}

    def see(layer: nn.Module, args: tuple, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) and len(output) == 1 else output
        given = args[0] if args else None
        if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor) and value.shape == given.shape:
            kinds[layer] = isinstance(output, tuple)

    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    with ExitStack() as stack, torch.no_grad():
        for layer in {layer for found in lists for layer in found}:
            stack.callback(layer.register_forward_hook(see).remove)
        loss(model, batch)
    usable = [list(found) for found in lists if len(found) and all(layer in kinds for layer in found)]
    if not usable:
        raise NothingToDo(f"{who} found no nn.ModuleList in {type(model).__name__} whose modules map a tensor to "
                          "one of the same shape")  # fmt: skip
    longest = max(usable, key=len)
    return {layer: kinds[layer] for layer in longest}
