"""Returns and advantages, against loops that follow their definitions."""

import pytest
import torch

from tutti.rl.returns import discounted, gae, vtrace

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
    found = gae(reward, value, after, terminated, done, 0.9, 0.8)
    for t in range(T):
        for i in range(N):
            total, weight = 0.0, 1.0
            for s in range(t, T):
                follows = 0.0 if terminated[s, i] else float(after[s, i])
                total += weight * float(reward[s, i] + 0.9 * follows - value[s, i])
                weight *= 0.9 * 0.8
                if done[s, i]:
                    break
            assert abs(float(found[t, i]) - total) < 1e-12


def test_discounted_sums_end_with_the_episode(rows):
    reward, _, after, terminated, done, _ = rows
    found = discounted(reward, after, terminated, done, 0.9)
    for t in range(T):
        for i in range(N):
            total, weight = 0.0, 1.0
            for s in range(t, T):
                total += weight * float(reward[s, i])
                weight *= 0.9
                if done[s, i] or s == T - 1:
                    total += 0.0 if terminated[s, i] else weight * float(after[s, i])
                    break
            assert abs(float(found[t, i]) - total) < 1e-12


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
