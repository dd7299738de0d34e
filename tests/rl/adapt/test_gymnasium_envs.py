"""`Gymnasium` against gymnasium's own environments stepped by hand."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tutti.rl import PPO
from tutti.rl.adapt.checked import StepError
from tutti.rl.adapt.gymnasium import Gymnasium
from tutti.rl.adapt.layout import gather, rows, scatter

N = 3
TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))


class Odd(gymnasium.Env):
    """Nested spaces, Discrete with a start, an observation buffer that is written again in each step."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(5, start=-2), spaces.MultiBinary(3))),
            "x": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )
    action_space = spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 4]), spaces.Box(-1, 1, (2,))))

    def __init__(self, length: int = 4):
        self.length, self.t, self.seen = length, 0, []
        self.x = np.zeros(2, np.float32)

    def look(self):
        self.x[:] = self.t, self.np_random.random()
        image = self.np_random.integers(0, 256, (2, 2, 3), np.uint8)
        return {"image": image, "pair": (self.t % 5 - 2, np.array([1, 0, self.t % 2], np.int8)), "x": self.x}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.seen.append(action)
        self.t += 1
        return self.look(), float(action[0]), self.t == self.length, False, {}

    def action_masks(self):
        return [True, self.t > 0, True]


def by_hand(env_id: str, actions: np.ndarray, seed: int, **kwargs):
    """What n environments of gymnasium return, with a reset after each end."""
    envs = [gymnasium.make(env_id, **kwargs) for _ in range(N)]
    first = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    steps = []
    for action in actions:
        rows = []
        for env, a in zip(envs, action, strict=True):
            last, reward, terminated, truncated, _ = env.step(a)
            rows.append((env.reset()[0] if terminated or truncated else last, reward, terminated, truncated, last))
        steps.append([np.array(column) for column in zip(*rows, strict=True)])
    return np.array(first), steps


def random_actions(env: Gymnasium, steps: int, seed: int = 0):
    env.spaces[1].seed(seed)
    return [gather(env.spaces[1], [env.spaces[1].sample() for _ in range(env.n)]) for _ in range(steps)]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", TAXI, "Hopper-v5"])
def test_equals_gymnasium(env_id):
    env = Gymnasium(env_id, N)
    actions = random_actions(env, 250)
    first, steps = by_hand(env_id, np.array(actions), 7)
    np.testing.assert_array_equal(env.reset(7), first)
    for action, expected in zip(actions, steps, strict=True):
        moved = env.step(action)
        assert moved.reward.dtype == np.float32 and moved.terminated.dtype == moved.truncated.dtype == bool
        got = moved.obs, moved.reward, moved.terminated, moved.truncated, moved.last
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, y.astype(np.float32) if x is moved.reward else y)
    ends = sum((e[2] | e[3]).sum() for e in steps)
    assert ends > 0


def test_limit_and_threshold_come_from_the_registry():
    env = Gymnasium("CartPole-v1", 1)
    assert (env.name, env.limit, env.threshold) == ("CartPole-v1", 500, 475.0)
    assert Gymnasium("CartPole-v1", 1, max_episode_steps=9).limit == 9
    assert Gymnasium(Odd, 1).limit is None


def test_nested_spaces_are_dicts_that_begin_at_zero():
    env = Gymnasium(Odd, N)
    assert env.observation_space["pair"] == spaces.Dict({"0": spaces.Discrete(5), "1": spaces.MultiBinary(3)})
    assert env.action_space["0"] == spaces.Discrete(3)
    obs = env.reset(0)
    assert obs["image"].shape == (N, 2, 2, 3) and obs["image"].dtype == np.uint8
    np.testing.assert_array_equal(obs["pair"]["0"], [0] * N)
    action = {"0": np.arange(N), "1": np.ones((N, 2), np.int64), "2": np.zeros((N, 2), np.float32)}
    moved = env.step(action)
    np.testing.assert_array_equal(moved.reward, np.arange(N) + 1.0)
    np.testing.assert_array_equal(moved.obs["x"][:, 0], [1] * N)
    assert [e.seen[0][0] for e in env.envs] == [1, 2, 3]
    for value, i in zip(scatter(env.spaces[1], action, N), range(N), strict=True):
        assert env.spaces[1].contains(value) and value[0] == i + 1
    assert rows(moved.obs, 1)["pair"]["1"].tolist() == [1, 0, 1]


