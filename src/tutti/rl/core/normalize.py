"""Running statistics by which observations and rewards are normalized, as a part of the learner's state.

Observations become (x - mean) / std, clipped to [-10, 10]; rewards are divided by the standard deviation of discounted
returns. Statistics are merged chunk by chunk (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tutti
from tutti.rl.core.env import ends
from tutti.rl.networks.pixels import scaled
from tutti.rl.placement.ranks import mean_of_ranks

Tree = dict[str, Any]
CLIP, EPS = 10.0, 1e-8


class Normalizer:
    """obs, reward: whether observations (size,) and rewards are normalized."""

    def __init__(self, size: int, obs: bool = False, reward: bool = False):
        self.size, self.obs, self.reward = size, obs, reward

    def init(self, rows: tuple[int, ...]) -> Tree:
        """Initial statistics. rows: the shape of a reward."""
        state: Tree = {}
        if self.obs:
            state["obs_norm"] = _empty(self.size)
        if self.reward:
            state["reward_norm"] = {**_empty(1), "return": torch.zeros(rows)}
        return state

    def apply(self, learner: Tree, obs: Tensor) -> Tensor:
        """Normalized features; pixels as numbers up to 1."""
        obs = scaled(obs)
        if not self.obs:
            return obs
        norm = learner["obs_norm"]
        return ((obs - norm["mean"]) / (norm["var"] + EPS).sqrt()).clamp(-CLIP, CLIP)

    def update(self, learner: Tree, chunk: Tree, gamma: Any = 1.0) -> tuple[Tree, Tree]:
        """The learner with statistics that include the chunk, and the chunk normalized: observations as the policy that
        acted has seen them, rewards by the new statistics. gamma: discount of the returns that scale rewards."""
        learner, chunk = dict(learner), dict(chunk)
        if self.obs:
            rows, valid = scaled(chunk["obs"]).reshape(-1, self.size), chunk.get("valid")
            for name in ("obs", "last"):
                chunk[name] = self.apply(learner, chunk[name])
            learner["obs_norm"] = _merged(learner["obs_norm"], rows, valid)
        if self.reward:
            norm = learner["reward_norm"]
            done = ends(chunk, chunk["reward"])[1]

            def body(total: Tensor, x: tuple[Tensor, Tensor]):
                reward, done = x
                total = total * gamma + reward
                return torch.where(done, torch.zeros_like(total), total), total

            last, totals = tutti.scan(body, norm["return"], (chunk["reward"], done))
            merged = _merged({k: norm[k] for k in ("count", "mean", "var")}, totals.reshape(-1, 1),
                             chunk.get("valid"))  # fmt: skip
            learner["reward_norm"] = {**merged, "return": last}
            chunk["reward"] = (chunk["reward"] / (merged["var"] + EPS).sqrt()).clamp(-CLIP, CLIP)
        return learner, chunk


def over_ranks(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of the rows of all ranks, of those of each, which has equally many."""
    whole = mean_of_ranks(mean)
    return whole, mean_of_ranks(var + (mean - whole).square())


def _empty(size: int) -> Tree:
    return {"count": torch.full((), 1e-4), "mean": torch.zeros(size), "var": torch.ones(size)}


def _merged(norm: Tree, rows: Tensor, valid: Tensor | None = None) -> Tree:
    """Statistics that include more rows (n, size). valid: bool, as many, which of them count."""
    n: Any = len(rows)
    if valid is None:
        mean, var = over_ranks(rows.mean(0), rows.var(0, correction=0))
    else:  # of which ranks have unequally many
        counts = valid.reshape(-1, 1)
        n = mean_of_ranks(counts.sum().float())
        each = n.clamp(min=1e-6)
        mean = mean_of_ranks(torch.where(counts, rows, 0.0).sum(0)) / each
        var = mean_of_ranks(torch.where(counts, (rows - mean).square(), 0.0).sum(0)) / each
    total = norm["count"] + n
    moved = mean - norm["mean"]
    spread = norm["var"] * norm["count"] + var * n + moved.square() * norm["count"] * n / total
    return {"count": total, "mean": norm["mean"] + moved * n / total, "var": spread / total}
