"""`MuJoCo` against gymnasium's own tasks: equal observations, rewards and ends, to the bit."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest

from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.mujoco import MuJoCo
from tutti.rl.adapt.tasks import TASKS

N = 8
# The most a scalar and an array may differ where a CPU computes them differently; the physics does not see them.
ROUNDING = {"InvertedDoublePendulum-v5": 1e-14, "Reacher-v5": 1e-14}


def actions(env, steps: int) -> np.ndarray:
    space, rng = env.action_space, np.random.default_rng(0)
    return rng.uniform(space.low, space.high, (steps, env.n, *space.shape)).astype(np.float32)


def equal(a, b, rounding: float = 0.0):
    np.testing.assert_allclose(a.obs, b.obs, rtol=0, atol=rounding)
    np.testing.assert_allclose(a.last, b.last, rtol=0, atol=rounding)
    np.testing.assert_allclose(a.reward, b.reward, rtol=1e-7 if rounding else 0)
    np.testing.assert_array_equal(a.terminated, b.terminated)
    np.testing.assert_array_equal(a.truncated, b.truncated)


def compare(env_id: str, steps: int, **kwargs) -> int:
    """Steps both, and returns how many episodes ended."""
    ours, theirs = MuJoCo(env_id, N, threads=2, **kwargs), Gymnasium(env_id, N, **kwargs)
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    assert (ours.limit, ours.threshold) == (theirs.limit, theirs.threshold)
    rounding, ends = ROUNDING.get(env_id, 0.0), 0
    np.testing.assert_allclose(ours.reset(5), theirs.reset(5), rtol=0, atol=rounding)
    for action in actions(ours, steps):
        a, b = ours.step(action), theirs.step(action)
        equal(a, b, rounding)
        ends += (a.terminated | a.truncated).sum()
    ours.close()
    return ends


@pytest.mark.parametrize("env_id", TASKS)
def test_equals_gymnasium(env_id):
    assert compare(env_id, 110, max_episode_steps=100) >= N


@pytest.mark.slow
@pytest.mark.parametrize("env_id", TASKS)
def test_equals_gymnasium_for_a_thousand_steps(env_id):
    assert compare(env_id, 1000) >= N


@pytest.mark.parametrize(
    "env_id, kwargs",
    [
        ("HalfCheetah-v5", {"ctrl_cost_weight": 0.3, "exclude_current_positions_from_observation": False}),
        (
            "Ant-v5",
            {"include_cfrc_ext_in_observation": False, "healthy_z_range": (0.5, 0.9), "contact_cost_weight": 1e-2},
        ),
        ("Humanoid-v5", {"include_cinert_in_observation": False, "terminate_when_unhealthy": False}),
        ("Hopper-v5", {"reset_noise_scale": 0.1, "frame_skip": 3, "healthy_angle_range": (-0.4, 0.1)}),
        ("Pusher-v5", {"reward_near_weight": 2.0}),
    ],
)
def test_gymnasiums_parameters(env_id, kwargs):
    compare(env_id, 30, **kwargs)


@pytest.mark.parametrize("env_id", ["Ant-v5", "Humanoid-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "Pusher-v5"])
def test_a_restored_state_continues_bit_for_bit(env_id):
    one, other = (MuJoCo(env_id, 3, threads=1, max_episode_steps=20) for _ in range(2))
    one.reset(0)
    plan = actions(one, 50)
    for action in plan[:17]:
        one.step(action)
    saved = pickle.loads(pickle.dumps(one.state()))
    expected = [one.step(action) for action in plan[17:]]
    other.reset(9)
    for env in (one, other):
        env.restore(saved)
        for action, want in zip(plan[17:], expected, strict=True):
            equal(env.step(action), want)
    with pytest.raises(ValueError, match=r"of 3 instances of .*, not of 2"):
        MuJoCo(env_id, 2).restore(saved)


def test_seeds():
    env = MuJoCo("Hopper-v5", 3)
    first, second = env.reset(4), env.reset()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(env.reset(4), first)
    np.testing.assert_array_equal(env.reset(5)[:2], first[1:])
    np.testing.assert_array_equal(gymnasium.make("Hopper-v5").reset(seed=6)[0], first[2])


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"'Hopper-v4' is not one of .*HalfCheetah-v5"):
        MuJoCo("Hopper-v4", 2)
    with pytest.raises(ValueError, match=r"Hopper-v5 has no parameter \['control_cost'\]; it has .*ctrl_cost_weight"):
        MuJoCo("Hopper-v5", 2, control_cost=1)
    with pytest.raises(ValueError, match="threads 0"):
        MuJoCo("Hopper-v5", 2, threads=0)
    env = MuJoCo("Hopper-v5", 2)
    env.reset(0)
    with pytest.raises(ValueError, match=r"shape \(2, 4\); 2 instances of Box.* take \(2, 3\)"):
        env.step(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="Hopper-v5: instance 1 returned the reward nan in step 1"):
        env.step(np.array([[0, 0, 0], [0, np.nan, 0]], np.float32))
