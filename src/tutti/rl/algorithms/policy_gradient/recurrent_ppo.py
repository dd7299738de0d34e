"""Proximal policy optimization with a memory, for tasks whose observations do not tell the state.

A recurrent cell (`tutti.rl.networks.memory`) sees the observations of an episode one after another; the policy and the
value function read its output. A minibatch is the whole rollout of some environments, from the state of the memory in
which
it began, with zeros where an episode begins: gradients reach back to the beginning of the rollout (truncated
backpropagation through time, Williams and Peng 1990). Memories at the beginning of a rollout are those of the policy
that acted, as in Stable-Baselines3 Contrib.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.core.env import ends
from tutti.rl.core.returns import explained, gae
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.memory import Remembering, begins
from tutti.rl.networks.networks import Network

Tree = dict[str, Any]


class RecurrentPPO(PPO):
    """Options: `RecurrentPPO.Config`."""

    @dataclass(frozen=True)
    class Config(PPO.Config):
        """cell: "gru" or "lstm". memory: its width. hidden: layers before it. batch_size: rows of a minibatch,
        n_steps x agents for each of its environments."""

        n_steps: int = 64
        cell: str = "gru"
        memory: int = 64
        hidden: tuple[int, ...] = (64,)

    sees = False

    def minibatch_unit(self) -> tuple[int, str]:
        n, agents = self.config.n_steps, len(self.env.agents)
        return n * agents, f"minibatches are rollouts of whole environments (n_steps {n} x {agents} agents)"

    def build(self) -> None:
        super().build()
        c, d = self.config, self.distribution
        self.each = self.minibatch_unit()[0]
        outputs = {"policy": d.size, "value": 1}
        self.net = Network(lambda: Remembering(self.policy_size(), c.hidden, c.memory, c.cell, outputs, c.activation,
                                               {"policy": 0.01}))  # fmt: skip
        self.width = c.memory * (2 if c.cell == "lstm" else 1)

    def carry(self, n: int) -> Tree:
        return {"memory": torch.zeros(*self.rows(n), self.width)}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        heads, state = self.net(policy["weights"], self.policy_input(seen["obs"]), carry["memory"])
        outputs, d = masked(heads["policy"], seen.get("mask")), self.distribution
        action = d.sample(outputs, key) if explore else d.mode(outputs)
        return action, {"log_prob": d.log_prob(outputs, action), "memory": carry["memory"]}, {"memory": state}

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c, done = self.config, chunk["terminated"] | chunk["truncated"]
        rows = {name: chunk[name] for name in ("action", "log_prob", "mask", "valid") if name in chunk}
        rows |= {"obs": self.policy_input(chunk["obs"]), "memory": chunk["memory"][:1], "first": begins(done)}
        heads, states = self.net(learner["weights"], rows["obs"], chunk["memory"][0], rows["first"])
        value = heads["value"].squeeze(-1)
        after = self.net(learner["weights"], self.policy_input(chunk["last"]), states)[0]["value"].squeeze(-1)
        advantage = gae(chunk["reward"], value, after, *ends(chunk, value), c.gamma, c.gae_lambda)
        rows |= {"advantage": advantage, "target": advantage + value, "value": value}
        learner, metrics = self.epochs(learner, rows, key, 1, c.batch_size // self.each)
        return learner, {**metrics, "explained_variance": explained(value, advantage + value, chunk.get("valid"))}

    def network(self, weights: Tensor, batch: Tree) -> tuple[Tensor, Tensor]:
        heads, _ = self.net(weights, batch["obs"], batch["memory"][0], batch["first"])
        return masked(heads["policy"], batch.get("mask")), heads["value"].squeeze(-1)
