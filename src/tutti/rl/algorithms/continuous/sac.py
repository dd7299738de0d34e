"""Soft actor-critic (Haarnoja et al., 2018, arXiv 1812.05905), with two critics and a learned temperature.

With actions a' ~ pi(.|s') and the temperature alpha,

    y = r + gamma (min_i Q_i'(s', a') - alpha log pi(a'|s'))
    actor: alpha log pi(a|s) - min_i Q_i(s, a)      log alpha: -log alpha (log pi(a|s) + target entropy)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.networks.networks import Ensemble, Network, mlp

Tree = dict[str, Any]


class SAC(OffPolicy):
    """Options: `SAC.Config`."""

    @dataclass(frozen=True)
    class Config(OffPolicy.Config):
        """ent_coef: the temperature; None learns it. target_entropy: by default minus the number of actions."""

        learning_rate: Rate = 3e-4
        hidden: tuple[int, ...] = (256, 256)
        activation: str = "relu"
        ent_coef: Number | None = None
        target_entropy: Number | None = None

    actions = (spaces.Box,)
    multi_agent = False
    sees = True
    squashed = True
    critics = 2

    def build(self) -> None:
        c, size, width = self.config, self.features.size, self.distribution.width
        self.pi = Network(lambda: self.sighted(lambda n: mlp([n, *c.hidden, 2 * width], c.activation)))
        self.q = Ensemble(lambda: self.sighted(lambda n: mlp([n, *c.hidden, self.outputs], c.activation), size + width),
                          self.critics)  # fmt: skip
        self.adam = Adam()

    @property
    def target_entropy(self) -> Number:
        target = self.config.target_entropy
        return -float(self.distribution.width) if target is None else target

    outputs = 1  # of each critic

    def init(self, seed: int) -> Tree:
        actor, critic, log_alpha = self.pi.init(seed), self.q.init(seed + 1), torch.zeros(())
        return {"actor": actor, "critic": critic, "target_critic": critic.clone(), "log_alpha": log_alpha,
                "actor_adam": self.adam.init(actor), "critic_adam": self.adam.init(critic),
                "alpha_adam": self.adam.init(log_alpha)}  # fmt: skip

    def policy(self, learner: Tree) -> Tree:
        return {"actor": learner["actor"]}

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        outputs, d = self.pi(policy["actor"], seen["obs"]), self.distribution
        return (d.sample(outputs, key) if explore else d.mode(outputs)), {}, carry

    def critic(self, weights: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Action values of all critics, (critics, count, outputs)."""
        return self.q(weights, torch.cat([obs, action.reshape(*obs.shape[:-1], -1)], -1))

    def alpha(self, learner: Tree) -> Number | Tensor:
        return learner["log_alpha"].exp() if self.config.ent_coef is None else self.config.ent_coef

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        of_critic, of_actor = keys.split(key)
        rate, alpha, metrics = self.rate(learner), self.alpha(learner), {}

        gradient, (error, metrics["critic_loss"]) = torch.func.grad(self.critic_loss, has_aux=True)(
            learner["critic"], learner, batch, alpha, of_critic
        )
        critic, critic_adam = self.adam.step(learner["critic"], gradient, learner["critic_adam"], rate)
        gradient, log_prob = torch.func.grad(self.actor_loss, has_aux=True)(
            learner["actor"], critic, batch, alpha, of_actor
        )
        actor, actor_adam = self.adam.step(learner["actor"], gradient, learner["actor_adam"], rate)
        learner = {**learner, "actor": actor, "actor_adam": actor_adam, "critic": critic, "critic_adam": critic_adam,
                   "target_critic": moved_towards(learner["target_critic"], critic, self.config.tau)}  # fmt: skip
        if self.config.ent_coef is None:
            gradient = -(log_prob + self.target_entropy)
            log_alpha, state = self.adam.step(learner["log_alpha"], gradient, learner["alpha_adam"], rate)
            learner = {**learner, "log_alpha": log_alpha, "alpha_adam": state}
            metrics["alpha"] = log_alpha.exp()
        return learner, error, {**metrics, "entropy": -log_prob}

    def critic_loss(self, weights: Tensor, learner: Tree, batch: Tree, alpha: Any, key: Tensor):
        """(loss, (errors (count,), the loss to report))."""
        action, log_prob = self.distribution.sample_with_log_prob(self.pi(learner["actor"], batch["last"]), key)
        after = self.critic(learner["target_critic"], batch["last"], action).squeeze(-1).amin(0) - alpha * log_prob
        target = (batch["reward"] + batch["discount"] * after).detach()
        errors = self.critic(weights, batch["obs"], batch["action"]).squeeze(-1) - target
        total = 0.5 * (batch["weight"] * errors.square()).mean(-1).sum()
        return total, (errors.detach().mean(0), total.detach())

    def actor_loss(self, weights: Tensor, critic: Tensor, batch: Tree, alpha: Any, key: Tensor):
        """(loss, the mean log-probability)."""
        action, log_prob = self.distribution.sample_with_log_prob(self.pi(weights, batch["obs"]), key)
        value = self.value(critic, batch["obs"], action)
        return (alpha * log_prob - value).mean(), log_prob.detach().mean()

    def value(self, critic: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Objective that the actor maximizes, (count,)."""
        return self.critic(critic, obs, action).squeeze(-1).amin(0)
