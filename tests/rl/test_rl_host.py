"""Rollouts that the host steps: what a chunk says of observations at the end of an episode."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tutti.rl import DQN, PPO, make
from tutti.rl.adapt.processes.halves import Halves
from tutti.rl.adapt.pure import Pure, in_workers
from tutti.rl.core.env import Env
from tutti.rl.core.files import equal
from tutti.rl.core.vector import Moved, VectorEnv
from tutti.rl.networks.features import features_of
from tutti.rl.offline_data import episodes

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
    unsaved = lambda: Unsaved(make("CartPole-v1"), 2)  # noqa: E731
    agent = learning(unsaved())
    first = agent.host.seen["obs"].clone()
    agent.learn(64)
    again = PPO.load(agent.save(tmp_path / "agent"), unsaved(), level="eager")
    assert again.host.steps == agent.host.steps == 32
    assert not torch.equal(again.host.seen["obs"], first) and again.host.length.tolist() == [0, 0]
    again.learn(32)


class Broken(gymnasium.Env):
    """Returns NaN in the observation, or the reward, of one step after a reset; that of an episode's end is its 4th."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, at, what="observation"):
        self.at, self.what, self.t = at, what, 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), np.nan if self.what == "reward" and self.t == self.at else 1.0, self.t == 4, False, {}

    def observe(self):
        return np.full(2, np.nan if self.what == "observation" and self.t == self.at else 0, np.float32)


@pytest.mark.parametrize("kind", [PPO, DQN])
@pytest.mark.parametrize("at, where", [(0, "`reset`"), (1, "step 1"), (4, "step 4")])
def test_observations_that_are_not_finite_are_named(kind, at, where):
    options = {"learning_starts": 8} if kind is DQN else {"n_steps": 4}
    with pytest.raises(ValueError, match=rf"Broken: instance 0 returned an observation with nan in {where}"):
        kind(Broken(at), batch_size=4, level="eager", **options).learn(32)
    with pytest.raises(ValueError, match="Broken: instance 0 returned the reward nan in step 1"):
        kind(Broken(1, "reward"), batch_size=4, level="eager", **options).learn(32)


class PureBroken(Ticks):
    """Its observations are NaN from the second step on, for ever or for one step."""

    def __init__(self, forever):
        self.forever = forever

    def masks(self, state):
        return None

    def observe(self, t):
        return torch.where(t >= 2 if self.forever else t == 2, torch.nan, 1.0).unsqueeze(-1)


@pytest.mark.parametrize("kind, forever", [(PPO, True), (DQN, True), (DQN, False)])
def test_observations_of_pure_environments_are_named(kind, forever):
    options = {"learning_starts": 8} if kind is DQN else {"n_steps": 2}
    with pytest.raises(ValueError, match=r"PureBroken: the observation .* is nan; `step` must return finite observat"):
        kind(PureBroken(forever), n_envs=2, batch_size=4, level="eager", **options).learn(64)


def test_rewards_of_vectors_are_finite():
    class Own(Pure):
        def step(self, action):
            moved = super().step(action)
            moved.reward = np.array([1, np.inf, 1, 1], np.float32)
            return moved

    with pytest.raises(ValueError, match="instance 1 returned a reward that is inf; `step` must return finite rewards"):
        chunk_of(Own(Ticks(), N))
