"""The family of algorithms that learn from a replay of what earlier policies did."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.rl.core import agent, collect, keys
from tutti.rl.core.env import Env
from tutti.rl.networks.distributions import Box, masked
from tutti.rl.replay.hindsight import Hindsight
from tutti.rl.replay.ring import Ring, Shape

Tree = dict[str, Any]


class OffPolicy(agent.Agent):
    """`n_steps` in each environment, then `gradient_steps` of `update` on batches from the replay."""

    @dataclass(frozen=True)
    class Config(agent.Config):
        """buffer_size: transitions in the replay. learning_starts: steps with random actions before the first update.
        n_step: steps of n-step returns. gradient_steps: updates of an iteration; -1 is one for each step.
        tau: rate of the targets' slow average; 1 copies. hindsight: in environments with goals, number of goals that
        were reached later and are learned from for each true one; 4 is usual (`tutti.rl.replay.hindsight`)."""

        learning_rate: agent.Rate = 3e-4
        buffer_size: int = 100_000
        learning_starts: int = 1_000
        batch_size: int = 256
        gradient_steps: int = -1
        n_step: int = 1
        tau: agent.Number = 0.005
        hindsight: int = 0

    gaps = pixels = True
    unused = ("normalize_reward",)  # rewards are learned from as they were stored
    replay: Ring

    @abstractmethod
    def update(self, learner: Tree, batch: Tree, key: Tensor) -> tuple[Tree, Tensor, Tree]:
        """Learn from a batch of transitions (`Ring.sample`), with "weight" (count,) for prioritized ones.
        Returns (learner, errors (count,), metrics)."""

    @property
    def updates(self) -> int:
        c = self.config
        return c.gradient_steps if c.gradient_steps >= 0 else c.n_steps * c.n_envs

    def make_replay(self) -> Ring:
        c = self.config
        length = max(c.buffer_size // c.n_envs, 1)
        if not c.hindsight:
            return Ring(length, c.n_envs, c.n_step)
        if c.n_step != 1:
            raise ValueError(f"n_step is {c.n_step}; hindsight knows rewards of one step only: set it to 1")
        return Hindsight.of(self.env, self.features, length, c.n_envs, c.hindsight)

    def row_shapes(self) -> dict[str, Shape]:
        """Shapes and dtypes of the entries that the replay stores per step of one environment."""
        rows = self.rows(1)[1:]
        obs, action = (*rows, self.features.size), self.distribution.zero(rows)
        floats, bits = torch.float32, torch.bool
        shapes: dict[str, Shape] = {
            "obs": (obs, self.features.dtype), "last": (obs, self.features.dtype),
            "action": (tuple(action.shape), action.dtype),
            "reward": (rows, floats), "terminated": ((), bits), "truncated": ((), bits),
        }  # fmt: skip
        for name in self.parts():
            shapes[name] = rows, bits
        for name, x in self.extras().items():
            shapes[name] = shapes[f"last_{name}"] = (tuple(x.shape[1:]), x.dtype)
        return shapes

    def parts(self) -> tuple[str, ...]:
        """Names of the stored masks: agents that take part, and agents that end."""
        if isinstance(self.env, Env):
            some = self.env.alive(self.env.reset(keys.make(0), 1)[0]) is not None
            by_agent = self.env.ends_by_agent
        else:
            some, by_agent = self.env.gaps, self.env.gaps and len(self.env.agents) > 1
        return ("valid", "last_valid") * some + ("agent_terminated", "agent_truncated") * by_agent

    def extras(self) -> Tree:
        """The present masks and overviews of the environments, if they have any."""
        if isinstance(self.env, Env):
            state, _ = self.env.reset(keys.make(0), 1)
            arrays = self.env.masks(state), self.env.overview(state)
        else:
            arrays = (None if x is None else torch.from_numpy(x) for x in (self.env.masks(), self.env.overview()))
        return {name: x for name, x in collect.seen_by(None, *arrays).items() if name != "obs"}

    def more_state(self) -> Tree:
        self.replay = self.make_replay()
        return {"replay": self.replay.init(self.row_shapes())}

    def warm(self, policy: Tree, seen: Tree, carry: Tree, key: Tensor, explore: bool) -> tuple[Tensor, Tree, Tree]:
        """Random actions, before the first update."""
        d, rows = self.distribution, seen["obs"].shape[:-1]
        if isinstance(d, Box):
            drawn = keys.uniform(key, d.zero(rows).shape, -1.0, 1.0)
            return (drawn if self.squashed else d.low + (drawn + 1) / 2 * (d.high - d.low)), {}, carry
        logits = torch.zeros(*rows, d.size)
        return d.sample(masked(logits, seen.get("mask")), key), {}, carry

    def behaviour(self) -> Callable:
        return self.warm if self.warming else self.act

    @property
    def warming(self) -> bool:
        c = self.config
        return self.num_timesteps < self.warm_until + max(c.learning_starts, c.n_step * c.n_envs)

    def phase(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        return self.explore if self.warming else self.iterate

    def learning(self) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        return self.remember if self.warming else self.absorb

    def explore(self, run: Tree) -> tuple[Tree, Tree]:
        """An iteration before the first update."""
        run, chunk = self._acted(run, self.warm)
        return self.remember(run, chunk)

    def iterate(self, run: Tree) -> tuple[Tree, Tree]:
        run, chunk = self._acted(run, self.act)
        return self.absorb(run, chunk)

    def _acted(self, run: Tree, act: Callable) -> tuple[Tree, Tree]:
        assert isinstance(self.env, Env)
        actor, chunk = collect.rollout(self, self.env, self.acting(run["learner"]), run["actor"],
                                       keys.fold(run["key"], 0), self.config.n_steps, act=act)  # fmt: skip
        return {**run, "actor": actor}, chunk

    def remember(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        steps, n = chunk["terminated"].shape
        episodes = {name: chunk[name] for name in ("return", "length")}
        learner, _ = self.normalizer.update(run["learner"], chunk)
        replay = self.replay.add(run["replay"], chunk)
        run = {**run, "learner": learner, "replay": replay, "key": keys.fold(run["key"], 2)}
        return self.advance(run, steps * n), {"episodes": episodes}

    def absorb(self, run: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        run, episodes = self.remember(run, chunk)
        c, replay = self.config, run["replay"]
        bookkeeping = {name: x for name, x in replay.items() if name != "rows"}
        learner = self.before(run["learner"], run["steps"])

        def body(carry: tuple[Tree, Tree], i: Tensor) -> tuple[tuple[Tree, Tree], Tree]:
            learner, bookkeeping = carry
            of_sample, of_update = keys.split(keys.fold(run["key"], i + 3))
            memory = {**bookkeeping, "rows": replay["rows"]}
            batch, where = self.replay.sample(memory, of_sample, c.batch_size, c.gamma)
            batch = {**batch, "weight": where["weight"]}
            for name in ("obs", "last"):
                batch[name] = self.normalizer.apply(learner, batch[name])
            learner, error, metrics = self.update(learner, batch, of_update)
            memory = self.replay.learned(memory, where, error)
            return (learner, {name: memory[name] for name in bookkeeping}), metrics

        (learner, bookkeeping), metrics = tutti.scan(body, (learner, bookkeeping), torch.arange(self.updates))
        run = {**run, "learner": learner, "replay": {**bookkeeping, "rows": replay["rows"]}}
        return run, {**{name: x.mean() for name, x in metrics.items()}, **episodes}

    def before(self, learner: Tree, steps: Tensor) -> Tree:
        """The learner before the updates of an iteration, after `steps` steps: targets that are copied now and then."""
        return learner
