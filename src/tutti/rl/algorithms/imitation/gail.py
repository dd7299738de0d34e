"""Generative adversarial imitation learning (Ho and Ermon, 2016, arXiv 1606.03476), with PPO as its learner.

A discriminator D(s, a) descends -E_expert[log D] - E_policy[log(1 - D)], regularized towards small gradients at the
expert's data (Mescheder et al., 2018, R1). The policy's reward is one of

    gail: -log(1 - D)     always positive: it also rewards long episodes
    airl: log D - log(1 - D)     the discriminator's logit (Fu et al., 2018), of either sign

The environment's own reward is never learned from; `evaluate` still reports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tutti
from tutti.rl.algorithms.families.actor_critic import flat_rows
from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.core import keys
from tutti.rl.core.descent import Adam
from tutti.rl.dataset import Rows, rows_of
from tutti.rl.networks.distributions import Box
from tutti.rl.networks.networks import Network, mlp

Tree = dict[str, Any]
REWARDS = "gail", "airl"


class GAIL(PPO):
    """Options: `GAIL.Config`.

    data: the expert's, see `tutti.rl.dataset`. Without data an agent can act, as one that was loaded from a file, but
    not learn. Only observations and actions are read.
    """

    @dataclass(frozen=True)
    class Config(PPO.Config):
        """disc_hidden, disc_lr, disc_batch_size: widths of the discriminator's hidden layers, its learning rate and
        batch size. disc_steps: its updates in each iteration. penalty: weight of the penalty of its gradients.
        reward: one of `REWARDS`."""

        disc_hidden: tuple[int, ...] = (64, 64)
        disc_lr: float = 3e-4
        disc_batch_size: int = 256
        disc_steps: int = 10
        penalty: float = 1.0
        reward: str = "gail"

    sees = pixels = False

    multi_agent, gaps = False, False
    unused = ("normalize_reward",)  # the reward is that of the discriminator

    def __init__(self, *args: Any, data: Any = None, **options: Any):
        self.data = data
        super().__init__(*args, **options)

    def build(self) -> None:
        super().build()
        c, d = self.config, self.distribution
        if c.reward not in REWARDS:
            raise ValueError(f"there is no reward {c.reward!r}; there are {', '.join(REWARDS)}")
        width = d.width if isinstance(d, Box) else d.size
        self.disc = Network(lambda: mlp([self.features.size + width, *c.disc_hidden, 1], "tanh"))
        self.disc_adam = Adam(lr=c.disc_lr, betas=(0.5, 0.999))
        spaced = self.env.observation_space, self.env.action_space
        rows = None if self.data is None else rows_of(self.data, self.features, self.distribution, spaced)
        self.expert: Rows | None = None if rows is None else {name: rows[name] for name in ("obs", "action")}

    def init(self, seed: int) -> Tree:
        weights = self.disc.init(seed + 1)
        return {**super().init(seed), "disc": weights, "disc_adam": self.disc_adam.init(weights)}

    def step(self) -> None:
        if self.expert is None:
            raise ValueError("GAIL has no data of an expert; pass data=")
        super().step()

    def pairs(self, obs: Tensor, action: Tensor) -> Tensor:
        """Inputs of the discriminator, (..., features)."""
        d = self.distribution
        x = self.to_env(action).reshape(*obs.shape[:-1], -1) if isinstance(d, Box) else F.one_hot(action, d.size)
        return torch.cat([obs, x.float()], -1)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        of_disc, of_policy = keys.split(key)
        seen = self.pairs(chunk["obs"], chunk["action"])
        learner, disc_metrics = self.discriminate(learner, flat_rows({"x": seen}, 2)["x"], of_disc)
        chunk = {**chunk, "reward": self.imitation(learner["disc"], seen)}
        learner, metrics = super().update(learner, chunk, of_policy)
        return learner, {**metrics, **disc_metrics, "imitation_reward": chunk["reward"].mean()}

    def imitation(self, disc: Tensor, pairs: Tensor) -> Tensor:
        """Rewards of the discriminator, as pairs without their last dim."""
        logit = self.disc(disc, pairs).squeeze(-1)
        return F.softplus(logit) if self.config.reward == "gail" else logit

    def discriminate(self, learner: Tree, policy: Tensor, key: Tensor) -> tuple[Tree, Tree]:
        """Update the discriminator. policy: pairs (count, features) of the present policy."""
        c, expert = self.config, self.expert
        assert expert is not None
        obs, n = self.normalizer.apply(learner, expert["obs"]), expert["obs"].shape[0]

        def body(carry: tuple[Tensor, Tree], i: Tensor) -> tuple[tuple[Tensor, Tree], Tree]:
            of_expert, of_policy = keys.split(keys.fold(key, i))
            index = keys.integers(of_expert, (c.disc_batch_size,), n)
            real = self.pairs(obs[index], expert["action"][index])
            fake = policy[keys.integers(of_policy, (c.disc_batch_size,), policy.shape[0])]
            gradient, metrics = torch.func.grad(self.disc_loss, has_aux=True)(carry[0], real, fake)
            return self.disc_adam.step(carry[0], gradient, carry[1]), metrics

        start = learner["disc"], learner["disc_adam"]
        (disc, adam), metrics = tutti.scan(body, start, torch.arange(c.disc_steps))
        return {**learner, "disc": disc, "disc_adam": adam}, {name: x.mean() for name, x in metrics.items()}

    def disc_loss(self, disc: Tensor, real: Tensor, fake: Tensor) -> tuple[Tensor, Tree]:
        """(loss with its penalty, metrics)."""
        one, zero = self.disc(disc, real).squeeze(-1), self.disc(disc, fake).squeeze(-1)
        cross = F.softplus(-one).mean() + F.softplus(zero).mean()
        slope = torch.func.grad(lambda x: self.disc(disc, x).sum())(real)
        right = 0.5 * ((one > 0).float().mean() + (zero < 0).float().mean())
        metrics = {"disc_loss": cross.detach(), "disc_accuracy": right}
        return cross + 0.5 * self.config.penalty * slope.square().sum(-1).mean(), metrics
