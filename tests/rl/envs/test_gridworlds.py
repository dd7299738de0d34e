"""Grid worlds, Catch, deep sea and the T-maze: gymnasium's transitions, and returns that can be worked out by hand."""

import gymnasium
import numpy as np
import pytest
import torch

from rl_cases import stepped
from tutti.rl.core import keys
from tutti.rl.envs.catch import Catch
from tutti.rl.envs.deep_sea import DeepSea
from tutti.rl.envs.gridworld import LAKES, GridWorld, frozen_lake
from tutti.rl.envs.tmaze import TMaze


def returns(env, policy, n, seed=0):
    """The returns of one episode in each of n instances. policy: (state, observation, key) -> actions."""
    key = keys.make(seed)
    state, obs = env.reset(key, n)
    total, running = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    while running.any():
        key, of_policy, of_step = keys.split(key, 3)
        state, obs, reward, terminated, truncated = env.step(state, policy(state, obs, of_policy), of_step)
        total += torch.where(running, reward, 0.0)
        running &= ~(terminated | truncated)
    return total


@pytest.mark.parametrize("size", LAKES)
def test_frozen_lake_moves_as_in_gymnasium(size):
    name = {4: "FrozenLake-v1", 8: "FrozenLake8x8-v1"}[size]
    reference = gymnasium.make(name, is_slippery=False)
    env = frozen_lake(size, slippery=False)
    assert reference.spec is not None
    assert (env.limit, env.threshold) == (reference.spec.max_episode_steps, reference.spec.reward_threshold)
    table = reference.unwrapped.P
    cells = torch.tensor([cell for cell in table for _ in range(4)])
    actions = torch.arange(4).repeat(size * size)
    open_ = torch.tensor([LAKES[size][cell // size][cell % size] in "SF" for cell in cells.tolist()])
    cells, actions = cells[open_], actions[open_]  # there, holes and goals hold the walker
    state, obs, reward, terminated, _ = env.step({"cell": cells, "t": torch.zeros_like(cells)}, actions, keys.make(0))
    wanted = [table[cell][action][0][1:] for cell, action in zip(cells.tolist(), actions.tolist(), strict=True)]
    assert list(zip(state["cell"].tolist(), reward.tolist(), terminated.tolist(), strict=True)) == wanted
    assert torch.equal(obs, torch.nn.functional.one_hot(state["cell"], size * size).float())


def test_frozen_lake_slips_as_in_gymnasium():
    env, n = frozen_lake(), 200_000
    table = gymnasium.make("FrozenLake-v1").unwrapped.P
    for cell, action in ((6, 1), (9, 3), (0, 0)):
        cells = torch.full((n,), cell)
        after = env.step({"cell": cells, "t": cells * 0}, torch.full((n,), action), keys.make(cell))[0]["cell"]
        wanted = np.zeros(16)
        for probability, to, _, _ in table[cell][action]:
            wanted[to] += probability
        np.testing.assert_allclose(after.bincount(minlength=16).numpy() / n, wanted, atol=4 * 0.5 / n**0.5)


def test_gridworld_walls_hold_and_the_shortest_path_returns_what_it_should():
    env = GridWorld(("SFG", "FWF", "HFF"))
    right = returns(env, lambda state, obs, key: torch.full((2,), 2), 2)
    torch.testing.assert_close(right, torch.full((2,), 0.99))
    down = returns(env, lambda state, obs, key: torch.ones(2, dtype=torch.int64), 2)
    torch.testing.assert_close(down, torch.full((2,), -1.01))
    state = {"cell": torch.tensor([1]), "t": torch.tensor([0])}
    assert env.step(state, torch.tensor([1]), keys.make(0))[0]["cell"].item() == 1  # the wall
    waiting = returns(env, lambda state, obs, key: torch.full((2,), 3), 2)
    torch.testing.assert_close(waiting, torch.full((2,), -1.0))  # a hundred steps


def test_gridworld_names_a_bad_map():
    with pytest.raises(ValueError, match="must have one length"):
        GridWorld(("SF", "FFG"))
    with pytest.raises(ValueError, match="have a start S"):
        GridWorld(("FG",))
    with pytest.raises(ValueError, match=r"no map of size 5; sizes are \[4, 8\]"):
        frozen_lake(5)


def test_catch_rewards_by_where_the_ball_falls():
    env = Catch()

    def follow(state, obs, key):
        return 1 + (state["ball"] - state["paddle"]).sign()

    assert (returns(env, follow, 256) == 1).all()
    waiting = returns(env, lambda state, obs, key: torch.ones_like(state["ball"]), 10_000)
    assert waiting.mean().item() == pytest.approx(-0.6, abs=4 * 0.8 / 100)  # one column in five is right
    state, obs = env.reset(keys.make(1), 64)
    for row in range(9):
        assert torch.equal(obs[torch.arange(64), row, state["ball"]], torch.ones(64))
        assert torch.equal(obs.sum((1, 2)), torch.full((64,), 2.0))
        state, obs, _, terminated, _ = env.step(state, torch.ones_like(state["ball"]), keys.make(2))
        assert (terminated == (row == 8)).all()


def test_deep_sea_is_found_by_going_right_only():
    env = DeepSea(8, seed=3)
    right = torch.tensor(env.right).reshape(8, 8)
    assert 8 < right.sum() < 56  # both actions go right somewhere

    def go(state, obs, key):
        return right[state["t"].clamp(max=7), state["column"]]

    torch.testing.assert_close(returns(env, go, 3), torch.full((3,), 0.99))
    torch.testing.assert_close(returns(env, lambda *a: 1 - go(*a), 3), torch.zeros(3))
    random = returns(env, lambda state, obs, key: keys.integers(key, (20_000,), 2), 20_000)
    assert (random > 0.9).float().mean().item() == pytest.approx(1 / 256, abs=4 * (1 / 256 / 20_000) ** 0.5)
    assert random.max() == pytest.approx(0.99)


def test_tmaze_needs_memory():
    env, n = TMaze(5), 4000
    sign = env.reset(keys.make(0), n)[1][:, 0]  # `returns` begins with this key, too

    def remembering(state, obs, key):
        return torch.where(obs[:, 2] == 0, 0, torch.where(sign > 0, 1, 2))

    assert (returns(env, remembering, n) == 1).all()
    blind = returns(env, lambda state, obs, key: (obs[:, 2] == 1).long(), n)
    assert sorted(set(blind.tolist())) == [-1, 1]
    assert blind.mean().item() == pytest.approx(0, abs=4 / n**0.5)
    turning = returns(env, lambda state, obs, key: torch.ones_like(state["t"]), 3)
    torch.testing.assert_close(turning, torch.full((3,), -0.1 * env.limit))
    state, obs = env.reset(keys.make(1), n)
    seen = []
    for _ in range(5):
        state, obs, *_ = env.step(state, torch.zeros_like(state["t"]), keys.make(2))
        seen.append(obs)
    assert (torch.stack(seen)[:, :, 0] == 0).all()
    assert torch.stack(seen)[:, 0, 2].tolist() == [0, 0, 0, 0, 1]


def test_episodes_of_catch_follow_each_other():
    env, key = Catch(), keys.make(5)
    state, _ = env.reset(key, 8)
    ends = []
    for i in range(27):
        state, _, _, terminated, _, _ = stepped(env, state, torch.ones_like(state["t"]), keys.fold(key, i))
        ends.append(terminated)
    assert torch.stack(ends).nonzero()[:, 0].unique().tolist() == [8, 17, 26]
