"""Hindsight experience replay (Andrychowicz et al., 2017, arXiv 1707.01495): goals are replaced by what was reached.

A share of the samples gets, as its goal, what the same episode achieved at a later step (strategy "future"), and the
reward of that goal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import GoalEnv
from tutti.rl.networks.features import Features
from tutti.rl.replay.ring import Number, Ring

Tree = dict[str, Any]
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
HORIZON = 50  # steps, where episodes have no limit


class Hindsight(Ring):
    """achieved, desired: where observations (..., size) have what was reached, and the goal. judge: see
    `tutti.rl.core.env.GoalEnv`. later: replaced goals for each true one. horizon: how many steps later at most.
    """

    def __init__(self, length: int, n: int, achieved: slice, desired: slice, judge: Judge, later: int = 4,
                 horizon: int = HORIZON):  # fmt: skip
        super().__init__(length, n)
        self.achieved, self.desired, self.judge = achieved, desired, judge
        self.share, self.horizon = later / (later + 1), horizon

    @staticmethod
    def of(env: Any, features: Features, length: int, n: int, later: int) -> Hindsight:
        """That of an environment. Raises ValueError for one without goals."""
        if not isinstance(env, GoalEnv):
            raise ValueError(f"hindsight needs an environment with goals, a tutti.rl.core.env.GoalEnv such as BitFlip; "
                             f"{env.name} is none; leave it out")  # fmt: skip
        parts = features.parts
        return Hindsight(length, n, parts["achieved_goal"], parts["desired_goal"], env.judge, later,
                         env.limit or HORIZON)  # fmt: skip

    def sample(self, memory: Tree, key: Tensor, count: int, gamma: Number = 1.0) -> tuple[Tree, Tree]:
        of_rows, of_share, of_step = keys.split(key, 3)
        of_time, of_env = keys.split(of_rows)
        start = keys.integers(of_time, (count,), memory["size"])
        env = keys.integers(of_env, (count,), self.n)
        batch = self.transitions(memory, start, env, gamma)
        ahead = (keys.uniform(of_step, (count,)) * (self._left(memory, start, env) + 1)).long()
        at = (memory["at"] - memory["size"] + start + ahead) % self.length * self.n + env
        later = memory["rows"]["last"].flatten(0, 1)[at][:, self.achieved]
        relabel = keys.uniform(of_share, (count,)) < self.share
        goal = torch.where(relabel.unsqueeze(-1), later, batch["obs"][:, self.desired])
        reward, terminated = self.judge(batch["last"][:, self.achieved], goal)
        reward = torch.where(relabel, reward, batch["reward"])
        terminated = torch.where(relabel, terminated, batch["terminated"])
        with_goal = {name: self._with(batch[name], goal) for name in ("obs", "last")}
        return {**batch, **with_goal, "reward": reward, "terminated": terminated,
                "discount": torch.where(terminated, 0.0, gamma)}, {"weight": torch.ones(count)}  # fmt: skip

    def _with(self, obs: Tensor, goal: Tensor) -> Tensor:
        """Observations with other goals."""
        return torch.cat([obs[:, : self.desired.start], goal, obs[:, self.desired.stop :]], -1)

    def _left(self, memory: Tree, start: Tensor, env: Tensor) -> Tensor:
        """Number of following rows of the same episode, less than `horizon`."""
        steps = torch.arange(self.horizon)
        age = start.unsqueeze(-1) + steps
        at = (memory["at"] - memory["size"] + age) % self.length * self.n + env.unsqueeze(-1)
        ended = (memory["rows"]["terminated"] | memory["rows"]["truncated"]).flatten()[at]
        last = ended | (age >= memory["size"] - 1)
        last = torch.cat([last[:, :-1], torch.ones_like(last[:, -1:])], -1)
        return last.long().argmax(-1)
