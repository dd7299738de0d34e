"""`EnvPool` against gymnasium's dynamics and EnvPool's own episodes. Skipped where envpool is not installed."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from tutti.rl.adapt.envpool import EnvPool

envpool = pytest.importorskip("envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
N = 3


def test_cartpole_moves_as_gymnasiums_does_and_begins_in_the_same_step():
    env = EnvPool("CartPole-v1", N)
    assert (env.name, env.limit, env.threshold) == ("CartPole-v1", 500, 475.0)
    assert env.action_space == gymnasium.spaces.Discrete(2)
    obs = env.reset(5)
    single = gymnasium.make("CartPole-v1").unwrapped
    single.reset()
    rng, ends = np.random.default_rng(0), 0
    for _ in range(120):
        action = rng.integers(2, size=N)
        moved = env.step(action)
        for i in range(N):
            single.state, single.steps_beyond_terminated = obs[i].astype(float), None
            last, reward, terminated, _, _ = single.step(action[i])
            np.testing.assert_allclose(moved.last[i], last, atol=1e-5)
            assert moved.terminated[i] == terminated and moved.reward[i] == reward
        done = moved.terminated | moved.truncated
        assert (np.abs(moved.obs[done]) <= 0.05).all() and not (moved.last[done] == moved.obs[done]).all(1).any()
        np.testing.assert_array_equal(moved.obs[~done], moved.last[~done])
        ends, obs = ends + done.sum(), moved.obs
    assert ends > 5 and obs.dtype == np.float32
    env.close()


def test_seeds_and_limits():
    env = EnvPool("Pendulum-v1", N, max_episode_steps=7)
    assert env.limit == 7
    first = env.reset(3)
    np.testing.assert_array_equal(env.reset(3), first)
    np.testing.assert_array_equal(env.reset(4)[:2], first[1:])
    truncated = [env.step(np.zeros((N, 1), np.float32)).truncated for _ in range(14)]
    assert np.array(truncated).sum(0).tolist() == [2] * N and truncated[6].all() and truncated[13].all()
    env.close()
    assert EnvPool("Blackjack-v1", 1).limit is None


def test_what_it_cannot_do():
    with pytest.raises(ValueError, match="batch_size and seed cannot be chosen"):
        EnvPool("CartPole-v1", N, seed=3)
    with pytest.raises(NotImplementedError, match="CartPole-v1 cannot save its state"):
        EnvPool("CartPole-v1", N).state()
    env = EnvPool("CartPole-v1", N)
    env.reset(0)
    with pytest.raises(ValueError, match=r"shape \(2,\); 3 instances of Discrete\(2\) take \(3,\)"):
        env.step(np.zeros(2, np.int64))
