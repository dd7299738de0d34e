"""Choosing tokens: from logits to the next token of each sequence.

The order is that of `transformers`: bias, penalties and constraints change logits; then temperature, top-k, top-p and
min-p select. A token is the one at which the cumulative probability passes a random number that depends on the seed of
the request, the number of the sequence and the position only. So a request gets the same tokens in any batch, and again
after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import tutti.nn.sample  # noqa: F401  (registers the operator)
from tutti.serve.engine.request import Sampling, TokenLogprobs

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
    prompt: Sequence[int]
    output: Sequence[int]
    allowed: Tensor | None = None
    ends: Sequence[int] = ()

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed."""
        return not self.sampling.adjusts_nothing or self.allowed is not None or bool(self.ends)


def adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits (rows, vocabulary) after bias, penalties and constraints: in float32, and in the place of the argument if
    that is float32; or the argument, if no row is changed."""
    changed = [(i, row) for i, row in enumerate(rows) if row.adjusts]
    if not changed:
        return logits  # on a GPU, looking at a row takes as long as all rows of a kernel
    logits = logits.float()
    for i, row in changed:
        sampling, x = row.sampling, logits[i]
        if sampling.logit_bias:
            x.index_add_(0, *(part.to(x.device) for part in sampling.biases))
        if sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted({*row.prompt, *row.output}), device=x.device)
            old = x[seen]
            x[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
        if row.output and (sampling.presence_penalty or sampling.frequency_penalty):
            tokens, counts = torch.tensor(row.output, device=x.device).unique(return_counts=True)
            x[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if sampling.allowed_tokens is not None:
            allowed = sampling.allowed_tokens.to(x.device)
            x.copy_(torch.full_like(x, OUT).index_copy(0, allowed, x[allowed]))
        # one write for all: each takes as long as a thousand numbers, while all requests wait
        if bad := [x[-1] for x in sampling.bad if list(row.output[len(row.output) - len(x) + 1 :]) == list(x[:-1])]:
            x[torch.tensor(bad, device=x.device)] = OUT
        if row.allowed is not None:
            x.masked_fill_(~row.allowed, OUT)
        if row.ends:
            x[torch.tensor(list(row.ends), device=x.device)] = OUT
    return logits


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is taken: at temperatures that float32 cannot divide by, too."""
    return sampling.temperature < COLDEST


def drawn(logits: Tensor, rows: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """The token of each row of logits (rows, vocabulary) for a number in [0, 1): see `tutti.nn.sample`."""

    def column(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device)

    return torch.ops.tutti.sample(
        logits.float(), column(0 if is_greedy(x) else x.temperature for x in rows),
        column((x.top_k for x in rows), torch.int64), column(x.top_p for x in rows), column(x.min_p for x in rows),
        column(numbers),
    ).tolist()  # fmt: skip


def report(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int | None], others: Sequence[Sequence[int]] | None = None
) -> list[TokenLogprobs]:
    """The log-probability of a token of each row, those of the most likely tokens, and of `others` of the row. Logits
    are those of the model, before constraints, penalties and temperature."""
    logprobs = logits.float().log_softmax(-1)
    taken = torch.tensor(tokens, dtype=torch.int64, device=logits.device).clamp_(0)  # -1: none is left, an error later
    own = logprobs.gather(1, taken[:, None])
    ranks = (1 + (logprobs > own).sum(-1)).tolist()
    of_each = zip(own[:, 0].tolist(), ranks, counts, others or [()] * len(tokens), strict=True)
    reports = []
    for row, token, (logprob, rank, count, more) in zip(logprobs, tokens, of_each, strict=True):
        values, places = row.topk(count or 0)
        top = list(zip(places.tolist(), values.tolist(), strict=True))
        top += [(x, float(row[x])) for x in dict.fromkeys(more) if x not in dict(top)]
        reports.append(TokenLogprobs(int(token), logprob, top, rank))
    return reports
