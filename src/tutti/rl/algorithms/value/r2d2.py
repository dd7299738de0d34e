"""Recurrent experience replay (Kapturowski et al., 2019, "R2D2"): double Q-learning with a memory.

The replay holds sequences, and of each step the state of the memory from which the policy acted. A batch begins with
these states, runs the first `burn_in` steps only to bring them up to date, and learns from the rest by n-step targets

    y_t = h(r_t + ... + gamma^(n-1) r_(t+n-1) + gamma^n h^-1(Q'(s_(t+n), argmax_a Q(s_(t+n), a))))
    h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x

where h makes the scales of rewards alike (Pohlen et al., 2018). Sequences are drawn uniformly, where the paper has
priorities, and actors share one epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.algorithms.value.dqn import DQN
from tutti.rl.core.agent import Rate
from tutti.rl.core.returns import mean_of, n_step
from tutti.rl.networks.distributions import masked
from tutti.rl.networks.memory import Remembering, begins
from tutti.rl.networks.networks import Network
from tutti.rl.replay.ring import Shape
from tutti.rl.replay.sequence import Sequences

Tree = dict[str, Any]


class R2D2(DQN):
    """Options: `R2D2.Config`."""

    @dataclass(frozen=True)
    class Config(DQN.Config):
        """sequence: steps learned from, after burn_in steps. batch_size: sequences. cell: "gru" or "lstm", memory: its
        width. rescale: whether values are h of returns."""

        n_envs: int = 8
        batch_size: int = 32
        learning_rate: Rate = 5e-4
        n_step: int = 5
        sequence: int = 20
        burn_in: int = 10
        cell: str = "gru"
        memory: int = 64
        hidden: tuple[int, ...] = (64,)
        activation: str = "tanh"
        target_update_interval: int = 2_000
        rescale: bool = True

    actions = (spaces.Discrete,)
    unused = (*DQN.unused, "hindsight")
    sees = False

    def build(self) -> None:
        super().build()
        c, run = self.config, self.config.sequence + self.config.burn_in
        if c.learning_starts < run * c.n_envs:
            raise ValueError(f"learning_starts is {c.learning_starts}; the replay must hold {run} steps of each of "
                             f"{c.n_envs} environments before the first update: set it to at least "
                             f"{run * c.n_envs}")  # fmt: skip
        self.width = c.memory * (2 if c.cell == "lstm" else 1)
        outputs = {"q": self.distribution.size}
        self.q = Network(lambda: Remembering(self.features.size, c.hidden, c.memory, c.cell, outputs, c.activation))

    def make_replay(self) -> Sequences:
        c = self.config
        return Sequences(c.buffer_size // c.n_envs, c.n_envs, c.sequence + c.burn_in)

    def row_shapes(self) -> dict[str, Shape]:
        return {**super().row_shapes(), "memory": ((self.width,), torch.float32)}

    def carry(self, n: int) -> Tree:
        return {"memory": torch.zeros(n, self.width)}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        outputs, state = self.q(policy["weights"], seen["obs"], carry["memory"])
        q = masked(outputs["q"], seen.get("mask"))
        action = self.sometimes_random(policy, q, key) if explore else q.argmax(-1)
        return action, {"memory": carry["memory"]}, {"memory": state}

    def warm(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        action = super().warm(policy, seen, carry, key, explore)[0]
        return action, *self.act(policy, seen, carry, key, False)[1:]

    def loss(self, weights: Tensor, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tensor, tuple[Tensor, Tree]]:
        c = self.config
        first, past = begins(batch["terminated"] | batch["truncated"]), c.burn_in
        start, state = batch["memory"][0], {"weights": weights, "target": learner["target"]}
        if past:
            state = {name: self.q(w, batch["obs"][:past], start, first[:past])[1][-1].detach()
                     for name, w in state.items()}  # fmt: skip
        else:
            state = {name: start for name in state}
        rows = {name: x[past:] for name, x in batch.items() if name not in ("memory", "weight")}
        outputs, states = self.q(weights, rows["obs"], state["weights"], first[past:])
        q = outputs["q"].gather(-1, rows["action"].unsqueeze(-1)).squeeze(-1)
        target = self.targets(weights, learner, rows, states, state["target"], first[past:]).detach()
        errors = q - target
        total = mean_of(batch["weight"] * errors.square(), rows.get("valid"))
        return total, (errors.detach().abs().mean(0), {"loss": total.detach(), "q": q.detach().mean()})

    def targets(
        self, weights: Tensor, learner: Tree, rows: Tree, states: Tensor, start: Tensor, first: Tensor
    ) -> Tensor:
        """y above, (sequence, count). states: states of the memory after each step. start: state of the target's memory
        before them."""
        c, target = self.config, learner["target"]
        of_target = self.q(target, rows["obs"], start, first)[1]
        best = masked(self.q(weights, rows["last"], states)[0]["q"], rows.get("last_mask")).argmax(-1, keepdim=True)
        after = self.q(target, rows["last"], of_target)[0]["q"].gather(-1, best).squeeze(-1)
        done = rows["terminated"] | rows["truncated"]
        after = unscaled(after) if c.rescale else after
        returns = n_step(rows["reward"], after, rows["terminated"], done, c.gamma, c.n_step)
        return scaled(returns) if c.rescale else returns


EPS = 1e-3


def scaled(x: Tensor) -> Tensor:
    """h above."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + EPS * x


def unscaled(x: Tensor) -> Tensor:
    """The inverse of h."""
    root = (1 + 4 * EPS * (x.abs() + 1 + EPS)).sqrt()
    return x.sign() * (((root - 1) / (2 * EPS)).square() - 1)
