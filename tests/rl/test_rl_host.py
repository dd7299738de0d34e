"""Rollouts that the host steps: what a chunk says of observations at the end of an episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tutti.rl import PPO, make
from tutti.rl.adapt.halves import Halves
from tutti.rl.adapt.pure import Pure, in_workers
from tutti.rl.env import Env
from tutti.rl.features import features_of
from tutti.rl.files import equal
from tutti.rl.offline_data import episodes
from tutti.rl.vector import Moved, VectorEnv

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
    halves = Halves(in_workers(Ticks(), 2, 1), in_workers(Ticks(), 2, 1))  # pyright: ignore[reportArgumentType]
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


class Lengths(VectorEnv):
    """Episodes of instance 0 have 2 steps, those of instance 1 have 9."""

    n, name = 2, "Lengths"
    observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)

    def reset(self, seed=None):
        self.t, self.seed = np.zeros(2, np.int64), seed
        return self.look()

    def look(self):
        return self.t[:, None].astype(np.float32)

    def step(self, action):
        self.t += 1
        last, done = self.look(), self.t == (2, 9)
        self.t[done] = 0
        return Moved(self.look(), np.ones(2, np.float32), done, np.zeros(2, bool), last)


def learning(env="CartPole-v1", **options):
    return PPO(env, **{"n_envs": 2, "n_steps": 16, "batch_size": 32, "n_epochs": 1, "level": "eager", **options})


def test_short_episodes_are_not_preferred():
    agent = learning()
    agent.env = env = Lengths()
    agent.features = features_of(env.observation_space)
    agent.act = lambda policy, seen, carry, key, explore: (torch.zeros(2, dtype=torch.int64), {}, carry)
    assert agent.evaluate(7, env=env).lengths.tolist() == [2] * 4 + [9] * 3
    assert agent.evaluate(1, env=env).lengths.tolist() == [2]
    assert [len(e.rewards) for e in episodes(agent, 7, env=env)] == [2] * 4 + [9] * 3
    assert [e.observations[-1, 0] for e in episodes(agent, 2, env=env)] == [2, 9]
    with pytest.raises(ValueError, match="0 episodes were asked for"):
        agent.evaluate(0, env=env)
    with pytest.raises(ValueError, match=r"Lengths was not given by name: pass episodes\(env=\)"):
        agent.env_name = None
        episodes(agent, 2)


def test_evaluations_have_no_seeds_of_training():
    agent, env = learning(Lengths()), Lengths()
    seeds = [agent.host.seed]
    for seed in range(3):
        agent.evaluate(2, env=env, seed=seed)
        seeds.append(env.seed)
    episodes(agent, 2, env=env, seed=1)
    seeds.append(env.seed)
    assert len(set(seeds)) == 5 and seeds[0] < 1 << 20 and min(seeds[1:]) >= 1 << 30
    assert max(seeds) < (1 << 31) - (1 << 20)


def test_recording_leaves_the_environments_of_the_agent_alone():
    one, two = (learning("gymnasium:CartPole-v1").learn(64) for _ in range(2))
    assert len(episodes(one, 3)) == 3
    one.learn(64)
    two.learn(64)
    assert equal(one, two) and list(one.episodes) == list(two.episodes)


class Unsaved(Pure):
    def state(self):
        raise NotImplementedError


def test_keys_and_episodes_go_on_after_a_load_where_environments_cannot_be_saved(tmp_path):
    made = lambda: Unsaved(make("CartPole-v1"), 2)  # noqa: E731
    agent = learning(made())
    first = agent.host.seen["obs"].clone()
    agent.learn(64)
    again = PPO.load(agent.save(tmp_path / "agent"), made(), level="eager")
    assert again.host.steps == agent.host.steps == 32
    assert not torch.equal(again.host.seen["obs"], first) and again.host.length.tolist() == [0, 0]
    again.learn(32)
