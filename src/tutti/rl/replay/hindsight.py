"""Hindsight experience replay (Andrychowicz et al., 2017): goals are replaced by what was reached later.

Observations end with the goal. A share of the samples gets, as its goal, what the same episode reached at a later step
(strategy "future"), and the reward of that goal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.rl import keys
from tutti.rl.replay.ring import Number, Ring

Tree = dict[str, Any]


class Hindsight(Ring):
    """goals: numbers at the end of an observation. reached: maps observations without the goal (..., size - goals) to
    what they have reached (..., goals). reward: maps (reached, goal) to a reward and whether the episode terminates.
    later: goals per true one. horizon: how many steps later at most.
    """

    def __init__(self, length: int, n: int, goals: int, reached: Callable[[Tensor], Tensor],
                 reward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], later: int = 4, horizon: int = 50):  # fmt: skip
        super().__init__(length, n)
        self.goals, self.reached, self.reward, self.share, self.horizon = (
            goals,
            reached,
            reward,
            later / (later + 1),
            horizon,
        )

    def sample(self, memory: Tree, key: Tensor, count: int, gamma: Number = 1.0) -> tuple[Tree, Tree]:
        of_rows, of_share, of_step = keys.split(key, 3)
        of_time, of_env = keys.split(of_rows)
        start = keys.integers(of_time, (count,), memory["size"])
        env = keys.integers(of_env, (count,), self.n)
        batch = self.transitions(memory, start, env, gamma)
        left = self._left(memory, start, env)
        ahead = (keys.uniform(of_step, (count,)) * (left + 1)).long()
        at = (memory["at"] - memory["size"] + start + ahead) % self.length * self.n + env
        later = memory["rows"]["last"].flatten(0, 1)[at][:, : -self.goals]
        relabel = keys.uniform(of_share, (count,)) < self.share
        goal = torch.where(relabel.unsqueeze(-1), self.reached(later), batch["obs"][:, -self.goals :])
        reward, terminated = self.reward(self.reached(batch["last"][:, : -self.goals]), goal)
        reward = torch.where(relabel, reward, batch["reward"])
        terminated = torch.where(relabel, terminated, batch["terminated"])
        with_goal = {name: torch.cat([batch[name][:, : -self.goals], goal], -1) for name in ("obs", "last")}
        return {**batch, **with_goal, "reward": reward, "terminated": terminated,
                "discount": torch.where(terminated, 0.0, gamma)}, {"weight": torch.ones(count)}  # fmt: skip

    def _left(self, memory: Tree, start: Tensor, env: Tensor) -> Tensor:
        """How many rows of the same episode follow, at most `horizon`."""
        steps = torch.arange(self.horizon)
        age = start.unsqueeze(-1) + steps
        at = (memory["at"] - memory["size"] + age) % self.length * self.n + env.unsqueeze(-1)
        ended = (memory["rows"]["terminated"] | memory["rows"]["truncated"]).flatten()[at]
        last = ended | (age >= memory["size"] - 1)
        last = torch.cat([last[:, :-1], torch.ones_like(last[:, -1:])], -1)
        return last.long().argmax(-1)
