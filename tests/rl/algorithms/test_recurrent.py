"""Algorithms with a memory."""

import pytest
import torch

from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.algorithms.policy_gradient.recurrent_ppo import RecurrentPPO
from tutti.rl.algorithms.value.r2d2 import R2D2, scaled, unscaled
from tutti.rl.core import keys
from tutti.rl.core.collect import rollout
from tutti.rl.core.returns import n_step
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
    with pytest.raises(ValueError, match=r"is no multiple of 16: minibatches are rollouts.*use batch_size=16"):
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
    options = {"n_envs": 64, "n_steps": 4, "batch_size": 256, "n_epochs": 4, "ent_coef": 0.05, "learning_rate": 1e-2}
    means = {}
    for kind, more in ((PPO, {}), (RecurrentPPO, {"memory": 16})):
        agent = kind(make("TMaze", length=1), seed=0, level="eager", hidden=(16,), **options, **more)
        agent.learn(5_000)
        means[kind] = sum(r for r, _ in agent.episodes) / len(agent.episodes)
    assert means[RecurrentPPO] > 0.9 and means[PPO] < 0.4


def test_rescaled_values():
    """h is that of Pohlen et al. (2018), section 3.2: odd, and `unscaled` its inverse."""
    x = torch.tensor([-100.0, -1.0, 0.0, 0.25, 3.0, 1e4], dtype=torch.float64)
    torch.testing.assert_close(unscaled(scaled(x)), x)
    torch.testing.assert_close(scaled(torch.tensor([3.0, -8.0])), torch.tensor([1.003, -2.008]))


def test_n_step_targets_of_sequences():
    torch.manual_seed(0)
    reward, after = torch.randn(9, 3), torch.randn(9, 3)
    terminated, truncated = torch.rand(9, 3) < 0.2, torch.rand(9, 3) < 0.2
    targets = n_step(reward, after, terminated, terminated | truncated, 0.9, 4)
    for t in range(9):
        for k in range(3):
            total, factor = 0.0, 1.0
            for j in range(t, min(t + 4, 9)):
                total, factor = total + factor * reward[j, k], factor * 0.9
                if terminated[j, k] or truncated[j, k]:
                    break
            total += factor * after[j, k] * ~terminated[j, k]
            torch.testing.assert_close(targets[t, k], total)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_r2d2_learns_from_what_single_steps_give(burn_in):
    """Errors of sequences against a loop over steps, with the memory of each episode: of the online weights from stored
    states, of the target's likewise."""
    options = {"n_envs": 4, "n_steps": 16, "hidden": (8,), "memory": 8, "level": "eager", "sequence": 9, "n_step": 2}
    agent = R2D2(make("TMaze", length=1), burn_in=burn_in, **options)
    learner, chunk = chunk_of(agent, 16)
    learner["target"] = agent.q.init(7)
    batch = {name: x[: 9 + burn_in] for name, x in chunk.items()} | {"weight": torch.ones(4)}
    assert (batch["terminated"] | batch["truncated"]).any()
    loss, (error, _) = agent.loss(learner["weights"], learner, batch, keys.make(0))
    length = 9 + burn_in
    errors = torch.zeros(9, 4)
    for k in range(4):
        now = then = batch["memory"][0, k]
        q, after = [], []
        for t in range(length):
            output, now = agent.q(learner["weights"], batch["obs"][t, k], now)
            _, then = agent.q(learner["target"], batch["obs"][t, k], then)
            q.append(output["q"][batch["action"][t, k]])
            best = agent.q(learner["weights"], batch["last"][t, k], now)[0]["q"].argmax()
            after.append(unscaled(agent.q(learner["target"], batch["last"][t, k], then)[0]["q"][best]))
            if batch["terminated"][t, k] or batch["truncated"][t, k]:
                now = then = torch.zeros(8)
        for t in range(burn_in, length):
            total, factor = 0.0, 1.0
            for j in range(t, min(t + 2, length)):
                total, factor = total + factor * batch["reward"][j, k], factor * 0.99
                if batch["terminated"][j, k] or batch["truncated"][j, k]:
                    break
            errors[t - burn_in, k] = q[t] - scaled(total + factor * after[j] * ~batch["terminated"][j, k])
    torch.testing.assert_close(error, errors.abs().mean(0))
    torch.testing.assert_close(loss, errors.square().mean())


def test_the_replay_holds_the_memory_of_each_step():
    """A sequence is consecutive in time: the memory of a row follows from the row before it."""
    agent = R2D2(make("TMaze", length=2), n_envs=4, hidden=(8,), memory=8, level="eager", learning_starts=400)
    agent.learn(400)
    state = agent.program.state()
    batch, _ = agent.replay.sample(state["replay"], keys.make(5), 16)
    weights = state["learner"]["weights"]  # nothing was learned so far
    after = agent.q(weights, batch["obs"], batch["memory"])[1]
    after = torch.where((batch["terminated"] | batch["truncated"]).unsqueeze(-1), 0.0, after)
    torch.testing.assert_close(batch["memory"][1:], after[:-1])


def test_sequences_must_be_in_the_replay_before_updates():
    with pytest.raises(ValueError, match="set it to at least 960"):
        R2D2(make("TMaze"), n_envs=32, learning_starts=200)
