"""Environments: two pure functions on batched tensors.

    env = CartPole()
    state, obs = env.reset(key, 64)
    state, obs, reward, terminated, truncated = env.step(state, action, key)

Dim 0 of every tensor is the instance. A state is a dict of tensors with fixed shapes and dtypes, so that a rollout can
be a `tutti.scan` and a checkpoint can name what it stores. Functions do not write to their arguments, and have no
Python branches on values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils import _pytree as pytree

State = dict[str, Tensor]
Step = tuple[State, Any, Tensor, Tensor, Tensor]


class Env(ABC):
    """A pure environment.

    observation_space, action_space: spaces of one instance and one agent (`gymnasium.spaces`).
    agents: names of the agents. With more than one, observations, actions and rewards have a dim of agents after
        that of instances: (n, agents, ...). Observations and actions of unlike agents are padded to the largest.
    limit: steps of an episode until it is truncated, or None. Environments count them in `state["t"]`, int64 (n,).
    threshold: mean return of an episode at which the environment counts as solved, or None.
    ends_by_agent: whether agents end one by one; then `alive` says who has not.
    """

    observation_space: spaces.Space
    action_space: spaces.Space
    agents: tuple[str, ...] = ("agent",)
    limit: int | None = None
    threshold: float | None = None
    ends_by_agent: bool = False

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def reset(self, key: Tensor, n: int) -> tuple[State, Any]:
        """Begin n episodes. key: a 0-d int64 tensor (`tutti.rl.core.keys`). Returns the state and the observations."""

    @abstractmethod
    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        """Advance all instances by one step. Begins no new episodes: see `begun_again`.

        action: int64 (n,) or (n, agents) for a discrete space, else float32 with the shape of the space at the end.

        Returns (state, observations, reward, terminated, truncated). reward: float32, (n,) or (n, agents). terminated,
        truncated: bool (n,). An episode terminates where its task ends, and is truncated where only its time does. With
        `ends_by_agent` they are (n, agents), and an episode ends when no agent is left that has not ended.
        """

    def masks(self, state: State) -> Tensor | None:
        """Mask of the possible discrete actions: bool (n, actions) or (n, agents, actions). None: all of them."""
        return None

    def alive(self, state: State) -> Tensor | None:
        """Mask of the agents that take part now: bool (n, agents). None: all. Other rows are not learned from."""
        return None

    def overview(self, state: State) -> Tensor | None:
        """Global observation for a central critic: float32 (n, features). None: all observations."""
        return None

    def draw(self, state: State, i: int) -> np.ndarray | None:
        """A picture of instance i, uint8 (height, width, 3), or None if there is none."""
        return None

    def truncated(self, t: Tensor) -> Tensor:
        """Whether the time of an episode is over after t steps, bool (n,)."""
        return torch.zeros_like(t, dtype=torch.bool) if self.limit is None else t >= self.limit


class GoalEnv(Env):
    """An environment whose task is to reach a goal.

    Observations are a `Dict` with "achieved_goal" and "desired_goal", Boxes (goals,), and others, as those of
    gymnasium-robotics.
    """

    @abstractmethod
    def judge(self, achieved: Tensor, desired: Tensor) -> tuple[Tensor, Tensor]:
        """(reward, terminated), (n,), of steps that reach `achieved` (n, goals) where the goal is `desired`."""


def begun_again(env: Env, done: Tensor, state: State, last: Any, key: Tensor) -> tuple[State, Any]:
    """The state and the observations after a step, with new episodes where one is done. last: the observations."""
    fresh, first = env.reset(key, len(done))
    return {name: where(done, fresh[name], x) for name, x in state.items()}, pytree.tree_map(
        lambda a, b: where(done, a, b), first, last
    )


def where(done: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` for the instances that are done, else `b`. done: bool (n,)."""
    return torch.where(done.reshape(-1, *[1] * (b.ndim - 1)), a, b)


def over(x: Tensor, like: Tensor) -> Tensor:
    """A tensor with the first dims of another, expanded over the others: episodes that end for all agents."""
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim)).expand_as(like)


def ends(chunk: dict[str, Any], like: Tensor) -> tuple[Tensor, Tensor]:
    """(terminated, done) of each row of a chunk, or of each agent where agents end one by one, as tensors whose first
    dims are those of rewards. The next row of the same agent belongs to another episode where it is done."""
    whole = over(chunk["terminated"] | chunk["truncated"], like)
    if "agent_terminated" not in chunk:
        return over(chunk["terminated"], like), whole
    terminated = over(chunk["agent_terminated"], like)
    return terminated, terminated | over(chunk["agent_truncated"], like) | whole
