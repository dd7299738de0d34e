"""Losses and their gradients in float64, against the formulas of the papers in plain PyTorch.

References read weights from the vector by themselves, and call nothing of the algorithms. Random numbers are inputs.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tutti.rl.algorithms import algorithm
from tutti.rl.core import keys
from tutti.rl.replay.priority import EPS, Prioritized

N, ROWS = 24, 60
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
REPLAYED = {"hidden": (5,), "level": "eager", "learning_starts": 8, "buffer_size": 64, "batch_size": 8}


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    """Random numbers of float32 are those of float64."""
    torch.manual_seed(0)
    normal = keys.normal
    monkeypatch.setattr(keys, "normal", lambda key, shape: normal(key, shape).double())


def agent_of(name, env, **options):
    return algorithm(name)(env, **{"hidden": (5,), "level": "eager", **options})


def double(*shape, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64)


def perceptron(w: Tensor, sizes, x: Tensor, act) -> tuple[Tensor, Tensor]:
    """(outputs, the weights that are left)."""
    for i, (a, b) in enumerate(pairwise(sizes)):
        x = x @ w[: a * b].view(b, a).T + w[a * b : a * b + b]
        w = w[a * b + b :]
        x = act(x) if i < len(sizes) - 2 else x
    return x, w


def least(x: Tensor, y: Tensor) -> Tensor:
    return x if x.item() <= y.item() else y


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Bounds have no gradient."""
    return (
        torch.full_like(x, low).detach()
        if x.item() < low
        else torch.full_like(x, high).detach()
        if x.item() > high
        else x
    )


def both(loss, reference, weights, more=()):
    """Values and gradients of a loss and of its reference are equal."""
    ours, theirs = (weights.clone().requires_grad_() for _ in range(2))
    a, b = loss(ours), reference(theirs)
    torch.testing.assert_close(a, b, **TIGHT)
    (x,), (y,) = torch.autograd.grad(a, ours), torch.autograd.grad(b, theirs)
    assert y.abs().max() > 1e-6
    torch.testing.assert_close(x, y, **TIGHT)
    for one, two in more:
        torch.testing.assert_close(one, two, **TIGHT)


# -- PPO and A2C: Schulman et al. (2017), equations 7 and 9; Mnih et al. (2016) --------------------------------------


