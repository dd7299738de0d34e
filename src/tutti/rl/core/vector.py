"""Environments outside of the graph: a batch of instances, stepped together on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces


@dataclass
class Moved:
    """The result of a step of n environments.

    obs: observations, an array (n, ...) or a dict of arrays. Where an episode ended, the first of the next episode.
    reward: float32 (n,) or (n, agents). terminated, truncated: bool (n,).
    last: as obs, but where an episode ended its last observation.
    valid: bool as rewards: which of the steps were one of an episode. False for agents that had left it before, and for
        instances that spent the step on their reset. agent_terminated, agent_truncated: bool (n, agents), which agents'
        parts ended in the step. Where `VectorEnv.gaps`.
    last_masks, last_overview: as `VectorEnv.masks` and `overview`, of `last`. None where the environment has none, and
        where no episode ended.
    """

    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    last: Any
    last_masks: np.ndarray | None = None
    last_overview: np.ndarray | None = None
    valid: np.ndarray | None = None
    agent_terminated: np.ndarray | None = None
    agent_truncated: np.ndarray | None = None


class VectorEnv(ABC):
    """n environments on the host. A new episode begins in the step in which one ends.

    observation_space, action_space, agents, limit, threshold: as in `tutti.rl.core.env.Env`, of one instance and agent.
    gaps: whether agents may leave an episode before its end, or instances spend steps on their reset: then steps say
        which of their rows are `valid`.
    starts: what observations and actions of the environment that is adapted have more than ours, whose discrete values
        begin at 0: see `tutti.rl.adapt.layout.starts`. `Agent.predict` speaks the language of that environment.
    """

    n: int
    name: str
    observation_space: spaces.Space
    action_space: spaces.Space
    agents: tuple[str, ...] = ("agent",)
    limit: int | None = None
    threshold: float | None = None
    starts: tuple[Any, Any] = (None, None)
    gaps: bool = False

    @abstractmethod
    def reset(self, seed: int | None = None) -> Any:
        """Begin new episodes everywhere. Returns the observations. Instance i begins with seed + i."""

    @abstractmethod
    def step(self, action: np.ndarray) -> Moved:
        """Advance all instances. action: int64 (n,) or (n, agents) for a discrete space, else float32 (n, ...)."""

    def masks(self) -> np.ndarray | None:
        """Mask of the possible discrete actions: bool (n, actions) or (n, agents, actions). None: all."""
        return None

    def overview(self) -> np.ndarray | None:
        """Global observation for a central critic: float32 (n, features). None: all observations."""
        return None

    def draw(self, i: int = 0) -> np.ndarray | None:
        """A picture of instance i, uint8 (height, width, 3), or None if there is none."""
        return None

    def state(self) -> Any:
        """Everything that `restore` needs to continue with equal results: data that `tutti.rl.core.plain.pack` can
        store, such as dicts of arrays.

        Raises NotImplementedError where an environment cannot be saved.
        """
        raise NotImplementedError(f"{self.name} cannot save its state")

    def restore(self, state: Any) -> Any:
        """Continue from what `state` returned. Returns the observations."""
        raise NotImplementedError(f"{self.name} cannot restore a state")

    def close(self) -> None:  # noqa: B027
        """Release processes and windows."""