def test_the_last_observation_survives_an_environment_that_reuses_its_array():
    env = Gymnasium(lambda: Odd(length=2), N)
    env.reset(0)
    action = random_actions(env, 1)[0]
    env.step(action)
    moved = env.step(action)
    assert moved.terminated.all()
    np.testing.assert_array_equal(moved.last["x"][:, 0], [2] * N)
    np.testing.assert_array_equal(moved.obs["x"][:, 0], [0] * N)


def test_masks_of_info_and_of_a_method():
    env = Gymnasium(TAXI, N)
    env.reset(3)
    expected = [gymnasium.make(TAXI).reset(seed=3 + i)[1]["action_mask"] for i in range(N)]
    np.testing.assert_array_equal(env.masks(), np.array(expected, bool))
    env = Gymnasium(Odd, N)
    env.reset(0)
    assert env.masks().tolist() == [[True, False, True]] * N
    assert Gymnasium("CartPole-v1", 1).masks() is None


def test_infos_of_episodes_that_ended():
    env = Gymnasium(lambda: gymnasium.wrappers.RecordEpisodeStatistics(Odd(length=3)), 2)
    env.reset(0)
    action = random_actions(env, 1)[0]
    returned = sum(env.step(action).reward for _ in range(2))
    assert env.ended == {}
    returned = returned + env.step(action).reward
    assert [env.ended[i]["episode"]["r"] for i in range(2)] == returned.tolist()
    env.step(action)
    assert env.ended == {}


def test_draws():
    env = Gymnasium("CartPole-v1", 2, render_mode="rgb_array")
    env.reset(0)
    picture = env.draw(1)
    assert picture.dtype == np.uint8 and picture.shape == (400, 600, 3) and picture.std() > 0
    env.close()
    assert Gymnasium("CartPole-v1", 1).draw() is None


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0", TAXI, "Blackjack-v1", "HalfCheetah-v5",
               "Hopper-v5", "Ant-v5", "Humanoid-v5", "InvertedDoublePendulum-v5", "Reacher-v5", "Pusher-v5"]
)  # fmt: skip
def test_a_restored_state_continues_bit_for_bit(env_id):
    one, other = Gymnasium(env_id, 2, max_episode_steps=15), Gymnasium(env_id, 2, max_episode_steps=15)
    actions = random_actions(one, 60)
    one.reset(1)
    for action in actions[:20]:
        one.step(action)
    saved = pickle.loads(pickle.dumps(one.state()))
    expected = [one.step(action) for action in actions[20:]]
    other.reset(99)
    other.step(actions[0])
    same(other.restore(saved), one.restore(saved))
    for env in (one, other):
        for action, want in zip(actions[20:], expected, strict=True):
            moved = env.step(action)
            for field in ("obs", "reward", "terminated", "truncated", "last"):
                same(getattr(moved, field), getattr(want, field))
        env.restore(saved)


def same(x, y):
    if isinstance(x, dict):
        assert x.keys() == y.keys()
        for key in x:
            same(x[key], y[key])
    else:
        np.testing.assert_array_equal(x, y)


def test_a_state_that_cannot_be_saved():
    env = Gymnasium(Odd, 1)
    env.reset(0)
    env.envs[0].open = (x for x in range(3))
    with pytest.raises(NotImplementedError, match=r"Odd.* cannot save its state: .*\.open is a .*generator"):
        env.state()
    with pytest.raises(ValueError, match="of 1 instances of CartPole-v1, not of 2"):
        one = Gymnasium("CartPole-v1", 1)
        one.reset(0)
        Gymnasium("CartPole-v1", 2).restore(one.state())


