"""Offline algorithms against torch.optim, torch.distributions, scipy, quadrature, and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tutti.rl.adapt import minari
from tutti.rl.adapt.minari import Episode
from tutti.rl.adapt.pure import Pure
from tutti.rl.algorithms.imitation.bc import BC
from tutti.rl.algorithms.offline.awac import AWAC
from tutti.rl.algorithms.offline.cql import CQL
from tutti.rl.algorithms.offline.discrete_cql import DiscreteCQL
from tutti.rl.algorithms.offline.dt import DT
from tutti.rl.algorithms.offline.iql import IQL, expectile_loss
from tutti.rl.algorithms.offline.td3_bc import TD3BC
from tutti.rl.core import collect, keys
from tutti.rl.dataset import first_steps, returns_to_go
from tutti.rl.envs.cartpole import CartPole
from tutti.rl.offline_data import episodes, record

SMALL = {"hidden": (8,), "batch_size": 16, "gradient_steps": 3, "level": "eager"}


def pendulum(count: int = 3, steps: int = 30) -> list[Episode]:
    """Episodes of any numbers in the spaces of Pendulum."""
    r = np.random.default_rng(0)
    obs = [r.uniform(-1, 1, (steps + i + 1, 3)).astype(np.float32) for i in range(count)]
    action = [r.uniform(-2, 2, (steps + i, 1)).astype(np.float32) for i in range(count)]
    end = [np.arange(steps + i) == steps + i - 1 for i in range(count)]
    return [Episode(o, a, r.normal(size=len(a)), e & (i % 2 == 0), e & (i % 2 == 1))
            for i, (o, a, e) in enumerate(zip(obs, action, end, strict=True))]  # fmt: skip


def steered(count: int) -> list[Episode]:
    """CartPole pushed towards the side to which the pole falls, by a known rule."""
    env, episodes = CartPole(), []
    for i in range(count):
        state, obs = env.reset(keys.make(i), 1)
        seen, done, actions, over = [obs], [], [], False
        while not over:
            action = (3 * obs[:, 2] + obs[:, 3] > 0).long()
            state, obs, _, terminated, truncated = env.step(state, action, keys.make(0))
            seen.append(obs)
            actions.append(action)
            done.append((bool(terminated), bool(truncated)))
            over = any(done[-1])
        ends = np.array(done)
        episodes.append(Episode(torch.cat(seen).numpy(), torch.cat(actions).numpy(), np.ones(len(done)), *ends.T))
    return episodes


def batch_of(agent, n: int = 16):
    rows = {name: x[:n] for name, x in agent.program.state()["replay"].items()}
    return {**rows, "discount": 0.9 * torch.ones(n), "weight": torch.ones(n)}


def test_data_from_a_folder_from_arrays_and_from_episodes_are_equal(tmp_path):
    data = pendulum()
    minari.save(tmp_path / "some-v0", data, "Pendulum-v1")
    arrays = minari.load(tmp_path / "some-v0")
    agents = [BC("Pendulum-v1", data=x, **SMALL) for x in (data, arrays, tmp_path / "some-v0")]
    rows = [agent.program.state()["replay"] for agent in agents]
    for other in rows[1:]:
        assert all(torch.equal(rows[0][name], other[name]) for name in rows[0])
    assert rows[0]["action"].numpy() == pytest.approx(arrays["action"] / 2)
    assert torch.equal(rows[0]["last"][:29], rows[0]["obs"][1:30])


def test_returns_to_go_and_first_steps_are_those_of_a_loop():
    agent = BC("Pendulum-v1", data=pendulum(4), **SMALL)
    rows = agent.program.state()["replay"]
    wanted, firsts, first = [], [], 0
    for i in range(len(rows["reward"])):
        total, j = 0.0, i
        while True:
            total += float(rows["reward"][j])
            if rows["terminated"][j] or rows["truncated"][j]:
                break
            j += 1
        wanted.append(total)
        firsts.append(first)
        first = i + 1 if rows["terminated"][i] or rows["truncated"][i] else first
    assert returns_to_go(rows).tolist() == pytest.approx(wanted, abs=1e-5)
    assert first_steps(rows).tolist() == firsts


def test_wrong_data_are_refused():
    arrays = dict(BC("Pendulum-v1", level="eager").env.__dict__)
    with pytest.raises(ValueError, match="the data have no observation"):
        BC("Pendulum-v1", data=arrays, **SMALL)
    data = pendulum()
    data[0].actions *= 3
    with pytest.raises(ValueError, match="actions outside"):
        BC("Pendulum-v1", data=data, **SMALL)
    with pytest.raises(ValueError, match=r"action has the shape \(93, 1\)"):
        BC("CartPole-v1", data=[_wide(e) for e in pendulum()], **SMALL)
    with pytest.raises(ValueError, match="n_steps has no effect"):
        BC("Pendulum-v1", data=pendulum(), n_steps=4, **SMALL)
    with pytest.raises(ValueError, match="no data to learn from"):
        BC("Pendulum-v1", level="eager").learn(1)


def _wide(e: Episode) -> Episode:
    return Episode(np.pad(e.observations, ((0, 0), (0, 1))), e.actions, e.rewards, e.terminations, e.truncations)


def test_bc_takes_the_steps_of_torchs_adamw():
    agent = BC("Pendulum-v1", data=pendulum(), decay=0.1, learning_rate=0.01, **SMALL)
    learner, batch = agent.init(3), batch_of(agent)
    module = agent.net.make()
    for p, x in zip(module.parameters(), agent.net.named(learner["weights"]).values(), strict=True):
        p.data = x.clone()
    adam = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(5):
        learner, _, _ = agent.update({**learner, "progress": torch.zeros(())}, batch, keys.make(0))
        adam.zero_grad()
        torch.nn.functional.mse_loss(module(batch["obs"]).tanh(), batch["action"]).backward()
        adam.step()
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(learner["weights"], mine)


def test_td3bc_without_value_is_cloning():
    agent = TD3BC("Pendulum-v1", data=pendulum(), alpha=0.0, policy_delay=1, **SMALL)
    learner, batch = agent.program.state()["learner"], batch_of(agent)
    momentum = agent.actor_step(learner, batch)["actor_adam"]["m"]

    def loss(weights):
        return (agent.pi(weights, batch["obs"]) - batch["action"]).square().mean()

    torch.testing.assert_close(momentum, 0.1 * torch.func.grad(loss)(learner["actor"]))


def test_td3bc_weighs_values_by_their_size():
    """Rewards that are k times as large, and critics so too, give the same gradient of the actor."""
    agent = TD3BC("Pendulum-v1", data=pendulum(), policy_delay=1, **SMALL)
    learner, batch = agent.program.state()["learner"], batch_of(agent)
    parts = list(agent.q.one.named(torch.arange(agent.q.size)).values())  # indices; the last two are the output layer's
    last = torch.cat([parts[-2].flatten(), parts[-1].flatten()]).long()
    scaled = learner["critic"].clone()
    scaled[:, last] *= 7
    one = agent.actor_step(learner, batch)["actor_adam"]["m"]
    two = agent.actor_step({**learner, "critic": scaled}, batch)["actor_adam"]["m"]
    torch.testing.assert_close(one, two)


def test_awac_regression_weighs_log_likelihoods_of_torch():
    agent = AWAC("Pendulum-v1", data=pendulum(), temperature=0.5, max_weight=3.0, **SMALL)
    learner, batch = agent.program.state()["learner"], batch_of(agent)
    mean, log_std = agent.pi(learner["actor"], batch["obs"])
    log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch["action"]).sum(-1)
    torch.testing.assert_close(agent.log_prob(learner["actor"], batch["obs"], batch["action"]), log_prob)
    advantage = torch.linspace(-1, 1, 16)
    _, metrics = agent.regression(learner, batch, advantage)
    weight = torch.tensor([min(math.exp(2 * a), 3.0) for a in advantage.tolist()])
    torch.testing.assert_close(metrics["actor_loss"], -(weight * log_prob).mean())


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_iqls_loss_is_least_at_scipys_expectile(expectile):
    x = torch.from_numpy(np.random.default_rng(1).normal(size=500))
    best = torch.tensor(stats.expectile(x.numpy(), expectile))
    slope = torch.func.grad(lambda v: expectile_loss(x - v, expectile).mean())(best)
    assert float(slope) == pytest.approx(0, abs=1e-6)


def test_iql_values_only_actions_of_the_data():
    """Without a next value, V and Q settle at the rewards of a data set with one action for each observation."""
    data = pendulum(1, 16)
    data[0].rewards[:] = np.sign(data[0].observations[:-1, 0])
    agent = IQL("Pendulum-v1", data=data, gamma=0.0, learning_rate=0.02, expectile=0.9, tau=0.1,
                **{**SMALL, "hidden": (32,)}).learn(401)  # fmt: skip
    state = agent.program.state()
    rows, learner = state["replay"], state["learner"]
    value = agent.v(learner["value"], rows["obs"]).squeeze(-1)
    assert (value - rows["reward"]).abs().max() < 0.35
    assert (agent.critic(learner["critic"], rows["obs"], rows["action"]) - rows["reward"]).abs().max() < 0.35


class KnownQ(CQL):
    """Q(s, a) = 3 a, whose integral of exp over [-1, 1] is (e^3 - e^-3) / 3."""

    def critic(self, weights, obs, action):
        return 3 * action.reshape(1, -1, 1) + 0 * weights.sum()


def test_cqls_gap_is_a_log_integral():
    agent = KnownQ("Pendulum-v1", data=pendulum(), n_actions=20_000, **SMALL)
    learner, batch = agent.program.state()["learner"], batch_of(agent)
    gap = agent.gap(learner["critic"], learner, batch, keys.make(0))
    wanted = math.log((math.exp(3) - math.exp(-3)) / 3) - 3 * batch["action"].squeeze(-1)
    torch.testing.assert_close(gap[0], wanted, atol=0.05, rtol=0)


def test_discrete_cql_adds_the_log_likelihood_of_the_data():
    data = steered(2)
    agent = DiscreteCQL("CartPole-v1", data=data, cql_alpha=2.0, **SMALL)
    plain = DiscreteCQL("CartPole-v1", data=data, cql_alpha=0.0, **SMALL)
    learner, batch = agent.program.state()["learner"], batch_of(agent)
    q = agent.values(learner["weights"], batch["obs"])
    with_gap, _ = agent.loss(learner["weights"], learner, batch, keys.make(0))
    without, _ = plain.loss(learner["weights"], learner, batch, keys.make(0))
    torch.testing.assert_close(with_gap - without, 2 * torch.nn.functional.cross_entropy(q, batch["action"]))


def test_dt_sees_only_the_past_and_no_padding():
    agent = DT("Pendulum-v1", data=pendulum(), context=6, width=16, batch_size=4, level="eager")
    state = agent.program.state()
    learner, returns = state["learner"], state["replay"]["to_go"]
    assert learner["scale"] == returns.abs().max() and learner["target"] == returns.max()
    g, o, a = torch.randn(2, 6), torch.randn(2, 6, 3), torch.randn(2, 6, 1)
    valid = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    out = agent.net(learner["weights"], g, o, a, valid)
    later = [x.clone() for x in (g, o, a)]
    for x in later[:2]:
        x[:, 4:] += 1
    later[2][:, 3:] += 1  # the action of step 3 is what step 3 predicts
    moved = agent.net(learner["weights"], *later, valid)
    torch.testing.assert_close(out[:, :4], moved[:, :4])
    assert not torch.allclose(out[:, 4], moved[:, 4])
    for x in (g, o, a):
        x[0, :2] += 1
    torch.testing.assert_close(agent.net(learner["weights"], g, o, a, valid)[0, 2:], out[0, 2:])


def test_dt_windows_and_acting_agree():
    """What `act` feeds the model in a rollout is what `sample` cuts from a record of that rollout."""
    options = {"context": 5, "width": 16, "level": "eager", "target_return": 0.0, "scale": 1.0, "normalize_obs": False}
    agent = DT("CartPole-v1", data=steered(1), **options)
    actor = collect.begin(agent, agent.env, keys.make(3), 1)
    policy = agent.acting(agent.program.state()["learner"])
    _, chunk = collect.rollout(agent, agent.env, policy, actor, keys.make(4), 80)
    end = int((chunk["terminated"] | chunk["truncated"])[:, 0].nonzero()[0]) + 1
    assert 5 < end < 80
    net, seen = agent.net, []
    agent.net = lambda weights, *inputs: (seen.append(inputs), net(weights, *inputs))[1]
    collect.rollout(agent, agent.env, policy, actor, keys.make(4), end)
    for t, (to_go, obs, action, valid) in enumerate(seen):
        n = min(t + 1, 5)
        assert valid[0].tolist() == [False] * (5 - n) + [True] * n
        assert to_go[0, -n:].tolist() == [-float(i) for i in range(t + 1 - n, t + 1)]
        torch.testing.assert_close(obs[0, -n:], chunk["obs"][t + 1 - n : t + 1, 0])
        assert action[0, -n:-1].argmax(-1).tolist() == chunk["action"][t + 1 - n : t, 0].tolist()
    assert seen[0][3].sum() == 1


def test_recorded_episodes_are_whole(tmp_path):
    agent = BC("CartPole-v1", data=steered(1), n_envs=1, **SMALL)
    recorded = episodes(agent, 20, "random")
    lengths = [len(e.rewards) for e in recorded]
    assert 15 < np.mean(lengths) < 32  # 22 for random play
    for e in recorded:
        assert len(e.observations) == len(e.rewards) + 1
        assert e.terminations[-1] and not e.terminations[:-1].any() and not e.truncations.any()
        assert np.abs(e.observations[0]).max() <= 0.05
    record(agent, tmp_path / "random-v0", 3, "random")
    assert len(list(minari.episodes(tmp_path / "random-v0"))) == 3


def test_bc_does_as_its_teacher_and_continues_from_a_file(tmp_path):
    data = steered(4)
    agent = BC("CartPole-v1", data=data, learning_rate=0.01, gradient_steps=100, level="eager").learn(300)
    teacher = np.mean([len(e.rewards) for e in data])
    assert teacher > 150
    assert agent.num_timesteps == 300
    assert agent.evaluate(4).mean > 0.8 * teacher
    path = agent.save(tmp_path / "bc.safetensors")
    again = BC.load(path, data=data, level="eager")
    assert BC.load(path, level="eager").evaluate(4).mean == agent.evaluate(4).mean
    agent.learn(100)
    again.learn(100)
    assert torch.equal(agent.program.state()["learner"]["weights"], again.program.state()["learner"]["weights"])


def test_a_file_of_an_agent_with_several_environments_of_the_host(tmp_path):
    file = BC(Pure(CartPole(), 4), level="eager").save(tmp_path / "agent.safetensors")
    assert BC.load(file, env=Pure(CartPole(), 4)).config.n_envs == 4
