"""Pack several short sequences into rows of one length, without attention between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tutti.data.rows import Rows

WINDOW = 1024


def pack_lengths(lengths: Sequence[int], capacity: int, window: int = WINDOW, fit: str = "best") -> list[list[int]]:
    """Which sequences share a row: lists of indices whose lengths sum to at most `capacity`.

    Windows of `window` sequences are packed one after the other, each by itself, longest sequence first (ties by
    index): best fit puts a sequence into the fullest row that has room, first fit into the first. So the rows are a
    function of the lengths, and those of a window of its lengths alone. Within a row, indices ascend.

    Raises ValueError if a sequence is empty or longer than `capacity`.

    >>> pack_lengths([5, 3, 4, 2], capacity=8)
    [[0, 1], [2, 3]]
    """
    if fit not in ("best", "first"):
        raise ValueError(f"fit is {fit!r}; it must be 'best' or 'first'")
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
    for i, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"sequence {i} has {length} tokens; rows of {capacity} take 1 to {capacity}")
    choose = _best if fit == "best" else _first
    rows: list[list[int]] = []
    for start in range(0, len(lengths), window):
        indices = sorted(range(start, min(start + window, len(lengths))), key=lambda i: (-lengths[i], i))
        bins = choose([lengths[i] for i in indices], capacity)
        rows += sorted(sorted(indices[place] for place in row) for row in bins)
    return rows


def _best(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), ascending
    for place, length in enumerate(lengths):
        at = bisect_left(free, (length, -1))
        if at == len(free):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, chosen = free.pop(at)
        bins[chosen].append(place)
        if room > length:
            insort(free, (room - length, chosen))
    return bins


def _first(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[int] = []
    for place, length in enumerate(lengths):
        chosen = next((i for i, room in enumerate(rooms) if room >= length), len(bins))
        if chosen == len(bins):
            bins.append([])
            rooms.append(capacity)
        bins[chosen].append(place)
        rooms[chosen] -= length
    return bins


class Packs(Rows):
    """Rows of packed sequences: `{"sequences": [ids, ...]}`, with labels where the sequences have them.

    features: sequences with `input_ids`, and maybe `labels` of the same length, read by index.
    length: tokens in a row.
    window, fit: as in `pack_lengths`.

    The order of rows is that of the sequences, so a shuffle of rows by `tutti.data.Stream` resumes like any other.
    """

    def __init__(self, features: Any, length: int, window: int = WINDOW, fit: str = "best"):
        self.features, self.length = features, length
        self.rows = pack_lengths([len(features[i]["input_ids"]) for i in range(len(features))], length, window, fit)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        features = [self.features[place] for place in self.rows[i]]
        pack: dict[str, Any] = {"sequences": [list(f["input_ids"]) for f in features]}
        if "labels" in features[0]:
            pack["labels"] = [list(f["labels"]) for f in features]
        return pack

    def name(self, i: int) -> str:
        return f"pack {i} (sequences {', '.join(map(str, self.rows[i][:4]))}{', ...' if self.rows[i][4:] else ''})"

    @property
    def filled(self) -> float:
        """Fraction of positions that hold a token."""
        tokens = sum(len(self.features[i]["input_ids"]) for row in self.rows for i in row)
        return tokens / (len(self.rows) * self.length)


def packed_batch(
    rows: Sequence[dict[str, Any]],
    length: int,
    *,
    pad_id: int = 0,
    causal: bool = True,
    attention: str = "mask",
) -> dict[str, Any]:
    """The batch of some packs: positions restart with each sequence, and no token attends to another sequence.

    rows: packs, `{"sequences": lists of ids}`, maybe with `labels` (lists, as long).
    length: tokens in a row; the rest is padding.
    causal: whether labels are for a causal model, which shifts them: the first token of a sequence then has none, as
        it would be predicted from the sequence before.
    attention: "mask" adds a boolean mask (batch, 1, length, length), true where attention is allowed. It is right for
        models of transformers with SDPA attention to the whole text; it replaces windows that a model slides.
        "positions" adds no mask but `use_cache=False`: causal models of transformers then derive their masks, windows
        included, from positions that restart. Models that ignore positions or are not causal must not use it.

    Returns input_ids, position_ids and labels, (batch, length) int64, labels -100 at padding.
    """
    if attention not in ("mask", "positions"):
        raise ValueError(f"attention is {attention!r}; it must be 'mask' or 'positions'")
    if attention == "positions" and not causal:
        raise ValueError("transformers derives the mask from positions in causal models only; use attention='mask'")
    shape = len(rows), length
    ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, -100, np.int64)
    positions, segments = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for r, row in enumerate(rows):
        all_labels = row.get("labels") or row["sequences"]
        at = 0
        for number, (sequence, wanted) in enumerate(zip(row["sequences"], all_labels, strict=True), 1):
            place = slice(at, at + len(sequence))
            if place.stop > length:
                raise ValueError(f"a pack has {sum(map(len, row['sequences']))} tokens, more than a row of {length}")
            ids[r, place], labels[r, place] = sequence, wanted
            positions[r, place], segments[r, place] = np.arange(len(sequence)), number
            if causal:
                labels[r, at] = -100
            at = place.stop
        positions[r, at:] = np.arange(length - at)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    packed: dict[str, Any] = {name: torch.from_numpy(x) for name, x in batch.items()}
    if attention == "mask":
        mask = segments[:, None, :, None] == segments[:, None, None, :]
        if causal:
            mask &= np.tril(np.ones((length, length), bool))
        packed["attention_mask"] = torch.from_numpy(mask)
    else:
        packed["use_cache"] = False
    return packed
