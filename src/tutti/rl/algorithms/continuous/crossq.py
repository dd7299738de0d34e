"""CrossQ (Bhatt et al., 2024, arXiv 1902.05605): soft actor-critic with normalized critics, without target networks.

Both sides of the temporal-difference error go through the critics as one batch, so that (s, a) and (s', a') are
normalized by the same statistics. Critics normalize what each layer sees by batch renormalization (Ioffe, 2017),

    y = (x - mean_B) / std_B r + d,   r = clip(std_B / std, 1/3, 3),   d = clip((mean_B - mean) / std, -5, 5)

with running statistics mean and std, and no gradient through r and d. Before `renorm_warmup` updates r is 1 and d is 0,
which is batch normalization. The actor is updated in every `policy_delay`-th update, and sees critics with running
statistics. It is not normalized itself, unlike in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tutti.rl.algorithms.continuous.sac import SAC
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.core.normalize import over_ranks
from tutti.rl.networks.distributions import TanhGaussian
from tutti.rl.networks.networks import ACTIVATIONS, Ensemble

Tree = dict[str, Any]
EPS = 1e-3


class CrossQ(SAC):
    """Options: `CrossQ.Config`."""

    @dataclass(frozen=True)
    class Config(SAC.Config):
        """momentum: share of a batch in running statistics. critic_hidden: layers of critics, wider than the actor's.
        policy_delay, renorm_warmup: above."""

        learning_rate: Rate = 1e-3
        critic_hidden: tuple[int, ...] = (512, 512)
        policy_delay: int = 3
        momentum: Number = 0.01
        renorm_warmup: int = 100_000

    distribution: TanhGaussian
    unused = (*SAC.unused, "tau")
    sees = False

    def build(self) -> None:
        super().build()
        c, size = self.config, self.features.size + self.distribution.width
        self.q = Ensemble(lambda: Renormalized([size, *c.critic_hidden, 1], c.activation), self.critics)
        self.widths = size + sum(c.critic_hidden)
        self.adam = Adam(betas=(0.5, 0.999))

    def init(self, seed: int) -> Tree:
        learner = super().init(seed)
        del learner["target_critic"]
        shape = self.critics, self.widths
        return {**learner, "stats": {"mean": torch.zeros(shape), "var": torch.ones(shape)}, "updates": torch.zeros(())}

    def normalized_critic(self, weights: Tensor, stats: Tree, obs: Tensor, action: Tensor, renorm: Tensor | None):
        """(values (critics, count), mean and variance of the batch (critics, widths)). renorm: bool, whether running
        statistics correct those of the batch. Without it, running statistics are used instead."""
        x = torch.cat([obs, action.flatten(1)], -1)
        values, mean, var = torch.vmap(lambda w, m, v: self.q.one(w, x, m, v, renorm))(
            weights, stats["mean"], stats["var"]
        )
        return values, {"mean": mean, "var": var}

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        of_critic, of_actor = keys.split(key)
        rate, alpha, c = self.rate(learner), self.alpha(learner), self.config
        gradient, (error, seen, loss) = torch.func.grad(self.critic_loss, has_aux=True)(
            learner["critic"], learner, batch, alpha, of_critic
        )
        critic, adam = self.adam.step(learner["critic"], gradient, learner["critic_adam"], rate)
        seen = dict(zip(("mean", "var"), over_ranks(seen["mean"], seen["var"]), strict=True))
        stats = {name: moved_towards(x, seen[name], c.momentum) for name, x in learner["stats"].items()}
        count = learner["updates"] + 1
        learner = {**learner, "critic": critic, "critic_adam": adam, "stats": stats, "updates": count}

        seen_by_actor: Any = critic, stats
        gradient, log_prob = torch.func.grad(self.actor_loss, has_aux=True)(
            learner["actor"], seen_by_actor, batch, alpha, of_actor
        )
        actor, adam = self.adam.step(learner["actor"], gradient, learner["actor_adam"], rate)
        moved = {"actor": actor, "actor_adam": adam}
        if c.ent_coef is None:
            gradient = -(log_prob + self.target_entropy)
            log_alpha, adam = self.adam.step(learner["log_alpha"], gradient, learner["alpha_adam"], rate)
            moved |= {"log_alpha": log_alpha, "alpha_adam": adam}
        due = count % c.policy_delay == 0
        previous = {name: learner[name] for name in moved}
        learner = {**learner, **pytree.tree_map(lambda a, b: torch.where(due, a, b), moved, previous)}
        return learner, error, {"critic_loss": loss, "entropy": -log_prob, "alpha": learner["log_alpha"].exp()}

    def critic_loss(self, weights: Tensor, learner: Tree, batch: Tree, alpha: Any, key: Tensor):
        """(loss, (errors (count,), statistics of the batch, the loss to report))."""
        outputs = self.pi(learner["actor"], batch["last"])
        action, log_prob = self.distribution.sample_with_log_prob(outputs, key)
        obs, actions = torch.cat([batch["obs"], batch["last"]]), torch.cat([batch["action"], action])
        renorm = learner["updates"] >= self.config.renorm_warmup
        values, seen = self.normalized_critic(weights, learner["stats"], obs, actions, renorm)
        q, after = values.chunk(2, -1)
        target = batch["reward"] + batch["discount"] * (after.amin(0) - alpha * log_prob)
        errors = q - target.detach()
        total = 0.5 * (batch["weight"] * errors.square()).mean(-1).sum()
        return total, (errors.detach().mean(0), pytree.tree_map(torch.detach, seen), total.detach())

    def value(self, critic: Any, obs: Tensor, action: Tensor) -> Tensor:
        weights, stats = critic
        return self.normalized_critic(weights, stats, obs, action, None)[0].amin(0)


class Renormalized(nn.Module):
    """A perceptron that normalizes what each layer sees. Statistics of all layers are one vector (widths,)."""

    def __init__(self, sizes: list[int], activation: str):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(sizes)])
        self.scale = nn.ParameterList([torch.ones(n) for n in sizes[:-1]])
        self.shift = nn.ParameterList([torch.zeros(n) for n in sizes[:-1]])
        self.sizes, self.activation = sizes[:-1], ACTIVATIONS[activation]()

    def forward(self, x: Tensor, mean: Tensor, var: Tensor, renorm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs (count,), means, variances): statistics of the batch, or `mean` and `var` without `renorm`."""
        statistics = []
        parts = zip(self.layers, self.scale, self.shift, mean.split(self.sizes), var.split(self.sizes), strict=True)
        for i, (layer, scale, shift, m, v) in enumerate(parts):
            x = self.activation(x) if i else x
            x, seen = renormalized(x, m, v, renorm)
            statistics.append(seen)
            x = layer(x * scale + shift)
        means, variances = (torch.cat(column) for column in zip(*statistics, strict=True))
        return x.squeeze(-1), means, variances


def renormalized(x: Tensor, mean: Tensor, var: Tensor, renorm: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """y above of x (count, width), and (mean, variance) of the batch. Without `renorm`, y = (x - mean) / std."""
    std = (var + EPS).sqrt()
    if renorm is None:
        return (x - mean) / std, (mean, var)
    batch_mean, batch_var = x.mean(0), x.var(0, correction=0)
    batch_std = (batch_var + EPS).sqrt()
    r = torch.where(renorm, (batch_std / std).clamp(1 / 3, 3.0), 1.0).detach()
    d = torch.where(renorm, ((batch_mean - mean) / std).clamp(-5.0, 5.0), 0.0).detach()
    return (x - batch_mean) / batch_std * r + d, (batch_mean, batch_var)
