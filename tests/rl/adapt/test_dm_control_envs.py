"""`DmControl` against an environment written to the contract of dm_env, and against dm_control where it works."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from tutti.rl.adapt.checked import StepError
from tutti.rl.adapt.dm_control import DmControl

N = 3


class Contract:
    """dm_env's contract: reset() is a FIRST step with neither reward nor discount; LAST has discount 0 or 1."""

    def __init__(self, seed, discount=0.0, length=3):
        self.rng, self.discount, self.length, self.actions = np.random.RandomState(seed), discount, length, []

    def observation_spec(self):
        return {"z": SimpleNamespace(shape=(2,), dtype=np.float64), "a": SimpleNamespace(shape=(), dtype=np.float64)}

    def action_spec(self):
        return SimpleNamespace(
            shape=(3,),
            dtype=np.dtype(float),
            minimum=np.array([-2.0, 0.0, -np.inf]),
            maximum=np.array([2.0, 1.0, np.inf]),
        )

    def look(self):
        return {"z": np.array([self.t, 7.0]), "a": self.x}

    def reset(self):
        self.t, self.x = 0, self.rng.uniform()
        return SimpleNamespace(reward=None, discount=None, observation=self.look(), last=lambda: False)

    def step(self, action):
        if self.t == self.length:
            raise OSError("stepped past the end")
        self.actions.append(action)
        self.t += 1
        end = self.t == self.length
        return SimpleNamespace(
            reward=float(self.t), discount=self.discount if end else 1.0, observation=self.look(), last=lambda: end
        )

    def close(self):
        pass


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_contract(discount):
    env = DmControl(lambda seed: Contract(seed, discount), N)
    assert env.observation_space.shape == (3,) and env.limit is None
    np.testing.assert_array_equal(env.action_space.high, np.float32([1, 1, np.inf]))
    obs = env.reset(4)
    assert obs.dtype == np.float32
    expected = [np.random.RandomState(4 + i).uniform() for i in range(N)]
    np.testing.assert_array_equal(obs, np.float32([[0, 7, x] for x in expected]))
    action = np.tile(np.float32([0.5, 0.5, 5.0]), (N, 1))
    rewards = [env.step(action).reward.tolist() for _ in range(2)]
    assert rewards == [[1] * N, [2] * N]
    np.testing.assert_array_equal(env.envs[0].actions[0], [1.0, 0.75, 5.0])
    moved = env.step(action)
    assert moved.terminated.tolist() == [discount == 0] * N and moved.truncated.tolist() == [discount == 1] * N
    assert moved.last[:, 0].tolist() == [3] * N and moved.obs[:, 0].tolist() == [0] * N
    env.step(np.tile(np.float32([9, 9, 0]), (N, 1)))
    assert env.envs[0].actions[-1].tolist() == [2, 1, 0]  # never out of bounds


def test_dicts_limits_and_errors():
    env = DmControl(lambda seed: Contract(seed, length=9), N, flat=False, limit=2)
    assert list(env.observation_space.spaces) == ["z", "a"]
    assert env.reset(0)["a"].shape == (N,)
    env.step(np.zeros((N, 3), np.float32))
    moved = env.step(np.zeros((N, 3), np.float32))
    assert moved.truncated.all() and not moved.terminated.any() and moved.last["z"][0, 0] == 2
    env.envs[1].t = 9
    with pytest.raises(StepError, match=r"instance 1 raised OSError: stepped past the end .* in step 3"):
        env.step(np.zeros((N, 3), np.float32))
    with pytest.raises(ValueError, match="'walker' is not of the form domain-task"):
        DmControl("walker", 1)


def test_discrete_actions():
    class Discrete(Contract):
        def action_spec(self):
            return SimpleNamespace(shape=(), dtype=np.dtype(int), num_values=4)

    env = DmControl(Discrete, 1)
    assert env.action_space == spaces.Discrete(4) and env.name == "Discrete"
    env.reset(0)
    env.step(np.array([3]))
    assert env.envs[0].actions == [3]


def load(domain, task, seed):
    suite = pytest.importorskip("dm_control.suite")
    try:
        return suite.load(domain, task, task_kwargs={"random": seed})
    except AttributeError as error:
        pytest.skip(f"this dm_control does not work with the installed mujoco: {error}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("domain, task", [("cartpole", "swingup"), ("walker", "walk"), ("humanoid", "stand")])
def test_equals_dm_controls_suite(domain, task):
    raw = [load(domain, task, 2 + i) for i in range(N)]
    env = DmControl(f"{domain}-{task}", N)
    assert env.limit == 1000
    flat = lambda o: np.concatenate([np.ravel(x) for x in o.values()]).astype(np.float32)  # noqa: E731
    np.testing.assert_array_equal(env.reset(2), [flat(e.reset().observation) for e in raw])
    rng = np.random.default_rng(0)
    for _ in range(50):
        action = rng.uniform(-1, 1, (N, *env.action_space.shape)).astype(np.float32)
        moved, steps = env.step(action), [e.step(a) for e, a in zip(raw, action, strict=True)]
        np.testing.assert_array_equal(moved.obs, [flat(s.observation) for s in steps])
        np.testing.assert_array_equal(moved.reward, np.float32([s.reward for s in steps]))
    for e in raw:
        e._step_count = 999
    for e in env.envs:
        e._step_count = 999
    assert env.step(action).truncated.all() and all(e.step(a).last() for e, a in zip(raw, action, strict=True))
