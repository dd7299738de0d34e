"""Multi-agent deep deterministic policy gradient (Lowe et al., 2017, arXiv 1706.02275).

Each agent has an actor that sees its own observation, and a critic that sees the observations and actions of all.
Agents may have different rewards, and so compete. With the target actors mu' and target critics Q_i',

    y_i = r_i + gamma Q_i'(s', mu_1'(o_1'), ..., mu_n'(o_n'))       actor i: -Q_i(s, a_1, ..., mu_i(o_i), ..., a_n)

Discrete actions are one-hot vectors. The actor's own is drawn by the Gumbel-softmax trick (Jang, Gu and Poole, 2017):
the forward pass has the one-hot action, gradients pass through softmax((logits + Gumbel noise) / temperature).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl import teams
from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.networks.distributions import Box, masked
from tutti.rl.networks.networks import Ensemble, mlp

Tree = dict[str, Any]


class MADDPG(OffPolicy):
    """Options: `MADDPG.Config`."""

    @dataclass(frozen=True)
    class Config(OffPolicy.Config):
        """noise: standard deviation of exploration of continuous actions, which are in [-1, 1]. temperature:
        temperature of the Gumbel-softmax of discrete ones. logit_penalty: weight of the mean squared output of actors,
        which keeps actions from saturating."""

        n_envs: int = 16
        n_steps: int = 4
        gradient_steps: int = 1
        learning_rate: Rate = 1e-3
        gamma: Number = 0.95
        tau: Number = 0.01
        activation: str = "relu"
        noise: Number = 0.2
        temperature: Number = 1.0
        logit_penalty: Number = 1e-3
        max_grad_norm: Number = 0.5

    actions = (spaces.Discrete, spaces.Box)
    squashed = True
    unused = (*OffPolicy.unused, "hindsight")

    def check(self) -> None:
        if isinstance(self.distribution, Box):
            self.refuse("with continuous actions", "temperature")
        else:
            self.refuse("with discrete actions", "noise")

    def build(self) -> None:
        c, d, self.count, size = self.config, self.distribution, teams.several(self), self.features.size
        self.width = d.width if isinstance(d, Box) else d.size
        self.pi = Ensemble(lambda: mlp([size, *c.hidden, self.width], c.activation), self.count)
        self.q = Ensemble(lambda: mlp([self.count * (size + self.width), *c.hidden, 1], c.activation), self.count)
        self.adam = Adam()

    def init(self, seed: int) -> Tree:
        actor, critic = self.pi.init(seed), self.q.init(seed + 1)
        return {"actor": actor, "critic": critic, "target_actor": actor.clone(), "target_critic": critic.clone(),
                "actor_adam": self.adam.init(actor), "critic_adam": self.adam.init(critic)}  # fmt: skip

    def policy(self, learner: Tree) -> Tree:
        return {"actor": learner["actor"]}

    def outputs(self, actor: Tensor, obs: Tensor, mask: Tensor | None) -> Tensor:
        """Each actor's outputs for its own observation: (..., agents, width), logits or numbers before tanh."""
        raw = torch.vmap(self.pi.one, in_dims=(0, -2), out_dims=-2)(actor, obs)
        return raw if isinstance(self.distribution, Box) else masked(raw, mask)

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        outputs, d = self.outputs(policy["actor"], seen["obs"], seen.get("mask")), self.distribution
        if not isinstance(d, Box):
            return (keys.categorical(key, outputs) if explore else outputs.argmax(-1)), {}, carry
        noise = self.config.noise * keys.normal(key, outputs.shape) if explore else 0.0
        return (outputs.tanh() + noise).clamp(-1, 1).unflatten(-1, d.shape), {}, carry

    def vectors(self, action: Tensor) -> Tensor:
        """Actions as critics see them, float32 (..., agents, width)."""
        d = self.distribution
        return action.flatten(-len(d.shape)) if isinstance(d, Box) else teams.one_hot(action, d.size)

    def best(self, outputs: Tensor) -> Tensor:
        """The vectors of the actions that actors prefer."""
        return outputs.tanh() if isinstance(self.distribution, Box) else self.vectors(outputs.argmax(-1))

    def drawn(self, outputs: Tensor, key: Tensor) -> Tensor:
        """The vectors of actions, differentiable with respect to outputs."""
        if isinstance(self.distribution, Box):
            return outputs.tanh()
        soft = ((outputs + keys.gumbel(key, outputs.shape)) / self.config.temperature).softmax(-1)
        hard = teams.one_hot(soft.argmax(-1), self.width)
        return hard + soft - soft.detach()

    def critic(self, weights: Tensor, obs: Tensor, action: Tensor) -> Tensor:
        """Each agent's value of the actions of all: obs (count, agents, size), action (count, agents, width) or, where
        they differ between critics, (critics, count, agents, width). Returns (count, agents)."""
        if action.ndim == 3:
            action = action.expand(self.count, *action.shape)
        joint = torch.cat([obs.flatten(1).expand(self.count, -1, -1), action.flatten(2)], -1)
        return torch.vmap(self.q.one)(weights, joint).squeeze(-1).T

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        rate, tau = self.rate(learner), self.config.tau
        gradient, (error, metrics) = torch.func.grad(self.critic_loss, has_aux=True)(learner["critic"], learner, batch)
        critic, critic_adam = self.descend(learner["critic"], gradient, learner["critic_adam"], rate)
        gradient, loss = torch.func.grad_and_value(self.actor_loss)(learner["actor"], critic, batch, key)
        actor, actor_adam = self.descend(learner["actor"], gradient, learner["actor_adam"], rate)
        learner = {**learner, "actor": actor, "actor_adam": actor_adam, "critic": critic, "critic_adam": critic_adam,
                   "target_actor": moved_towards(learner["target_actor"], actor, tau),
                   "target_critic": moved_towards(learner["target_critic"], critic, tau)}  # fmt: skip
        return learner, error, {**metrics, "actor_loss": loss}

    def descend(self, weights: Tensor, gradient: Tensor, state: Tree, rate: Any) -> tuple[Tensor, Tree]:
        """A step of Adam. Each agent's gradient is clipped by itself."""
        norm = gradient.square().sum(-1, keepdim=True).sqrt()
        return self.adam.step(
            weights, gradient * (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0), state, rate
        )

    def critic_loss(self, weights: Tensor, learner: Tree, batch: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
        """(loss, (errors (count,), metrics))."""
        action = self.best(self.outputs(learner["target_actor"], batch["last"], batch.get("last_mask")))
        after = self.critic(learner["target_critic"], batch["last"], action)
        target = (batch["reward"] + batch["discount"] * after).detach()
        q = self.critic(weights, batch["obs"], self.vectors(batch["action"]))
        errors = q - target
        total = mean_of_rows(batch["weight"].unsqueeze(-1) * errors.square(), batch.get("valid")).sum()
        metrics = {"critic_loss": total.detach() / self.count, "q": q.detach().mean()}
        return total, (errors.detach().mean(-1), metrics)

    def actor_loss(self, actor: Tensor, critic: Tensor, batch: Tree, key: Tensor) -> Tensor:
        """The sum over agents: critic i sees agent i's own action, and those that the others took."""
        outputs = self.outputs(actor, batch["obs"], batch.get("mask"))
        own, taken = self.drawn(outputs, key), self.vectors(batch["action"])
        mine = torch.eye(self.count, dtype=torch.bool).view(self.count, 1, self.count, 1)
        value = self.critic(critic, batch["obs"], torch.where(mine, own, taken))
        size = outputs.square() if batch.get("mask") is None else torch.where(batch["mask"], outputs, 0.0).square()
        valid, penalty = batch.get("valid"), self.config.logit_penalty
        sizes = size.mean((0, 2)) if valid is None else mean_of_rows(size.mean(2), valid)
        return -mean_of_rows(value, valid).sum() + penalty * sizes.sum()


def mean_of_rows(x: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of each agent (agents,) over rows (count, agents), of those in which it took part."""
    if valid is None:
        return x.mean(0)
    return torch.where(valid, x, 0.0).sum(0) / valid.sum(0).clamp(min=1)
