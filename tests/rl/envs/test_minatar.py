"""Breakout and Space Invaders: MinAtar's games, step by step, and rules that hold in any case."""

import numpy as np
import pytest
import torch

from rl_cases import stepped
from tutti.rl.core import keys
from tutti.rl.envs.minatar import Breakout, SpaceInvaders

GAMES = {"breakout": Breakout, "space_invaders": SpaceInvaders}


def follow(state):
    """Breakout: the action that brings the paddle below the ball."""
    return torch.where(
        state["ball"][:, 0] > state["paddle"], 2, torch.where(state["ball"][:, 0] < state["paddle"], 1, 0)
    )


def dodge(state):
    """Space Invaders: shoot, and step aside from shots two rows above."""
    cannon = state["numbers"][:, 0]
    danger = state["bombs"][:, 6:9].any(1).gather(1, cannon.unsqueeze(1)).squeeze(1)
    return torch.where(danger, torch.where(cannon > 5, 1, 2), 3)


@pytest.mark.parametrize("name", GAMES)
def test_steps_are_those_of_minatar(name):
    reference = pytest.importorskip(f"minatar.environments.{name}")
    env, n = GAMES[name](sticky=0.0), 16
    games = [reference.Env() for _ in range(n)]
    chosen = games[0].minimal_action_set()
    state, _ = env.reset(keys.make(0), n)

    def begin(i):
        games[i].reset()
        if name == "breakout":
            games[i].ball_x, games[i].ball_dir = (0, 2) if state["ball"][i, 0] == 0 else (9, 3)
            games[i].last_x = games[i].ball_x

    for i in range(n):
        begin(i)
    generator, ends, rewards = torch.Generator().manual_seed(1), 0, 0.0
    for i in range(1000):
        skilled = follow(state) if name == "breakout" else dodge(state)
        random = torch.randint(len(chosen), (n,), generator=generator)
        action = torch.where(torch.rand(n, generator=generator) < 0.1, random, skilled)
        state, _, reward, terminated, _, last = stepped(env, state, action, keys.fold(keys.make(2), i))
        moved = [game.act(chosen[a]) for game, a in zip(games, action.tolist(), strict=True)]
        assert reward.tolist() == [float(r) for r, _ in moved]
        assert terminated.tolist() == [bool(over) for _, over in moved]
        wanted = np.stack([game.state() for game in games]).transpose(0, 3, 1, 2)
        assert (last.numpy() == wanted).all()
        ends, rewards = ends + int(terminated.sum()), rewards + float(reward.sum())
        for k in terminated.nonzero().flatten().tolist():
            begin(k)
    assert ends > 20
    assert rewards > 1000


def test_breakout_bricks_go_one_by_one_and_come_back():
    env = Breakout(sticky=0.0)
    state, _ = env.reset(keys.make(3), 32)
    total = torch.zeros(32)
    for _ in range(700):
        after, obs, reward, terminated, _ = env.step(state, follow(state), keys.make(4))
        left, now = state["bricks"].flatten(1).sum(-1), after["bricks"].flatten(1).sum(-1)
        assert ((left - now == reward) | ((left == 0) & (now == 30))).all()
        ball, before = after["ball"], state["ball"]
        assert ((ball[:, :2] - before[:, :2]).abs() <= 1).all()
        assert torch.equal(ball[:, 2:4], before[:, :2])
        assert (obs[:, :3].sum((2, 3)) == 1).all()
        assert not terminated.any()  # a paddle below the ball never misses it
        state, total = after, total + reward
    assert (total > 30).all()


def test_space_invaders_aliens_go_by_shots_only():
    env = SpaceInvaders(sticky=0.0)
    state, _ = env.reset(keys.make(5), 32)
    kills = 0
    for i in range(600):
        after, _, reward, _, _, last = stepped(env, state, dodge(state), keys.fold(keys.make(6), i))
        left, now = state["aliens"].flatten(1).sum(-1), last[:, 1].flatten(1).sum(-1)
        assert ((left - now == reward) | ((left == reward) & (now == 24))).all()
        assert torch.equal(last[:, 2] + last[:, 3], last[:, 1])
        assert (last[:, 0].flatten(1).sum(-1) == 1).all()
        kills += int(reward.sum())
        state = after
    assert kills > 24 * 32


@pytest.mark.parametrize("name", GAMES)
def test_sticky_actions_repeat_the_last_one(name):
    env = GAMES[name](sticky=0.25)
    state, _ = env.reset(keys.make(7), 20_000)
    state = env.step(state, torch.ones_like(state["t"]), keys.make(8))[0]
    last = state["last"] if name == "breakout" else state["numbers"][:, 6]
    repeated = (last == 0).float().mean().item()  # the action before the first is 0
    assert repeated == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 20_000) ** 0.5)
