"""Particle worlds: agents are disks that push each other, among landmarks (Mordatch and Abbeel 2018; Lowe et al. 2017).

    force = acceleration * action + sum over contacts of 100 m * s(penetration / m) * direction,   s = softplus
    position <- position + 0.1 velocity
    velocity <- 0.75 velocity + 0.1 force, at most as long as the greatest speed

with m = 0.001. Constants and order are those of the package `mpe2`, with which scenarios are compared.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.core.env import Env, State, Step
from tutti.rl.envs.canvas import BLUE, GRAY, GREEN, RED, Canvas

DT, DAMPING, CONTACT, MARGIN = 0.1, 0.25, 100.0, 0.001
MOVES = 5  # none, left, right, down, up


@dataclass(frozen=True)
class Body:
    """An agent or a landmark. accel: force of an action, 0 for what cannot move. fastest: greatest speed."""

    size: float
    collides: bool = False
    accel: float = 5.0
    fastest: float = inf


class Around:
    """All bodies as agents see them: x, y and distance, each (n, agents, bodies). An agent is 1 from itself."""

    def __init__(self, state: State):
        self.places = torch.cat([state["position"], state["landmarks"]], 1)
        self.agents = state["position"].shape[1]

    @cached_property
    def x(self) -> Tensor:
        return self.places[:, None, :, 0] - self.places[:, : self.agents, None, 0]

    @cached_property
    def y(self) -> Tensor:
        return self.places[:, None, :, 1] - self.places[:, : self.agents, None, 1]

    @cached_property
    def distance(self) -> Tensor:
        itself = torch.eye(*self.x.shape[1:], dtype=self.x.dtype, device=self.x.device)
        return torch.hypot(self.x, self.y) + itself

    def seen(self) -> tuple[Tensor, Tensor]:
        """Landmarks and other agents, relative to the agent: (n, agents, 2 landmarks), (n, agents, 2 (agents - 1))."""
        places = torch.stack([self.x, self.y], -1)
        return places[:, :, self.agents :].flatten(2), others(places[:, :, : self.agents]).flatten(2)


class Particles(Env):
    """A scenario: bodies, a reward and observations.

    Action: 0 none, 1 left, 2 right, 3 down, 4 up; if continuous, five numbers from 0 to 1, whose differences (right -
    left, up - down) are the force. Episodes are truncated after 25 steps.

    widths: sizes of the agents' observations; where they differ, those that are shorter end in zeros.
    state["position"], state["velocity"]: positions and velocities of agents, (n, agents, 2). state["landmarks"]:
    positions, (n, landmarks, 2).
    """

    limit = 25

    def __init__(
        self,
        agents: dict[str, Body],
        landmarks: tuple[Body, ...],
        widths: tuple[int, ...],
        continuous: bool,
        spread: float = 1.0,
    ):
        """spread: landmarks are placed up to so far from the middle."""
        self.agents, self.widths, self.continuous, self.spread = tuple(agents), widths, continuous, spread
        self.movers, self.landmarks = tuple(agents.values()), landmarks
        self.observation_space = spaces.Box(-np.inf, np.inf, (max(widths),), np.float32)
        self.action_space = spaces.Box(0.0, 1.0, (MOVES,), np.float32) if continuous else spaces.Discrete(MOVES)
        bodies = self.movers + landmarks
        meets = [[a is not b and a.collides and b.collides for b in landmarks] for a in self.movers]
        pairs = [
            [i != j and a.collides and b.collides for j, b in enumerate(self.movers)] for i, a in enumerate(self.movers)
        ]
        self.meets = [p + m for p, m in zip(pairs, meets, strict=True)]  # agents x bodies
        self.reach = [[a.size + b.size for b in bodies] for a in self.movers]

    def reset(self, key: Tensor, n: int) -> tuple[State, Tensor]:
        count = len(self.movers)
        u = keys.uniform(key, (n, count + len(self.landmarks) + 1, 2), -1.0, 1.0)
        position = u[:, :count]
        state = {
            "position": position,
            "velocity": torch.zeros_like(position),
            "landmarks": self.spread * u[:, count:-1],
            **self.begin((u[:, -1, 0] + 1) / 2),
            "t": torch.zeros(n, dtype=torch.int64, device=key.device),
        }
        return state, self.observe(state, Around(state))

    def step(self, state: State, action: Tensor, key: Tensor) -> Step:
        state = {**state, **self.move(state, action), "t": state["t"] + 1}
        around = Around(state)
        terminated = torch.zeros_like(state["t"], dtype=torch.bool)
        return state, self.observe(state, around), self.reward(state, around), terminated, self.truncated(state["t"])

    def begin(self, u: Tensor) -> State:
        """Further entries of the state. u: uniform numbers from 0 to 1, (n,)."""
        return {}

    @abstractmethod
    def observe(self, state: State, around: Around) -> Tensor:
        """(n, agents, max(widths))."""

    @abstractmethod
    def reward(self, state: State, around: Around) -> Tensor:
        """(n, agents)."""

    def move(self, state: State, action: Tensor) -> State:
        """Positions and velocities after one step."""
        return self.drive(state, self.pushes(action, state["position"].dtype))

    def pushes(self, action: Tensor, dtype: torch.dtype) -> Tensor:
        """Directions, (n, agents, 2)."""
        if self.continuous:
            action = action.to(dtype).clamp(0.0, 1.0)
            return action[..., 2::2] - action[..., 1::2]
        x = (action == 2).to(dtype) - (action == 1).to(dtype)
        y = (action == 4).to(dtype) - (action == 3).to(dtype)
        return torch.stack([x, y], -1)

    def drive(self, state: State, push: Tensor) -> State:
        """Positions and velocities after one step in which agents push in these directions, (n, agents, 2)."""
        position, velocity = state["position"], state["velocity"]
        force = push * self.of_agents([b.accel for b in self.movers], push).unsqueeze(-1)
        if any(any(row) for row in self.meets):
            force = force + self.contacts(state)
        after = (1 - DAMPING) * velocity + DT * force
        if any(b.fastest < inf for b in self.movers):
            fastest = self.of_agents([b.fastest for b in self.movers], after).unsqueeze(-1)
            speed = after.square().sum(-1, keepdim=True).sqrt()
            after = torch.where(speed > fastest, after / speed * fastest, after)
        return {"position": position + DT * velocity, "velocity": after}

    def contacts(self, state: State) -> Tensor:
        """Sums of the forces of all bodies on each agent, (n, agents, 2)."""
        around = Around(state)
        deep = F.softplus((self.of_agents(self.reach, around.x) - around.distance) / MARGIN, threshold=50.0)
        strength = deep / around.distance * self.of_agents(self.meets, around.x) * (-CONTACT * MARGIN)
        return torch.stack([(strength * around.x).sum(-1), (strength * around.y).sum(-1)], -1)

    def touching(self, around: Around) -> Tensor:
        """Mask of the bodies that an agent overlaps with: bool (n, agents, bodies)."""
        overlap = around.distance < self.of_agents(self.reach, around.x)
        return overlap & self.of_agents(self.meets, around.x).bool()

    def of_agents(self, numbers: list, like: Tensor) -> Tensor:
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)

    def draw(self, state: State, i: int) -> np.ndarray:
        """Agents are blue, adversaries red, landmarks gray, and the goal is green."""
        canvas = Canvas(-1.5, -1.5, 1.5, 1.5)
        goal = int(state["goal"][i]) if "goal" in state else None
        for k, (body, (x, y)) in enumerate(zip(self.landmarks, state["landmarks"][i].tolist(), strict=True)):
            canvas.disk(x, y, body.size, GREEN if k == goal else GRAY)
        for k, (body, (x, y)) in enumerate(zip(self.movers, state["position"][i].tolist(), strict=True)):
            adversary = k < len(self.agents) and self.agents[k].startswith("adversary")
            canvas.disk(x, y, body.size, RED if adversary else BLUE, 0.8)
        return canvas.picture()

    def overview(self, state: State) -> Tensor:
        """The observations of all agents, without padding."""
        obs = self.observe(state, Around(state))
        return torch.cat([obs[:, i, :width] for i, width in enumerate(self.widths)], -1)


def others(x: Tensor) -> Tensor:
    """Drop each agent's view of itself: (n, agents, agents, ...) to (n, agents, agents - 1, ...)."""
    agents = x.shape[1]
    if agents == 1:
        return x[:, :, :0]
    off_diagonal = x.flatten(1, 2)[:, 1:].unflatten(1, (agents - 1, agents + 1))[:, :, :-1]
    return off_diagonal.flatten(1, 2).unflatten(1, (agents, agents - 1))


def padded(x: Tensor, width: int) -> Tensor:
    """With zeros at the end of the last dim."""
    return F.pad(x, (0, width - x.shape[-1]))
