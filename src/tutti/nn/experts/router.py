"""The router of a mixture of experts: the experts of each token, their weights, and the balance of the load.

    s = softmax(W x) or sigmoid(W x)          index = the k largest of s + bias
    weight = s[index], divided by their sum if normalized

in float32 for any dtype of x. With E experts, T tokens, f_i the fraction of the T k choices that are expert i and P_i
the mean of its score (divided by the sum over experts for sigmoids):

    balance = E sum_i f_i P_i                 1 if balanced; only P is differentiated
    z = mean over tokens of (logsumexp of W x)^2

Balance: Fedus et al., "Switch Transformers" (2021), eq. 4 to 6, over all k choices. z: Zoph et al., "ST-MoE" (2022),
eq. 5. Without a loss: Wang et al., "Auxiliary-loss-free load balancing" (2024), algorithm 1, as in DeepSeek-V3: a bias
used only for the selection moves by `rate * sign(mean load - load)` in each forward pass in training.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """index (..., k) int64 and weight (..., k) float32; balance and z 0-d float32; load (E,) float32: number of choices
    per expert."""

    index: Tensor
    weight: Tensor
    balance: Tensor
    z: Tensor
    load: Tensor


class Router(nn.Module):
    """Maps x (..., hidden) to a `Routing`. bias_update: the rate of the bias; 0 for none.

    Raises ValueError for unknown scores, or a top_k outside 1 to `experts`.
    """

    bias: Tensor | None

    def __init__(
        self, hidden: int, experts: int, top_k: int, *, scores: str = "softmax", normalize: bool = True,
        bias_update: float = 0.0, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        if scores not in SCORES:
            raise ValueError(f"unknown scores {scores!r}; expected one of {', '.join(SCORES)}")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} of {experts} experts: it must be 1 to {experts}")
        self.experts, self.top_k = experts, top_k
        self.scores, self.normalize, self.bias_update = scores, normalize, bias_update
        self.weight = nn.Parameter(torch.empty(experts, hidden, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(experts, device=device) if bias_update else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Routing:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        index = (scores if self.bias is None else scores + self.bias).topk(self.top_k).indices
        weight = scores.gather(-1, index)
        if self.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        chosen = index.flatten()
        load = scores.new_zeros(self.experts).scatter_add(0, chosen, torch.ones_like(chosen, dtype=scores.dtype))
        if self.bias is not None and self.training:
            with torch.no_grad():
                self.bias.add_(self.bias_update * (load.mean() - load).sign())
        shares = scores if self.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        mean = shares.flatten(0, -2).mean(0)
        balance = self.experts * (load / chosen.numel() * mean).sum()
        return Routing(index, weight, balance, logits.logsumexp(-1).square().mean(), load)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, experts={self.experts}, top_k={self.top_k}, scores={self.scores!r}"
