"""Advantages and returns against closed forms, and the parts of policy gradients against definitions by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tutti.align import objectives
from tutti.align.advantages import (
    generalized_advantages,
    group_advantages,
    leave_one_out,
    normalized,
    returns_to_go,
)
from tutti.align.algorithms.grpo import reduced
from tutti.align.algorithms.ppo import value_loss
from tutti.align.algorithms.reinforce import token_rewards

NAN = float("nan")


def test_groups_are_compared_with_themselves():
    rewards = torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 10.0])
    advantages = group_advantages(rewards, 3)
    torch.testing.assert_close(advantages[:3], torch.tensor([-1.0, 0.0, 1.0]) / 1.0001)
    assert advantages[3:].tolist() == [0, 0, 0], "equal rewards teach nothing, and nothing is divided by 0"
    assert group_advantages(rewards, 3, "none").tolist() == [-1, 0, 1, 0, 0, 0]
    torch.testing.assert_close(group_advantages(rewards, 3, "batch")[2], 1 / (rewards.std() + 1e-4))
    with pytest.raises(ValueError, match="expected group, batch or none"):
        group_advantages(rewards, 3, "all")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_large_equal_rewards_teach_nothing(scale):
    advantages = group_advantages(torch.full((14,), 1000.1), 7, scale)
    assert advantages.dtype == torch.float32 and advantages.abs().max() < 1e-6


def test_rewards_that_are_missing_count_for_nothing():
    rewards = torch.tensor([1.0, NAN, 3.0, NAN, NAN, NAN, math.inf, 5.0, 5.0])
    advantages = group_advantages(rewards, 3)
    torch.testing.assert_close(advantages[:3], torch.tensor([-1.0, 0.0, 1.0]) / (2**0.5 + 1e-4))
    assert advantages[3:].tolist() == [0] * 6
    assert leave_one_out(rewards, 3).tolist() == [-2, 0, 2, 0, 0, 0, 0, 0, 0]


def test_one_is_left_out():
    advantages = leave_one_out(torch.tensor([1.0, 2.0, 6.0]), 3)
    torch.testing.assert_close(advantages, torch.tensor([1 - 4.0, 2 - 3.5, 6 - 1.5]))
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(torch.ones(3), 1)


def test_generalized_advantages_are_sums_of_differences():
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 6), torch.randn(4, 6)
    mask = torch.tensor(
        [[0, 1, 1, 1, 1, 0], [1] * 6, [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1]]
    ).float()  # the last row has two turns
    gamma, lam = 0.9, 0.8
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, lam)
    for r in range(4):
        at = [i for i in range(6) if mask[r, i]]
        for k, t in enumerate(at):
            following = [*at[k:], None]
            deltas = []
            for i, j in pairwise(following):
                after = 0.0 if j is None else float(values[r, j])
                deltas.append(float(rewards[r, i]) + gamma * after - float(values[r, i]))
            expected = sum((gamma * lam) ** n * d for n, d in enumerate(deltas))
            assert float(advantages[r, t]) == pytest.approx(expected, abs=1e-5)
            assert float(returns[r, t]) == pytest.approx(expected + float(values[r, t]), abs=1e-5)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


def test_with_lambda_1_they_are_returns_less_values():
    rewards, values, mask = torch.randn(2, 5), torch.randn(2, 5), torch.ones(2, 5)
    advantages, returns = generalized_advantages(rewards, values, mask, 0.95, 1.0)
    torch.testing.assert_close(returns, returns_to_go(rewards, 0.95))
    torch.testing.assert_close(advantages, returns_to_go(rewards, 0.95) - values)


def test_whitening():
    x, mask = torch.randn(4, 5) * 3 + 2, (torch.rand(4, 5) > 0.4).float()
    whitened = normalized(x, mask)
    inside = whitened[mask > 0]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-5)
    assert float(inside.var(unbiased=False)) == pytest.approx(1, abs=1e-4)
    assert torch.equal(whitened[mask == 0], x[mask == 0])
    scaled = normalized(x, mask, center=False)[mask > 0]
    assert float(scaled.mean()) == pytest.approx(float(x[mask > 0].mean()), abs=1e-4)
    assert bool(normalized(torch.ones(2, 2)).isfinite().all())


def test_rewards_come_at_the_last_token():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).float()
    rewards = token_rewards(torch.tensor([2.0, NAN, 5.0]), mask)
    assert rewards.tolist() == [[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_ratios_of_sequences_do_not_grow_with_the_length():
    old, mask = -torch.rand(2, 300), torch.ones(2, 300)
    assert objectives.log_ratios(old, old, mask, "sequence").abs().max() == 0
    new = old + 0.01
    torch.testing.assert_close(objectives.log_ratios(new, old, mask, "sequence"), torch.full((2, 1), 0.01))
    torch.testing.assert_close(
        objectives.log_ratios(new, old, mask, "sequence"),
        objectives.log_ratios(new[:, :3], old[:, :3], mask[:, :3], "sequence"),
    )
    far = objectives.log_ratios(old + 100, old, mask).exp()
    assert bool(far.isfinite().all())
    with pytest.raises(ValueError, match="expected token or sequence"):
        objectives.log_ratios(old, old, mask, "word")


def test_clipping():
    draw = torch.Generator().manual_seed(0)
    log = torch.randn(40, generator=draw, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(40, generator=draw, dtype=torch.float64)
    losses = objectives.clipped_loss(log.exp(), advantages, 0.2, 0.3)
    for r, a, loss in zip(log.exp().tolist(), advantages.tolist(), losses.tolist(), strict=True):
        assert loss == pytest.approx(-min(r * a, min(max(r, 0.8), 1.3) * a))
    (slope,) = torch.autograd.grad(losses.sum(), log)
    gone = objectives.clipped_share(log.exp().detach(), advantages, 0.2, 0.3) > 0
    assert torch.equal(slope == 0, gone) and 0 < int(gone.sum()) < 40
    assert torch.autograd.gradcheck(lambda x: objectives.clipped_loss(x.exp(), advantages, 0.2, 0.3), (log,))
    capped = objectives.clipped_loss(torch.tensor([50.0]), torch.tensor([-1.0]), 0.2, 0.2, delta=4.0)
    assert capped.tolist() == [4.0]


def test_the_estimate_of_the_divergence_is_unbiased_and_not_negative():
    torch.manual_seed(0)
    p, q = torch.softmax(torch.randn(5).double(), 0), torch.softmax(torch.randn(5).double(), 0)
    each = objectives.divergence(p.log(), q.log())
    assert bool((each >= 0).all())
    torch.testing.assert_close((p * each).sum(), (p * (p / q).log()).sum())
    assert bool(objectives.divergence(torch.tensor([-900.0]), torch.tensor([0.0])).isfinite())


def test_entropy():
    logits = torch.randn(2, 4, 6)
    expected = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    torch.testing.assert_close(objectives.entropy(logits), expected)


def test_means_of_losses():
    each, mask = torch.arange(6.0).view(2, 3), torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    assert float(reduced(each, mask, "grpo", None, 4)) == 0.25  # (0 + 1) / 2 / 2 rows
    assert float(reduced(each, mask, "bnpo", torch.tensor(7.0), 4)) == 0.5
    assert float(reduced(each, mask, "dapo", torch.tensor(4.0), 4)) == 0.25
    assert float(reduced(each, mask, "dr_grpo", None, 4)) == 1 / 8
    assert float(reduced(each, mask * 0, "dapo", torch.tensor(0.0), 4)) == 0, "nothing is learned, and nothing is nan"


def test_values_are_clipped():
    values, old, returns = torch.tensor([1.0, 0.1, 3.0]), torch.tensor([0.0, 0.0, 2.9]), torch.tensor([2.0, 1.0, 3.0])
    expected = [max(1.0, (0.2 - 2) ** 2) / 2, 0.81 / 2, 0.0]
    torch.testing.assert_close(value_loss(values, old, returns, 0.2), torch.tensor(expected))
