"""Tasks whose goal is a part of the observation, with no reward before it is reached.

Each step costs 1 but the one that reaches the goal, which terminates the episode.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import GoalEnv, State, Step
from tutti.rl.envs.canvas import GREEN, ORANGE, Canvas, tiles


class BitFlip(GoalEnv):
    """Action i flips bit i; the goal is a random word of `bits` bits (Andrychowicz et al., 2017, arXiv 1707.01495).

    Random play reaches the goal in a share of about bits / 2^bits of the episodes, which are truncated after `bits`
    steps. state["bits"], state["goal"]: bool (n, bits).
    """

    def __init__(self, bits: int = 12, threshold: float | None = -6.0):
        self.bits, self.limit, self.threshold = bits, bits, threshold
        word = spaces.Box(0.0, 1.0, (bits,), np.float32)
        self.observation_space = spaces.Dict({"achieved_goal": word, "desired_goal": word})
        self.action_space = spaces.Discrete(bits)

    def reset(self, key: Tensor, n: int) -> tuple[State, dict[str, Tensor]]:
        drawn = keys.uniform(key, (2, n, self.bits)) < 0.5
        state = {"bits": drawn[0], "goal": drawn[1], "t": torch.zeros(n, dtype=torch.int64)}
        return state, self.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        flipped = action.unsqueeze(-1) == torch.arange(self.bits, device=action.device)
        state = {**state, "bits": state["bits"] ^ flipped, "t": state["t"] + 1}
        obs = self.observe(state)
        return state, obs, *self.judge(obs["achieved_goal"], obs["desired_goal"]), self.truncated(state["t"])

    def observe(self, state: State) -> dict[str, Tensor]:
        return {"achieved_goal": state["bits"].float(), "desired_goal": state["goal"].float()}

    def judge(self, achieved: Tensor, desired: Tensor) -> tuple[Tensor, Tensor]:
        reached = (achieved == desired).all(-1)
        return reached.float() - 1, reached

    def draw(self, state: State, i: int) -> np.ndarray:
        word, goal = state["bits"][i].numpy(), state["goal"][i].numpy()
        none = np.zeros_like(goal)
        return tiles(np.array([[word, none], [none, goal]]), [ORANGE, GREEN])


class Reach(GoalEnv):
    """A point in the square from -1 to 1 moves by `speed` times the action, up to within `radius` of a random goal.

    state["at"], state["goal"]: float32 (n, 2).
    """

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, speed: float = 0.1, radius: float = 0.05, limit: int = 40, threshold: float | None = -14.0):
        self.speed, self.radius, self.limit, self.threshold = speed, radius, limit, threshold
        place = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"achieved_goal": place, "desired_goal": place})

    def reset(self, key: Tensor, n: int) -> tuple[State, dict[str, Tensor]]:
        drawn = keys.uniform(key, (2, n, 2), -1.0, 1.0)
        state = {"at": drawn[0], "goal": drawn[1], "t": torch.zeros(n, dtype=torch.int64)}
        return state, self.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        at = (state["at"] + self.speed * action.clamp(-1, 1)).clamp(-1, 1)
        state = {**state, "at": at, "t": state["t"] + 1}
        obs = self.observe(state)
        return state, obs, *self.judge(obs["achieved_goal"], obs["desired_goal"]), self.truncated(state["t"])

    def observe(self, state: State) -> dict[str, Tensor]:
        return {"achieved_goal": state["at"], "desired_goal": state["goal"]}

    def judge(self, achieved: Tensor, desired: Tensor) -> tuple[Tensor, Tensor]:
        reached = (achieved - desired).square().sum(-1) < self.radius**2
        return reached.float() - 1, reached

    def draw(self, state: State, i: int) -> np.ndarray:
        canvas = Canvas(-1.1, -1.1, 1.1, 1.1)
        for name, radius, color in (("goal", self.radius, GREEN), ("at", self.radius / 2, ORANGE)):
            x, y = state[name][i].tolist()
            canvas.disk(x, y, radius, color)
        return canvas.picture()
