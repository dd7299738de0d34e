"""Distributions of actions, chosen by the action space: pure functions of the outputs of a network.

| space | distribution | outputs |
|---|---|---|
| `Discrete(n)` | `Categorical` | n logits |
| `MultiDiscrete([n, m])` | `MultiCategorical` | n + m logits |
| `MultiBinary(n)` | `Bernoulli` | n logits |
| `Box` | `Gaussian`, or `TanhGaussian` within the bounds | means, and log standard deviations |

`outputs` are float tensors (..., size), actions (..., *shape). Log-probabilities and entropies are (...).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys

NEVER = -1e9  # the logit of an action that is masked
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits under which masked actions have probability 0. mask: bool, true for possible actions."""
    return logits if mask is None else torch.where(mask, logits, NEVER)


@dataclass(frozen=True)
class Categorical:
    """One of `size` actions, int64."""

    size: int
    start: int = 0  # of the actions of the space

    def sample(self, outputs: Tensor, key: Tensor) -> Tensor:
        return keys.categorical(key, outputs)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        return outputs.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        logs = outputs.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """KL(old || new)."""
        a, b = old.log_softmax(-1), new.log_softmax(-1)
        return (a.exp() * (a - b)).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return action + self.start if self.start else action

    def from_env(self, action: Tensor) -> Tensor:
        return action.long() - self.start

    def zero(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)


