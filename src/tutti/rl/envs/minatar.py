"""Breakout and Space Invaders on boards of 10 x 10, as in MinAtar (Young and Tian 2019), with its minimal actions.

Observations are planes, (planes, 10, 10), of zeros and ones: MinAtar's own have the planes at the end. As there, an
action is replaced by the one before with probability `sticky`. MinAtar's episodes have no limit.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLUE, GRAY, GREEN, ORANGE, RED, WHITE, tiles

SIZE = 10


class Breakout(Env):
    """Planes: paddle, ball, where the ball was, bricks. Action: 0 stay, 1 left, 2 right.

    Reward 1 for each brick. Three rows of bricks come back where none is left. Terminates when the ball is missed.

    state["ball"]: x, y, x and y before, and steps of x and y, int64 (n, 6). state["bricks"]: rows 1 to 3, bool
    (n, 3, 10). state["paddle"], state["last"]: the column and the last action, int64 (n,). state["struck"]: bool (n,).
    """

    observation_space = spaces.Box(0.0, 1.0, (4, SIZE, SIZE), np.float32)
    action_space = spaces.Discrete(3)
    limit, threshold = 5000, None

    def __init__(self, sticky: float = 0.1):
        self.sticky = sticky

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        right = keys.integers(key, (n,), 2)  # the side the ball comes from
        zero, x = torch.zeros_like(right), right * (SIZE - 1)
        y, down = zero + 3, zero + 1
        state = {
            "ball": torch.stack([x, y, x, y, 1 - 2 * right, down], -1),
            "bricks": torch.ones(n, 3, SIZE, dtype=torch.bool, device=key.device),
            "paddle": zero + 4,
            "last": zero,
            "struck": torch.zeros_like(right, dtype=torch.bool),
            "t": zero,
        }
        return state, self.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        action = stick(action, state["last"], self.sticky, key)
        paddle = (state["paddle"] + (action == 2).long() - (action == 1).long()).clamp(0, SIZE - 1)
        x, y, _, _, dx, dy = state["ball"].unbind(-1)
        to_x, to_y = x + dx, y + dy
        dx = torch.where((to_x < 0) | (to_x >= SIZE), -dx, dx)
        to_x = to_x.clamp(0, SIZE - 1)

        bricks = state["bricks"]
        here = (at(to_y - 1, 3).unsqueeze(-1) & at(to_x, SIZE).unsqueeze(-2)) & bricks
        ceiling, inside = to_y < 0, here.flatten(1).any(-1)
        breaks = inside & ~state["struck"]
        bottom = to_y == SIZE - 1
        back, corner = bottom & (x == paddle), bottom & (x != paddle) & (to_x == paddle)
        terminated = bottom & ~back & ~corner

        bricks = bricks & ~(here & breaks[:, None, None])
        bricks = bricks | (bottom & ~bricks.flatten(1).any(-1))[:, None, None]
        dy = torch.where(ceiling | breaks | back | corner, -dy, dy)
        dx = torch.where(corner, -dx, dx)
        to_y = torch.where(breaks | back | corner, y, to_y.clamp(min=0))
        t = state["t"] + 1
        state = {
            "ball": torch.stack([to_x, to_y, x, y, dx, dy], -1),
            "bricks": bricks,
            "paddle": paddle,
            "last": action,
            "struck": inside,
            "t": t,
        }
        return state, self.observe(state), breaks.float(), terminated, self.truncated(t)

    def draw(self, state: State, i: int) -> np.ndarray:
        return tiles(self.observe(state)[i].numpy(), [WHITE, ORANGE, GRAY, RED])

    def observe(self, state: State) -> Tensor:
        x, y, old_x, old_y = state["ball"][:, :4].unbind(-1)
        bottom = torch.full_like(x, SIZE - 1)
        cells = torch.stack([bottom * SIZE + state["paddle"], y * SIZE + x, old_y * SIZE + old_x], -1)
        points = at(cells, SIZE * SIZE).unflatten(-1, (SIZE, SIZE))
        bricks = torch.nn.functional.pad(state["bricks"], (0, 0, 1, 6)).unsqueeze(1)
        return torch.cat([points, bricks], 1).float()


class SpaceInvaders(Env):
    """Planes: cannon, aliens, aliens that go left, aliens that go right, own shots, shots of aliens.

    Action: 0 stay, 1 left, 2 right, 3 shoot. Reward 1 for each alien. A new wave comes when all are gone, which moves
    more often. Terminates when a shot or an alien hits the cannon, or the aliens have arrived at the bottom.

    state["aliens"], state["shots"], state["bombs"]: bool (n, 10, 10). state["numbers"]: column of the cannon, direction
    of the aliens, their interval, timers of their moves, of their shots and of the cannon's, last action; int64 (n, 7).
    """

    observation_space = spaces.Box(0.0, 1.0, (6, SIZE, SIZE), np.float32)
    action_space = spaces.Discrete(4)
    limit, threshold = 5000, None
    RELOAD, INTERVAL, FASTEST, BOMBS = 5, 12, 6, 10  # steps

    def __init__(self, sticky: float = 0.1):
        self.sticky = sticky

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        numbers = torch.tensor([SIZE // 2, -1, self.INTERVAL, self.INTERVAL, self.BOMBS, 0, 0], device=key.device)
        wave = new_wave(key.device).expand(n, SIZE, SIZE)
        state = {
            "aliens": wave,
            "shots": torch.zeros_like(wave),
            "bombs": torch.zeros_like(wave),
            "numbers": numbers.expand(n, 7),
            "t": torch.zeros(n, dtype=torch.int64, device=key.device),
        }
        return state, self.observe(state)

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        cannon, way, interval, moves, bombs_in, reload, last = state["numbers"].unbind(-1)
        aliens, shots, bombs = state["aliens"], state["shots"], state["bombs"]
        action = stick(action, last, self.sticky, key)
        fires = (action == 3) & (reload == 0)
        reload = torch.where(fires, self.RELOAD, reload)
        cannon = (cannon + (action == 2).long() - (action == 1).long()).clamp(0, SIZE - 1)
        column = at(cannon, SIZE)  # of the cannon: bool (n, 10)

        shot = (fires.unsqueeze(-1) & column).unsqueeze(1)
        none = torch.zeros_like(shot)
        shots = torch.cat([shots[:, 1:-1], shots[:, -1:] | shot, none], 1)
        bombs = torch.cat([none, bombs[:, :-1]], 1)
        terminated = (bombs[:, -1] & column).any(-1) | (aliens[:, -1] & column).any(-1)

        moving = moves == 0
        moves = torch.where(moving, torch.minimum(aliens.flatten(1).sum(-1), interval), moves)
        edge = torch.where(way < 0, aliens[:, :, 0].any(-1), aliens[:, :, -1].any(-1))
        turns = moving & edge
        way = torch.where(turns, -way, way)
        terminated = terminated | (turns & aliens[:, -1].any(-1))
        sideways = torch.where((way < 0)[:, None, None], aliens.roll(-1, 2), aliens.roll(1, 2))
        moved = torch.where(edge[:, None, None], aliens.roll(1, 1), sideways)
        aliens = torch.where(moving[:, None, None], moved, aliens)
        terminated = terminated | (moving & (aliens[:, -1] & column).any(-1))

        bombing = bombs_in == 0
        bombs_in = torch.where(bombing, self.BOMBS, bombs_in)
        bombs = bombs | (self.bomber(aliens, cannon) & bombing[:, None, None])

        hits = aliens & shots
        reward = hits.flatten(1).sum(-1).float()
        aliens, shots = aliens & ~hits, shots & ~hits
        gone = ~aliens.flatten(1).any(-1)
        interval = interval - (gone & (interval > self.FASTEST)).long()
        aliens = aliens | (gone[:, None, None] & new_wave(aliens.device))
        numbers = [cannon, way, interval, moves - 1, bombs_in - 1, (reload - 1).clamp(min=0), action]
        t = state["t"] + 1
        state = {"aliens": aliens, "shots": shots, "bombs": bombs, "numbers": torch.stack(numbers, -1), "t": t}
        return state, self.observe(state), reward, terminated, self.truncated(t)

    def bomber(self, aliens: Tensor, cannon: Tensor) -> Tensor:
        """The lowest alien of the column that is nearest to the cannon, the left one of two: bool (n, 10, 10)."""
        places = torch.arange(SIZE, device=cannon.device)
        distance = (places - cannon.unsqueeze(-1)).abs() * SIZE + places  # no two are equal
        distance = torch.where(aliens.any(1), distance, SIZE * SIZE)
        nearest = distance == distance.amin(-1, keepdim=True)
        rows = torch.where(aliens, places.unsqueeze(-1), -1)
        return aliens & (rows == rows.amax(1, keepdim=True)) & nearest.unsqueeze(1)

    def draw(self, state: State, i: int) -> np.ndarray:
        planes = self.observe(state)[i, [0, 4, 5, 2, 3]].numpy()
        return tiles(planes, [WHITE, ORANGE, RED, GREEN, BLUE])

    def observe(self, state: State) -> Tensor:
        cannon, way = state["numbers"][:, 0], state["numbers"][:, 1, None, None]
        aliens = state["aliens"]
        own = at(cannon + SIZE * (SIZE - 1), SIZE * SIZE).unflatten(-1, (SIZE, SIZE))
        planes = [own, aliens, aliens & (way < 0), aliens & (way > 0), state["shots"], state["bombs"]]
        return torch.stack(planes, 1).float()


def stick(action: Tensor, last: Tensor, sticky: float, key: Tensor) -> Tensor:
    return torch.where(keys.uniform(key, action.shape) < sticky, last, action) if sticky else action


def at(place: Tensor, size: int) -> Tensor:
    """One-hot, bool (..., size); none where a place is outside."""
    return place.unsqueeze(-1) == torch.arange(size, device=place.device)


def new_wave(device: torch.device) -> Tensor:
    """Four rows of six aliens, bool (10, 10)."""
    place = torch.arange(SIZE, device=device)
    return (place < 4).unsqueeze(-1) & (place >= 2) & (place < 8)
