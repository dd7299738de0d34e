"""Random network distillation."""

import torch

from tutti.rl.algorithms.policy_gradient.ppo import PPO
from tutti.rl.algorithms.policy_gradient.rnd import RND
from tutti.rl.core import keys
from tutti.rl.core.collect import rollout
from tutti.rl.envs.registry import make

SMALL = {"n_envs": 4, "n_steps": 25, "batch_size": 50, "hidden": (8,), "level": "eager"}


def chunk_of(agent):
    run = agent.program.state()
    with torch.no_grad():
        return run["learner"], rollout(agent, agent.env, agent.acting(run["learner"]), run["actor"], keys.make(3), 25)[
            1
        ]


def test_bonuses_are_errors_over_the_deviation_of_their_returns():
    agent = RND(make("DeepSea", size=6), int_gamma=0.9, **SMALL)
    learner, chunk = chunk_of(agent)
    after, rows = agent.novelty(learner, chunk)
    seen = chunk["last"].reshape(-1, 36)
    mean, std = seen.mean(0), seen.std(0, correction=0)
    expected = ((chunk["last"] - mean) / (std + 1e-7)).clamp(-10, 10)
    torch.testing.assert_close(rows["seen"], expected, atol=1e-3, rtol=1e-3)
    error = (
        agent.net(learner["weights"], None, None, rows["seen"]) - agent.random(learner["random"], rows["seen"])
    ) ** 2
    error, total, totals = error.mean(-1), torch.zeros(4), []
    for t in range(25):
        total = 0.9 * total + error[t]  # over the ends of episodes
        totals.append(total)
    expected = error / torch.stack(totals).std(correction=0)
    torch.testing.assert_close(rows["bonus"], expected.clamp(-10, 10), atol=1e-4, rtol=1e-3)
    assert torch.equal(after["random"], learner["random"])


def test_bonuses_go_on_over_the_ends_of_episodes_and_rewards_do_not():
    """Targets with lambda 1 are sums of what follows, against a loop."""
    agent = RND(make("DeepSea", size=6), gae_lambda=1.0, gamma=0.8, int_gamma=0.9, ext_coef=2.0, int_coef=0.5, **SMALL)
    learner, chunk = chunk_of(agent)
    seen = {}
    agent.epochs = lambda learner, rows, key, dim, size: seen.update(rows) or (learner, {})
    agent.update(learner, chunk, keys.make(0))
    target, bonus = seen["target"].unflatten(0, (25, 4)), seen["bonus"].unflatten(0, (25, 4))
    last = agent.net(learner["weights"], None, chunk["last"][-1])[1]
    value = agent.net(learner["weights"], None, chunk["obs"])[1]
    rewards, bonuses = last[:, 0], last[:, 1]
    for t in reversed(range(25)):
        rewards = chunk["reward"][t] + 0.8 * rewards * ~chunk["terminated"][t]
        bonuses = bonus[t] + 0.9 * bonuses
        torch.testing.assert_close(target[t], torch.stack([rewards, bonuses], -1))
    assert chunk["terminated"].any()
    advantage = 2.0 * (target - value)[..., 0] + 0.5 * (target - value)[..., 1]
    torch.testing.assert_close(seen["advantage"], advantage.flatten())


def test_the_random_network_stays_and_the_other_learns_to_predict_it():
    agent = RND(make("DeepSea", size=6), learning_rate=1e-3, **SMALL)
    first = agent.program.state()["learner"]["random"].clone()
    agent.learn(100)
    before = agent.metrics["distill_loss"]
    agent.learn(400)
    assert torch.equal(agent.program.state()["learner"]["random"], first)
    assert agent.metrics["distill_loss"] < 0.5 * before


def test_curiosity_finds_the_reward_that_ppo_does_not():
    """The best return is 0.99. It counts whether most of the last 100 episodes earn it."""
    options = {"n_envs": 16, "n_steps": 32, "batch_size": 128, "n_epochs": 4, "learning_rate": 1e-3, "hidden": (32,)}
    means = {}
    for kind in (PPO, RND):
        agent = kind(make("DeepSea", size=8), seed=0, level="eager", **options)
        agent.learn(9_000)
        means[kind] = sum(r for r, _ in agent.episodes) / len(agent.episodes)
    assert means[RND] > 0.5 and means[PPO] < 0.1