def cartpole(w: Tensor, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities (n, actions), entropies, values) of the two perceptrons."""
    logits, w = perceptron(w, [4, 5, 2], obs, torch.tanh)
    value, w = perceptron(w, [4, 5, 1], obs, torch.tanh)
    assert len(w) == 0
    logs = logits - logits.exp().sum(-1, keepdim=True).log()
    return logs, -(logs.exp() * logs).sum(-1), value[:, 0]


def pendulum(w: Tensor, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_std, w = w[0], w[1:]
    mean, w = perceptron(w, [3, 5, 1], obs, torch.tanh)
    value, _ = perceptron(w, [3, 5, 1], obs, torch.tanh)
    log_prob = -((action[:, 0] - mean[:, 0]) ** 2) / (2 * (2 * log_std).exp()) - log_std - 0.5 * math.log(2 * math.pi)
    return log_prob, (0.5 * math.log(2 * math.pi * math.e) + log_std).expand(len(obs)), value[:, 0]


def rows_of(agent, env):
    size = 4 if env == "CartPole-v1" else 3
    obs = double(ROWS, size)
    action = torch.randint(2, (ROWS,)) if size == 4 else double(ROWS, 1)
    weights = double(agent.net.size, scale=0.5)
    outputs = agent.network(weights, {"obs": obs, "critic": obs})[0]
    old = agent.distribution.log_prob(outputs, action) + double(ROWS, scale=0.5)  # ratios on both sides of both bounds
    return weights, {
        "obs": obs,
        "critic": obs,
        "action": action,
        "log_prob": old,
        "advantage": double(ROWS, scale=3) + 1,
        "target": double(ROWS, scale=2),
        "value": double(ROWS),
    }


@pytest.mark.parametrize("vf", [None, 0.3])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_ppo(env, normalize, vf):
    c, e1, e2 = 0.2, 0.7, 0.3
    agent = agent_of("PPO", env, vf_coef=e1, ent_coef=e2, clip_range=c, clip_range_vf=vf, normalize_advantage=normalize)
    weights, rows = rows_of(agent, env)
    expected = {}

    def reference(w):
        if env == "CartPole-v1":
            logs, entropy, value = cartpole(w, rows["obs"])
            log_prob = torch.stack([logs[i, a] for i, a in enumerate(rows["action"])])
        else:
            log_prob, entropy, value = pendulum(w, rows["obs"], rows["action"])
        a = rows["advantage"]
        a = (a - a.mean()) / (((a - a.mean()) ** 2).sum() / (ROWS - 1)).sqrt() if normalize else a
        r = (log_prob - rows["log_prob"]).exp()
        assert ((r > 1 + c) & (a > 0)).any() and ((r < 1 - c) & (a < 0)).any() and ((r > 1 + c) & (a < 0)).any()
        surrogate = torch.stack([least(x * y, clip(x, 1 - c, 1 + c) * y) for x, y in zip(r, a, strict=True)])
        if vf is not None:
            value = torch.stack([v + clip(x - v, -vf, vf) for x, v in zip(value, rows["value"], strict=True)])
        expected["kl"] = (r - 1 - r.log()).mean()  # Schulman's third estimator of KL(old || new)
        expected["clipped"] = ((r < 1 - c) | (r > 1 + c)).double().mean()
        expected["entropy"] = entropy.mean()
        expected["policy_loss"], expected["value_loss"] = -surrogate.mean(), ((value - rows["target"]) ** 2).mean()
        return -surrogate.mean() + e1 * expected["value_loss"] - e2 * entropy.mean()

    # 1e-8 beside the deviation of advantages is not in the paper: it moves numbers by less than 1e-8
    loose = {"rtol": 3e-8, "atol": 3e-8} if normalize else TIGHT
    ours, theirs = (weights.clone().requires_grad_() for _ in range(2))
    (a, metrics), b = agent.loss(ours, rows), reference(theirs)
    torch.testing.assert_close(a, b, **loose)
    torch.testing.assert_close(torch.autograd.grad(a, ours), torch.autograd.grad(b, theirs), **loose)
    for name, x in expected.items():
        torch.testing.assert_close(metrics[name].double(), x.detach(), rtol=3e-8, atol=3e-8)


def test_ppo_normalizes_with_its_small_number():
    agent = agent_of("PPO", "CartPole-v1")
    weights, rows = rows_of(agent, "CartPole-v1")
    a = rows["advantage"]
    plain = {**rows, "advantage": (a - a.mean()) / (a.std() + 1e-8)}
    other = agent_of("PPO", "CartPole-v1", normalize_advantage=False)
    torch.testing.assert_close(agent.loss(weights, rows)[0], other.loss(weights, plain)[0], **TIGHT)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("name", ["A2C", "REINFORCE", "IMPALA"])
def test_a2c(name, env):
    agent = agent_of(name, env, vf_coef=0.6, ent_coef=0.3)
    weights, rows = rows_of(agent, env)

    def reference(w):
        if env == "CartPole-v1":
            logs, entropy, value = cartpole(w, rows["obs"])
            log_prob = torch.stack([logs[i, a] for i, a in enumerate(rows["action"])])
        else:
            log_prob, entropy, value = pendulum(w, rows["obs"], rows["action"])
        return (-log_prob * rows["advantage"] + 0.6 * (value - rows["target"]) ** 2 - 0.3 * entropy).sum() / ROWS

    both(lambda w: agent.loss(w, rows)[0], reference, weights)


def test_networks_of_policies_begin_small_and_obey_masks():
    """Orthogonal first weights of gain 0.01 for policies and 1 for values, after hidden layers of sqrt(2)."""
    agent = agent_of("PPO", "CartPole-v1")
    parts = agent.net.named(agent.net.init(0))
    for name, gain, rows in (("actor.0", 2.0, False), ("actor.2", 1e-4, True), ("critic.2", 1.0, True)):
        w = parts[f"{name}.weight"].double()
        square = w @ w.T if rows else w.T @ w
        torch.testing.assert_close(square, gain * torch.eye(len(square)).double(), rtol=1e-4, atol=1e-6 * gain)
        assert not parts[f"{name}.bias"].any()
    weights, obs = double(agent.net.size), double(N, 4)
    mask = torch.tensor([[True, False], [False, True]]).repeat(N // 2, 1)
    for explore in (True, False):
        action, extra, _ = agent.act({"weights": weights}, {"obs": obs, "mask": mask}, {}, keys.make(0), explore)
        assert action.tolist() == [0, 1] * (N // 2) and extra["log_prob"].abs().max() == 0
    outputs, value = agent.network(weights, {"obs": obs, "critic": obs, "mask": mask})
    assert (outputs.softmax(-1) * ~mask).max() == 0
    torch.testing.assert_close(value, cartpole(weights, obs)[2], **TIGHT)


def gae_by_hand(reward, value, after, terminated, done, gamma, lam):
    advantage = torch.zeros_like(reward)
    for t in reversed(range(len(reward))):
        later = advantage[t + 1] if t + 1 < len(reward) else 0.0
        delta = reward[t] + gamma * torch.where(terminated[t], 0.0, after[t]) - value[t]
        advantage[t] = delta + gamma * lam * torch.where(done[t], 0.0, later)
    return advantage


@pytest.mark.parametrize("name", ["PPO", "A2C"])
def test_a_rollout_becomes_rows_with_advantages_and_targets(name, monkeypatch):
    options = {
        "n_envs": 2,
        "n_steps": 12,
        "gae_lambda": 0.7,
        "gamma": 0.8,
        "learning_rate": 0.01,
        "max_grad_norm": 0.05,
    }
    options |= {"n_epochs": 1, "batch_size": 24} if name == "PPO" else {}
    agent = agent_of(name, "CartPole-v1", **options)
    learner = {"weights": double(agent.net.size, scale=0.5)}
    learner["adam"] = {k: x.double() for k, x in agent.adam.init(learner["weights"]).items()}
    no = torch.zeros(12, 2, dtype=torch.bool)
    terminated, cut = no.clone(), no.clone()
    terminated[3, 0] = cut[7, 1] = cut[8, 0] = True
    chunk = {
        "obs": double(12, 2, 4),
        "last": double(12, 2, 4),
        "reward": double(12, 2),
        "terminated": terminated,
        "truncated": cut,
        "action": torch.randint(2, (12, 2)),
        "log_prob": -double(12, 2).abs(),
    }
    seen, loss = {}, agent.loss
    monkeypatch.setattr(agent, "loss", lambda w, rows: (seen.update(rows), loss(w, rows))[1])
    after, _ = agent.update(learner, chunk, keys.make(0))
    value = cartpole(learner["weights"], chunk["obs"].flatten(0, 1))[2].view(12, 2)
    later = cartpole(learner["weights"], chunk["last"].flatten(0, 1))[2].view(12, 2)
    wanted = gae_by_hand(chunk["reward"], value, later, terminated, terminated | cut, 0.8, 0.7)
    order = (seen["obs"].unsqueeze(1) == chunk["obs"].flatten(0, 1)).all(-1).long().argmax(-1)  # PPO shuffles
    assert sorted(order.tolist()) == list(range(24))
    for key, x in (("advantage", wanted), ("target", wanted + value)):
        torch.testing.assert_close(seen[key], x.flatten()[order], **TIGHT)
    if name == "PPO":
        torch.testing.assert_close(seen["value"], value.flatten()[order], **TIGHT)
    gradient = torch.func.grad(lambda w: loss(w, seen)[0])(learner["weights"])
    gradient = gradient * (0.05 / (gradient.norm() + 1e-6)).clamp(max=1.0)
    assert gradient.norm() < 0.051
    # The first step of Adam, where m / (1 - b1) = g and v / (1 - b2) = g^2, and that of RMSProp.
    root = gradient.abs() if name == "PPO" else (0.01 * gradient**2).sqrt()
    step = gradient / (root + 1e-5)
    torch.testing.assert_close(after["weights"], learner["weights"] - 0.01 * step, rtol=1e-6, atol=1e-9)


def test_ppo_stops_where_the_policy_has_moved_too_far():
    """Two minibatches: the second gradient step is not made once the first one's divergence is above 1.5 target_kl."""

    def moved(target_kl, shift):
        agent = agent_of("PPO", "CartPole-v1", n_envs=2, n_steps=2, batch_size=4, n_epochs=2, target_kl=target_kl)
        weights, rows = rows_of(agent, "CartPole-v1")
        rows = {name: x[:4] for name, x in rows.items()}
        logs = cartpole(weights, rows["obs"])[0].gather(1, rows["action"].unsqueeze(1))[:, 0]
        rows["log_prob"] = logs + shift
        learner = {"weights": weights, "adam": {k: x.double() for k, x in agent.adam.init(weights).items()}}
        return agent.epochs(learner, rows, keys.make(0), 0, 4)[0]["weights"] - weights, learner

    divergence = math.exp(-0.5) - 1 + 0.5
    assert moved(divergence / 1.5 * 1.01, 0.5)[0].abs().max() > 0  # not above: the first step is made
    assert moved(divergence / 1.5 * 0.99, 0.5)[0].abs().max() == 0
    assert moved(None, 0.5)[0].abs().max() > 0


