"""`Native` against the vector environments it wraps, and against single ones."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.native import Native

N = 4


def equal(a, b):
    for field in ("obs", "reward", "terminated", "truncated", "last"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)


def test_cartpole_moves_as_a_single_one_does_and_begins_in_the_same_step():
    env = Native("CartPole-v1", N)
    assert (env.name, env.limit, env.threshold, env.n) == ("CartPole-v1", 500, 475.0, N)
    obs = env.reset(0)
    single = gymnasium.make("CartPole-v1").unwrapped
    single.reset()
    rng, ends = np.random.default_rng(0), 0
    for _ in range(200):
        before = env.env.unwrapped.state.T.copy()
        action = rng.integers(2, size=N)
        moved = env.step(action)
        for i in range(N):
            single.state, single.steps_beyond_terminated = before[i], None
            last, _, terminated, _, _ = single.step(action[i])
            np.testing.assert_allclose(moved.last[i], last, rtol=1e-6)
            assert moved.terminated[i] == terminated and moved.reward[i] == 1
        done = moved.terminated | moved.truncated
        assert (np.abs(moved.obs[done]) <= 0.05).all()
        np.testing.assert_array_equal(moved.obs[~done], moved.last[~done])
        ends += done.sum()
        obs = moved.obs
    assert ends > 10 and obs.dtype == np.float32


def test_episodes_are_truncated_at_the_limit():
    env = Native("CartPole-v1", N, max_episode_steps=7)
    env.reset(0)
    truncated = np.array([env.step(np.arange(N) % 2).truncated for _ in range(21)])
    assert truncated.sum(0).tolist() == [3] * N and truncated[6].all() and truncated[13].all()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("env_id", ["Blackjack-v1", "MountainCarContinuous-v0"])
def test_vector_environments_of_other_modes_equal_single_ones(mode, env_id):
    factory = [lambda: gymnasium.make(env_id, max_episode_steps=11, disable_env_checker=True)] * N
    env = Native(SyncVectorEnv(factory, autoreset_mode=mode))
    other = Gymnasium(env_id, N, max_episode_steps=11)
    nested = isinstance(env.reset(3), dict)
    other.reset(3)
    rng = np.random.default_rng(0)
    for _ in range(40):
        discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        action = rng.integers(2, size=N) if discrete else rng.uniform(-1, 1, (N, 1)).astype(np.float32)
        a, b = env.step(action), other.step(action)
        if nested:
            for key in a.obs:
                np.testing.assert_array_equal(a.obs[key], b.obs[key])
                np.testing.assert_array_equal(a.last[key], b.last[key])
            a.obs = a.last = b.obs = b.last = 0
        equal(a, b)


def test_an_id_without_a_vector_environment():
    with pytest.raises(ValueError, match="Acrobot-v1 has no vector_entry_point"):
        Native("Acrobot-v1", 2)


def test_a_restored_state_continues():
    env, other = Native("CartPole-v1", N), Native("CartPole-v1", N)
    env.reset(0)
    actions = np.random.default_rng(0).integers(2, size=(120, N))
    for action in actions[:20]:
        env.step(action)
    saved = pickle.loads(pickle.dumps(env.state()))
    expected = [env.step(action) for action in actions]
    for x in (env, other):
        x.restore(saved)
        for action, want in zip(actions, expected, strict=True):
            equal(x.step(action), want)
