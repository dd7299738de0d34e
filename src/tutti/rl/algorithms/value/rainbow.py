"""Rainbow (Hessel et al., 2018): double, dueling, prioritized, multi-step, distributional and noisy Q-learning.

Exploration comes from noise on the weights of the last layers (Fortunato et al., 2018), mu + sigma f(e_i) f(e_j)
with f(e) = sign(e) sqrt(|e|). The noise is drawn anew for each batch and each step of acting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.rl.algorithms.value.c51 import C51
from tutti.rl.core import keys
from tutti.rl.core.agent import Number
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.networks import ACTIVATIONS
from tutti.rl.replay.priority import Prioritized

Tree = dict[str, Any]


class Rainbow(C51):
    """Options: `Rainbow.Config`."""

    @dataclass(frozen=True)
    class Config(C51.Config):
        """sigma: first size of the noise. alpha, beta: exponents of priorities and of weights in the replay."""

        n_step: int = 3
        sigma: float = 0.5
        alpha: float = 0.5
        beta: float = 0.4
        exploration_initial_eps: Number = 0.0
        exploration_final_eps: Number = 0.0

    unused = (*C51.unused, "hindsight")
    cnn_hidden = (512,)

    def module(self) -> nn.Module:
        c = self.config
        actions = self.distribution.size
        return self.sighted(lambda size: Noisy(size, c.hidden, actions, c.atoms, c.sigma, c.activation))

    def make_replay(self) -> Prioritized:
        c = self.config
        return Prioritized(max(c.buffer_size // c.n_envs, 1), c.n_envs, c.n_step, c.alpha, c.beta)

    def logits(self, weights: Tensor, obs: Tensor, key: Tensor | None) -> Tensor:
        return self.q(weights, obs, key)

    def choosing(self, weights: Tensor, learner: Tree) -> Tensor:
        return weights

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        of_noise, of_choice = keys.split(key)
        q = masked(self.values(policy["weights"], seen["obs"], of_noise if explore else None), seen.get("mask"))
        return (self.sometimes_random(policy, q, of_choice) if explore else q.argmax(-1)), {}, carry


class Noisy(nn.Module):
    """A dueling network whose layers after the first have noisy weights: (..., actions, atoms)."""

    def __init__(self, size: int, hidden: tuple[int, ...], actions: int, atoms: int, sigma: float, activation: str):
        super().__init__()
        *shared, last = hidden
        self.first = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise([size, *shared])])
        width = shared[-1] if shared else size
        self.value = nn.ModuleList([NoisyLinear(width, last, sigma), NoisyLinear(last, atoms, sigma)])
        self.advantage = nn.ModuleList([NoisyLinear(width, last, sigma), NoisyLinear(last, actions * atoms, sigma)])
        self.atoms, self.activation = atoms, ACTIVATIONS[activation]()

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        for layer in self.first:
            x = self.activation(layer(x))
        streams = []
        for i, (hidden, out) in enumerate((self.value, self.advantage)):  # pyright: ignore[reportGeneralTypeIssues]
            noise = (None, None) if key is None else keys.split(keys.fold(key, i))
            streams.append(out(self.activation(hidden(x, noise[0])), noise[1]).unflatten(-1, (-1, self.atoms)))
        value, advantage = streams
        return value + advantage - advantage.mean(-2, keepdim=True)


class NoisyLinear(nn.Module):
    """A linear layer with factorized noise on its weights; without a key there is none."""

    def __init__(self, inputs: int, outputs: int, sigma: float):
        super().__init__()
        bound, size = 1 / math.sqrt(inputs), sigma / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_size = nn.Parameter(torch.full((outputs, inputs), size))
        self.bias_size = nn.Parameter(torch.full((outputs,), size))

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        if key is None:
            return F.linear(x, self.weight, self.bias)
        drawn = (keys.normal(k, (n,)) for k, n in zip(keys.split(key), self.weight.shape, strict=True))
        rows, columns = (_root(noise).to(x.dtype) for noise in drawn)
        weight = self.weight + self.weight_size * rows.unsqueeze(-1) * columns
        return F.linear(x, weight, self.bias + self.bias_size * rows)


def _root(x: Tensor) -> Tensor:
    return x.sign() * x.abs().sqrt()
