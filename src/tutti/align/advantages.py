"""Advantages: the excess of the reward of an output over its expectation.

All are computed on the host and are float32, from rewards of whole completions or of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4  # added to standard deviations


def group_advantages(rewards: Tensor, size: int, scale: str = "group") -> Tensor:
    """(r - mean of the group) / (standard deviation + 1e-4), (rows): GRPO (Shao et al. 2024, arXiv:2402.03300).

    rewards: (rows), of groups of `size` completions of one prompt; those that are not finite count for nothing and get
    0. scale: "group"; "batch", the deviation of all rows (Liu et al. 2025, arXiv:2508.08221); or "none", no division
    (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). A group of equal rewards gets zeros.
    """
    grid = rewards.double().view(-1, size)  # the mean of equal large rewards in float32 differs from them
    valid = grid.isfinite()
    counts = valid.sum(1, keepdim=True).clamp(min=1)
    means = torch.where(valid, grid, 0).sum(1, keepdim=True) / counts
    centered = torch.where(valid, grid - means, 0)
    if scale == "group":
        deviation = (centered.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()
        return (centered / (deviation + EPSILON)).flatten().float()
    if scale == "batch":
        present = grid[valid]
        deviation = present.std() if len(present) > 1 else torch.zeros(())
        return (centered / (deviation + EPSILON)).flatten().float()
    if scale != "none":
        raise ValueError(f"scale {scale!r}; expected group, batch or none")
    return centered.flatten().float()


def leave_one_out(rewards: Tensor, size: int) -> Tensor:
    """r minus the mean of the other completions of the prompt, (rows): RLOO (Ahmadian et al. 2024, arXiv:2402.14740).

    rewards: (rows), of groups of `size` of at least 2; those that are not finite count for nothing and get 0.
    """
    if size < 2:
        raise ValueError(f"groups of {size}: leaving one out needs at least 2 completions of a prompt")
    grid = rewards.float().view(-1, size)
    valid = grid.isfinite()
    present = torch.where(valid, grid, 0)
    baseline = (present.sum(1, keepdim=True) - present) / (valid.sum(1, keepdim=True) - 1).clamp(min=1)
    alone = valid.sum(1, keepdim=True) < 2
    return torch.where(valid & ~alone, grid - baseline, 0).flatten()


def normalized(x: Tensor, mask: Tensor | None = None, center: bool = True) -> Tensor:
    """x with a mean of 0 and a variance of 1 over masked entries, which alone are changed (whitening).

    center: whether the mean becomes 0; otherwise it stays. mask: tensor of the shape of x, 1 or 0; None: all.
    """
    mask = torch.ones_like(x) if mask is None else mask.to(x.dtype)
    count = mask.sum().clamp(min=1)
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / count
    scaled = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask > 0, scaled if center else scaled + mean, x)


def returns_to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """The sum of gamma^i r_(t + i) from each token on, (rows, t). rewards: (rows, t)."""
    returns, total = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        total = rewards[:, t] + gamma * total
        returns[:, t] = total
    return returns


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of tokens, (rows, t): GAE (Schulman et al. 2016, arXiv:1506.02438).

        d_t = r_t + gamma v_(t+1) - v_t,      A_t = d_t + gamma lam A_(t+1),      R_t = A_t + v_t

    rewards, values: (rows, t). mask: 1 at tokens that the model has written; t + 1 is the next of those, so what an
    environment writes in between is left out. The value behind the last of them is 0, as the episode ends there.
    Elsewhere the results are 0.
    """
    mask = mask.to(values.dtype)
    values, rewards = values * mask, rewards * mask
    advantages, last = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    following = torch.zeros_like(last)
    for t in range(values.shape[1] - 1, -1, -1):
        on, delta = mask[:, t] > 0, rewards[:, t] + gamma * following - values[:, t]
        last = torch.where(on, delta + gamma * lam * last, last)
        following = torch.where(on, values[:, t], following)
        advantages[:, t] = last
    return advantages * mask, (advantages + values) * mask
