"""Weights that correct for completions that other weights have written than those that learn from them.

Completions that are written ahead (`PolicyConfig.staleness`), or by an engine that computes in another precision, come
from a distribution q, and the gradient is one of an expectation under the distribution p that learns. With w = p / q,

    E_q[w A grad log p] = E_p[A grad log p]

w is that of the weights at the beginning of the round; the ratio of the loss is relative to them, so clipping is, too
(the decoupled objective of Hilton et al. 2021, arXiv:2110.00641). Large w are truncated to `clip_max`, C: then the
expectation is that of min(p, C q) in place of p, and the variance is bounded (Ionides 2008; for language models Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tutti.align.objectives import LARGEST

MODES = "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"


def importance_weights(
    logprobs: Tensor, sampled: Tensor, mask: Tensor, mode: str = "token_truncate", clip_max: float | None = 3.0
) -> Tensor:
    """p / q of each token, or of the whole completion at each of its tokens; (rows, t), 1 where the mask is 0.

    logprobs: log p, and sampled: log q, (rows, t). mask: 1 at tokens of the completion that count. mode: token_* or
    sequence_*; *_truncate, those above clip_max become clip_max; *_mask, they become 0. clip_max: None for no bound but
    that of finite numbers.

    Products of many tokens are sums of logarithms, so they are finite for any length. Raises ValueError for an unknown
    mode.
    """
    if mode not in MODES:
        raise ValueError(f"importance_sampling_mode {mode!r}; expected one of {', '.join(MODES)}")
    level, _, what = mode.partition("_")
    change = torch.where(mask > 0, logprobs - sampled, 0)
    if level == "sequence":
        change = change.sum(1, keepdim=True).expand_as(change)
    limit = LARGEST if clip_max is None else math.log(clip_max)
    weights = change.clamp(max=limit).exp()
    if what == "mask":
        weights = torch.where(change > limit, 0, weights)
    return torch.where(mask > 0, weights, 1)
