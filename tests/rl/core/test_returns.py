"""Returns and advantages, against loops that follow their definitions."""

import pytest
import torch

from tutti.rl.core.returns import deviation, discounted, explained, gae, mean_of, mean_over, standardized, vtrace
from tutti.rl.placement.ranks import Ranks

T, N = 12, 5


@pytest.fixture
def rows():
    torch.manual_seed(0)
    reward, value, after, ratio = torch.rand(4, T, N, dtype=torch.float64)
    terminated = torch.rand(T, N) < 0.2
    done = terminated | (torch.rand(T, N) < 0.15)
    after = torch.where(done, after, torch.cat([value[1:], after[-1:]]))
    return reward, value, after, terminated, done, 2 * ratio


def test_gae_is_the_sum_of_its_definition(rows):
    reward, value, after, terminated, done, _ = rows
    advantages = gae(reward, value, after, terminated, done, 0.9, 0.8)
    for t in range(T):
        for i in range(N):
            total, weight = 0.0, 1.0
            for s in range(t, T):
                follows = 0.0 if terminated[s, i] else float(after[s, i])
                total += weight * float(reward[s, i] + 0.9 * follows - value[s, i])
                weight *= 0.9 * 0.8
                if done[s, i]:
                    break
            assert abs(float(advantages[t, i]) - total) < 1e-12


def test_discounted_sums_end_with_the_episode(rows):
    reward, _, after, terminated, done, _ = rows
    returns = discounted(reward, after, terminated, done, 0.9)
    for t in range(T):
        for i in range(N):
            total, weight = 0.0, 1.0
            for s in range(t, T):
                total += weight * float(reward[s, i])
                weight *= 0.9
                if done[s, i] or s == T - 1:
                    total += 0.0 if terminated[s, i] else weight * float(after[s, i])
                    break
            assert abs(float(returns[t, i]) - total) < 1e-12


def test_vtrace_is_the_sum_of_its_definition(rows):
    reward, value, after, terminated, done, ratio = rows
    target, advantage = vtrace(ratio, reward, value, after, terminated, done, 0.9, 0.95, 1.0, 0.7)
    for i in range(N):
        for t in range(T):
            total, weight = float(value[t, i]), 1.0
            for s in range(t, T):
                follows = 0.0 if terminated[s, i] else float(after[s, i])
                delta = min(float(ratio[s, i]), 1.0) * (float(reward[s, i]) + 0.9 * follows - float(value[s, i]))
                total += weight * delta
                weight *= 0.9 * 0.95 * min(float(ratio[s, i]), 0.7)
                if done[s, i]:
                    break
            assert abs(float(target[t, i]) - total) < 1e-12
            later = after[t, i] if done[t, i] or t == T - 1 else target[t + 1, i]
            later = 0.0 if terminated[t, i] else float(later)
            wanted = min(float(ratio[t, i]), 1.0) * (float(reward[t, i]) + 0.9 * later - float(value[t, i]))
            assert abs(float(advantage[t, i]) - wanted) < 1e-12


def test_vtrace_of_the_same_policy_is_the_discounted_return(rows):
    """Espeholt et al. 2018, remark 1: with equal policies, targets are n-step Bellman targets."""
    reward, value, after, terminated, done, _ = rows
    target, _ = vtrace(torch.ones_like(reward), reward, value, after, terminated, done, 0.9)
    torch.testing.assert_close(target, discounted(reward, after, terminated, done, 0.9))


def test_the_mean_over_ranks_is_that_of_all_rows_that_count():
    x, weights = torch.randn(3, 4, 5, 2), torch.ones(2)
    valid = torch.arange(60).view(3, 4, 5) % 10 < torch.tensor([1, 9, 0]).view(3, 1, 1)

    def loss(weights, rank):
        return mean_of((x[rank] * weights).square(), valid[rank])

    each = Ranks(3).run(lambda rank: torch.func.grad_and_value(loss)(weights, rank))
    gradient, value = (torch.stack(parts).mean(0) for parts in zip(*each, strict=True))
    torch.testing.assert_close(value, x[valid].square().mean())
    torch.testing.assert_close(gradient, x[valid].square().mean(0))
    nothing = torch.zeros(4, 5, dtype=torch.bool)
    assert Ranks(2).run(lambda rank: mean_over(nothing)(x[rank]).item()) == [0, 0]


def test_statistics_of_advantages_are_those_of_a_rank():
    x, valid = torch.randn(2, 6), torch.tensor([[1, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]).bool()

    def work(rank):
        mine = x[rank], valid[rank]
        return standardized(*mine)[valid[rank]], deviation(*mine), explained(x[rank], 2 * x[rank], valid[rank])

    for rank, (moved, spread, share) in enumerate(Ranks(2).run(work)):
        mine = x[rank][valid[rank]]
        torch.testing.assert_close(spread, mine.std())
        torch.testing.assert_close(moved, (mine - mine.mean()) / (mine.std() + 1e-8))
        torch.testing.assert_close(share, torch.tensor(0.75))
