"""Environments with goals against their rules, and what hindsight makes of their replay."""

from __future__ import annotations

import pytest
import torch

from tutti.rl import DQN, make
from tutti.rl.algorithms import algorithm
from tutti.rl.core import keys

SMALL = {"n_envs": 4, "n_steps": 6, "hidden": (8,), "batch_size": 8, "learning_starts": 24, "buffer_size": 400,
         "level": "eager"}  # fmt: skip


def test_a_goal_of_bits_is_reached_by_flipping_those_that_differ():
    env = make("BitFlip")
    state, obs = env.reset(keys.make(0), 50)
    left = (obs["achieved_goal"] != obs["desired_goal"]).sum(-1)
    for step in range(1, 13):
        action = (obs["achieved_goal"] - obs["desired_goal"]).abs().argmax(-1)
        state, obs, reward, terminated, truncated = env.step(state, action, keys.make(1))
        there = left == step
        assert torch.equal(terminated[left >= step], there[left >= step]) and (reward[there] == 0).all()
        assert (reward[left > step] == -1).all() and bool(truncated.all()) == (step == 12)


def test_a_point_moves_to_its_goal():
    env = make("Reach", limit=60)
    state, obs = env.reset(keys.make(0), 50)
    over = torch.zeros(50, dtype=torch.bool)
    for _ in range(60):
        to_go = obs["desired_goal"] - obs["achieved_goal"]
        before = to_go.abs().amax(-1)
        state, obs, reward, terminated, _ = env.step(state, to_go * 10, keys.make(1))
        assert torch.equal(reward == 0, terminated)
        after = (obs["desired_goal"] - obs["achieved_goal"]).abs().amax(-1)
        assert ((before - after - 0.1).abs() < 1e-5)[before > 0.1].all()
        over |= terminated
    assert over.all()


@pytest.mark.parametrize(("name", "env"), [("DQN", "BitFlip"), ("TD3", "Reach")])
def test_batches_have_other_goals_and_their_rewards(name, env):
    agent = algorithm(name)(env, hindsight=4, gamma=0.9, **SMALL).learn(300)
    parts, task = agent.features.parts, make(env)
    memory = agent.program.state()["replay"]
    batch, _ = agent.replay.sample(memory, keys.make(0), 2000, 0.9)
    goal, reached = batch["obs"][:, parts["desired_goal"]], batch["last"][:, parts["achieved_goal"]]
    assert torch.equal(goal, batch["last"][:, parts["desired_goal"]])
    reward, terminated = task.judge(reached, goal)
    assert torch.equal(batch["reward"], reward) and torch.equal(batch["terminated"], terminated)
    assert torch.equal(batch["discount"], torch.where(terminated, 0.0, 0.9))
    assert terminated.float().mean() > 0.1  # hardly ever without hindsight
    stored = memory["rows"]["obs"].flatten(0, 1)[:, parts["desired_goal"]]
    own = (goal.unsqueeze(1) == stored).all(-1).any(1)
    assert abs(float(own.float().mean()) - 0.2) < 0.06


def test_hindsight_needs_goals_and_returns_of_one_step():
    with pytest.raises(ValueError, match=r"hindsight needs an environment with goals, .*; CartPole is none"):
        DQN("CartPole-v1", hindsight=4, level="eager")
    with pytest.raises(ValueError, match="n_step is 3; hindsight knows rewards of one step only"):
        DQN("BitFlip", hindsight=4, n_step=3, level="eager")
    with pytest.raises(ValueError, match="hindsight has no effect on R2D2"):
        algorithm("R2D2")("BitFlip", hindsight=4, level="eager")
