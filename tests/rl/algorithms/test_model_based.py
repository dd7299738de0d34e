"""Learned dynamics against torch.distributions and known systems; MBPO's imagined rollouts."""

from __future__ import annotations

import pytest
import torch

from tutti.rl.algorithms.model_based.mbpo import MBPO
from tutti.rl.core import keys
from tutti.rl.networks.dynamics import HIGHEST, LOWEST, Dynamics

SMALL = {"hidden": (8,), "batch_size": 20, "gradient_steps": 2, "model_steps": 3, "rollouts": 6, "retained": 2,
         "learning_starts": 10, "n_steps": 10, "n_envs": 2, "buffer_size": 100, "level": "eager"}  # fmt: skip


def linear(n: int):
    """Transitions of x' = x + 0.5 a, reward = x_0 with noise of standard deviation 0.3, ending where x_0 > 1."""
    obs, action = keys.normal(keys.make(1), (n, 2)), keys.normal(keys.make(2), (n, 2))
    reward = obs[:, 0] + 0.3 * keys.normal(keys.make(3), (n,))
    return {"obs": obs, "action": action, "last": obs + 0.5 * action, "reward": reward, "terminated": obs[:, 0] > 1}


def test_loss_is_the_likelihood_of_torchs_normal():
    model = Dynamics(2, 2, members=3, hidden=(8,))
    weights = model.init(0)["weights"]
    x, y = keys.normal(keys.make(0), (3, 5, 4)), keys.normal(keys.make(1), (3, 5, 3))
    ended = torch.tensor([1.0, 0, 0, 1, 0]).expand(3, 5)
    total = 0.0
    for i in range(3):
        mean, log_var, logit = model._parts(model.net.one(weights[i], x[i]))
        normal = torch.distributions.Normal(mean, (0.5 * log_var).exp()).log_prob(y[i])
        end = torch.distributions.Bernoulli(logits=logit).log_prob(ended[i])
        constant = 0.5 * torch.log(torch.tensor(2 * torch.pi))
        total += -(normal + constant).mean() - end.mean()
    torch.testing.assert_close(model.loss(weights, x, y, ended), total)


def test_log_variances_stay_within_bounds():
    model = Dynamics(1, 1, members=1)
    outputs = torch.tensor([[0.0, 0.0, -100.0, 100.0, 0.0]])
    _, log_var, _ = model._parts(outputs)
    assert log_var[0].tolist() == pytest.approx([LOWEST, HIGHEST], abs=0.05)


def test_a_model_learns_a_linear_system_and_its_noise():
    rows, n = linear(800), 600
    model = Dynamics(2, 2, members=3, hidden=(32,), lr=5e-3)
    valid = torch.arange(800) < n
    state = model.scaled(model.init(0), rows, valid)
    change = rows["last"][:n] - rows["obs"][:n]
    torch.testing.assert_close(state["out_mean"][:2], change.mean(0))
    torch.testing.assert_close(state["out_std"][:2], change.std(0, correction=0))
    state, _ = model.fit(state, rows, torch.tensor(n), 400, 128, keys.make(4))
    test = {name: x[n:] for name, x in rows.items()}
    drawn = [model.step(state, test["obs"], test["action"], keys.make(i)) for i in range(40)]
    last, reward, ended = (torch.stack(x).float() for x in zip(*drawn, strict=True))
    inside = (test["obs"].abs() < 1.5).all(-1) & (test["action"].abs() < 1.5).all(-1)
    assert (last.mean(0) - test["last"])[inside].abs().max() < 0.15
    assert float(reward.std(0)[inside].mean()) == pytest.approx(0.3, abs=0.07)
    clear = inside & ((test["obs"][:, 0] - 1).abs() > 0.3)
    assert ((ended.mean(0) > 0.5) == test["terminated"])[clear].all()


def test_rows_beyond_the_size_are_never_learned_from():
    rows, model = linear(64), Dynamics(2, 2, members=2, hidden=(8,))
    state = model.scaled(model.init(0), rows, torch.arange(64) < 32)
    other = {name: torch.cat([x[:32], torch.full_like(x[32:], 1)]) for name, x in rows.items()}
    a, _ = model.fit(state, rows, torch.tensor(32), 5, 16, keys.make(0))
    b, _ = model.fit(model.scaled(model.init(0), other, torch.arange(64) < 32), other, torch.tensor(32), 5, 16,
                     keys.make(0))  # fmt: skip
    assert torch.equal(a["weights"], b["weights"])


class Counter(Dynamics):
    """Adds one to observations, and ends where the first is above 2."""

    def step(self, model, obs, action, key):
        return obs + 1, obs[:, 0], obs[:, 0] + 1 > 2


def test_imagined_rollouts_follow_the_model_from_real_states():
    agent = MBPO("Pendulum-v1", horizon=4, **SMALL)
    agent.learn(40)
    state = agent.program.state()
    agent.model = Counter(3, 1)
    chunk = agent.imagine(state["learner"], state["replay"], keys.make(0))
    assert chunk["obs"].shape == (4, 6, 3)
    assert torch.equal(chunk["obs"][1:], chunk["last"][:-1])
    real = state["replay"]["rows"]["obs"].flatten(0, 1)
    assert all((real == x).all(-1).any() for x in chunk["obs"][0])
    for i in range(6):
        over = False
        for t in range(4):
            assert float(chunk["weight"][t, i]) == float(not over)
            over |= bool(chunk["terminated"][t, i])
    assert chunk["weight"][-1].sum() == 0


def test_imagined_steps_fill_their_ring_after_the_warm_up():
    agent = MBPO("Pendulum-v1", horizon=2, **SMALL).learn(20)
    assert int(agent.program.state()["imagined"]["size"]) == 0
    agent.learn(60)
    state = agent.program.state()
    assert int(state["imagined"]["size"]) == 4  # two iterations of two steps, of three that there were
    assert int(state["replay"]["size"]) == 40
    with pytest.raises(ValueError, match="does not normalize"):
        MBPO("Pendulum-v1", normalize_obs=True, **SMALL)
