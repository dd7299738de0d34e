"""CrossQ: batch renormalization against torch's batch normalization and its formula, and the loss against a loop."""

import pytest
import torch

from tutti.rl.algorithms.continuous.crossq import EPS, CrossQ, renormalized
from tutti.rl.core import keys
from tutti.rl.core.collect import rollout
from tutti.rl.envs.registry import make

OFF, ON = torch.tensor(False), torch.tensor(True)
SMALL = {"n_envs": 4, "hidden": (8,), "critic_hidden": (8, 6), "level": "eager"}


def batch_of(agent):
    run = agent.program.state()
    with torch.no_grad():
        chunk = rollout(agent, agent.env, agent.acting(run["learner"]), run["actor"], keys.make(3), 5)[1]
    batch = {name: x.flatten(0, 1) for name, x in chunk.items()}
    return run["learner"], batch | {"discount": torch.full((20,), 0.9), "weight": torch.ones(20)}


def test_without_correction_it_is_batch_normalization():
    torch.manual_seed(0)
    x, mean, var = torch.randn(32, 5) * 3 + 1, torch.randn(5), torch.rand(5) + 0.5
    reference = torch.nn.BatchNorm1d(5, eps=EPS, affine=False)
    y, (batch_mean, batch_var) = renormalized(x, mean, var, OFF)
    torch.testing.assert_close(y, reference(x))
    torch.testing.assert_close(batch_mean, x.mean(0))
    torch.testing.assert_close(batch_var, x.var(0, correction=0))
    reference.running_mean, reference.running_var = mean, var
    reference.eval()
    torch.testing.assert_close(renormalized(x, mean, var, None)[0], reference(x))


def test_with_correction_it_is_close_to_running_statistics():
    """Where r and d are not clipped, y is what running statistics give; its gradient is that of batch statistics."""
    torch.manual_seed(0)
    x = torch.randn(32, 5)
    mean, var = x.mean(0) + 0.1, x.var(0, correction=0) * 1.2
    running = (x - mean) / (var + EPS).sqrt()
    torch.testing.assert_close(renormalized(x, mean, var, ON)[0], running, atol=1e-5, rtol=1e-5)
    far = renormalized(x, mean + 100, var, ON)[0]
    assert far.min() >= -5 - 4 and abs(far.mean() + 5) < 1e-4
    weight = torch.randn(32, 5)
    slope = torch.func.grad(lambda x: (renormalized(x, mean, var, ON)[0] * weight).sum())(x)
    plain = torch.func.grad(lambda x: (renormalized(x, mean, var, OFF)[0] * weight).sum())(x)
    r = ((x.var(0, correction=0) + EPS) / (var + EPS)).sqrt()
    torch.testing.assert_close(slope, plain * r)


def test_both_sides_are_one_batch():
    """The loss, with plain modules of torch that normalize (s, a) and (s', a') together."""
    agent = CrossQ(make("Pendulum-v1"), **SMALL)
    learner, batch = batch_of(agent)
    alpha = 0.2
    loss, (error, seen, _) = agent.critic_loss(learner["critic"], learner, batch, alpha, keys.make(1))
    action, log_prob = agent.distribution.sample_with_log_prob(agent.pi(learner["actor"], batch["last"]), keys.make(1))
    x = torch.cat([torch.cat([batch["obs"], batch["action"]], -1), torch.cat([batch["last"], action], -1)])
    values, first = [], None
    for weights in learner["critic"]:
        named, y = agent.q.one.named(weights), x
        for i in range(3):
            y = torch.nn.BatchNorm1d(y.shape[-1], eps=EPS, affine=False)(y.relu() if i else y)
            first = y.shape[-1] if first is None else first
            y = y @ named[f"layers.{i}.weight"].T + named[f"layers.{i}.bias"]
        values.append(y.squeeze(-1))
    (q1, after1), (q2, after2) = (v.split(20) for v in values)
    target = batch["reward"] + 0.9 * (torch.minimum(after1, after2) - alpha * log_prob)
    expected = 0.5 * ((q1 - target) ** 2).mean() + 0.5 * ((q2 - target) ** 2).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(error, (q1 + q2) / 2 - target)
    torch.testing.assert_close(seen["mean"][:, :first], x.mean(0).expand(2, -1))


def test_statistics_run_and_the_actor_waits():
    agent = CrossQ(make("Pendulum-v1"), policy_delay=3, momentum=0.25, **SMALL)
    learner, batch = batch_of(agent)
    first = {name: x.clone() for name, x in learner.items() if isinstance(x, torch.Tensor)}
    _, (_, seen, _) = agent.critic_loss(learner["critic"], learner, batch, 1.0, keys.split(keys.make(0))[0])
    moved = []
    for i in range(3):
        learner, _, _ = agent.update(learner, batch, keys.make(i))
        if i == 0:
            torch.testing.assert_close(learner["stats"]["mean"], 0.25 * seen["mean"])
            torch.testing.assert_close(learner["stats"]["var"], 0.75 + 0.25 * seen["var"])
        moved.append([not torch.equal(learner[name], first[name]) for name in ("actor", "log_alpha", "critic")])
    assert moved == [[False, False, True], [False, False, True], [True, True, True]]
    assert "target_critic" not in learner


def test_discrete_actions_are_refused():
    with pytest.raises(ValueError, match="CrossQ needs a Box action space"):
        CrossQ(make("CartPole-v1"), level="eager")
