"""Trust region policy optimization (Schulman et al., 2015).

The step solves max g.s subject to s.F s / 2 <= target_kl, F the Fisher matrix of the policy: s is proportional to
F^-1 g, which conjugate gradients find from products with F alone. A line search shrinks it until the surrogate improves
and the divergence is small. The value function is fitted by Adam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.rl.algorithms.families.actor_critic import ActorCritic, flat_rows
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam
from tutti.rl.core.returns import gae, mean_of, standardized
from tutti.rl.placement.ranks import mean_of_ranks

Tree = dict[str, Any]


class TRPO(ActorCritic):
    """Options: `TRPO.Config`."""

    @dataclass(frozen=True)
    class Config(ActorCritic.Config):
        """damping: multiple of the identity that is added to the Fisher matrix. cg_steps: steps of conjugate gradients.
        line_steps: most steps of the line search, each with 0.8 of the step before. value_epochs: passes of the value
        function over a rollout, in batches of batch_size."""

        learning_rate: Rate = 1e-3
        gae_lambda: Number = 0.95
        target_kl: float = 0.01
        damping: float = 0.1
        cg_steps: int = 10
        line_steps: int = 10
        value_epochs: int = 10
        batch_size: int = 128

    unused = ("vf_coef", "ent_coef", "max_grad_norm")

    def build(self) -> None:
        super().build()
        self.adam = Adam()
        self.policy_part = self._part("critic")

    def _part(self, without: str) -> Tensor:
        """1 for weights of the policy, 0 for those of the value function."""
        marks = [torch.full((shape.numel(),), float(not name.startswith(without)))
                 for name, shape in self.net.shapes.items()]  # fmt: skip
        return torch.cat(marks)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c = self.config
        value, after, terminated, done = self.values(learner, chunk)
        advantage = gae(chunk["reward"], value, after, terminated, done, c.gamma, c.gae_lambda)
        rows = flat_rows({**self.inputs(chunk), "action": chunk["action"], "log_prob": chunk["log_prob"],
                          "advantage": advantage, "target": advantage + value}, chunk["reward"].ndim)  # fmt: skip
        rows["advantage"] = standardized(rows["advantage"], rows.get("valid"))
        weights, metrics = self._policy_step(learner["weights"], rows)
        weights, state, loss = self._value_steps(weights, learner, rows, key)
        return {**learner, "weights": weights, "adam": state}, {**metrics, "value_loss": loss}

    def _policy_step(self, weights: Tensor, rows: Tree) -> tuple[Tensor, Tree]:
        c, part = self.config, self.policy_part
        old = self.network(weights, rows)[0]

        def surrogate(w: Tensor) -> Tensor:
            outputs = self.network(w, rows)[0]
            ratio = (self.distribution.log_prob(outputs, rows["action"]) - rows["log_prob"]).exp()
            return mean_of(ratio * rows["advantage"], rows.get("valid"))

        def divergence(w: Tensor) -> Tensor:
            return mean_of(self.distribution.kl(old, self.network(w, rows)[0]), rows.get("valid"))

        gradient, before = torch.func.grad_and_value(surrogate)(weights)
        g, before = mean_of_ranks(gradient) * part, mean_of_ranks(before)

        def fisher(v: Tensor) -> Tensor:
            product = torch.func.grad(lambda w: (torch.func.grad(divergence)(w) * v).sum())(weights)
            return mean_of_ranks(product) * part + c.damping * v

        def cg(carry: tuple[Tensor, ...], _: Tensor):
            x, r, p, rr = carry
            fp = fisher(p)
            size = rr / ((p * fp).sum() + 1e-10)
            x, r = x + size * p, r - size * fp
            after = (r * r).sum()
            return (x, r, r + after / (rr + 1e-10) * p, after), None

        (direction, *_), _ = tutti.scan(
            cg, (torch.zeros_like(g), g, g.clone(), (g * g).sum()), torch.arange(c.cg_steps)
        )
        curvature = (direction * fisher(direction)).sum().clamp(min=1e-10)
        step = (2 * c.target_kl / curvature).sqrt() * direction

        def shrink(carry: tuple[Tensor, Tensor], i: Tensor):
            best, accepted = carry
            tried = weights + 0.8**i * step
            kl, gain = mean_of_ranks(divergence(tried)), mean_of_ranks(surrogate(tried))
            good = (kl <= c.target_kl) & (gain > before) & ~accepted
            return (torch.where(good, tried, best), accepted | good), None

        start = weights, torch.zeros((), dtype=torch.bool)
        (moved, accepted), _ = tutti.scan(shrink, start, torch.arange(c.line_steps))
        return moved, {"kl": divergence(moved), "improved": surrogate(moved) - before, "accepted": accepted.float()}

    def _value_steps(self, weights: Tensor, learner: Tree, rows: Tree, key: Tensor) -> tuple[Tensor, Tree, Tensor]:
        c, rate, n = self.config, self.rate(learner), rows["target"].shape[0]
        size = n if n < c.batch_size else c.batch_size
        order = torch.cat([keys.permutation(keys.fold(key, i), n)[: n // size * size] for i in range(c.value_epochs)])

        def loss(w: Tensor, index: Tensor) -> Tensor:
            value = self.net(w, None, rows.get("critic", rows["obs"])[index])[1]
            valid = rows["valid"][index] if "valid" in rows else None
            return mean_of((value - rows["target"][index]).square(), valid)

        def body(carry: tuple[Tensor, Tree], index: Tensor):
            gradient, value_loss = torch.func.grad_and_value(loss)(carry[0], index)
            return self.adam.step(carry[0], gradient * (1 - self.policy_part), carry[1], rate), value_loss

        (weights, state), losses = tutti.scan(body, (weights, learner["adam"]), order.view(-1, size))
        return weights, state, losses.mean()
