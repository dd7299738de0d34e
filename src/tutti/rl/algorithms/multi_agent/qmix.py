"""QMIX (Rashid et al., 2018, arXiv 1803.11485): values of agents are mixed by a network that is monotonic in each.

    Q(s, a) = w2(s) . elu(W1(s) q + b1(s)) + b2(s),   q_i = Q_i(o_i, a_i),   W1, w2 >= 0

Weights of the mixing network are absolute values of what hypernetworks make of the state s, so that Q rises with every
q_i, and the best joint action consists of the best action of each agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.rl import teams
from tutti.rl.algorithms.multi_agent.vdn import VDN
from tutti.rl.networks.networks import Network, mlp

Tree = dict[str, Any]


class QMIX(VDN):
    """Options: `QMIX.Config`."""

    @dataclass(frozen=True)
    class Config(VDN.Config):
        """mixing_size: hidden units of the mixing network. hyper_size: hidden units of the hypernetworks."""

        mixing_size: int = 32
        hyper_size: int = 64

    def build(self) -> None:
        super().build()
        c, features = self.config, teams.width_for_all(self)
        self.mixer = Network(lambda: Monotonic(self.count, features, c.mixing_size, c.hyper_size))

    def init(self, seed: int) -> Tree:
        weights = torch.cat([self.q.init(seed), self.mixer.init(seed + 1)])
        return {"weights": weights, "target": weights.clone(), "adam": self.adam.init(weights)}

    def mix(self, weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        return self.mixer(weights[self.q.size :], values, seen)


class Monotonic(nn.Module):
    """The mixing network: values (..., agents) and a state (..., features) to (...)."""

    def __init__(self, agents: int, features: int, size: int, hyper: int):
        super().__init__()
        self.first = mlp([features, hyper, agents * size], "relu")
        self.first_bias = nn.Linear(features, size)
        self.second = mlp([features, hyper, size], "relu")
        self.second_bias = mlp([features, size, 1], "relu")
        self.agents = agents

    def forward(self, values: Tensor, seen: Tensor) -> Tensor:
        weight = self.first(seen).abs().unflatten(-1, (self.agents, -1))
        hidden = F.elu((values.unsqueeze(-1) * weight).sum(-2) + self.first_bias(seen))
        return (hidden * self.second(seen).abs()).sum(-1) + self.second_bias(seen).squeeze(-1)
