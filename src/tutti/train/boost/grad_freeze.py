"""Gradient freezing: most steps train all parameters, some only the last layers, whose backward pass is shorter.

The parameters are divided into `groups`, in the order of the model. Step t trains the groups from index i(t) on: all of
them for i = 0, all but the first two for i = 2. The other parameters keep their values and optimizer state in that
step. Two kinds of sequences i(0), i(1), ... are known:

    kind 0: n zeros, then 1, 2, ..., groups - 1, and again; n = floor(p (groups - 1) / (1 - p))
    kind 1: 0, then an index from 1 whenever the share of steps with an index has fallen below 1 - p, else 0; index j is
            drawn with a probability proportional to groups - j, so that 1 is the most likely

On a CPU this has no gain: a partial step saves only the backward pass of its first groups, mostly of one in ten. Steps
of small models are no cheaper on average (docs/guide/boost.md), and first layers that train less often need more of
them. It can help where the backward pass of the first layers is expensive and they change little.

p is `full_share`, the share of steps that train everything. Kind 1 is drawn by `numpy.random.RandomState(seed)`, and
both sequences equal those of `mindspore.boost.GradientFreeze`, whose `freeze_p` is p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from tutti.train.boost.algorithm import Algorithm

if TYPE_CHECKING:
    from tutti.api.step import Step

SMALLEST = 3  # parameters of a unit, after which a new one may begin


@dataclass
class GradFreeze(Algorithm):
    """Train all parameters in a share of steps, and only the last groups in the others.

    groups: number of groups; less for a model with fewer units.
    kind: kind of the sequence, 0 or 1.
    full_share: share of steps that train everything, at least 0 and less than 1.
    seed: random seed of a sequence of kind 1.

    Raises ValueError for values out of range.
    """

    groups: int = 10
    kind: int = 1
    full_share: float = 0.7
    seed: int = 0
    _parts: list[list[str]] = field(default_factory=list, init=False, repr=False)
    _indices: list[int] = field(default_factory=list, init=False, repr=False)
    _rest: Iterator[int] = field(default_factory=lambda: iter(()), init=False, repr=False)

    def __post_init__(self):
        if self.groups < 1:
            raise ValueError(f"groups is {self.groups}; grad_freeze needs at least 1")
        next(sequence(self.groups, self.kind, self.full_share, self.seed))

    def classes(self, model: nn.Module) -> Mapping[str, int]:
        self._parts = split(model, self.groups)
        self._indices, self._rest = [], sequence(len(self._parts), self.kind, self.full_share, self.seed)
        last = len(self._parts) - 1
        return {name: last - i for i, names in enumerate(self._parts) for name in names}

    def before(self, step: Step, number: int) -> None:
        index = self.index(number)
        names = [name for part in self._parts[index:] for name in part]
        step.train_only(names if index else None)

    def index(self, number: int) -> int:
        """The first group that a step trains; steps are numbered from 0."""
        self._indices += islice(self._rest, max(0, number + 1 - len(self._indices)))
        return self._indices[number]


def sequence(groups: int, kind: int, full_share: float, seed: int = 0) -> Iterator[int]:
    """The index of the first trained group in each step, without end.

    Raises ValueError for another kind than 0 and 1, and for a share out of range.
    """
    if kind not in (0, 1):
        raise ValueError(f"kind is {kind!r}; it may be 0 (continuous) or 1 (interval)")
    if not 0 <= full_share < 1:
        raise ValueError(f"full_share is {full_share!r}; it must be at least 0 and less than 1")
    if groups < 2:
        while True:
            yield 0
    if kind == 0:
        while True:
            yield from [0] * int(full_share * (groups - 1) // (1 - full_share))
            yield from range(1, groups)
    draw, indices = np.random.RandomState(seed), list(range(1, groups))
    full, partial, odds = 1, 0, [i / sum(indices) for i in indices]
    yield 0
    while True:
        if partial / (full + partial) < 1 - full_share:
            partial += 1
            yield int(draw.choice(indices[::-1], p=odds))
        else:
            full += 1
            yield 0


def split(model: nn.Module, groups: int) -> list[list[str]]:
    """The names of trained parameters in groups, in the order of the model.

    Parameters are first collected in units: a unit takes parameters until it has at least 3, and then all vectors
    (biases, weights of norms) that follow, so that a layer and its norm stay together. Each group has the same number
    of units, and the last one also the rest. With fewer units than `groups`, each unit is a group.

    Raises ValueError if no parameter requires gradients.
    """
    units: list[list[str]] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if not units or (p.ndim > 1 and len(units[-1]) >= SMALLEST):
            units.append([])
        units[-1].append(name)
    if not units:
        raise ValueError("no parameter requires gradients: there is nothing to freeze")
    count = min(groups, len(units))
    stride = len(units) // count
    ends: Sequence[int] = [*(stride * i for i in range(1, count)), len(units)]
    return [list(chain(*units[i * stride : end])) for i, end in enumerate(ends)]
