"""Returns and advantages of trajectories: pure functions of tensors (time, ...).

terminated: no reward follows. done: terminated or truncated; the next row belongs to another episode. after: values of
the last observation of each step, which is that of the episode that ended and not of the one that begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import tutti
from tutti.rl.core.env import over
from tutti.rl.placement.ranks import mean_of_ranks

Number = float | Tensor


def mean_over(valid: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function that takes the mean over rows. valid: bool, the first dims of what it is given, which rows count;
    None: all. 0 where none does.

    Ranks that learn together have unequally many rows that count: what this returns on each is such that its mean over
    the ranks is the mean over the rows of all of them.
    """
    if valid is None:
        return torch.mean
    return partial(_mean, valid=valid, rows=mean_of_ranks(valid.sum().float()).clamp(min=1e-6))


def mean_of(x: Tensor, valid: Tensor | None) -> Tensor:
    """The mean over rows, as of `mean_over`."""
    return mean_over(valid)(x)


def _mean(x: Tensor, valid: Tensor, rows: Tensor) -> Tensor:
    """rows: how many count."""
    return torch.where(over(valid, x), x, 0.0).sum() / (rows * (x.numel() // valid.numel()))


def _own_mean(x: Tensor, valid: Tensor) -> Tensor:
    """The mean over the rows of this rank that count."""
    return _mean(x, valid, valid.sum().clamp(min=1))


def standardized(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantages with mean 0 and standard deviation 1, as Stable-Baselines3 has them: one row alone stays as it is."""
    if valid is None:
        return x if x.numel() < 2 else (x - x.mean()) / (x.std() + 1e-8)
    moved = (x - _own_mean(x, valid)) / (deviation(x, valid) + 1e-8)
    return torch.where(valid, torch.where(valid.sum() < 2, x, moved), 0.0)


def deviation(x: Tensor, valid: Tensor | None) -> Tensor:
    """The standard deviation of the rows that count, without bias; 1 of one row."""
    if valid is None:
        return x.std() if x.numel() > 1 else torch.ones_like(x.sum())
    square, count = (x - _own_mean(x, valid)).square(), valid.sum()
    return torch.where(count < 2, 1.0, (torch.where(valid, square, 0.0).sum() / (count - 1).clamp(min=1)).sqrt())


def explained(value: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Share of the variance of targets that values explain; 0 for a single row."""
    if valid is None:
        if target.numel() < 2:
            return torch.zeros_like(target.sum())
        return 1 - (target - value).var() / (target.var() + 1e-8)
    residual, total = (_own_mean((x - _own_mean(x, valid)).square(), valid) for x in (target - value, target))
    return torch.where(valid.sum() < 2, 0.0, 1 - residual / (total + 1e-8))


def gae(reward: Tensor, value: Tensor, after: Tensor, terminated: Tensor, done: Tensor, gamma: Number, lam: Number):
    """Generalized advantage estimates, as `value` (Schulman et al., 2016, equation 16)."""
    delta = reward + gamma * after * ~terminated - value

    def body(advantage: Tensor, x: tuple[Tensor, Tensor]):
        delta, done = x
        advantage = delta + gamma * lam * advantage * ~done
        return advantage, advantage

    return tutti.scan(body, torch.zeros_like(delta[0]), (delta, done), reverse=True)[1]


def discounted(reward: Tensor, after: Tensor, terminated: Tensor, done: Tensor, gamma: Number) -> Tensor:
    """Sums of discounted rewards to the end of the episode, or of the trajectory, which values continue."""
    return gae(reward, torch.zeros_like(reward), after * _cut(done), terminated, done, gamma, 1.0)


def _cut(done: Tensor) -> Tensor:
    """Mask of the rows where a sum ends: ends of episodes, and the last row."""
    last = torch.zeros_like(done)
    last = torch.cat([last[:-1], torch.ones_like(done[:1])])
    return done | last


def lambda_returns(reward: Tensor, discount: Tensor, value: Tensor, lam: Number) -> Tensor:
    """R_t = r_t + d_t ((1 - lam) v_{t+1} + lam R_{t+1}), (time, n). value: (time + 1, n); the last one is R there."""

    def body(later: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        reward, discount, after = x
        now = reward + discount * ((1 - lam) * after + lam * later)
        return now, now

    return tutti.scan(body, value[-1], (reward, discount, value[1:]), reverse=True)[1]


def vtrace(
    ratio: Tensor, reward: Tensor, value: Tensor, after: Tensor, terminated: Tensor, done: Tensor, gamma: Number,
    lam: Number = 1.0, rho: float = 1.0, c: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Value targets and policy-gradient advantages of V-trace (Espeholt et al., 2018, section 4.1).

    ratio: pi(a|s) / mu(a|s) of the learner's and the actor's policy. rho, c: its upper bounds.
    """
    bounded, trace = ratio.clamp(max=rho), lam * ratio.clamp(max=c)
    delta = bounded * (reward + gamma * after * ~terminated - value)

    def body(carry: Tensor, x: tuple[Tensor, ...]):
        delta, trace, done = x
        carry = delta + gamma * trace * carry * ~done
        return carry, carry

    correction = tutti.scan(body, torch.zeros_like(delta[0]), (delta, trace, done), reverse=True)[1]
    target = value + correction
    later = torch.cat([target[1:], after[-1:]])
    later = torch.where(done, after, later)
    return target, bounded * (reward + gamma * later * ~terminated - value)


def n_step(reward: Tensor, after: Tensor, terminated: Tensor, done: Tensor, gamma: Number, steps: int) -> Tensor:
    """Sums of up to `steps` discounted rewards and the value that follows (Watkins, 1989). They are shorter where an
    episode or the trajectory ends."""
    after = after * ~terminated
    total = reward + gamma * after
    for _ in range(steps - 1):
        later = torch.cat([total[1:], after[-1:]])
        total = reward + gamma * torch.where(done, after, later)
    return total
