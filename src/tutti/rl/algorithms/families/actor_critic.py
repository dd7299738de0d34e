"""On-policy algorithms with a policy and a value function: what A2C, PPO, TRPO and IMPALA share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.rl.algorithms.families.on_policy import OnPolicy
from tutti.rl.core.agent import Number
from tutti.rl.core.descent import Adam, RMSProp
from tutti.rl.core.env import ends
from tutti.rl.networks.distributions import Box, masked
from tutti.rl.networks.networks import GAIN, Network, mlp
from tutti.rl.networks.pixels import FEATURES, NatureCNN

Tree = dict[str, Any]


class ActorCritic(OnPolicy):
    """One vector of weights holds the policy's and the value function's network."""

    @dataclass(frozen=True)
    class Config(OnPolicy.Config):
        """vf_coef, ent_coef: weights of the value loss and of the entropy. max_grad_norm: largest norm of a gradient.
        log_std: first log standard deviation of continuous actions."""

        vf_coef: Number = 0.5
        ent_coef: Number = 0.0
        max_grad_norm: Number = 0.5
        log_std: float = 0.0

    adam: Adam | RMSProp
    gaps = pixels = sees = True
    cnn_hidden = ()

    def check(self) -> None:
        if not isinstance(self.distribution, Box):
            self.refuse("with discrete actions", "log_std")

    def build(self) -> None:
        self.net = Network(lambda: Both(self))

    def init(self, seed: int) -> Tree:
        weights = self.net.init(seed)
        return {"weights": weights, "adam": self.adam.init(weights)}

    def policy(self, learner: Tree) -> Tree:
        return {"weights": learner["weights"]}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        outputs = masked(self.net(policy["weights"], self.policy_input(seen["obs"]), None)[0], seen.get("mask"))
        action = self.distribution.sample(outputs, key) if explore else self.distribution.mode(outputs)
        return action, {"log_prob": self.distribution.log_prob(outputs, action)}, carry

    def network(self, weights: Tensor, batch: Tree) -> tuple[Tensor, Tensor]:
        """Outputs of the policy and values of rows."""
        outputs, value = self.net(weights, batch["obs"], batch.get("critic", batch["obs"]))
        return masked(outputs, batch.get("mask")), value

    def inputs(self, chunk: Tree) -> Tree:
        """The entries of a chunk that `network` reads."""
        critic = {} if self.image else {"critic": self.critic_input(chunk, "")}  # with pictures it is what `obs` is
        return (
            {"obs": self.policy_input(chunk["obs"])}
            | critic
            | ({name: chunk[name] for name in ("mask", "valid") if name in chunk})
        )

    def policy_input(self, obs: Tensor) -> Tensor:
        """Inputs of the policy for observations (..., size): by default the observations."""
        return obs

    def policy_size(self) -> int:
        return self.features.size

    def critic_input(self, chunk: Tree, prefix: str) -> Tensor:
        """Inputs of the value function, before or (prefix "last_") after the step: by default the observation."""
        return chunk["last"] if prefix else chunk["obs"]

    def critic_size(self) -> int:
        return self.features.size

    def values(self, learner: Tree, chunk: Tree) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(values, values after each step, terminated, done), as rewards (time, n, ...)."""
        seen = torch.stack([self.critic_input(chunk, ""), self.critic_input(chunk, "last_")])
        value, after = self.net(learner["weights"], None, seen)[1].unbind(0)
        return value, after, *ends(chunk, value)


class Both(nn.Module):
    """A policy and a value function: outputs of the policy (..., outputs), and values (...). Pictures go through
    convolutions that both share."""

    def __init__(self, agent: ActorCritic):
        super().__init__()
        c, d = agent.config, agent.distribution
        self.continuous = isinstance(d, Box)
        size = d.width if isinstance(d, Box) else d.size
        self.eyes = NatureCNN(agent.image, GAIN) if agent.image else None
        inputs = (FEATURES, FEATURES) if agent.image else (agent.policy_size(), agent.critic_size())
        self.actor = mlp([inputs[0], *c.hidden, size], c.activation, GAIN, 0.01)
        self.critic = mlp([inputs[1], *c.hidden, 1], c.activation, GAIN, 1.0)
        if self.continuous:
            self.log_std = nn.Parameter(torch.full((size,), c.log_std))

    def forward(self, obs: Tensor | None, critic: Tensor | None) -> tuple[Any, Any]:
        if self.eyes is not None:  # shared, as in Stable-Baselines3
            same = critic is obs
            obs = None if obs is None else self.eyes(obs)
            critic = obs if same else None if critic is None else self.eyes(critic)
        outputs = None if obs is None else self.actor(obs)
        if outputs is not None and self.continuous:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        return outputs, None if critic is None else self.critic(critic).squeeze(-1)


def flat_rows(chunk: Tree, dims: int) -> Tree:
    """Rows of a chunk: the first dims, those of a reward, as one."""
    return {name: x.flatten(0, dims - 1) for name, x in chunk.items()}
