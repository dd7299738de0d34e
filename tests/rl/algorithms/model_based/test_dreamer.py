"""World models against plain loops and torch's autograd; two-hot codes and returns against their definitions."""

from __future__ import annotations

import pytest
import torch

from tutti.rl.algorithms.model_based.dreamer import Dreamer
from tutti.rl.core import keys
from tutti.rl.core.descent import Adam
from tutti.rl.core.returns import lambda_returns
from tutti.rl.networks.two_hot import TwoHot, symexp, symlog
from tutti.rl.networks.world_model import WorldModel, divergence

SMALL = {"deter": 6, "groups": 2, "classes": 3, "width": 8, "hidden": (8,), "batch_size": 3, "length": 5, "horizon": 4,
         "learning_starts": 40, "gradient_steps": 1, "level": "eager"}  # fmt: skip


def test_two_hot_codes_are_read_back():
    code, x = TwoHot(41, 10.0), torch.tensor([-300.0, -1.5, -0.01, 0.0, 0.4, 1.0, 77.0, 1e5])
    bins = code.encode(x[:-1])
    assert (bins > 0).sum(-1).max() <= 2
    torch.testing.assert_close(bins.sum(-1), torch.ones(7))
    torch.testing.assert_close((bins * code.bins).sum(-1), symlog(x[:-1]))
    torch.testing.assert_close(code.mean((bins + 1e-30).log()), x[:-1], rtol=1e-4, atol=1e-4)
    assert code.encode(x[-1]).argmax() == 40  # beyond the last bin
    torch.testing.assert_close(symexp(symlog(x)), x)
    with pytest.raises(ValueError, match="odd number"):
        TwoHot(40)


def test_two_hot_loss_is_least_at_the_mean_of_targets():
    """Cross-entropy with targets of one bin and another is minimized by their frequencies."""
    code = TwoHot(5, 2.0)
    targets = symexp(torch.tensor([0.0, 1.0, 1.0, 1.0]))
    best = code.encode(targets).mean(0)
    slope = torch.func.grad(lambda logits: code.loss(logits.expand(4, 5), targets).mean())((best + 1e-9).log())
    assert slope.abs().max() < 1e-5


def test_lambda_returns_are_those_of_a_recursion():
    reward, discount = keys.normal(keys.make(0), (6, 3)), keys.uniform(keys.make(1), (6, 3))
    value = keys.normal(keys.make(2), (7, 3))

    def at(t: int, lam: float) -> torch.Tensor:
        later = value[6] if t == 5 else at(t + 1, lam)
        return reward[t] + discount[t] * ((1 - lam) * value[t + 1] + lam * later)

    for lam in (0.0, 0.6, 1.0):
        returns = lambda_returns(reward, discount, value, lam)
        for t in range(6):
            torch.testing.assert_close(returns[t], at(t, lam))
    torch.testing.assert_close(lambda_returns(reward, discount, value, 0.0), reward + discount * value[1:])


def test_divergence_is_that_of_torch():
    a, b = (keys.normal(keys.make(i), (4, 3, 5)).log_softmax(-1) for i in range(2))
    one, two = torch.distributions.Categorical(logits=a), torch.distributions.Categorical(logits=b)
    torch.testing.assert_close(divergence(a, b), torch.distributions.kl_divergence(one, two).sum(-1))


def test_latents_are_one_hot_with_the_gradient_of_probabilities():
    model = WorldModel(2, 1, 4, groups=2, classes=3, hidden=8)
    logits, gumbel = keys.normal(keys.make(0), (5, 6)), model.noise(keys.make(1), (5,))
    drawn = model.drawn(logits, gumbel)
    assert torch.equal(drawn.unflatten(-1, (2, 3)).round().sum(-1), torch.ones(5, 2))
    weight = keys.normal(keys.make(2), (5, 6))
    gradient = torch.func.grad(lambda x: (model.drawn(x, gumbel) * weight).sum())(logits)
    p = lambda x: 0.99 * x.unflatten(-1, (2, 3)).softmax(-1) + 0.01 / 3  # noqa: E731
    wanted = torch.func.grad(lambda x: (p(x).flatten(-2) * weight).sum())(logits)
    torch.testing.assert_close(gradient, wanted)
    many = model.drawn(
        torch.zeros(20_000, 6) + torch.tensor([2.0, 0, 0, 0, 1, 0]), model.noise(keys.make(3), (20_000,))
    )
    torch.testing.assert_close(many.mean(0), p(torch.tensor([2.0, 0, 0, 0, 1, 0])).flatten(), atol=0.015, rtol=0)


