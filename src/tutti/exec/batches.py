"""Batches: microbatches, signatures, and checks against the example batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutti.ir.spec import Spec
from tutti.tracing.batch import Batch, batch_items, part, rows, statics

Signature = tuple[tuple, ...]  # (name, Spec) of tensors, (name, value, type) of static entries, sorted by name


def signature_of(batch: Batch) -> Signature:
    """What a captured graph depends on: names (in any order), shapes, dtypes and static values."""
    entries = [(name, Spec.of(x)) for name, x in batch_items(batch)]
    others = [(name, x, type(x).__name__) for name, x in statics(batch)]  # 1, 1.0 and True are equal
    return tuple(sorted([*entries, *others], key=lambda item: item[0]))


def microbatches(batch: Batch, count: int) -> list[Batch]:
    """Equal parts of a global batch along its batch dim (`capture.batch.part`)."""
    if count == 1:
        return [batch]
    size = rows(batch)
    if not size or size % count:
        name, x = next((item for item in batch_items(batch) if not size or item[1].shape[:1] == (size,)), ("", None))
        shape = None if x is None else tuple(x.shape)
        raise ValueError(f"batch entry {name!r} of shape {shape} does not divide into {count} microbatches")
    each = size // count
    return [part(batch, i * each, (i + 1) * each) for i in range(count)]


def batch_size(batch: Batch) -> int:
    """The number of rows, which microbatches must divide; 1 if no entry has rows."""
    return rows(batch) or 1


def check_like(batch: Batch, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise ValueError if a batch differs in names or dtypes from the example batch."""
    entries = dict(batch_items(batch))
    if missing := [key for key in dtypes if key not in entries]:
        name = missing[0]
        if isinstance(batch, Mapping) and name in batch:
            raise ValueError(
                f"batch entry {name!r} is a {type(batch[name]).__name__}; it was a tensor when the step was made"
            )
        raise ValueError(f"the batch lacks {name!r}; it had {list(dtypes)} when the step was made")
    if unknown := [key for key in entries if key not in dtypes]:
        raise ValueError(f"the batch has {unknown[0]!r}, which it did not have when the step was made")
    for key, x in entries.items():
        if x.dtype != dtypes[key]:
            raise ValueError(f"batch entry {key!r} is {x.dtype}; it was {dtypes[key]} when the step was made")
