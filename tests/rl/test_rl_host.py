"""Rollouts that the host steps: what a chunk says of observations at the end of an episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tutti.rl import PPO
from tutti.rl.adapt.halves import Halves
from tutti.rl.adapt.pure import Pure, in_workers
from tutti.rl.env import Env

N, LIMIT = 4, 3


class Ticks(Env):
    """Observes its step t; action t is masked, and the overview is 10 t. Truncated after 3 steps."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(5)
    limit = LIMIT

    def reset(self, key, n):
        t = torch.zeros(n, dtype=torch.int64)
        return {"t": t}, self.observe(t)

    def step(self, state, action, key):
        t = state["t"] + 1
        return {"t": t}, self.observe(t), torch.ones(len(t)), torch.zeros_like(t, dtype=torch.bool), self.truncated(t)

    def observe(self, t):
        return t.float().unsqueeze(-1)

    def masks(self, state):
        return torch.arange(5) != state["t"].unsqueeze(-1)

    def overview(self, state):
        return 10 * state["t"].float().unsqueeze(-1)


def chunk_of(env):
    agent = PPO(env, n_envs=N, n_steps=7, batch_size=N * 7, level="eager")
    return agent.host.collect(agent)


def check(chunk):
    t = torch.arange(7) % LIMIT
    assert torch.equal(chunk["obs"][:, 0, 0], t.float()) and torch.equal(chunk["last"][:, 0, 0], t + 1.0)
    for name, at in (("", t), ("last_", t + 1)):
        assert torch.equal(chunk[f"{name}overview"][..., 0], 10.0 * at.unsqueeze(-1).expand(7, N))
        assert torch.equal(chunk[f"{name}mask"][:, 0], torch.arange(5) != at.unsqueeze(-1))
    assert torch.equal(chunk["truncated"][:, 0], t == LIMIT - 1)


def test_masks_and_overviews_of_last_observations_are_of_their_episode():
    check(chunk_of(Pure(Ticks(), N)))


def test_workers_and_halves_report_them_too():
    halves = Halves(in_workers(Ticks(), 2, 1), in_workers(Ticks(), 2, 2))  # pyright: ignore[reportArgumentType]
    try:
        check(chunk_of(halves))
    finally:
        halves.close()


def test_an_environment_that_does_not_report_them_is_an_error():
    class Silent(Pure):
        def step(self, action):
            moved = super().step(action)
            moved.last_masks = None
            return moved

    with pytest.raises(ValueError, match=r"Ticks has masks, but .* give `Moved` its last_masks"):
        chunk_of(Silent(Ticks(), N))
