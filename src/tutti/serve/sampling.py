"""Choosing tokens: from logits to the next token of each sequence.

The order is that of `transformers`: bias, penalties and constraints change logits; then temperature, top-k, top-p and
min-p select. A token is the one at which the cumulative probability passes a random number that depends on the seed of
the request, the number of the sequence and the position only. So a request gets the same tokens in any batch, and again
after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.serve.request import Sampling, TokenLogprobs

OUT = float("-inf")
COLDEST = 1e-5


def uniform(seed: int, number: int, position: int) -> float:
    """A random number in [0, 1), a function of its arguments (SplitMix64; Steele et al., "Fast splittable pseudorandom
    number generators", 2014)."""
    state = seed
    for word in (number, position):
        state = _mixed(state + 0x9E3779B97F4A7C15 * (word + 1))
    return (state >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return x ^ (x >> 31)


class Row(NamedTuple):
    """What decides about a token besides its logits. prompt, output: the tokens before. allowed: a bool mask of the
    vocabulary, or None. ends: tokens that may not be chosen yet."""

    sampling: Sampling
    prompt: Several[int]
    output: Several[int]
    allowed: Tensor | None = None
    ends: Several[int] = ()


def adjusted(logits: Tensor, rows: Several[Row]) -> Tensor:
    """Logits (rows, vocabulary) after bias, penalties and constraints, in float32. The argument may be changed."""
    logits = logits.float()
    for x, row in zip(logits, rows, strict=True):
        sampling = row.sampling
        if sampling.logit_bias:
            places, values = zip(*sampling.logit_bias.items(), strict=True)
            x.index_add_(0, torch.tensor(places, device=x.device), torch.tensor(values, device=x.device))
        if sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted({*row.prompt, *row.output}), device=x.device)
            old = x[seen]
            x[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        if row.output and (sampling.presence_penalty or sampling.frequency_penalty):
            tokens, counts = torch.tensor(row.output, device=x.device).unique(return_counts=True)
            x[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if sampling.allowed is not None:
            kept = torch.tensor(list(sampling.allowed), device=x.device)
            x.copy_(torch.full_like(x, OUT).index_copy(0, kept, x[kept]))
        if row.allowed is not None:
            x.masked_fill_(~row.allowed, OUT)
        if row.ends:
            x[torch.tensor(list(row.ends), device=x.device)] = OUT
    return logits


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is taken: at temperatures that float32 cannot divide by, too."""
    return sampling.temperature < COLDEST


def probabilities(logits: Tensor, rows: Several[Sampling]) -> Tensor:
    """The distributions (rows, vocabulary) that tokens are drawn from, float32. Temperature 0 gives one token all."""
    chosen = torch.zeros_like(logits)
    greedy = torch.tensor([is_greedy(x) for x in rows], device=logits.device)
    chosen[greedy] = torch.nn.functional.one_hot(logits[greedy].argmax(-1), logits.shape[-1]).to(logits.dtype)
    drawn = [i for i, x in enumerate(rows) if not is_greedy(x)]
    if not drawn:
        return chosen

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(rows[i], name) for i in drawn], device=logits.device)[:, None]

    scaled = logits[drawn] / column("temperature")
    if any(rows[i].top_k or rows[i].top_p < 1 for i in drawn):
        ordered, order = scaled.sort(-1, descending=True)
        top_k, size = column("top_k"), scaled.shape[-1]
        kth = ordered.gather(1, torch.where(top_k > 0, top_k.clamp(max=size), size) - 1)
        ordered = ordered.masked_fill(ordered < kth, OUT)
        p = ordered.softmax(-1)
        top_p = column("top_p").clamp(min=1e-9)
        top_p = top_p.masked_fill(top_p >= 1, torch.inf)  # rounded sums exceed 1
        ordered = ordered.masked_fill((p.cumsum(-1) - p) >= top_p, OUT)
        scaled = torch.empty_like(scaled).scatter_(1, order, ordered)
    p = scaled.softmax(-1)
    p = p.masked_fill(p < column("min_p") * p.amax(-1, keepdim=True), 0)
    chosen[drawn] = p / p.sum(-1, keepdim=True)
    return chosen


def drawn(p: Tensor, numbers: Several[float]) -> Tensor:
    """The tokens (rows,) at which the cumulative probability passes a number in [0, 1) for each row."""
    total = p.double().cumsum(-1)
    at = torch.tensor(numbers, dtype=torch.float64, device=p.device)[:, None] * total[:, -1:]
    last = p.shape[-1] - 1 - p.flip(-1).ne(0).to(torch.uint8).argmax(-1)  # where rounding would go beyond it
    return torch.searchsorted(total, at, right=True)[:, 0].minimum(last)


def report(logits: Tensor, tokens: Several[int], counts: Several[int | None]) -> list[TokenLogprobs]:
    """The log-probability of a token of each row, and the most likely tokens. Logits are those of the model, before
    constraints, penalties and temperature."""
    logprobs = logits.float().log_softmax(-1)
    found = []
    for row, token, count in zip(logprobs, tokens, counts, strict=True):
        values, places = row.topk(count or 0)
        found.append(TokenLogprobs(int(token), float(row[token]),
                                   list(zip(places.tolist(), values.tolist(), strict=True))))  # fmt: skip
    return found
