"""Proximal policy optimization (Schulman et al., 2017, arXiv 1707.06347).

With the ratio r = pi(a|s) / pi_old(a|s) and generalized advantage estimates A, each minibatch descends

    -E[min(r A, clip(r, 1 - eps, 1 + eps) A)] + vf_coef E[(V(s) - R)^2] - ent_coef E[H(pi(.|s))]

for several epochs over the same rollout. Advantages are normalized in each minibatch; gradients are clipped to the norm
`max_grad_norm`. Actions that are masked have probability 0 (Huang and Ontanon, 2020, arXiv 2006.14171). Agents of one
team share weights: independent PPO (de Witt et al., 2020, arXiv 2011.09533).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tutti
from tutti.rl.algorithms.families.actor_critic import ActorCritic, flat_rows
from tutti.rl.core import keys
from tutti.rl.core.agent import Number
from tutti.rl.core.descent import Adam
from tutti.rl.core.returns import explained, gae, mean_over, standardized
from tutti.rl.placement.ranks import mean_of_ranks

Tree = dict[str, Any]


class PPO(ActorCritic):
    """Options: `PPO.Config`."""

    @dataclass(frozen=True)
    class Config(ActorCritic.Config):
        """clip_range: eps above. clip_range_vf: how far a value may move from that of the rollout; None: as far as it
        does. normalize_advantage: in each minibatch. target_kl: stop the epochs of a rollout where the policy has moved
        so far."""

        n_steps: int = 256
        batch_size: int = 256
        n_epochs: int = 10
        gae_lambda: Number = 0.95
        clip_range: Number = 0.2
        clip_range_vf: Number | None = None
        normalize_advantage: bool = True
        target_kl: float | None = None

    def check(self) -> None:
        super().check()
        c, agents = self.config, len(self.env.agents)
        self.fit_batch(c.n_envs * c.n_steps * agents,
                       f"rows of a rollout (n_envs {c.n_envs} x n_steps {c.n_steps} x {agents} agents)",
                       *self.minibatch_unit())  # fmt: skip

    def minibatch_unit(self) -> tuple[int, str]:
        """The unit that minibatch sizes must be a multiple of, and why."""
        return 1, ""

    def build(self) -> None:
        super().build()
        c = self.config
        assert c.n_envs * c.n_steps * len(self.env.agents) % c.batch_size == 0
        self.adam = Adam(eps=1e-5, clip=c.max_grad_norm)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c = self.config
        value, after, terminated, done = self.values(learner, chunk)
        advantage = gae(chunk["reward"], value, after, terminated, done, c.gamma, c.gae_lambda)
        rows = flat_rows({**self.inputs(chunk), "action": chunk["action"], "log_prob": chunk["log_prob"],
                          "advantage": advantage, "target": advantage + value, "value": value},
                         chunk["reward"].ndim)  # fmt: skip
        learner, metrics = self.epochs(learner, rows, key, 0, c.batch_size)
        return learner, {**metrics, "explained_variance": explained(value, advantage + value, chunk.get("valid"))}

    def epochs(self, learner: Tree, rows: Tree, key: Tensor, dim: int, size: int) -> tuple[Tree, Tree]:
        """Learn from all rows `n_epochs` times, in minibatches of `size` along a dim. Returns (learner, metrics)."""
        c, rate, n = self.config, self.rate(learner), rows["advantage"].shape[dim]

        def minibatch(carry: Tree, index: Tensor) -> tuple[Tree, Tree]:
            batch = {name: x.index_select(dim, index) for name, x in rows.items()}
            gradient, metrics = torch.func.grad(self.loss, has_aux=True)(carry["weights"], batch)
            weights, state = self.adam.step(carry["weights"], gradient, carry["adam"], rate)
            moved = {"weights": weights, "adam": state}
            if c.target_kl is not None:
                go = carry["go"] & (mean_of_ranks(metrics["kl"]) <= 1.5 * c.target_kl)
                moved = pytree.tree_map(lambda a, b: torch.where(go, a, b), moved,
                                                     {"weights": carry["weights"], "adam": carry["adam"]})  # fmt: skip
                moved["go"] = go
            return moved, metrics

        start = {"weights": learner["weights"], "adam": learner["adam"]}
        if c.target_kl is not None:
            start["go"] = torch.ones((), dtype=torch.bool)
        order = torch.cat([keys.permutation(keys.fold(key, i), n) for i in range(c.n_epochs)])
        last, stacked = tutti.scan(minibatch, start, order.view(-1, size))
        metrics = {name: x.mean() for name, x in stacked.items()}
        return {**learner, "weights": last["weights"], "adam": last["adam"]}, metrics

    def loss(self, weights: Tensor, batch: Tree) -> tuple[Tensor, Tree]:
        """(loss, metrics) of a minibatch."""
        c, valid = self.config, batch.get("valid")
        mean = mean_over(valid)
        outputs, value = self.network(weights, batch)
        advantage = standardized(batch["advantage"], valid) if c.normalize_advantage else batch["advantage"]
        log_ratio = self.distribution.log_prob(outputs, batch["action"]) - batch["log_prob"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - c.clip_range, 1 + c.clip_range)
        policy_loss = -mean(torch.minimum(ratio * advantage, clipped * advantage))
        if c.clip_range_vf is not None:
            value = batch["value"] + (value - batch["value"]).clamp(-c.clip_range_vf, c.clip_range_vf)
        value_loss = mean((value - batch["target"]).square())
        entropy = mean(self.distribution.entropy(outputs))
        total = policy_loss + c.vf_coef * value_loss - c.ent_coef * entropy
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy,
                   "kl": mean(ratio - 1 - log_ratio), "clipped": mean((ratio != clipped).float())}  # fmt: skip
        return total, {name: x.detach() for name, x in metrics.items()}
