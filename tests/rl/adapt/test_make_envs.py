"""`make` chooses the adapter."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from mpe2 import simple_spread_v3

from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.make import make
from tutti.rl.adapt.mujoco import MuJoCo
from tutti.rl.adapt.native import Native
from tutti.rl.adapt.pettingzoo import PettingZoo
from tutti.rl.adapt.processes.workers import Workers


@pytest.mark.parametrize(
    "env, kind, name",
    [
        ("CartPole-v1", Gymnasium, "CartPole-v1"),
        ("gymnasium.envs.classic_control:Pendulum-v1", Gymnasium, "gymnasium.envs.classic_control:Pendulum-v1"),
        ("Hopper-v5", MuJoCo, "Hopper-v5"),
        ("gymnasium:Hopper-v5", Gymnasium, "Hopper-v5"),
        ("native:CartPole-v1", Native, "CartPole-v1"),
        (lambda: gymnasium.make("Acrobot-v1"), Gymnasium, "Acrobot-v1"),
        (simple_spread_v3.parallel_env, PettingZoo, "simple_spread_v3"),
        (simple_spread_v3.env, PettingZoo, "simple_spread_v3"),
    ],
)
def test_the_adapter_that_fits(env, kind, name):
    envs = make(env, 2)
    assert type(envs) is kind and envs.name == name and envs.n == 2
    envs.reset(0)
    sample = np.array([envs.action_space.sample() for _ in range(2 * len(envs.agents))])
    moved = envs.step(sample.reshape(2, len(envs.agents), *sample.shape[1:]) if len(envs.agents) > 1 else sample)
    assert moved.reward.shape[0] == 2
    envs.close()


def test_instances():
    env = gymnasium.make("CartPole-v1")
    assert make(env).envs == [env]
    with pytest.raises(ValueError, match="is one environment; for 2 of them give its id or a function"):
        make(env, 2)
    vector = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    assert type(make(vector, 3)) is Native
    with pytest.raises(ValueError, match="has 3 instances, not 1"):
        make(vector)
    with pytest.raises(ValueError, match="is in this process"):
        make(env, 1, processes=1)
    with pytest.raises(ValueError, match="already"):
        make(make("CartPole-v1"))


def test_what_is_no_environment():
    with pytest.raises(ValueError, match="3 is not an id, a function"):
        make(3)
    with pytest.raises(ValueError, match="the function returned 'cart', not an environment"):
        make(lambda: "cart")
    with pytest.raises(gymnasium.error.NameNotFound):
        make("Nope-v0")


@pytest.mark.starts
def test_processes():
    env = make("HalfCheetah-v5", 3, processes=2, ctrl_cost_weight=0.0, timeout=100.0)
    here = make("HalfCheetah-v5", 3, ctrl_cost_weight=0.0)
    assert type(env) is Workers and env.timeout == 100 and env.name == "HalfCheetah-v5"
    np.testing.assert_array_equal(env.reset(1), here.reset(1))
    action = np.ones((3, 6), np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(env.step(action).obs, here.step(action).obs)
    env.close()
    here.close()
