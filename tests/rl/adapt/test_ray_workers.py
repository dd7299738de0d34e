"""Workers that are actors of Ray give the results of workers that are processes."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import pytest
from torch.utils import _pytree as pytree

from tutti.rl.adapt import layout
from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.processes.workers import Workers
from tutti.rl.placement.placement import Placed

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'tutti[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, log_to_driver=False, logging_level=40)
    yield
    ray.shutdown()


def same(x, y) -> None:
    if isinstance(x, np.ndarray | dict):
        for path, a in layout.leaves(x).items():
            b = layout.leaves(y)[path]
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    else:
        assert x == y


def test_steps_are_those_of_processes():
    make = partial(Gymnasium, "CartPole-v1")
    pair = [Workers(make, 5, 2, start=start) for start in ("forkserver", "ray")]
    draw, ends = np.random.default_rng(0), 0
    same(*(x.reset(3) for x in pair))
    for _ in range(80):
        action = draw.integers(0, 2, 5)
        one, two = (x.step(action) for x in pair)
        for field in ("obs", "last", "reward", "terminated", "truncated"):
            same(getattr(one, field), getattr(two, field))
        ends += int(one.terminated.sum())
    assert ends > 5
    for x in pair:
        x.close()


@pytest.mark.filterwarnings("ignore:.*is started again:RuntimeWarning")
def test_an_actor_that_is_killed_is_started_again():
    env = Workers(partial(Gymnasium, "CartPole-v1"), 4, 2, start="ray")
    env.reset(0)
    env.step(np.zeros(4, np.int64))
    actor = env.workers[1].connection.actor
    process = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(process, signal.SIGKILL)
    moved = env.step(np.zeros(4, np.int64))
    assert moved.truncated.tolist() == [False, False, True, True] and env.restarts == 1
    assert env.step(np.ones(4, np.int64)).obs.shape == (4, 4)
    env.close()


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnasium:CartPole-v1"])
def test_learning_is_that_of_processes(name):
    options = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 1}
    states = []
    for workers in ("processes", "ray"):
        placed = Placed("PPO", name, "environments", 2, level="eager", workers=workers, **options)
        placed.learn(256)
        states.append([x.clone() for x in pytree.tree_leaves(placed.agent.program.state()["learner"])])
        placed.agent.env.close()
    assert len(states[0]) == len(states[1]) > 0
    assert all(x.equal(y) for x, y in zip(*states, strict=True))