# -- DQN and its variants --------------------------------------------------------------------------------------------


def batch_of(discrete=True, obs=4, masks=False):
    batch = {
        "obs": double(N, obs),
        "last": double(N, obs),
        "reward": double(N, scale=2),
        "weight": double(N).abs() + 0.1,
        "discount": torch.where(torch.rand(N) < 0.3, 0.0, 0.9).double(),
        "terminated": torch.zeros(N, dtype=torch.bool),
        "action": torch.randint(2, (N,)) if discrete else double(N, 1).clamp(-1, 1),
    }
    if masks:
        batch["last_mask"] = torch.ones(N, 2, dtype=torch.bool)
        batch["last_mask"][: N // 3, 0] = False
        batch["last_mask"][-N // 3 :, 1] = False
    return batch


def huber(x):
    return torch.where(x.abs() < 1, 0.5 * x**2, x.abs() - 0.5)


def q_of(name, w, obs):
    if name != "DuelingDQN":
        return perceptron(w, [4, 5, 2], obs, torch.relu)[0]
    value, w = perceptron(w, [4, 5, 1], obs, torch.relu)
    advantage, _ = perceptron(w, [4, 5, 2], obs, torch.relu)
    return value + advantage - (advantage[:, :1] + advantage[:, 1:]) / 2


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("name", ["DQN", "DoubleDQN", "DuelingDQN", "PrioritizedDQN"])
def test_q_learning(name, masks):
    agent = agent_of(name, "CartPole-v1", **REPLAYED)
    weights, target, batch = double(agent.q.size), double(agent.q.size), batch_of(masks=masks)
    errors = {}

    def reference(w):
        now, slow, present = (
            q_of(name, x, batch[k]).detach() if k == "last" else q_of(name, x, batch[k])
            for x, k in ((w, "last"), (target, "last"), (w, "obs"))
        )
        total = 0.0
        for i in range(N):
            possible = [a for a in range(2) if not masks or batch["last_mask"][i, a]]
            chooses = slow if name == "DQN" else now
            best = max(possible, key=lambda a: float(chooses[i, a]))
            y = batch["reward"][i] + batch["discount"][i] * slow[i, best]
            errors[i] = (present[i, batch["action"][i]] - y).detach()
            total = total + batch["weight"][i] * huber(present[i, batch["action"][i]] - y)
        return total / N

    learner = {"weights": weights, "target": target}
    both(lambda w: agent.loss(w, learner, batch, keys.make(0))[0], reference, weights)
    td_errors = agent.loss(weights, learner, batch, keys.make(0))[1][0]
    torch.testing.assert_close(td_errors, torch.stack([errors[i] for i in range(N)]), **TIGHT)


def test_dueling_with_shared_layers():
    agent = agent_of("DuelingDQN", "CartPole-v1", **{**REPLAYED, "hidden": (6, 5)})
    w, obs = double(agent.q.size), double(N, 4)
    x, rest = perceptron(w, [4, 6, 5], obs, torch.relu)
    value, rest = perceptron(rest, [5, 5, 1], x.relu(), torch.relu)
    advantage, rest = perceptron(rest, [5, 5, 2], x.relu(), torch.relu)
    assert len(rest) == 0
    torch.testing.assert_close(agent.values(w, obs), value + advantage - advantage.mean(-1, keepdim=True), **TIGHT)


@pytest.mark.parametrize("masks", [False, True])
def test_c51(masks):
    """Bellemare et al. (2017), algorithm 1."""
    agent = agent_of("C51", "CartPole-v1", **REPLAYED, atoms=7, v_min=-3.0, v_max=3.0)
    weights, target, batch = double(agent.q.size), double(agent.q.size), batch_of(masks=masks)
    z = [-3.0 + i for i in range(7)]

    def chances(w, obs):
        x = perceptron(w, [4, 5, 14], obs, torch.relu)[0].view(N, 2, 7)
        return x.exp() / x.exp().sum(-1, keepdim=True)

    def reference(w):
        p, after, total = chances(w, batch["obs"]), chances(target, batch["last"]), 0.0
        for i in range(N):
            q = [float((after[i, a] * torch.tensor(z)).sum()) for a in range(2)]
            best = max((a for a in range(2) if not masks or batch["last_mask"][i, a]), key=lambda a: q[a])
            m = torch.zeros(7, dtype=torch.float64)
            for j in range(7):
                b = (min(max(float(batch["reward"][i] + batch["discount"][i] * z[j]), -3.0), 3.0) + 3.0) / 1.0
                low, high = math.floor(b), math.ceil(b)
                m[low] += after[i, best, j] * (high - b if high > low else 1.0)
                m[high] += after[i, best, j] * (b - low)
            total = total - batch["weight"][i] * (m * p[i, batch["action"][i]].log()).sum()
        return total / N

    learner = {"weights": weights, "target": target}
    both(lambda w: agent.loss(w, learner, batch, keys.make(0))[0], reference, weights)


@pytest.mark.parametrize("masks", [False, True])
def test_quantile_regression(masks):
    """Dabney et al. (2018), equation 10 and algorithm 1, with kappa = 1."""
    agent = agent_of("QRDQN", "CartPole-v1", **REPLAYED, n_quantiles=4)
    weights, target, batch = double(agent.q.size), double(agent.q.size), batch_of(masks=masks)

    def quantiles(w, obs):
        return perceptron(w, [4, 5, 8], obs, torch.relu)[0].view(N, 2, 4)

    def reference(w):
        now, after, total = quantiles(w, batch["obs"]), quantiles(target, batch["last"]), 0.0
        for i in range(N):
            possible = [a for a in range(2) if not masks or batch["last_mask"][i, a]]
            best = max(possible, key=lambda a: float(after[i, a].sum()))
            y = batch["reward"][i] + batch["discount"][i] * after[i, best]
            for k in range(4):
                u = y - now[i, batch["action"][i], k]
                total = total + batch["weight"][i] * (((k + 0.5) / 4 - (u < 0).double()).abs() * huber(u)).mean()
        return total / N

    learner = {"weights": weights, "target": target}
    both(lambda w: agent.loss(w, learner, batch, keys.make(0))[0], reference, weights)


def test_quantiles_are_summed_and_targets_averaged():
    from tutti.rl.algorithms.value.qr_dqn import quantile_loss

    quantiles, targets = double(2, 3), double(2, 5)
    for row in range(2):
        total = 0.0
        for i in range(3):
            for y in targets[row]:
                u = float(y - quantiles[row, i])
                total += abs((i + 0.5) / 3 - (u < 0)) * (0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5) / 5
        loss = float(quantile_loss(quantiles, targets)[row])
        torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-6)  # levels are thirds in float32


def test_updates_of_q_learning_clip_gradients_and_copy_targets():
    agent = agent_of(
        "DQN",
        "CartPole-v1",
        **REPLAYED,
        max_grad_norm=0.01,
        learning_rate=0.1,
        target_update_interval=10,
        tau=0.75,
        n_envs=2,
        n_steps=3,
    )
    weights, target, batch = double(agent.q.size), double(agent.q.size), batch_of()
    learner = {
        "weights": weights,
        "target": target,
        "adam": {k: x.double() for k, x in agent.adam.init(weights).items()},
    }
    gradient = torch.func.grad(lambda w: agent.loss(w, learner, batch, keys.make(0))[0])(weights)
    after = agent.update(learner, batch, keys.make(0))[0]
    clipped = gradient * 0.01 / (gradient.norm() + 1e-6)
    torch.testing.assert_close(after["adam"]["m"], 0.1 * clipped, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(after["weights"], weights - 0.1 * clipped / (clipped.abs() + 1e-8), rtol=1e-6, atol=1e-9)
    for steps, due in ((6, False), (12, True), (18, False), (24, True), (30, True)):  # 6 steps in each iteration
        moved = agent.before({"weights": weights, "target": target}, torch.tensor(steps))["target"]
        torch.testing.assert_close(moved, 0.25 * target + 0.75 * weights if due else target, **TIGHT)


def test_exploration_falls_linearly():
    agent = agent_of(
        "DQN",
        "CartPole-v1",
        **REPLAYED,
        exploration_fraction=0.5,
        exploration_initial_eps=0.8,
        exploration_final_eps=0.2,
    )
    q = torch.tensor([[0.0, 1.0]]).expand(20_000, 2)
    for progress, epsilon in ((0.0, 0.8), (0.25, 0.5), (0.5, 0.2), (0.9, 0.2)):
        action = agent.sometimes_random({"progress": torch.tensor(progress)}, q, keys.make(3))
        assert abs(float((action == 0).float().mean()) - epsilon / 2) < 0.012


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_weights_and_priorities_of_prioritized_replay(beta):
    """Schaul et al. (2016), section 3.3 and 3.4: P(i) = p_i^alpha / sum, w_i = (N P(i))^-beta / max w."""
    ring = Prioritized(8, 2, alpha=0.7, beta=beta)
    floats, bits = torch.float32, torch.bool
    memory = ring.init(
        {
            "obs": ((1,), floats),
            "last": ((1,), floats),
            "reward": ((), floats),
            "terminated": ((), bits),
            "truncated": ((), bits),
        }
    )
    obs, no = torch.arange(16.0).view(8, 2, 1), torch.zeros(8, 2, dtype=torch.bool)
    rows = {"obs": obs, "last": obs, "reward": no.float(), "terminated": no, "truncated": no}
    memory = ring.add(memory, rows)
    errors = torch.randn(16) * 3
    memory = ring.learned(memory, {"index": torch.arange(16)}, errors)
    chance = (errors.abs() + EPS).double() ** 0.7
    torch.testing.assert_close(float(memory["largest"]), max(1.0, float(chance.max())))
    chance = chance / chance.sum()
    batch, where = ring.sample(memory, keys.make(0), 4096)
    index = batch["obs"][:, 0].long()
    assert torch.equal(index, where["index"])
    weight = (16 * chance[index]) ** -beta
    torch.testing.assert_close(where["weight"].double(), weight / weight.max(), rtol=2e-5, atol=1e-6)
    again = ring.add(memory, {name: x[:1] for name, x in rows.items()})
    assert (
        again["tree"][ring.leaves : ring.leaves + 2].tolist() == [float(memory["largest"])] * 2
    )  # as the largest so far
    drawn = torch.bincount(index, minlength=16) / 4096
    torch.testing.assert_close(drawn.double(), chance, rtol=0.0, atol=2 / 4096)  # one from each equal part


@pytest.mark.parametrize("steps", [1, 3])
def test_returns_of_several_steps(steps):
    """Watkins (1989): up to n rewards of the same episode, then the value, unless the episode terminated."""
    from tutti.rl.core.returns import n_step

    reward, after = double(8, 1), double(8, 1)
    terminated, cut = torch.zeros(8, 1, dtype=torch.bool), torch.zeros(8, 1, dtype=torch.bool)
    terminated[2], cut[5] = True, True
    returns = n_step(reward, after, terminated, terminated | cut, 0.9, steps)
    for t in range(8):
        total, k = 0.0, 0
        while True:
            total += 0.9**k * float(reward[t + k])
            k += 1
            if terminated[t + k - 1]:
                break
            if cut[t + k - 1] or k == steps or t + k == 8:
                total += 0.9**k * float(after[t + k - 1])
                break
        torch.testing.assert_close(float(returns[t]), total, **TIGHT)


# -- actor-critics with a replay -------------------------------------------------------------------------------------


def actor_critic(name, **options):
    agent = agent_of(name, "Pendulum-v1", **{**REPLAYED, "hidden": (5,), "gamma": 0.9, **options})
    learner = {
        k: (0.7 * torch.randn(x.shape, dtype=torch.float64) if isinstance(x, Tensor) and x.ndim else x)
        for k, x in agent.init(0).items()
    }
    for k, x in learner.items():
        if isinstance(x, dict):
            learner[k] = {n: y.double() for n, y in x.items()}
    return agent, {**learner, "progress": torch.zeros(())}, batch_of(False, 3)


def critic_of(w, obs, action):
    return perceptron(w, [4, 5, 1], torch.cat([obs, action], -1), torch.relu)[0][:, 0]


def step_of(before, after, adam):
    """The gradient that the first step of Adam saw."""
    return after[adam]["m"] / (1 - 0.9)


def close_gradient(gradient, loss, weights):
    w = weights.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(w), w)
    assert wanted.abs().max() > 1e-6
    torch.testing.assert_close(gradient, wanted, **TIGHT)


def squashed(w, obs, noise):
    """(action, log-probability) of tanh(mean + std noise)."""
    mean, log = perceptron(w, [3, 5, 2], obs, torch.relu)[0].chunk(2, -1)
    log = torch.where(log > 2, torch.full_like(log, 2.0), torch.where(log < -20, torch.full_like(log, -20.0), log))
    u = mean + log.exp() * noise
    density = -((u - mean) ** 2) / (2 * (2 * log).exp()) - log - 0.5 * math.log(2 * math.pi)
    return u.tanh(), (density - (1 - u.tanh() ** 2).log())[:, 0]


@pytest.mark.parametrize("fixed", [None, 0.3])
def test_sac(fixed):
    """Haarnoja et al. (2018b), equations 5 to 9 and 18."""
    agent, learner, batch = actor_critic("SAC", ent_coef=fixed, tau=0.2, target_entropy=-0.4)
    learner["log_alpha"] = torch.tensor(-0.7, dtype=torch.float64)
    key = keys.make(5)
    of_critic, of_actor = keys.split(key)
    after, error, metrics = agent.update(learner, batch, key)
    alpha = math.exp(-0.7) if fixed is None else fixed
    action, log_prob = squashed(learner["actor"], batch["last"], keys.normal(of_critic, (N, 1)))
    target = learner["target_critic"]
    q1, q2 = (critic_of(target[i], batch["last"], action) for i in range(2))
    y = batch["reward"] + batch["discount"] * (torch.minimum(q1, q2) - alpha * log_prob)

    def critic_loss(w):
        return sum(
            (batch["weight"] * 0.5 * (critic_of(w[i], batch["obs"], batch["action"]) - y) ** 2).mean() for i in (0, 1)
        )

    close_gradient(step_of(learner, after, "critic_adam"), critic_loss, learner["critic"])
    torch.testing.assert_close(metrics["critic_loss"], critic_loss(learner["critic"]), **TIGHT)
    q = torch.stack([critic_of(learner["critic"][i], batch["obs"], batch["action"]) for i in (0, 1)])
    torch.testing.assert_close(error, (q - y).mean(0), **TIGHT)

    def actor_loss(w):
        action, log_prob = squashed(w, batch["obs"], keys.normal(of_actor, (N, 1)))
        q = torch.minimum(*(critic_of(after["critic"][i], batch["obs"], action) for i in (0, 1)))
        return (alpha * log_prob - q).mean()

    close_gradient(step_of(learner, after, "actor_adam"), actor_loss, learner["actor"])
    value = agent.actor_loss(learner["actor"], after["critic"], batch, alpha, of_actor)[0]
    torch.testing.assert_close(value, actor_loss(learner["actor"]), **TIGHT)
    entropy = -squashed(learner["actor"], batch["obs"], keys.normal(of_actor, (N, 1)))[1].mean()
    torch.testing.assert_close(metrics["entropy"], entropy, **TIGHT)
    if fixed is None:
        close_gradient(step_of(learner, after, "alpha_adam"), lambda log: -log * (-entropy - 0.4), learner["log_alpha"])
        torch.testing.assert_close(metrics["alpha"], after["log_alpha"].exp(), **TIGHT)
    else:
        assert after["log_alpha"] == learner["log_alpha"]
    torch.testing.assert_close(after["target_critic"], 0.8 * target + 0.2 * after["critic"], **TIGHT)


def test_sac_by_default_wants_an_entropy_of_minus_the_number_of_actions():
    agent, learner, batch = actor_critic("SAC")
    after, _, metrics = agent.update(learner, batch, keys.make(5))
    torch.testing.assert_close(step_of(learner, after, "alpha_adam"), metrics["entropy"] + 1.0, **TIGHT)


def actor_of(w, obs):
    return perceptron(w, [3, 5, 1], obs, torch.relu)[0].tanh()


@pytest.mark.parametrize("name", ["DDPG", "TD3"])
def test_deterministic_policy_gradients(name):
    """Lillicrap et al. (2016), algorithm 1; Fujimoto et al. (2018), algorithm 1."""
    own = {"target_policy_noise": 0.4, "target_noise_clip": 0.3, "policy_delay": 3} if name == "TD3" else {}
    agent, learner, batch = actor_critic(name, tau=0.2, learning_rate=0.05, **own)
    key, critics = keys.make(7), range(2 if name == "TD3" else 1)
    action = actor_of(learner["target_actor"], batch["last"])
    if name == "TD3":
        noise = 0.4 * keys.normal(key, (N, 1)).double()
        assert (noise.abs() > 0.3).any() and ((action + noise).abs() > 1).any()
        noise = torch.where(noise > 0.3, 0.3, torch.where(noise < -0.3, -0.3, noise)).double()
        action = action + noise
        action = torch.where(action > 1, 1.0, torch.where(action < -1, -1.0, action)).double()
    q = [critic_of(learner["target_critic"][i], batch["last"], action) for i in critics]
    y = batch["reward"] + batch["discount"] * (torch.minimum(*q) if name == "TD3" else q[0])

    def critic_loss(w):
        return sum(
            (batch["weight"] * (critic_of(w[i], batch["obs"], batch["action"]) - y) ** 2).mean() for i in critics
        )

    after, error, metrics = agent.update(learner, batch, key)
    close_gradient(step_of(learner, after, "critic_adam"), critic_loss, learner["critic"])
    torch.testing.assert_close(metrics["critic_loss"], critic_loss(learner["critic"]), **TIGHT)
    own_q = torch.stack([critic_of(learner["critic"][i], batch["obs"], batch["action"]) for i in critics])
    torch.testing.assert_close(error, (own_q - y).mean(0), **TIGHT)
    torch.testing.assert_close(metrics["q"], own_q.mean(), **TIGHT)
    if name == "TD3":
        assert after["updates"] == 1
        for _ in range(2):  # the actor and the targets wait for the third update
            for part in ("actor", "target_actor", "target_critic"):
                assert torch.equal(after[part], learner[part])
            before, (after, *_) = after, agent.update(after, batch, key)
    else:
        before = learner

    def actor_loss(w):
        return -critic_of(after["critic"][0], batch["obs"], actor_of(w, batch["obs"])).mean()

    close_gradient(step_of(before, after, "actor_adam"), actor_loss, learner["actor"])
    loss = agent.actor_loss(learner["actor"], after, batch)
    torch.testing.assert_close(loss, actor_loss(learner["actor"]), **TIGHT)
    for part in ("actor", "critic"):
        wanted = 0.8 * learner[f"target_{part}"] + 0.2 * after[part]
        torch.testing.assert_close(after[f"target_{part}"], wanted, **TIGHT)


@pytest.mark.parametrize("name", ["DDPG", "TD3"])
def test_noise_of_exploration(name):
    agent = agent_of(name, "Pendulum-v1", **{**REPLAYED, "noise": 0.3})
    weights, obs, key = agent.pi.init(3), torch.randn(N, 3), keys.make(1)
    best = agent.act({"actor": weights}, {"obs": obs}, {}, key, False)[0]
    tried = agent.act({"actor": weights}, {"obs": obs}, {}, key, True)[0]
    torch.testing.assert_close(best, actor_of(weights, obs))
    torch.testing.assert_close(tried, (best + 0.3 * keys.normal(key, (N, 1))).clamp(-1, 1))
