"""Random network distillation (Burda et al., 2019, arXiv 1810.12894): a reward for what is new, added to PPO.

A network f learns to predict the outputs of a fixed random network g. Its error is large where it has seldom been:

    bonus(s') = mean((f(s') - g(s'))^2)

The bonus is divided by the standard deviation of its discounted sums, observations of f and g are normalized. Two value
functions learn sums of rewards and of bonuses; those of bonuses go on over the ends of episodes, so that the end of an
episode costs no curiosity. The policy ascends the advantage ext_coef A_reward + int_coef A_bonus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.rl.algorithms.families.actor_critic import Both, flat_rows
from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.core.agent import Number
from tutti.rl.core.normalize import Normalizer
from tutti.rl.core.returns import explained, gae, mean_of
from tutti.rl.networks.networks import GAIN, Network, mlp

Tree = dict[str, Any]


class RND(PPO):
    """Options: `RND.Config`."""

    @dataclass(frozen=True)
    class Config(PPO.Config):
        """int_gamma: discount of bonuses. ext_coef, int_coef: above. distilled: outputs of the random network.
        distill_hidden: its layers, and those of the network that predicts it."""

        n_steps: int = 128
        int_gamma: Number = 0.99
        ext_coef: Number = 2.0
        int_coef: Number = 1.0
        distilled: int = 32
        distill_hidden: tuple[int, ...] = (64,)

    sees = False

    def build(self) -> None:
        super().build()
        c, size = self.config, self.features.size
        self.net = Network(lambda: Curious(self))
        self.random = Network(lambda: mlp([size, *c.distill_hidden, c.distilled], "relu", GAIN, 1.0))
        self.of_seen, self.of_bonus = Normalizer(size, obs=True), Normalizer(size, reward=True)

    def init(self, seed: int) -> Tree:
        rows = self.rows(self.config.n_envs)
        novelty = {**self.of_seen.init(rows), **self.of_bonus.init(rows)}
        return {**super().init(seed), "random": self.random.init(seed + 1), "novelty": novelty}

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c = self.config
        learner, rows = self.novelty(learner, chunk)
        value, after, terminated, done = self.values(learner, chunk)  # (time, n, ..., 2): of rewards, of bonuses
        lasting = torch.tensor([True, False])
        # After the end of an episode bonuses go on with the next one, whose first observation is that of the next row.
        going = torch.cat([value[1:], after[-1:]])
        done = done & lasting
        if "valid" in chunk:  # an agent whose next row is none of its own goes on as where a rollout ends
            cut = ~torch.cat([chunk["valid"][1:], torch.ones_like(chunk["valid"][:1])]).unsqueeze(-1)
            going, done = torch.where(cut, after, going), done | cut
        after = torch.where(lasting, after, going)
        reward, gamma = torch.stack([chunk["reward"], rows["bonus"]], -1), gammas(c.gamma, c.int_gamma)
        each = gae(reward, value, after, terminated & lasting, done, gamma, c.gae_lambda)
        advantage, target = c.ext_coef * each[..., 0] + c.int_coef * each[..., 1], each + value
        flat = flat_rows({**self.inputs(chunk), "action": chunk["action"], "log_prob": chunk["log_prob"],
                          "advantage": advantage, "target": target, "value": value, **rows},
                         chunk["reward"].ndim)  # fmt: skip
        learner, metrics = self.epochs(learner, flat, key, 0, c.batch_size)
        valid = chunk.get("valid")
        return learner, {**metrics, "bonus": mean_of(rows["bonus"], valid),
                         "explained_variance": explained(value[..., 0], target[..., 0], valid)}  # fmt: skip

    def novelty(self, learner: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        """(learner with updated statistics, rows with the inputs of f, their targets and the bonuses) of a chunk."""
        valid = {"valid": chunk["valid"]} if "valid" in chunk else {}
        norm, _ = self.of_seen.update(learner["novelty"], {"obs": chunk["last"], "last": chunk["last"], **valid})
        seen = self.of_seen.apply(norm, chunk["last"])
        goal = self.random(learner["random"], seen)
        error = (self.net(learner["weights"], None, None, seen) - goal).square().mean(-1)
        error = torch.where(valid["valid"], error, 0.0) if valid else error
        never = torch.zeros_like(chunk["terminated"])
        bonus = {"reward": error, "terminated": never, "truncated": never, **valid}
        norm, normalized = self.of_bonus.update(norm, bonus, self.config.int_gamma)
        return {**learner, "novelty": norm}, {"seen": seen, "goal": goal, "bonus": normalized["reward"]}

    def loss(self, weights: Tensor, batch: Tree) -> tuple[Tensor, Tree]:
        total, metrics = super().loss(weights, batch)
        error = (self.net(weights, None, None, batch["seen"]) - batch["goal"]).square()
        distilled = mean_of(error, batch.get("valid"))
        return total + distilled, {**metrics, "distill_loss": distilled.detach()}


class Curious(Both):
    """A policy, two value functions (..., 2), and the network that predicts the random one."""

    def __init__(self, agent: RND):
        super().__init__(agent)
        c, size = agent.config, agent.features.size
        self.critic = mlp([agent.critic_size(), *c.hidden, 2], c.activation, GAIN, 1.0)
        self.predictor = mlp([size, *c.distill_hidden, *c.distill_hidden, c.distilled], "relu", GAIN, 1.0)

    def forward(self, obs: Tensor | None, critic: Tensor | None, seen: Tensor | None = None) -> Any:
        if seen is not None:
            return self.predictor(seen)
        return super().forward(obs, None)[0], None if critic is None else self.critic(critic)


def gammas(*numbers: Number) -> Tensor:
    return torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in numbers])
