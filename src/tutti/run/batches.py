"""Batches: their microbatches, their signatures, and whether one is like that for which the step was made."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import torch

from tutti.graph.capture import Batch, batch_items
from tutti.graph.step_graph import Spec

Signature = tuple[tuple[str, Spec], ...]


def signature_of(batch: Batch) -> Signature:
    """What a captured graph depends on: keys, in whatever order, shapes and dtypes."""
    return tuple(sorted(((key, Spec.of(x)) for key, x in batch_items(batch)), key=lambda item: item[0]))


def microbatches(batch: Batch, count: int) -> list[Batch]:
    """Equal parts of a global batch along dim 0."""
    if count == 1:
        return [batch]
    parts = {}
    for key, x in batch_items(batch):
        if x.ndim == 0 or x.shape[0] % count:
            raise ValueError(f"batch entry {key!r} of shape {tuple(x.shape)} does not divide into {count} microbatches")
        parts[key] = x.chunk(count)
    if isinstance(batch, Mapping):
        return [{key: parts[key][i] for key in parts} for i in range(count)]
    return [tuple(parts[key][i] for key in parts) for i in range(count)]


def batch_size(batch: Batch) -> int:
    """What the first dims of all entries are multiples of: microbatches divide it."""
    return gcd(*(x.shape[0] if x.ndim else 1 for _, x in batch_items(batch))) or 1


def check_like(batch: Batch, dtypes: Mapping[str, torch.dtype]) -> None:
    """ValueError where a batch has not the keys and dtypes that the step was made with."""
    given = dict(batch_items(batch))
    if missing := [key for key in dtypes if key not in given]:
        raise ValueError(f"the batch lacks {missing[0]!r}; it had {list(dtypes)} when the step was made")
    if unknown := [key for key in given if key not in dtypes]:
        raise ValueError(f"the batch has {unknown[0]!r}, which it did not have when the step was made")
    for key, x in given.items():
        if x.dtype != dtypes[key]:
            raise ValueError(f"batch entry {key!r} is {x.dtype}; it was {dtypes[key]} when the step was made")
