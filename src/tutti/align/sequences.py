"""Batches of sequences, and the log-probabilities that a model gives their tokens.

| entry of a batch | shape | |
|---|---|---|
| input_ids, attention_mask | (rows, t) int64 | padded at the end |
| labels | (rows, t) int64 | the tokens that are learned, elsewhere -100 |

Rows of pairs are (rows, 2, t): the chosen sequence, then the rejected one. So a part of a batch has whole pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tutti.data.buckets import bucket
from tutti.train.tasks.language.text import stacked

IGNORED = -100


def remainder(count: int, length: int | None, keep: str = "start") -> slice:
    """Slice of a sequence of `count` tokens that keeps at most `length` tokens at its start or end."""
    return slice(None, length) if keep == "start" or length is None else slice(max(0, count - length), None)


def cut(ids: Sequence[int], learned: Sequence[bool], length: int | None, keep: str = "start") -> dict[str, list[int]]:
    """A row of a dataset: `input_ids` and `labels`. Of sequences of more than `length` tokens, one end is kept."""
    part = remainder(len(ids), length, keep)
    ids, learned = list(ids)[part], list(learned)[part]
    return {"input_ids": ids, "labels": [x if on else IGNORED for x, on in zip(ids, learned, strict=True)]}


def batch_of(
    rows: Sequence[Mapping[str, Any]], pad: int, multiple: int | None = None, positions: int | None = None
) -> dict[str, Tensor]:
    """A batch of rows with `input_ids` and `labels`.

    They are padded to a multiple of `multiple`, or to one of a few lengths (`tutti.data.buckets`); but to no more than
    `positions`, those of the model.
    """
    ids = [list(x["input_ids"]) for x in rows]
    longest = max(map(len, ids))
    length = -(-longest // multiple) * multiple if multiple else bucket(longest)
    length = length if positions is None else max(longest, min(length, positions))
    fills = [[0] * (length - len(x)) for x in ids]
    return {
        "input_ids": stacked([x + [pad] * len(fill) for x, fill in zip(ids, fills, strict=True)], pad),
        "attention_mask": stacked([[1] * len(x) + fill for x, fill in zip(ids, fills, strict=True)], 0),
        "labels": stacked([list(x["labels"]) + [IGNORED] * len(fill) for x, fill in zip(rows, fills, strict=True)],
                          IGNORED),
    }  # fmt: skip


def batch_of_pairs(
    rows: Sequence[Mapping[str, Any]], pad: int, multiple: int | None = None, positions: int | None = None
) -> dict[str, Tensor]:
    """A batch of rows with two sequences each, `chosen` and `rejected`, which are rows of `batch_of`."""
    both = batch_of([x[key] for x in rows for key in ("chosen", "rejected")], pad, multiple, positions)
    return {name: x.unflatten(0, (-1, 2)) for name, x in both.items()}


def flat(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of pairs (rows, 2, t) as one of sequences (2 rows, t): chosen and rejected in turns."""
    return {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")}


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p of each label given what is before it: (rows, t - 1) float32, 0 where there is no label.

    logits: (rows, t, vocabulary). labels: (rows, t), -100 for none. Entry i is of label i + 1.
    """
    ahead = labels[:, 1:]
    lost = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ahead.flatten(), reduction="none", ignore_index=IGNORED
    )
    return -lost.view_as(ahead)


def model_logprobs(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """`token_logprobs` of a causal language model for a batch of sequences."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_logprobs(logits, batch["labels"])


def learned(labels: Tensor) -> Tensor:
    """Mask of the labels of `token_logprobs`: (rows, t - 1) float32, 1 or 0."""
    return (labels[:, 1:] != IGNORED).float()
