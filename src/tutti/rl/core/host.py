"""Rollouts in environments that the host steps: the policy is a program, the environments are `VectorEnv`s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutti.rl.core import keys
from tutti.rl.core.collect import rewarded, seen_by
from tutti.rl.core.vector import Moved, VectorEnv

if TYPE_CHECKING:
    from tutti.rl.core.agent import Agent

Tree = dict[str, Any]


class HostActor:
    """Steps environments and keeps what a policy sees of them."""

    def __init__(self, agent: Agent, env: VectorEnv, seed: int, explore: bool = True):
        self.env, self.explore, self.steps, self.seed = env, explore, 0, seed
        shape = agent.rows(env.n)
        self.total, self.length = np.zeros(shape, np.float32), np.zeros(env.n, np.float32)
        self.carry = agent.carry(env.n)
        self.seen = self._seen(agent, env.reset(seed))

    def collect(self, agent: Agent, steps: int | None = None, policy: Tree | None = None, act: Any = None) -> Tree:
        """Collect a chunk (`tutti.rl.core.collect`) of `steps` steps, by default the config's. policy: replaces the
        agent's.
        act: replaces the agent's `act`."""
        self.policy_args = () if policy is None else (policy,)
        act = act or acting(agent, self.explore)
        rows = [self._step(agent, act) for _ in range(steps or agent.config.n_steps)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _step(self, agent: Agent, act: Any) -> Tree:
        self.steps += 1
        key = keys.fold(keys.make(self.seed), self.steps)
        action, for_env, extra, carry = agent.program.ask(act, self.seen, self.carry, key, *self.policy_args)
        moved = self.env.step(for_env.numpy())
        done = moved.terminated | moved.truncated
        after = self._seen(agent, moved.obs)
        ended = self._ended(agent, moved) if done.any() else after
        reward = rewards_of(self.env, moved, self.total.shape)
        parts = self._parts(moved)
        self.total += reward
        self.length += parts["valid"].numpy().reshape(self.env.n, -1).any(1) if parts else 1
        wide = done.reshape(-1, *[1] * (self.total.ndim - 1))
        episode_stats = {"return": np.where(wide, self.total, 0.0), "length": np.where(done, self.length, 0.0)}
        self.total, self.length = np.where(wide, 0, self.total), np.where(done, 0, self.length)
        gap = ~parts["valid"] if parts and len(self.total.shape) == 1 else torch.zeros(self.env.n, dtype=torch.bool)
        now = [reward.astype(np.float32), moved.terminated, moved.truncated | gap.numpy()]
        named = dict(zip(("reward", "terminated", "truncated"), map(torch.from_numpy, now), strict=True))
        last = {"last" if name == "obs" else f"last_{name}": x for name, x in ended.items()}
        row = {**self.seen, **last, **named, **parts, "action": action, **extra,
               **{k: torch.from_numpy(x.astype(np.float32)) for k, x in episode_stats.items()}}  # fmt: skip
        over = torch.from_numpy(done) | gap
        self.carry = pytree.tree_map(
            lambda x: torch.where(over.view(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x), x),
            rewarded(carry, named["reward"]),
        )
        self.seen = after
        return row

    def _parts(self, moved: Moved) -> Tree:
        """Masks of rows that are steps of an episode, and of agents that end; empty if all rows are steps."""
        if not self.env.gaps:
            return {}
        if moved.valid is None:
            raise ValueError(f"{self.env.name} has gaps, and its step did not say which rows are `valid`")
        if len(self.env.agents) == 1:
            valid = torch.from_numpy(moved.valid)
            return {"valid": valid, "last_valid": valid & ~torch.from_numpy(moved.terminated)}
        names = ("valid", "agent_terminated", "agent_truncated")
        parts = {name: torch.from_numpy(getattr(moved, name)) for name in names}
        return {**parts, "last_valid": parts["valid"] & ~parts["agent_terminated"]}

    def _seen(self, agent: Agent, obs: Any) -> Tree:
        return self._finite(_all_of(agent, obs, self.env.masks(), self.env.overview()))

    def _finite(self, seen: Tree) -> Tree:
        """The observations. Raises ValueError if they are not finite, since only NaN can be computed from them."""
        obs = seen["obs"]
        if obs.is_floating_point() and not obs.isfinite().all():
            i = int((~obs.isfinite()).nonzero()[0, 0])
            where = f"step {self.steps}" if self.steps else "`reset`"
            raise ValueError(f"{self.env.name}: instance {i} returned an observation with "
                             f"{float(obs[~obs.isfinite()][0])} in {where}; observations must be finite")  # fmt: skip
        return seen

    def _ended(self, agent: Agent, moved: Moved) -> Tree:
        """The last observations of episodes, after a step in which one ended."""
        for name in ("masks", "overview"):
            if getattr(self.env, name)() is not None and getattr(moved, f"last_{name}") is None:
                raise ValueError(f"{self.env.name} has {name}, but its step did not return those of the last "
                                 f"observations where an episode ended: give `Moved` its last_{name}")  # fmt: skip
        return self._finite(_all_of(agent, moved.last, moved.last_masks, moved.last_overview))

    def state(self) -> Tree:
        """The state for a checkpoint. Without "env" if the environments cannot be saved."""
        try:
            env = self.env.state()
        except NotImplementedError:
            return {"steps": self.steps}
        return {"env": env, "total": self.total, "length": self.length, "carry": self.carry, "steps": self.steps}

    def restore(self, agent: Agent, state: Tree) -> None:
        """Continue; with new episodes, unlike those before, where environments cannot be saved."""
        self.steps = state["steps"]
        if "env" not in state:
            fresh = keys.seed(keys.fold(keys.make(self.seed), self.steps))
            self.seen = self._seen(agent, self.env.reset(fresh))
            return
        self.total, self.length, self.carry = state["total"], state["length"], state["carry"]
        self.seen = self._seen(agent, self.env.restore(state["env"]))


def _all_of(agent: Agent, obs: Any, masks: np.ndarray | None, overview: np.ndarray | None) -> Tree:
    extras = [None if x is None else torch.from_numpy(x) for x in (masks, overview)]
    return seen_by(agent.features(tensors(obs)), *extras)


def rewards_of(env: VectorEnv, moved: Moved, shape: tuple[int, ...]) -> np.ndarray:
    """Rewards of a step, (n,) or (n, agents). Raises ValueError for other shapes."""
    reward = np.asarray(moved.reward)
    if reward.shape != shape and reward.size == np.prod(shape) and reward.shape[:1] == shape[:1]:
        reward = reward.reshape(shape)  # arrays (n, 1) of environments that return rewards of the shape (1,)
    if reward.shape != shape:
        raise ValueError(f"{env.name} returned rewards of the shape {reward.shape}; they must be {shape}")
    if not np.isfinite(reward).all():
        i = int(np.argwhere(~np.isfinite(reward))[0][0])
        raise ValueError(f"{env.name}: instance {i} returned a reward that is {float(reward[~np.isfinite(reward)][0])};"
                         " `step` must return finite rewards")  # fmt: skip
    return reward


def tensors(obs: Any) -> Any:
    return {k: tensors(x) for k, x in obs.items()} if isinstance(obs, dict) else torch.from_numpy(obs)


def acting(agent: Agent, explore: bool) -> Any:
    """The agent's `act` as a function of its run. A policy as the last argument replaces the learner's."""

    choose = agent.behaviour() if explore else agent.act

    def act(run: Tree, seen: Tree, carry: Tree, key: Tensor, *policy_args: Tree) -> tuple[Tensor, Tensor, Tree, Tree]:
        policy = policy_args[0] if policy_args else agent.acting(run["learner"])
        action, extra, carry = choose(policy, agent.normalized(policy, seen), carry, key, explore)
        return action, agent.to_env(action), extra, carry

    return agent.functions.setdefault(("act", explore, choose), act)
