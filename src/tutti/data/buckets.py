"""Pad sequences to a few lengths, so that few shapes of a batch are ever compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

PADDED = {
    "attention_mask": 0, "decoder_attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": -100,
    "position_ids": 0, "decoder_position_ids": 0, "input_values": 0,
}  # fmt: skip
"""Padding values by entry. `input_ids` and `decoder_input_ids` take the padding token."""

_IDS = {"input_ids", "decoder_input_ids"}


def bucket(length: int, parts: int = 8, multiple: int = 8) -> int:
    """The length that a sequence is padded to: a multiple of `multiple`, and of 1 / `parts` of the power of two below.

    So beyond `parts * multiple` at most 1 / `parts` of a sequence is padding.

    >>> [bucket(n) for n in (1, 16, 17, 128, 129, 200)]
    [8, 16, 24, 128, 144, 208]
    """
    below = 1 << max(length - 1, 1).bit_length() - 1
    every = max(multiple, below // parts)
    return -(-length // every) * every


def bucket_lengths(longest: int, parts: int = 8, multiple: int = 8) -> list[int]:
    """All lengths of `bucket`, up to the last one, `longest`.

    >>> bucket_lengths(100, parts=4)
    [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    """
    lengths, length = [], bucket(1, parts, multiple)
    while length < longest:
        lengths.append(length)
        length = bucket(length + 1, parts, multiple)
    return [*lengths, longest]


def pad_to_bucket(
    batch: Mapping[str, Any],
    lengths: Sequence[int] | None = None,
    *,
    pad_id: int = 0,
    longest: int | None = None,
    values: Mapping[str, float] | None = None,
    side: str = "right",
) -> dict[str, Any]:
    """Pad the sequence dims of a batch to the next bucket.

    batch: tensors by name. The sequence dim is the last one of `input_ids`, `attention_mask`, `token_type_ids`,
        `position_ids`, `labels` and their `decoder_` forms (and of `input_values`); a mask of 4 dims is padded in its
        last two. Entries that share the length of `input_ids` go to its bucket; the decoder's entries, and labels of
        another length, go to a bucket of their own. Other entries are unchanged.
    lengths: the buckets, ascending; by default `bucket_lengths(longest)`.
    pad_id: the padding token.
    longest: the model's maximum length. By default a bucket is made for any length.
    values: padding values of further entries, by name.
    side: "right" or "left".

    A missing attention mask is added if `input_ids` is padded, and `decoder_attention_mask` likewise, unless there are
    `position_ids`, which tell packed sequences apart where there is no mask. Labels with one value per row (no sequence
    dim) and floating-point labels are unchanged. In a mask of 4 dims, padding attends to padding.

    Raises ValueError if a sequence is longer than the last bucket.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side is {side!r}; it must be 'right' or 'left'")
    fills = {**PADDED, **dict.fromkeys(_IDS, pad_id), **(values or {})}
    padded = dict(batch)
    groups: dict[int, list[str]] = {}
    for name, x in padded.items():
        floats = isinstance(x, torch.Tensor) and x.is_floating_point() and name == "labels"
        if name in fills and isinstance(x, torch.Tensor) and x.ndim >= 2 and not floats:
            groups.setdefault(x.shape[-1], []).append(name)
    for length, names in groups.items():
        target = _target(length, lengths, longest)
        if target == length:
            continue
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            if ids in names and mask not in padded and "position_ids" not in padded:
                padded[mask] = torch.ones_like(padded[ids])
                names = [*names, mask]
        for name in names:
            padded[name] = _padded(padded[name], target - length, fills[name], side)
    return padded


def _target(length: int, lengths: Sequence[int] | None, longest: int | None) -> int:
    if lengths is None:
        lengths = [bucket(length)] if longest is None else bucket_lengths(longest)
    fitting = next((n for n in lengths if n >= length), None)
    if fitting is None:
        raise ValueError(
            f"a sequence of {length} is longer than the last bucket, {lengths[-1]}; truncate it or add a bucket"
        )
    return fitting


def _padded(x: torch.Tensor, more: int, value: float, side: str) -> torch.Tensor:
    pads = (0, more) if side == "right" else (more, 0)
    if x.ndim != 4:
        return F.pad(x, pads, value=bool(value) if x.dtype == torch.bool else value)
    closed = torch.finfo(x.dtype).min if x.is_floating_point() else False  # (batch, heads, queries, keys)
    padded = F.pad(x, pads * 2, value=closed)
    corner = slice(-more, None) if side == "right" else slice(more)
    padded[..., corner, corner] = 0 if x.is_floating_point() else True
    return padded
