"""Parts of policy-gradient losses: ratios, clipping, divergences and means.

Log-probabilities, advantages and masks are (rows, t); masks are 1 at tokens that are learned, elsewhere 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 20.0  # of a log-ratio, so that its exponential is finite


def log_ratios(logprobs: Tensor, old: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """log of new over old probabilities, of tokens (rows, t); or with level="sequence" of sequences, (rows, 1).

    That of a sequence is the mean over its tokens (GSPO, Zheng et al. 2025, arXiv:2507.18071), so it does not grow with
    the length.
    """
    ratios = (logprobs - old) * mask
    if level == "sequence":
        ratios = ratios.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"level {level!r}; expected token or sequence")
    return ratios.clamp(-LARGEST, LARGEST)


def clipped_loss(ratios: Tensor, advantages: Tensor, low: float, high: float, delta: float | None = None) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, Schulman et al. 2017, arXiv:1707.06347).

    delta: the largest ratio of negative advantages, too (INTELLECT-2, arXiv:2505.07291).
    """
    plain = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.minimum(plain * advantages, ratios.clamp(1 - low, 1 + high) * advantages)


def clipped_share(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Mask of tokens whose gradient is zeroed by clipping: 1 or 0."""
    out = ((ratios < 1 - low) & (advantages < 0)) | ((ratios > 1 + high) & (advantages > 0))
    return out.float()


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased estimate of KL(policy || reference) that is never negative: e^d - d - 1 with d = log p_ref - log p
    (Schulman, "Approximating KL divergence", 2020)."""
    change = (reference - logprobs).clamp(-LARGEST, LARGEST)
    return change.exp() - change - 1


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the distribution of each token: (rows, t - 1) for logits (rows, t, vocabulary)."""
    logprobs = torch.log_softmax(logits[:, :-1].float(), -1)
    return -(logprobs.exp() * logprobs).sum(-1)


def mean_of_tokens(x: Tensor, mask: Tensor, items: Tensor | None) -> Tensor:
    """The mean over the masked tokens of a step, 0-d. items: their number over that of microbatches; None: those of
    this batch."""
    return (x * mask).sum() / (mask.sum() if items is None else items).clamp(min=1)


def mean_of_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over the masked tokens of each row, (rows); 0 for a row without any."""
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1)