def test_filtering_and_its_gradient_are_those_of_a_loop():
    model, time, n = WorldModel(3, 2, 5, groups=2, classes=3, hidden=8), 6, 2
    weights = model.init(0)
    obs, before = keys.normal(keys.make(0), (time, n, 3)), keys.normal(keys.make(1), (time, n, 2))
    first = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]]).float().T
    gumbel, scale = model.noise(keys.make(2), (time, n)), keys.normal(keys.make(3), (time, n, model.features))

    def looped(w):
        state, states = model.start(n), []
        for t in range(time):
            going = 1 - first[t].unsqueeze(-1)
            h = model.next(w, state * going, before[t] * going)
            state = model.seen(w, h, obs[t], gumbel[t])
            states.append(state)
        return torch.stack(states)

    torch.testing.assert_close(model.filtered(weights, obs, before, first, gumbel), looped(weights))
    slopes = [torch.func.grad(lambda w, f=f: (f(w) * scale).sum())(weights)
              for f in (looped, lambda w: model.filtered(w, obs, before, first, gumbel))]  # fmt: skip
    torch.testing.assert_close(slopes[0], slopes[1])
    assert slopes[0].abs().sum() > 0


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_acting_is_filtering(env):
    agent = Dreamer(env, n_envs=2, **SMALL)
    learner, carry = agent.init(0), agent.carry(2)
    obs, states, taken = keys.normal(keys.make(0), (4, 2, agent.features.size)), [], []
    for t in range(4):
        _, _, carry = agent.act(agent.policy(learner), {"obs": obs[t]}, carry, keys.make(t), False)
        states.append(carry["state"])
        taken.append(carry["action"])
    before = torch.stack([torch.zeros_like(taken[0]), *taken[:-1]])
    first = torch.tensor([1.0, 0, 0, 0]).unsqueeze(-1).expand(4, 2)
    none = torch.zeros(4, 2, 2, 3)
    torch.testing.assert_close(torch.stack(states), agent.world.filtered(learner["model"], obs, before, first, none))


@pytest.mark.slow
def test_the_world_model_learns_what_follows():
    """An observation that says whether the second action is rewarded; the episode ends after three steps."""
    model, time, n = WorldModel(2, 2, 16, groups=2, classes=4, hidden=32), 6, 12
    side = keys.integers(keys.make(0), (time, n), 2)
    action = torch.nn.functional.one_hot(keys.integers(keys.make(1), (time, n), 2), 2).float()
    ended = (torch.arange(time) % 3 == 2).unsqueeze(-1).expand(time, n)
    rows = {"obs": torch.nn.functional.one_hot(side, 2).float(), "terminated": ended,
            "truncated": torch.zeros_like(ended), "reward": side * action[..., 1]}  # fmt: skip
    adam, weights = Adam(1e-2), model.init(0)
    state = adam.init(weights)
    for i in range(60):
        gradient, (states, _) = torch.func.grad(model.loss, has_aux=True)(weights, rows, action, keys.make(i))
        weights, state = adam.step(weights, gradient, state)
    reward, goes_on = model.outcome(weights, model.next(weights, states, action))
    assert (reward - rows["reward"]).abs().mean() < 0.2  # 0.37 for their mean
    assert ((goes_on < 0.5) == ended).all()


def test_latents_tell_all_that_is_observed():
    """One of five observations, 1.6 nats. With errors of weight 1/2 latents stay at the free nat and confuse them."""
    model, none = WorldModel(5, 1, 16, groups=2, classes=5, hidden=32), torch.zeros(3, 32, dtype=torch.bool)
    adam, weights = Adam(1e-2, clip=10.0), model.init(0)
    state = adam.init(weights)
    for i in range(100):
        side = keys.integers(keys.make(i), (3, 32), 5)
        rows = {"obs": (side.unsqueeze(-1) == torch.arange(5)).float(), "reward": torch.zeros(3, 32),
                "terminated": none, "truncated": none}  # fmt: skip
        gradient, (states, metrics) = torch.func.grad(model.loss, has_aux=True)(
            weights, rows, torch.zeros(3, 32, 1), keys.make(1000 + i)
        )
        weights, state = adam.step(weights, gradient, state)
    right = model.net(weights, "decoder", states).argmax(-1) == side
    assert right.float().mean() > 0.95 and metrics["kl"] > 1.4


def test_the_actor_prefers_what_imagination_rewards():
    agent = Dreamer("CartPole-v1", n_envs=2, learning_rate=0.01, ent_coef=0.0, **SMALL)
    learner = {**agent.init(0), "progress": torch.zeros(())}
    states = keys.normal(keys.make(0), (4, 50, agent.world.features))
    action = keys.integers(keys.make(1), (4, 50), 2)
    dream = {"state": states, "action": action, "reward": action.float(), "goes_on": torch.zeros(4, 50),
             "last": states[0]}  # fmt: skip
    for _ in range(20):
        learner, metrics = agent.behave(learner, dream)
    assert agent.pi(learner["actor"], states).softmax(-1)[..., 1].mean() > 0.8
    assert float(metrics["imagined_return"]) == pytest.approx(float(action.float().mean()))


def test_advantages_are_scaled_by_the_middle_of_the_returns():
    """The range moves by a hundredth to that from the 5th to the 95th percentile, here of the order of 20 rewards."""
    agent = Dreamer("CartPole-v1", n_envs=2, **SMALL)
    learner = {**agent.init(0), "progress": torch.zeros(())}
    reward = keys.normal(keys.make(2), (4, 5)) * 100
    states = keys.normal(keys.make(0), (4, 5, agent.world.features))
    dream = {"state": states, "action": keys.integers(keys.make(1), (4, 5), 2), "reward": reward,
             "goes_on": torch.zeros(4, 5), "last": states[0]}  # fmt: skip
    after, _ = agent.behave(learner, dream)
    low, high = (reward.flatten().quantile(q, interpolation="lower") for q in (0.05, 0.95))
    torch.testing.assert_close(after["range"], 0.99 * learner["range"] + 0.01 * (high - low))


def test_iterations_learn_from_sequences_and_wrong_options_are_refused():
    agent = Dreamer("CartPole-v1", n_envs=2, n_steps=20, **SMALL).learn(120)
    assert all(torch.tensor(x).isfinite() for x in agent.metrics.values())
    assert agent.evaluate(2, deterministic=False).mean > 5
    with pytest.raises(ValueError, match="set it to at least 80"):
        Dreamer("CartPole-v1", n_envs=16, **SMALL)
