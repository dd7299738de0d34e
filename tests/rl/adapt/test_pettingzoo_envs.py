"""`PettingZoo` against PettingZoo's environments stepped by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium import spaces
from mpe2 import simple_adversary_v3, simple_spread_v3
from pettingzoo import ParallelEnv
from pettingzoo.classic.tictactoe.tictactoe import raw_env as tictactoe

from tutti.rl.adapt.checked import StepError
from tutti.rl.adapt.pettingzoo import PettingZoo

N = 3


@pytest.mark.parametrize("module", [simple_spread_v3, simple_adversary_v3])
@pytest.mark.parametrize("continuous", [False, True])
def test_equals_environments_stepped_by_hand(module, continuous):
    make = lambda: module.parallel_env(max_cycles=10, continuous_actions=continuous)  # noqa: E731
    env, raw = PettingZoo(make, N), [make() for _ in range(N)]
    agents = raw[0].possible_agents
    size = max(raw[0].observation_space(a).shape[0] for a in agents)
    assert env.agents == tuple(agents) and env.limit == 10 and env.observation_space.shape == (size,)
    obs = env.reset(4)
    assert obs.shape == (N, len(agents), size) and obs.dtype == np.float32
    now = [e.reset(seed=4 + i)[0] for i, e in enumerate(raw)]
    rng = np.random.default_rng(0)
    for t in range(25):
        for i in range(N):
            for k, agent in enumerate(agents):
                np.testing.assert_array_equal(obs[i, k, : len(now[i][agent])], now[i][agent])
                assert not obs[i, k, len(now[i][agent]) :].any()
        np.testing.assert_array_equal(env.overview(), np.stack([e.state() for e in raw]).astype(np.float32))
        shape = (N, len(agents))
        action = rng.uniform(0, 1, (*shape, 5)).astype(np.float32) if continuous else rng.integers(5, size=shape)
        moved = env.step(action)
        for i, e in enumerate(raw):
            now[i], reward, _, _, _ = e.step({agent: action[i, k] for k, agent in enumerate(agents)})
            assert moved.reward[i].tolist() == [np.float32(reward[agent]) for agent in agents]
            assert moved.truncated[i] == (t in (9, 19)) and not moved.terminated[i]
            for k, agent in enumerate(agents):
                np.testing.assert_array_equal(moved.last[i, k, : len(now[i][agent])], now[i][agent])
            if not e.agents:
                np.testing.assert_array_equal(moved.last_overview[i], e.state().astype(np.float32))
                now[i], _ = e.reset()
        obs = moved.obs
    assert env.masks() is None and env.alive.all()


class Uneven(ParallelEnv):
    """a leaves after 2 steps, b is truncated or ends after 4; their spaces are unlike."""

    metadata = {"name": "uneven"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, cut: bool = True):
        self.cut = cut

    def observation_space(self, agent):
        box = spaces.Box(-1, 9, (2,) if agent == "a" else (3,), np.float32)
        return spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(2)}) if agent == "a" else box

    def action_space(self, agent):
        return spaces.Discrete(2) if agent == "a" else spaces.Discrete(4, start=1)

    def look(self):
        obs = {"b": np.full(3, self.t, np.float32)}
        if "a" in self.agents:
            obs["a"] = {"observation": np.full(2, self.t, np.float32), "action_mask": np.array([0, 1], np.int8)}
        return obs

    def reset(self, seed=None, options=None):
        self.t, self.agents, self.actions = 0, ["a", "b"], []
        return self.look(), {"a": {}, "b": {}}

    def step(self, actions):
        assert actions.keys() == set(self.agents)
        if actions["b"] == 4:
            raise OSError("b is gone")
        self.actions.append(actions)
        self.t += 1
        ends = {"a": self.t == 2, "b": self.t == 4 and not self.cut}
        cuts = {"a": False, "b": self.t == 4 and self.cut}
        obs, now = self.look(), self.agents
        self.agents = [x for x in now if not (ends[x] or cuts[x])]
        return obs, {x: float(self.t) for x in now}, {x: ends[x] for x in now}, {x: cuts[x] for x in now}, {}


@pytest.mark.parametrize("cut", [True, False])
def test_agents_that_leave_early_and_unlike_spaces(cut):
    env = PettingZoo(lambda: Uneven(cut), N)
    assert env.observation_space.shape == (3,) and env.action_space == spaces.Discrete(4) and env.name == "uneven"
    obs = env.reset(0)
    assert obs.shape == (N, 2, 3)
    assert env.masks()[0].tolist() == [[False, True, False, False], [True] * 4]
    action = np.array([[1, 2]] * N)
    moved = env.step(action)
    assert moved.reward[0].tolist() == [1, 1] and moved.obs[0].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert env.envs[0].actions == [{"a": 1, "b": 3}]
    moved = env.step(action)
    assert moved.obs[0].tolist() == [[2, 2, 0], [2, 2, 2]] and env.alive.tolist() == [[False, True]] * N
    assert env.masks()[0].tolist() == [[True, False, False, False], [True] * 4]
    moved = env.step(action)
    assert moved.reward[0].tolist() == [0, 3] and moved.obs[0].tolist() == [[0, 0, 0], [3, 3, 3]]
    assert not moved.terminated.any() and not moved.truncated.any()
    assert moved.last_masks is None
    moved = env.step(action)
    assert moved.truncated.tolist() == [cut] * N and moved.terminated.tolist() == [not cut] * N
    assert moved.last_masks is not None and env.masks()[0, 0].tolist() == [False, True, False, False]
    assert moved.last_masks[0].tolist() == [[True, False, False, False], [True] * 4]  # a had left
    assert moved.last[0].tolist() == [[0, 0, 0], [4, 4, 4]] and moved.obs[0].tolist() == [[0, 0, 0]] * 2
    assert env.alive.all()


def test_turns():
    env, raw = PettingZoo(tictactoe, 2), tictactoe()
    obs = env.reset(0)
    raw.reset(seed=0)
    assert obs.shape == (2, 2, 3, 3, 2) and env.name == "tictactoe_v3"
    for t, move in enumerate([0, 3, 1, 4]):
        player = t % 2
        legal = raw.observe(raw.agent_selection)["action_mask"].astype(bool)
        np.testing.assert_array_equal(env.masks()[0, player], legal)
        assert env.masks()[0, 1 - player].tolist() == [True] + [False] * 8
        action = np.full((2, 2), move)
        action[:, 1 - player] = 0  # not played
        moved = env.step(action)
        raw.step(move)
        for k, agent in enumerate(raw.possible_agents):
            np.testing.assert_array_equal(moved.obs[1, k], raw.observe(agent)["observation"])
        assert not moved.reward.any() and not moved.terminated.any()
    moved = env.step(np.array([[2, 0], [5, 0]]))
    assert moved.terminated.tolist() == [True, False] and moved.reward.tolist() == [[1, -1], [0, 0]]
    assert moved.last[0, 0, :, :, 0].tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert not moved.obs[0].any() and env.alive.all()


def test_a_restored_state_continues_bit_for_bit():
    make = lambda: simple_adversary_v3.parallel_env(max_cycles=8)  # noqa: E731
    env, other = PettingZoo(make, N), PettingZoo(make, N)
    env.reset(0)
    rng = np.random.default_rng(0)
    plan = rng.integers(5, size=(30, N, 3))
    for action in plan[:5]:
        env.step(action)
    saved = pickle.loads(pickle.dumps(env.state()))
    expected = [env.step(action) for action in plan]
    other.reset(8)
    for e in (env, other):
        e.restore(saved)
        for action, want in zip(plan, expected, strict=True):
            moved = e.step(action)
            for field in ("obs", "reward", "terminated", "truncated", "last"):
                np.testing.assert_array_equal(getattr(moved, field), getattr(want, field))


def test_draws():
    env = PettingZoo(lambda: simple_spread_v3.parallel_env(render_mode="rgb_array"), 1)
    env.reset(0)
    assert env.draw().shape == (700, 700, 3)
    env.close()


def test_errors():
    env = PettingZoo(Uneven, 2)
    env.reset(0)
    with pytest.raises(ValueError, match=r"shape \(2, 3\); those for uneven begin with 2 instances and 2 agents"):
        env.step(np.zeros((2, 3), np.int64))
    with pytest.raises(StepError, match=r"uneven: instance 1 raised OSError: b is gone .*in step 1.*'b': .*4"):
        env.step(np.array([[1, 0], [1, 3]]))
    with pytest.raises(ValueError, match="made by a function that returns one, not 'chess'"):
        PettingZoo(lambda: "chess", 1)

    class Mixed(Uneven):
        def action_space(self, agent):
            return spaces.Discrete(2) if agent == "a" else spaces.Box(-1, 1, (2,))

    with pytest.raises(ValueError, match=r"uneven: actions cannot be padded to one space: Discrete\(2\), Box"):
        PettingZoo(Mixed, 1)
