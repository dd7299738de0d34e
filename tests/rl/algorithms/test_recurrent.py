"""Algorithms with a memory."""

import pytest
import torch

from tutti.rl import keys
from tutti.rl.algorithms.ppo import PPO
from tutti.rl.algorithms.recurrent_ppo import RecurrentPPO
from tutti.rl.collect import rollout
from tutti.rl.envs.registry import make

SMALL = {"n_envs": 4, "n_steps": 16, "batch_size": 32, "hidden": (8,), "memory": 8, "level": "eager"}


def chunk_of(agent, steps):
    run = agent.program.state()
    with torch.no_grad():
        actor, _ = rollout(agent, agent.env, agent.acting(run["learner"]), run["actor"], keys.make(2), steps)
        return run["learner"], rollout(agent, agent.env, agent.acting(run["learner"]), actor, keys.make(3), steps)[1]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_learning_sees_what_acting_saw(cell):
    """The log-probabilities of whole sequences are those of single steps, across ends of episodes."""
    agent = RecurrentPPO(make("TMaze", length=1), cell=cell, **SMALL)
    learner, chunk = chunk_of(agent, 16)
    done = chunk["terminated"] | chunk["truncated"]
    assert done.any() and chunk["memory"][0].abs().sum() > 0
    seen = {}
    agent.epochs = lambda learner, rows, key, dim, size: seen.update(rows) or (learner, {})
    agent.update(learner, chunk, keys.make(0))
    outputs, value = agent.network(learner["weights"], seen)
    torch.testing.assert_close(agent.distribution.log_prob(outputs, chunk["action"]), chunk["log_prob"])
    assert (chunk["memory"][1:][done[:-1]] == 0).all()
    # Minibatches of some environments see the same.
    some = {name: x[:, [1, 3]] for name, x in seen.items()}
    torch.testing.assert_close(agent.network(learner["weights"], some)[1], value[:, [1, 3]])


def test_values_after_steps_are_bootstrapped_from_the_same_episode():
    """With gamma 1 and lambda 1, advantages are sums of rewards to the end of the episode, or to the value of the last
    observation of the rollout, with the memory of its episode."""
    agent = RecurrentPPO(make("TMaze", length=2), gamma=1.0, gae_lambda=1.0, **SMALL)
    learner, chunk = chunk_of(agent, 16)
    seen = {}
    agent.epochs = lambda learner, rows, key, dim, size: seen.update(rows) or (learner, {})
    agent.update(learner, chunk, keys.make(0))
    for k in range(4):
        state = chunk["memory"][0, k]
        states = []
        for t in range(16):
            state = agent.net(learner["weights"], chunk["obs"][t, k], state)[1]
            states.append(state)
            state = torch.zeros_like(state) if chunk["terminated"][t, k] or chunk["truncated"][t, k] else state
        for t in range(16):
            total = 0.0
            for j in range(t, 16):
                total += chunk["reward"][j, k]
                over = chunk["truncated"][j, k] or j == 15
                if chunk["terminated"][j, k]:
                    break
                if over:
                    total += agent.net(learner["weights"], chunk["last"][j, k], states[j])[0]["value"][0]
                    break
            torch.testing.assert_close(seen["target"][t, k], total)


def test_minibatches_are_whole_environments():
    with pytest.raises(ValueError, match="must be a multiple of 16"):
        RecurrentPPO(make("TMaze"), **SMALL | {"batch_size": 8})


def test_agents_of_a_team_each_have_a_memory():
    agent = RecurrentPPO(make("simple_spread_v3"), **SMALL | {"batch_size": 96, "n_steps": 8, "n_envs": 4})
    agent.learn(64)
    assert agent.program.state()["actor"]["carry"]["memory"].shape == (4, 3, 8)


def test_predictions_carry_the_memory():
    agent = RecurrentPPO(make("TMaze"), **SMALL)
    obs = agent.env.reset(keys.make(0), 2)[1].numpy()
    _, state = agent.predict(obs)
    _, again = agent.predict(obs, state)
    _, fresh = agent.predict(obs, state, episode_start=torch.tensor([True, False]).numpy())
    assert torch.equal(fresh["memory"][0], state["memory"][0]) and torch.equal(fresh["memory"][1], again["memory"][1])


def test_a_memory_solves_a_maze_that_ppo_cannot():
    """The return without memory is at most 0 on average, with it 1."""
    options = {"n_envs": 32, "n_steps": 8, "batch_size": 64, "n_epochs": 4, "ent_coef": 0.05, "learning_rate": 5e-3}
    found = {}
    for kind, more in ((PPO, {}), (RecurrentPPO, {"memory": 16})):
        agent = kind(make("TMaze", length=2), seed=0, level="eager", hidden=(16,), **options, **more)
        agent.learn(12_000)
        found[kind] = sum(r for r, _ in agent.episodes) / len(agent.episodes)
    assert found[RecurrentPPO] > 0.9 and found[PPO] < 0.4