@dataclass(frozen=True)
class MultiCategorical:
    """Several independent categorical actions, int64 (..., len(sizes))."""

    sizes: tuple[int, ...]
    start: tuple[int, ...] = ()  # of the actions of the space; () is 0 for all

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def _each(self, outputs: Tensor) -> list[tuple[Categorical, Tensor]]:
        return [(Categorical(n), x) for n, x in zip(self.sizes, outputs.split(self.sizes, -1), strict=True)]

    def sample(self, outputs: Tensor, key: Tensor) -> Tensor:
        each = self._each(outputs)
        return torch.stack([d.sample(x, keys.fold(key, i)) for i, (d, x) in enumerate(each)], -1)

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.stack([d.mode(x) for d, x in self._each(outputs)], -1)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        each = zip(self._each(outputs), action.unbind(-1), strict=True)
        return torch.stack([d.log_prob(x, a) for (d, x), a in each], -1).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return torch.stack([d.entropy(x) for d, x in self._each(outputs)], -1).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        each = zip(self._each(old), self._each(new), strict=True)
        return torch.stack([d.kl(a, b) for (d, a), (_, b) in each], -1).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return action + torch.tensor(self.start) if self.start else action

    def from_env(self, action: Tensor) -> Tensor:
        return action.long() - torch.tensor(self.start) if self.start else action.long()

    def zero(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(*shape, len(self.sizes), dtype=torch.int64)


@dataclass(frozen=True)
class Bernoulli:
    """Independent bits, int64 (..., size)."""

    size: int

    def sample(self, outputs: Tensor, key: Tensor) -> Tensor:
        return (keys.uniform(key, outputs.shape) < outputs.sigmoid()).long()

    def mode(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).long()

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(outputs, action.to(outputs.dtype), reduction="none").sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return (F.softplus(outputs) - outputs * outputs.sigmoid()).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        p = old.sigmoid()
        return (p * (old - new) + F.softplus(new) - F.softplus(old)).sum(-1)

    def to_env(self, action: Tensor) -> Tensor:
        return action

    def from_env(self, action: Tensor) -> Tensor:
        return action.long()

    def zero(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(*shape, self.size, dtype=torch.int64)


class Box:
    """Base of the distributions of a `Box`: the shape of actions, and their bounds."""

    def __init__(self, space: spaces.Box):
        self.shape, self.width = space.shape, int(np.prod(space.shape))
        self.low, self.high = (torch.from_numpy(x.astype(np.float32)) for x in (space.low, space.high))
        self.bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())

    @property
    def size(self) -> int:
        return 2 * self.width

    def zero(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(*shape, *self.shape)

    def _halves(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations, each (..., *shape)."""
        mean, log = outputs.chunk(2, -1)
        return mean.unflatten(-1, self.shape), log.unflatten(-1, self.shape)

    def _summed(self, x: Tensor) -> Tensor:
        return x.flatten(-len(self.shape)).sum(-1)


class Gaussian(Box):
    """Independent normal actions, float32 (..., *shape). Environments get them clipped to the bounds of the space."""

    def sample(self, outputs: Tensor, key: Tensor) -> Tensor:
        mean, log = self._halves(outputs)
        return mean + log.exp() * keys.normal(key, mean.shape)

    def mode(self, outputs: Tensor) -> Tensor:
        return self._halves(outputs)[0]

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        mean, log = self._halves(outputs)
        return self._summed(-0.5 * ((action - mean) * (-log).exp()).square() - log - _HALF_LOG_2PI)

    def entropy(self, outputs: Tensor) -> Tensor:
        return self._summed(self._halves(outputs)[1] + 0.5 + _HALF_LOG_2PI)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        (a, log_a), (b, log_b) = self._halves(old), self._halves(new)
        return self._summed(log_b - log_a + 0.5 * ((2 * log_a).exp() + (a - b).square()) * (-2 * log_b).exp() - 0.5)

    def to_env(self, action: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(action, self.low), self.high)

    def from_env(self, action: Tensor) -> Tensor:
        return action.float()


class TanhGaussian(Box):
    """tanh of independent normal numbers, in (-1, 1), scaled to the bounds of the space for environments.

    Haarnoja et al., "Soft actor-critic" (2018), appendix C. Log standard deviations are clipped to [-20, 2].
    """

    def __init__(self, space: spaces.Box):
        super().__init__(space)
        if not self.bounded:
            raise ValueError(f"actions are scaled to the bounds of their space, and {space} is not bounded: "
                             "bound it (gymnasium.wrappers.RescaleAction), or use PPO")  # fmt: skip

    def sample(self, outputs: Tensor, key: Tensor) -> Tensor:
        return self.sample_with_log_prob(outputs, key)[0]

    def sample_with_log_prob(self, outputs: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(action, its log-probability), both differentiable with respect to `outputs`."""
        mean, log = self._halves(outputs)
        log = log.clamp(-20, 2)
        noise = keys.normal(key, mean.shape)
        before = mean + log.exp() * noise
        of_normal = -0.5 * noise.square() - log - _HALF_LOG_2PI
        slope = 2 * (math.log(2) - before - F.softplus(-2 * before))  # log of the derivative of tanh
        return before.tanh(), self._summed(of_normal - slope)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        mean, log = self._halves(outputs)
        log = log.clamp(-20, 2)
        inside = action.clamp(-1 + 1e-6, 1 - 1e-6)
        before = inside.atanh()
        of_normal = -0.5 * ((before - mean) * (-log).exp()).square() - log - _HALF_LOG_2PI
        return self._summed(of_normal - (1 - inside.square()).log())

    def mode(self, outputs: Tensor) -> Tensor:
        return self._halves(outputs)[0].tanh()

    def to_env(self, action: Tensor) -> Tensor:
        return self.low + 0.5 * (action + 1) * (self.high - self.low)

    def from_env(self, action: Tensor) -> Tensor:
        return 2 * (action.float() - self.low) / (self.high - self.low) - 1


Distribution = Categorical | MultiCategorical | Bernoulli | Gaussian | TanhGaussian


def distribution_for(space: spaces.Space, squashed: bool = False) -> Distribution:
    """The distribution of an action space. squashed: tanh for a `Box`. Raises ValueError for other spaces."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        start = tuple(map(int, space.start)) if np.any(space.start) else ()
        return MultiCategorical(tuple(map(int, space.nvec)), start)
    if isinstance(space, spaces.MultiBinary) and isinstance(space.n, (int, np.integer)):
        return Bernoulli(int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return TanhGaussian(space) if squashed else Gaussian(space)
    raise ValueError(f"there is no distribution for the action space {space}; use Discrete, MultiDiscrete, MultiBinary "
                     "or a Box of floats")  # fmt: skip
