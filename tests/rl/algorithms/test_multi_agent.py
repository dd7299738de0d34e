"""Algorithms for several agents against loops over agents, closed forms and brute force."""

from itertools import product

import pytest
import torch

from tutti.rl import keys, teams
from tutti.rl.algorithms.ippo import IPPO
from tutti.rl.algorithms.mappo import MAPPO
from tutti.rl.algorithms.ppo import PPO
from tutti.rl.algorithms.qmix import QMIX
from tutti.rl.algorithms.vdn import VDN
from tutti.rl.collect import rollout
from tutti.rl.envs.registry import make
from tutti.rl.program import leaves

SMALL = {"n_envs": 4, "n_steps": 8, "hidden": (16,), "level": "eager"}


def chunk_of(agent):
    run = agent.program.state()
    with torch.no_grad():
        return run["learner"], rollout(agent, agent.env, agent.acting(run["learner"]), run["actor"], keys.make(3), 8)[1]


def test_ids_follow_observations():
    obs = torch.randn(5, 2, 3, 4)
    seen = teams.with_ids(obs)
    for i in range(3):
        assert torch.equal(seen[..., i, :4], obs[..., i, :])
        assert torch.equal(seen[..., i, 4:], torch.eye(3)[i].expand(5, 2, 3))


def test_ippo_without_ids_is_ppo():
    made = [kind(make("simple_spread_v3"), batch_size=48, **SMALL, **more)
            for kind, more in ((PPO, {}), (IPPO, {"agent_ids": False}))]  # fmt: skip
    for agent in made:
        agent.learn(64)
    a, b = (leaves(agent.program.state()) for agent in made)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_agent_is_refused():
    with pytest.raises(ValueError, match="IPPO is for several agents, and CartPole has one"):
        IPPO(make("CartPole-v1"), level="eager")


def test_mappo_values_see_everything_and_policies_only_their_own():
    agent = MAPPO(make("Battle-3m"), batch_size=48, **SMALL)
    learner, chunk = chunk_of(agent)
    value = agent.values(learner, chunk)[0]
    critic = {k.removeprefix("critic."): x for k, x in agent.net.named(learner["weights"]).items() if "critic" in k}
    for i in range(3):
        ids = torch.eye(3)[i].expand(8, 4, 3)
        x = torch.cat([chunk["overview"], ids], -1)
        hidden = (x @ critic["0.weight"].T + critic["0.bias"]).tanh()
        expected = (hidden @ critic["2.weight"].T + critic["2.bias"])[..., 0]
        torch.testing.assert_close(value[..., i], expected)
    inputs = agent.inputs(chunk)
    outputs = agent.network(learner["weights"], inputs)[0]
    inputs["obs"] = inputs["obs"].clone()
    inputs["obs"][:, :, 1] += 1  # another agent's
    moved = agent.network(learner["weights"], inputs)[0]
    assert torch.equal(outputs[:, :, [0, 2]], moved[:, :, [0, 2]]) and not torch.equal(outputs[:, :, 1], moved[:, :, 1])


def test_the_team_is_rewarded_with_the_mean(monkeypatch):
    agent, seen = MAPPO(make("simple_spread_v3"), batch_size=96, **SMALL), {}
    monkeypatch.setattr(PPO, "update", lambda self, learner, chunk, key: seen.update(chunk) or (learner, {}))
    learner, chunk = chunk_of(agent)
    agent.update(learner, chunk, keys.make(0))
    expected = sum(chunk["reward"][..., i] for i in range(3)) / 3
    for i in range(3):
        torch.testing.assert_close(seen["reward"][..., i], expected)


@pytest.mark.parametrize("kind", [VDN, QMIX])
def test_best_actions_of_agents_are_the_best_joint_action(kind):
    """Individual-global-max (Son et al., 2019, definition 1), by trying all joint actions."""
    agent = kind(make("Battle-3m"), n_envs=4, hidden=(16,), level="eager")
    learner, chunk = chunk_of(agent)
    q = agent.values(learner["weights"], chunk["obs"][0])  # (4, 3, 9)
    seen = chunk["overview"][0]
    joint = torch.tensor(list(product(range(9), repeat=3)))  # (729, 3)
    values = torch.stack([agent.mix(learner["weights"], q[:, torch.arange(3), a], seen) for a in joint], -1)
    assert torch.equal(joint[values.argmax(-1)], q.argmax(-1))


def test_qmix_is_monotonic():
    agent = QMIX(make("simple_spread_v3"), n_envs=2, level="eager")
    weights, (values, seen) = agent.init(0)["weights"], (torch.randn(50, 3) * 3, torch.randn(50, 54))
    slope = torch.func.grad(lambda v: agent.mix(weights, v, seen).sum())(values)
    assert slope.min() >= 0 and slope.max() > 0
    assert agent.mix(weights, values, seen).std() > 0


def test_value_targets_of_a_team():
    """y = mean reward + gamma Q_target(s', argmax_a Q), with a loop over the batch, actions masked."""
    agent = VDN(make("Battle-3m"), n_envs=4, hidden=(16,), level="eager", gamma=0.9)
    learner, chunk = chunk_of(agent)
    learner["target"] = agent.init(1)["weights"]
    batch = {name: x[3] for name, x in chunk.items()}
    batch |= {"discount": torch.full((4, 3), 0.9), "weight": torch.ones(4)}
    loss, (error, _) = agent.loss(learner["weights"], learner, batch, keys.make(0))
    errors = []
    for k in range(4):
        now, then, target = 0.0, 0.0, 0.0
        for i in range(3):
            own = torch.cat([batch["obs"][k, i], torch.eye(3)[i]])
            last = torch.cat([batch["last"][k, i], torch.eye(3)[i]])
            now += agent.q(learner["weights"], own)[batch["action"][k, i]]
            possible = agent.q(learner["weights"], last).masked_fill(~batch["last_mask"][k, i], -torch.inf)
            then += agent.q(learner["target"], last)[possible.argmax()]
        target = batch["reward"][k].mean() + 0.9 * then
        errors.append(now - target)
    torch.testing.assert_close(error, torch.stack(errors))
    torch.testing.assert_close(loss, torch.nn.HuberLoss()(torch.stack(errors), torch.zeros(4)))


def test_only_possible_actions_are_taken():
    agent = QMIX(make("Battle-3m"), n_envs=8, hidden=(16,), level="eager", learning_starts=40, batch_size=32)
    agent.learn(400)
    rows = agent.program.state()["replay"]["rows"]
    chosen = rows["mask"].gather(-1, rows["action"].unsqueeze(-1))
    assert chosen[:50].all()
