"""DreamerV3, small (Hafner et al., 2023, arXiv 2301.04104): an actor-critic that learns in a world model's imagination.

`tutti.rl.networks.world_model` is fitted to sequences from a replay. From each of their states, the policy acts in the
model for `horizon` steps. With rewards r, probabilities c that the episode goes on, and values v,

    R_t = r_t + gamma c_t ((1 - lambda) v_{t+1} + lambda R_{t+1})

the critic learns R as a two-hot distribution, regularized towards its own slow average, and the actor descends
-sg((R - v) / max(1, S)) log pi - ent_coef H, where S is a running range of R from its 5th to its 95th percentile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

import tutti
from tutti.rl.algorithms.families.off_policy import OffPolicy
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.core.returns import lambda_returns
from tutti.rl.networks.distributions import Box, masked
from tutti.rl.networks.networks import Network, mlp
from tutti.rl.networks.two_hot import TwoHot
from tutti.rl.networks.world_model import WorldModel
from tutti.rl.placement.ranks import mean_of_ranks

Tree = dict[str, Any]
BINS = 41


class Dreamer(OffPolicy):
    """Options: `Dreamer.Config`."""

    @dataclass(frozen=True)
    class Config(OffPolicy.Config):
        """length: steps of a sequence, of which a batch has batch_size. deter, groups, classes, width: sizes of the
        world model (`WorldModel`, whose `hidden` is width). model_lr: learning rate of the world model;
        learning_rate: that of actor and critic. horizon: steps of imagination. tau: rate of the critic's slow average.
        max_grad_norm: largest norm of a gradient. obs_coef: weight of errors of observations."""

        n_envs: int = 8
        n_steps: int = 4
        gradient_steps: int = 8
        learning_rate: Rate = 1e-3
        model_lr: float = 3e-3
        hidden: tuple[int, ...] = (64, 64)
        activation: str = "silu"
        buffer_size: int = 50_000
        learning_starts: int = 512
        batch_size: int = 16
        length: int = 16
        horizon: int = 12
        deter: int = 128
        groups: int = 8
        classes: int = 8
        width: int = 128
        gamma: Number = 0.98
        gae_lambda: Number = 0.95
        ent_coef: Number = 3e-3
        tau: Number = 0.02
        max_grad_norm: Number = 10.0
        obs_coef: float = 10.0

    actions = (spaces.Discrete, spaces.Box)
    multi_agent, gaps = False, False
    unused = (*OffPolicy.unused, "hindsight", "n_step")  # returns are those of imagined steps

    def build(self) -> None:
        c, d = self.config, self.distribution
        if c.learning_starts < c.length * c.n_envs:
            raise ValueError(f"learning_starts is {c.learning_starts}: after it each of the {c.n_envs} environments "
                             f"must have {c.length} steps; set it to at least {c.length * c.n_envs}")  # fmt: skip
        self.numbers = d.width if isinstance(d, Box) else d.size
        self.world = WorldModel(
            self.features.size, self.numbers, c.deter, c.groups, c.classes, c.width, BINS, c.obs_coef
        )
        self.pi = Network(lambda: head([self.world.features, *c.hidden, d.size], c.activation))
        self.v = Network(lambda: head([self.world.features, *c.hidden, BINS], c.activation))
        self.two_hot = TwoHot(BINS)
        self.model_adam, self.adam = Adam(lr=c.model_lr, clip=c.max_grad_norm), Adam(clip=c.max_grad_norm)

    def init(self, seed: int) -> Tree:
        model, actor, critic = self.world.init(seed), self.pi.init(seed + 1), self.v.init(seed + 2)
        return {"model": model, "actor": actor, "critic": critic, "slow": critic.clone(), "range": torch.ones(()),
                "model_adam": self.model_adam.init(model), "actor_adam": self.adam.init(actor),
                "critic_adam": self.adam.init(critic)}  # fmt: skip

    def policy(self, learner: Tree) -> Tree:
        return {"model": learner["model"], "actor": learner["actor"]}

    def carry(self, n: int) -> Tree:
        return {"state": self.world.start(n), "action": torch.zeros(n, self.numbers)}

    def as_numbers(self, action: Tensor) -> Tensor:
        """Actions as the model reads them, float32 (..., numbers): one-hot, or as the environment takes them."""
        if isinstance(self.distribution, Box):
            return self.to_env(action).flatten(-len(self.distribution.shape))
        return F.one_hot(action, self.numbers).float()

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        of_latent, of_action = keys.split(key)
        h = self.world.next(policy["model"], carry["state"], carry["action"])
        gumbel = self.world.noise(of_latent, tuple(h.shape[:-1]))
        state = self.world.seen(policy["model"], h, seen["obs"], gumbel if explore else torch.zeros_like(gumbel))
        outputs, d = masked(self.pi(policy["actor"], state), seen.get("mask")), self.distribution
        action = d.sample(outputs, of_action) if explore else d.mode(outputs)
        return action, {}, {"state": state, "action": self.as_numbers(action)}

    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        c = self.config
        run, episodes = self.remember(run, chunk)
        replay = run["replay"]

        def body(learner: Tree, i: Tensor) -> tuple[Tree, Tree]:
            of_sample, of_update = keys.split(keys.fold(run["key"], i + 3))
            rows = self.replay.sequences(replay, of_sample, c.batch_size, c.length)
            rows["obs"] = self.normalizer.apply(learner, rows["obs"])
            learner, _, metrics = self.update(learner, rows, of_update)
            return learner, metrics

        learner, metrics = tutti.scan(body, run["learner"], torch.arange(self.updates))
        return {**run, "learner": learner}, {**{name: x.mean() for name, x in metrics.items()}, **episodes}

    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        """Learn from sequences (time, n, ...)."""
        of_model, of_dream = keys.split(key)
        action = self.as_numbers(batch["action"])
        gradient, (states, metrics) = torch.func.grad(self.world.loss, has_aux=True)(
            learner["model"], batch, action, of_model
        )
        model, adam = self.model_adam.step(learner["model"], gradient, learner["model_adam"])
        learner = {**learner, "model": model, "model_adam": adam}
        dream = self.imagine(learner, states.flatten(0, 1), of_dream)
        learner, more = self.behave(learner, dream)
        return learner, torch.zeros(batch["reward"].shape[1]), {**metrics, **more}

    def imagine(self, learner: Tree, start: Tensor, key: Tensor) -> Tree:
        """Steps (horizon, n, ...) of the policy in the model: "state", "action", "reward", "goes_on"; and "last"."""
        model = learner["model"]

        def body(state: Tensor, t: Tensor) -> tuple[Tensor, Tree]:
            of_action, of_latent = keys.split(keys.fold(key, t))
            action = self.distribution.sample(self.pi(learner["actor"], state), of_action)
            h = self.world.next(model, state, self.as_numbers(action))
            reward, goes_on = self.world.outcome(model, h)
            after = self.world.expected(model, h, self.world.noise(of_latent, tuple(h.shape[:-1])))
            return after, {"state": state, "action": action, "reward": reward, "goes_on": goes_on}

        last, rows = tutti.scan(body, start, torch.arange(self.config.horizon))
        return {**rows, "last": last}

    def behave(self, learner: Tree, dream: Tree) -> tuple[Tree, Tree]:
        """Move actor and critic by imagined steps."""
        c, rate = self.config, self.rate(learner)
        states = torch.cat([dream["state"], dream["last"].unsqueeze(0)])
        value = self.two_hot.mean(self.v(learner["critic"], states))
        discount = c.gamma * dream["goes_on"]
        returns = lambda_returns(dream["reward"], discount, value, c.gae_lambda)
        reached = torch.cat([torch.ones_like(discount[:1]), discount[:-1]]).cumprod(0)  # the weight of each step
        ordered = returns.flatten().sort().values
        n = ordered.shape[0]
        spread = mean_of_ranks(ordered[int(0.95 * (n - 1))] - ordered[int(0.05 * (n - 1))])
        span = 0.99 * learner["range"] + 0.01 * spread
        advantage = (returns - value[:-1]) / span.clamp(min=1.0)

        def of_actor(weights: Tensor) -> tuple[Tensor, Tensor]:
            outputs, d = self.pi(weights, dream["state"]), self.distribution
            entropy = d.entropy(outputs)
            each = -advantage * d.log_prob(outputs, dream["action"]) - c.ent_coef * entropy
            return (reached * each).mean(), entropy.detach().mean()

        slow = self.two_hot.mean(self.v(learner["slow"], dream["state"]))

        def of_critic(weights: Tensor) -> Tensor:
            logits = self.v(weights, dream["state"])
            return (reached * (self.two_hot.loss(logits, returns) + self.two_hot.loss(logits, slow))).mean()

        gradient, entropy = torch.func.grad(of_actor, has_aux=True)(learner["actor"])
        actor, actor_adam = self.adam.step(learner["actor"], gradient, learner["actor_adam"], rate)
        gradient, loss = torch.func.grad_and_value(of_critic)(learner["critic"])
        critic, critic_adam = self.adam.step(learner["critic"], gradient, learner["critic_adam"], rate)
        learner = {**learner, "actor": actor, "actor_adam": actor_adam, "critic": critic, "critic_adam": critic_adam,
                   "slow": moved_towards(learner["slow"], critic, c.tau), "range": span}  # fmt: skip
        return learner, {"imagined_return": returns.mean(), "critic_loss": loss, "entropy": entropy}


def head(sizes: list[int], activation: str) -> nn.Sequential:
    """A perceptron whose first outputs are all 0."""
    network = mlp(sizes, activation, norm=True)
    for parameter in network[-1].parameters():
        nn.init.zeros_(parameter)
    return network