class Wrong(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str):
        self.fault, self.t = fault, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        obs, reward = np.zeros(2, np.float32), 0.0
        if self.t == 3:
            match self.fault:
                case "reward":
                    reward = np.nan
                case "shape":
                    obs = np.zeros((1, 2), np.float32)
                case "dtype":
                    obs = np.array([0j, 0j])
                case "nan":
                    obs[1] = np.nan
                case "bounds":
                    obs[1] = 2
                case "raise":
                    raise OSError("the joystick is gone")
        return obs, reward, False, False, {}


@pytest.mark.parametrize(
    "fault, check, error, message",
    [
        ("reward", False, ValueError, "Wrong: instance 1 returned the reward nan in step 3; rewards must be finite"),
        (
            "shape",
            False,
            ValueError,
            r"instance 1 returned a wrong observation in step 3: observation has shape \(1, 2\)",
        ),
        ("dtype", False, ValueError, "instance 1 .* observation has dtype complex128, its space Box.* has float32"),
        ("nan", True, ValueError, "instance 1 .* in step 3: observation is not finite: array"),
        ("bounds", True, ValueError, "instance 1 .* in step 3: observation is not in its space Box"),
        ("raise", False, StepError, "instance 1 raised OSError: the joystick is gone .*in step 3, .* action .*1"),
    ],
)
def test_wrong_environments_are_named(fault, check, error, message):
    faults = iter(["none", fault, "none"])
    env = Gymnasium(lambda: Wrong(next(faults)), N, check=check)
    env.reset()
    env.step(np.array([0, 1, 0]))
    env.step(np.array([0, 1, 0]))
    with pytest.raises(error, match=message):
        env.step(np.array([0, 1, 0]))


class Old(gymnasium.Env):
    """The API of gym 0.21: resets without a seed and an info, steps of four values."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def reset(self):
        return np.zeros(2, np.float32)

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, {}


class OldWithSeed(Old):
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32)


class OldSteps(Old):
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}


@pytest.mark.parametrize(
    "kind, says",
    [(Old, "its reset takes no seed"), (OldWithSeed, "its reset returned a value of the type ndarray, not"),
     (OldSteps, r"its step returned a tuple of 4, not \(observation, reward, terminated, truncated, info\)")],
)  # fmt: skip
def test_the_old_api_is_named(kind, says):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: instance 0: {says}.*gym before 0.26.*shimmy"):
        env = Gymnasium(kind, 1)
        env.reset()
        env.step(np.zeros(1, np.int64))


def test_an_environment_of_gym_is_named():
    with pytest.raises(ValueError, match=r"env is a Own, which is no gymnasium.Env. Environments .* gym before 0.26"):
        PPO(type("Own", (), {"reset": Old.reset, "step": Old.step})())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="n is 0"):
        Gymnasium("CartPole-v1", 0)
    with pytest.raises(ValueError, match=r"render_mode.*are for gymnasium.make"):
        Gymnasium(Odd, 1, render_mode="rgb_array")
    shared = Odd()
    with pytest.raises(ValueError, match="same environment twice"):
        Gymnasium(lambda: shared, 2)
    env = Gymnasium("CartPole-v1", 2)
    env.reset(0)
    with pytest.raises(ValueError, match=r"actions have shape \(3,\); 2 instances of Discrete\(2\) take \(2,\)"):
        env.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"actions have dtype float32; Discrete\(2\) takes integers"):
        env.step(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.OneOf((spaces.Discrete(2),)),
              spaces.Graph(spaces.Box(0, 1), None)]
)  # fmt: skip
def test_spaces_without_a_fixed_shape_are_refused(space):
    class Wordy(Wrong):
        observation_space = spaces.Dict({"a": spaces.Tuple((space,))})

    with pytest.raises(ValueError, match=rf"Wordy.observation_space\['a'\]\[0\] is .* {type(space).__name__} space"):
        Gymnasium(lambda: Wordy(""), 1)


def test_masks_of_last_observations_are_not_those_of_the_next_episode():
    env = Gymnasium(lambda: Odd(2), N)
    env.reset(0)
    action = random_actions(env, 1)[0]
    assert env.step(action).last_masks is None
    moved = env.step(action)
    assert moved.terminated.all() and moved.last_masks.tolist() == [[True, True, True]] * N
    assert env.masks().tolist() == [[True, False, True]] * N
