"""T-maze: remember a sign from the start of a corridor until its end (Bakker 2002)."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step


class TMaze(Env):
    """Observation: the sign (1 or -1 at the start of the corridor, else 0), in the corridor, at the junction.

    Action: 0 forward, 1 turn up, 2 turn down. Turning at the junction terminates the episode, with a reward of 1 on the
    side of the sign (1 is up), else -1. A turn in the corridor, or forward at the junction, costs 0.1 and does not
    move. The best return is 1; without memory it is 0.

    length: steps from the start to the junction.
    state["sign"]: float32 (n,). state["place"]: int64 (n,), `length` at the junction.
    """

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(3)
    threshold = 0.9

    def __init__(self, length: int = 10):
        if length < 1:
            raise ValueError(f"TMaze: length is {length}; the junction must be at least 1 step away from the sign")
        self.length, self.limit = length, 3 * length + 10

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        place = torch.zeros(n, dtype=torch.int64, device=key.device)
        sign = 2.0 * keys.integers(key, (n,), 2) - 1
        return {"sign": sign, "place": place, "t": torch.zeros_like(place)}, self.observe(sign, place)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        sign, place, t = state["sign"], state["place"], state["t"] + 1
        junction, forward = place == self.length, action == 0
        terminated = junction & ~forward
        turned = torch.where(action == 1, sign, -sign)
        reward = torch.where(terminated, turned, torch.where(junction == forward, -0.1, 0.0))
        place = place + (forward & ~junction)
        return {"sign": sign, "place": place, "t": t}, self.observe(sign, place), reward, terminated, self.truncated(t)

    def observe(self, sign: Tensor, place: Tensor) -> Tensor:
        junction = (place == self.length).to(sign.dtype)
        return torch.stack([torch.where(place == 0, sign, 0.0), 1 - junction, junction], -1)
