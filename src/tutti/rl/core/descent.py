"""Gradient descent on vectors of weights, as pure functions.

    adam = Adam(lr=3e-4, clip=0.5)
    state = adam.init(weights)
    weights, state = adam.step(weights, torch.func.grad(loss)(weights), state)

The only place where ranks of a data-parallel run meet: `step` averages gradients over them
(`tutti.rl.placement.ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.nn.quantized.stored import stored
from tutti.rl.placement.ranks import mean_of_ranks

State = dict[str, Tensor]
Number = float | Tensor


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), with decoupled weight decay (Loshchilov and Hutter 2019).

    lr: may be a 0-d tensor. clip: the largest norm of a gradient, after averaging over ranks.
    """

    lr: Number = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0
    clip: Number | None = None

    def init(self, weights: Tensor) -> State:
        return {"m": torch.zeros_like(weights), "v": torch.zeros_like(weights), "count": torch.zeros(())}

    def step(self, weights: Tensor, gradient: Tensor, state: State, lr: Number | None = None) -> tuple[Tensor, State]:
        """The next weights and state. lr: instead of the optimizer's own."""
        gradient = clipped(mean_of_ranks(gradient), self.clip)
        (a, b), count = self.betas, state["count"] + 1
        m = a * state["m"] + (1 - a) * gradient
        v = b * state["v"] + (1 - b) * gradient.square()
        rate = self.lr if lr is None else lr
        root = (1 - b**count).sqrt()  # corrections of the bias are numbers: stored, not computed for each weight
        size, eps = stored(rate * root / (1 - a**count)), stored(self.eps * root)
        moved = size * m / (v.sqrt() + eps)
        if self.decay:
            moved = moved + rate * self.decay * weights
        return weights - moved, {"m": m, "v": v, "count": count}


@dataclass(frozen=True)
class RMSProp:
    """RMSProp (Tieleman and Hinton 2012). eps: added to the root, or within it as TensorFlow does (`inside`)."""

    lr: Number = 7e-4
    alpha: float = 0.99
    eps: float = 1e-5
    inside: bool = False
    clip: Number | None = None

    def init(self, weights: Tensor) -> State:
        return {"v": torch.ones_like(weights) if self.inside else torch.zeros_like(weights)}

    def step(self, weights: Tensor, gradient: Tensor, state: State, lr: Number | None = None) -> tuple[Tensor, State]:
        gradient = clipped(mean_of_ranks(gradient), self.clip)
        v = self.alpha * state["v"] + (1 - self.alpha) * gradient.square()
        root = (v + self.eps).sqrt() if self.inside else v.sqrt() + self.eps
        return weights - (self.lr if lr is None else lr) * gradient / root, {"v": v}


def clipped(gradient: Tensor, norm: Number | None) -> Tensor:
    """The gradient, scaled so that its norm is at most `norm`."""
    if norm is None:
        return gradient
    return gradient * stored((norm / (gradient.square().sum().sqrt() + 1e-6)).clamp(max=1.0))


def moved_towards(target: Tensor, weights: Tensor, tau: Number) -> Tensor:
    """The slow average of a target network: (1 - tau) target + tau weights."""
    return target + tau * (weights - target)
