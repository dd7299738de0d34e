"""`Workers` and `Halves` against the same environments in this process, and what crashes leave behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.processes.halves import Halves
from tutti.rl.adapt.processes.workers import Workers

pytestmark = [pytest.mark.starts, pytest.mark.filterwarnings("ignore:.*is started again:RuntimeWarning")]


def same(x, y):
    if isinstance(x, dict):
        assert x.keys() == y.keys()
        for key in x:
            same(x[key], y[key])
    else:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def equal(a, b):
    for field in ("obs", "reward", "terminated", "truncated", "last"):
        same(getattr(a, field), getattr(b, field))


class Counting(gymnasium.Env):
    """Observes its step and its seed; does what its action says."""

    observation_space = spaces.Dict({"t": spaces.Box(0, 1e9, (1,), np.float32), "k": spaces.Discrete(1000)})
    action_space = spaces.Discrete(6)
    CRASH, RAISE, HANG, NAN, END = 1, 2, 3, 4, 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.k = 0, seed or 0
        return self.look(), {"action_mask": np.arange(6) != self.t}

    def look(self):
        return {"t": np.array([self.t], np.float32), "k": self.k}

    def step(self, action):
        self.t += 1
        if action == self.CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == self.RAISE:
            raise OSError("no more sticks")
        if action == self.HANG:
            signal.pause()
        reward = np.nan if action == self.NAN else float(self.t)
        return self.look(), reward, action == self.END, False, {"action_mask": np.arange(6) != self.t}


def counting(n):
    return Gymnasium(Counting, n)


@pytest.fixture
def env(request):
    env = Workers(counting, 5, 2, **getattr(request, "param", {}))
    yield env
    env.close()


def test_equals_the_same_environments_in_this_process():
    there, here = Workers(lambda n: Gymnasium("Hopper-v5", n), 5, 2), Gymnasium("Hopper-v5", 5)
    assert there.observation_space == here.observation_space and there.action_space == here.action_space
    assert (there.name, there.limit, there.threshold, there.n) == ("Hopper-v5", 1000, 3800.0, 5)
    same(there.reset(3), here.reset(3))
    rng, steps = np.random.default_rng(0), []
    for _ in range(60):
        action = rng.uniform(-1, 1, (5, 3)).astype(np.float32)
        steps.append((there.step(action), here.step(action)))
    for a, b in steps:  # after the last step: results do not share memory
        equal(a, b)
    assert sum((a.terminated | a.truncated).sum() for a, _ in steps) > 0
    saved = pickle.loads(pickle.dumps(there.state()))
    action = np.ones((5, 3), np.float32)
    expected = there.step(action)
    there.restore(saved)
    equal(there.step(action), expected)
    there.close()
    with pytest.raises(ValueError, match="the workers are closed"):
        there.step(action)


def test_dicts_masks_and_ends(env):
    here = counting(5)
    same(env.reset(10), here.reset(10))
    same(env.masks(), here.masks())
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.choice([0, Counting.END], 5)
        equal(env.step(action), here.step(action))
        same(env.masks(), here.masks())
    assert env.overview() is None and env.draw(4) is None


def test_a_killed_worker_is_restarted_and_its_episodes_are_truncated(env):
    env.reset(10)
    env.step(np.zeros(5, np.int64))
    with pytest.warns(RuntimeWarning, match=r"worker 1 \(instances 2 to 4\) failed in step 2 and is started again"):
        moved = env.step(np.array([0, 0, Counting.CRASH, 0, 0]))
    assert env.restarts == 1
    assert moved.truncated.tolist() == [False, False, True, True, True] and not moved.terminated.any()
    assert moved.reward.tolist() == [2, 2, 0, 0, 0]
    assert moved.last["t"][:, 0].tolist() == [2, 2, 1, 1, 1] and moved.last["k"].tolist() == [10, 11, 12, 13, 14]
    assert moved.obs["t"][:, 0].tolist() == [2, 2, 0, 0, 0]
    assert moved.obs["k"].tolist() == [10, 11, 17, 18, 19]
    moved = env.step(np.zeros(5, np.int64))
    assert moved.reward.tolist() == [3, 3, 1, 1, 1] and not moved.truncated.any()


def test_an_external_kill_is_noticed(env):
    env.reset(0)
    os.kill(env.workers[0].process.pid, signal.SIGKILL)
    env.workers[0].process.join()
    moved = env.step(np.zeros(5, np.int64))
    assert moved.truncated.tolist() == [True, True, False, False, False] and env.restarts == 1
    os.kill(env.workers[0].process.pid, signal.SIGKILL)
    assert env.reset(3)["k"].tolist() == [3, 4, 5, 6, 7] and env.restarts == 2


def test_three_failures_in_a_row_are_an_error_with_the_workers_traceback(env):
    env.reset(0)
    raising = np.array([0, 0, 0, Counting.RAISE, 0])
    env.step(raising)
    env.step(np.zeros(5, np.int64))
    env.step(raising)
    env.step(raising)
    assert env.restarts == 3
    message = (
        r"(?s)Counting: worker 1 \(instances 2 to 4\) failed 3 times in a row, the last time in step 5: StepError: "
    )
    message += (
        r"Counting: instance 3 raised OSError: no more sticks .* in step 1, when .* action .*2.*Traceback.*in step"
    )
    with pytest.raises(RuntimeError, match=message):
        env.step(raising)


@pytest.mark.parametrize("env", [{"timeout": 1.0}], indirect=True)
def test_a_worker_that_hangs_is_restarted(env):
    env.reset(0)
    moved = env.step(np.array([0, Counting.HANG, 0, 0, 0]))
    assert moved.truncated.tolist() == [True, True, False, False, False] and env.restarts == 1


def test_what_an_environment_must_not_return_is_not_retried(env):
    env.reset(0)
    with pytest.raises(
        ValueError, match="Counting: instance 4 returned the reward nan in step 1; rewards must be finite"
    ):
        env.step(np.array([0, 0, 0, 0, Counting.NAN]))
    assert env.restarts == 0


def test_a_factory_that_fails():
    with pytest.raises(
        RuntimeError, match=r"(?s)worker 0 \(instance 0\) could not make .*ZeroDivisionError.*Traceback"
    ):
        Workers(lambda n: 1 / 0, 2, 2)
    with pytest.raises(ValueError, match="asked for a VectorEnv of 1 instances and returned 'cart'"):
        Workers(lambda n: "cart", 2, 2)
    with pytest.raises(ValueError, match="3 processes for 2 instances"):
        Workers(counting, 2, 3)


def test_a_state_that_cannot_be_saved_leaves_the_workers_as_they_are():
    class Opaque(Counting):
        def reset(self, *, seed=None, options=None):
            self.open = (x for x in range(3))
            return super().reset(seed=seed)

    env = Workers(lambda n: Gymnasium(Opaque, n), 2, 2)
    env.reset(0)
    with pytest.raises(NotImplementedError, match="cannot save its state"):
        env.state()
    assert env.step(np.zeros(2, np.int64)).reward.tolist() == [1, 1]
    env.close()


def test_sends_and_receives_alternate(env):
    env.reset(0)
    with pytest.raises(ValueError, match="recv was called before send"):
        env.recv()
    env.send(np.zeros(5, np.int64))
    with pytest.raises(ValueError, match="send was called twice"):
        env.send(np.zeros(5, np.int64))
    with pytest.raises(ValueError, match="state between send and recv"):
        env.state()
    assert env.recv().reward.tolist() == [1] * 5
    with pytest.raises(ValueError, match=r"actions for Counting have shapes \(4,\), not \(5,\)"):
        env.send(np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="actions for Counting have dtype float64; they are integers"):
        env.send(np.zeros(5))
    env.send(np.zeros(5, np.int64))
    assert env.reset(4)["t"].sum() == 0


def test_halves_step_alone_and_together():
    halves, here = Halves(Workers(counting, 2, 1), Workers(counting, 3, 2)), counting(5)
    obs = halves.reset(7)
    same(obs, here.reset(7))
    actions = np.random.default_rng(0).choice([0, Counting.END], (10, 5))
    expected = [here.step(action) for action in actions]
    equal(halves.step(actions[0]), expected[0])
    assert halves.masks().shape == (5, 6)
    for half, action in zip(halves.halves, halves.split(actions[1]), strict=True):
        half.send(action)
    for t in range(1, 10):
        for k, half in enumerate(halves.halves):
            moved = half.recv()
            same(moved.obs, halves.split(expected[t].obs)[k])
            same(moved.last, halves.split(expected[t].last)[k])
            if t < 9:
                half.send(halves.split(actions[t + 1])[k])
    saved = halves.state()
    halves.step(actions[0])
    same(halves.restore(saved), expected[-1].obs)
    halves.close()


def test_a_process_that_cannot_be_started_is_the_error(monkeypatch):
    def start(self):
        raise RuntimeError("before the current process has finished its bootstrapping phase")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(RuntimeError, match="bootstrapping"):
        Workers(lambda n: Gymnasium(Counting, n), 2, processes=2)
