"""Counterfactual multi-agent policy gradients (Foerster et al., 2018, arXiv 1705.08926).

A central critic gives the value of each action of agent i while the actions of all others, a_-i, stay as they are. An
agent's advantage compares its action with what its policy would do on average:

    A_i = Q(s, a) - sum_a' pi_i(a'|o_i) Q(s, (a_-i, a'))

so that it is told what it has contributed itself. The critic sees the overview, the agent's observation and index, and
the actions of the others. It is fitted to TD(lambda) targets of a slow copy, the policy then takes one step along
E[sum_i A_i grad log pi_i(a_i|o_i)]. As in the paper, policies give each possible action a least probability:

    pi_i(a|o) = (1 - epsilon) softmax(logits)_a + epsilon / n    for n possible actions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

import tutti
from tutti.rl import teams
from tutti.rl.algorithms.families.on_policy import OnPolicy
from tutti.rl.core import keys
from tutti.rl.core.agent import Number, Rate
from tutti.rl.core.descent import Adam, moved_towards
from tutti.rl.core.env import ends
from tutti.rl.core.returns import deviation, gae, mean_of
from tutti.rl.networks.distributions import Categorical, masked
from tutti.rl.networks.networks import Network, mlp

Tree = dict[str, Any]


class COMA(OnPolicy):
    """Options: `COMA.Config`."""

    @dataclass(frozen=True)
    class Config(OnPolicy.Config):
        """critic_learning_rate: learning rate of the critic; learning_rate: that of the policy. td_lambda: lambda of
        the critic's targets. tau: rate of the slow copy, in each step of the critic. critic_epochs: passes of the
        critic over a rollout, in batches of batch_size steps of the team. normalize_advantage: whether advantages are
        scaled to a variance of 1 over a rollout. epsilon: the probability of a random action, as above."""

        n_envs: int = 32
        n_steps: int = 32
        learning_rate: Rate = 1e-3
        critic_learning_rate: Number = 1e-3
        td_lambda: Number = 0.8
        tau: Number = 0.05
        critic_epochs: int = 8
        batch_size: int = 256
        ent_coef: Number = 0.01
        max_grad_norm: Number = 10.0
        normalize_advantage: bool = True
        epsilon: Number = 0.1

    actions = (spaces.Discrete,)
    gaps = True
    distribution: Categorical

    def check(self) -> None:
        super().check()
        c = self.config
        self.fit_batch(c.n_envs * c.n_steps, f"steps of a rollout (n_envs {c.n_envs} x n_steps {c.n_steps})")

    def build(self) -> None:
        c, self.count, actions = self.config, teams.several(self), self.distribution.size
        assert c.n_envs * c.n_steps % c.batch_size == 0
        own = self.features.size + self.count
        size = teams.width_for_all(self) + own + self.count * actions
        self.pi = Network(lambda: mlp([own, *c.hidden, actions], c.activation, 1.0, 0.01))
        self.q = Network(lambda: mlp([size, *c.hidden, actions], c.activation))
        self.adam = Adam(eps=1e-5, clip=c.max_grad_norm)

    def init(self, seed: int) -> Tree:
        actor, critic = self.pi.init(seed), self.q.init(seed + 1)
        return {"actor": actor, "critic": critic, "target": critic.clone(), "actor_adam": self.adam.init(actor),
                "critic_adam": self.adam.init(critic)}  # fmt: skip

    def policy(self, learner: Tree) -> Tree:
        return {"actor": learner["actor"]}

    def logits(self, actor: Tensor, seen: Tree) -> Tensor:
        """log pi (..., agents, actions)."""
        mask, c = seen.get("mask"), self.config
        logits = masked(self.pi(actor, teams.with_ids(seen["obs"])), mask)
        uniform = masked(torch.zeros_like(logits), mask).softmax(-1)
        probability = (1 - c.epsilon) * logits.softmax(-1) + c.epsilon * uniform
        return masked(probability.clamp(min=1e-30).log(), mask)

    def act(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        logits, d = self.logits(policy["actor"], seen), self.distribution
        return (d.sample(logits, key) if explore else d.mode(logits)), {}, carry

    def others(self, action: Tensor) -> Tensor:
        """Actions (..., agents) as each agent sees those of the others: one-hot, and zeros for its own,
        (..., agents, agents x actions)."""
        one_hot = teams.one_hot(action, self.distribution.size).flatten(-2)
        own = torch.eye(self.count).repeat_interleave(self.distribution.size, -1)
        return teams.for_each(one_hot, self.count) * (1 - own)

    def critic_input(self, chunk: Tree) -> Tensor:
        """Inputs of the critic for each agent: (..., agents, features)."""
        seen = teams.for_each(teams.seen_by_all(chunk), self.count)
        return torch.cat([seen, teams.with_ids(chunk["obs"]), self.others(chunk["action"])], -1)

    def update(self, learner: Tree, chunk: Tree, key: Tensor) -> tuple[Tree, Tree]:
        c = self.config
        reward, rows = teams.team_reward(chunk["reward"]), self.critic_input(chunk)
        # The action after the last observation of a rollout or an episode is not known: one is drawn.
        last = {"obs": chunk["last"], "action": torch.zeros_like(chunk["action"])}
        last |= {name: chunk[f"last_{name}"] for name in ("mask", "overview") if f"last_{name}" in chunk}
        last["action"] = self.distribution.sample(self.logits(learner["actor"], last), keys.fold(key, 0))
        value = taken(self.q(learner["target"], rows), chunk["action"])
        drawn = taken(self.q(learner["target"], self.critic_input(last)), last["action"])
        terminated, done = ends(chunk, value)
        target = value + gae(reward, value, next_values(value, drawn, done), terminated, done, c.gamma, c.td_lambda)
        learner, loss = self.critic_steps(learner, rows, chunk, target, keys.fold(key, 1))
        q = self.q(learner["critic"], rows)
        gradient, metrics = torch.func.grad(self.actor_loss, has_aux=True)(learner["actor"], chunk, q)
        actor, state = self.adam.step(learner["actor"], gradient, learner["actor_adam"], self.rate(learner))
        return {**learner, "actor": actor, "actor_adam": state}, {**metrics, "critic_loss": loss, "q": q.mean()}

    def critic_steps(self, learner: Tree, rows: Tensor, chunk: Tree, target: Tensor, key: Tensor):
        """Fit the critic to targets. Returns (learner, the mean loss)."""
        c, n = self.config, target.shape[0] * target.shape[1]
        rows, action, target = (x.flatten(0, 1) for x in (rows, chunk["action"], target))
        valid = chunk["valid"].flatten(0, 1) if "valid" in chunk else None

        def loss(weights: Tensor, index: Tensor) -> Tensor:
            error = taken(self.q(weights, rows[index]), action[index]) - target[index]
            return mean_of(error.square(), None if valid is None else valid[index])

        def body(carry: tuple[Tensor, Tensor, Tree], index: Tensor):
            critic, slow, state = carry
            gradient, critic_loss = torch.func.grad_and_value(loss)(critic, index)
            critic, state = self.adam.step(critic, gradient, state, c.critic_learning_rate)
            return (critic, moved_towards(slow, critic, c.tau), state), critic_loss

        order = torch.cat([keys.permutation(keys.fold(key, i), n) for i in range(c.critic_epochs)])
        start = learner["critic"], learner["target"], learner["critic_adam"]
        (critic, slow, state), losses = tutti.scan(body, start, order.view(-1, c.batch_size))
        return {**learner, "critic": critic, "target": slow, "critic_adam": state}, losses.mean()

    def actor_loss(self, actor: Tensor, chunk: Tree, q: Tensor) -> tuple[Tensor, Tree]:
        """(loss, metrics). q: values of each agent's actions (..., agents, actions)."""
        c, logits = self.config, self.logits(actor, chunk)
        advantage = counterfactual(q, logits, chunk["action"]).detach()
        valid = chunk.get("valid")
        if c.normalize_advantage:
            advantage = advantage / (deviation(advantage, valid) + 1e-8)
        policy_loss = -mean_of(self.distribution.log_prob(logits, chunk["action"]) * advantage, valid)
        entropy = mean_of(self.distribution.entropy(logits), valid)
        metrics = {"policy_loss": policy_loss, "entropy": entropy}
        return policy_loss - c.ent_coef * entropy, {name: x.detach() for name, x in metrics.items()}


def counterfactual(q: Tensor, logits: Tensor, action: Tensor) -> Tensor:
    """A_i above: q, logits (..., agents, actions), action (..., agents)."""
    return taken(q, action) - (logits.softmax(-1) * q).sum(-1)


def taken(q: Tensor, action: Tensor) -> Tensor:
    """The values of the actions that were taken."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def next_values(value: Tensor, drawn: Tensor, done: Tensor) -> Tensor:
    """Values after each step (time, ...): those of the next step, or of drawn actions where there is none."""
    later = torch.cat([value[1:], drawn[-1:]])
    return torch.where(done, drawn, later)
