"""What every step took in, gave out, dropped and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Dropped, Outcome, pc, sizes
from tutti.data.corpus.reading.records import SAMPLE

SAMPLES = 5
"""Dropped documents of each reason that a report shows."""


@dataclass
class Account:
    """The documents and bytes of text that went into a step and came out.

    dropped: by reason, [documents, bytes]. cut: by reason, parts removed from documents that stay, [parts, bytes].
    rewritten: documents whose text was changed, and by how many bytes it became shorter beyond what was cut.
    samples: by reason, the dropped documents whose hash is lowest.
    seconds: processor time in seconds.
    """

    step: str
    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    rewritten: list[int] = field(default_factory=lambda: [0, 0])
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0

    def drop(self, dropped: Dropped) -> None:
        _add(self.dropped, dropped.reason, 1, dropped.size)
        self._sample(dropped.reason, [asdict(dropped)])

    def record(self, before: pa.RecordBatch, outcome: Outcome) -> tuple[pa.RecordBatch, list[Dropped]]:
        """Account for what a step made of a batch. Returns the documents that stay, and the others."""
        after = outcome.batch
        if len(after) != len(before):
            raise ValueError(
                f"step {self.step}: {len(before)} documents went in and {len(after)} came out; give reasons"
            )
        text, raw = after.column("text"), after.column("raw")
        if text.type != pa.string() or text.null_count or raw.type != pa.binary():
            raise ValueError(
                f"step {self.step}: text has type {text.type} with {text.null_count} nulls and raw {raw.type}; "
                "they must be string without nulls and binary"
            )
        sizes_in, sizes_out = sizes(before), sizes(after)
        self.documents_in += len(before)
        self.bytes_in += int(sizes_in.sum())
        stays = np.ones(len(before), bool)
        lost: list[Dropped] = []
        if outcome.reasons is not None:
            for i, reason in enumerate(outcome.reasons):
                if reason is not None:
                    stays[i] = False
                    lost.append(self._dropped(before, i, reason, (outcome.details or {i: None})[i], int(sizes_in[i])))
        removed = np.zeros(len(before), np.int64)
        for reason, (parts, size) in outcome.cut.items():
            if parts[stays].any():
                _add(self.cut, reason, int(parts[stays].sum()), int(size[stays].sum()))
            removed += size
        changed = pc.fill_null(pc.not_equal(before.column("text"), after.column("text")), True)
        changed = changed.to_numpy(zero_copy_only=False) & stays
        self.rewritten[0] += int(changed.sum())
        self.rewritten[1] += int((sizes_in - sizes_out - removed)[stays].sum())
        for dropped in lost:
            self.drop(dropped)
        self.documents_out += int(stays.sum())
        self.bytes_out += int(sizes_out[stays].sum())
        return (after if stays.all() else after.filter(pa.array(stays))), lost

    def balance(self) -> None:
        """Assert that what came in went out, or is accounted for."""
        gone = [sum(x[k] for x in self.dropped.values()) for k in (0, 1)]
        cut = sum(x[1] for x in self.cut.values())
        assert self.documents_in == self.documents_out + gone[0], self
        assert self.bytes_in == self.bytes_out + gone[1] + cut + self.rewritten[1], self

    def merge(self, other: Account) -> None:
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, others in ((self.dropped, other.dropped), (self.cut, other.cut)):
            for reason, (count, size) in others.items():
                _add(mine, reason, count, size)
        self.rewritten = [a + b for a, b in zip(self.rewritten, other.rewritten, strict=True)]
        for reason, samples in other.samples.items():
            self._sample(reason, samples)

    def _dropped(self, batch: pa.RecordBatch, i: int, reason: str, detail: str | None, size: int) -> Dropped:
        text = batch.column("text")[i].as_py() or (batch.column("raw")[i].as_py() or b"")[: 4 * SAMPLE].decode(
            "utf-8", "replace"
        )
        return Dropped(batch.column("id")[i].as_py(), reason, detail or "", size, text[:SAMPLE])

    def _sample(self, reason: str, samples: Iterable[dict[str, Any]]) -> None:
        these = [*self.samples.get(reason, []), *samples]
        if len(these) > SAMPLES:
            these = sorted(these, key=_order)[:SAMPLES]
        self.samples[reason] = these


def total(shards: Iterable[list[Account]]) -> list[Account]:
    """The accounts of all shards, step by step."""
    sums: list[Account] = []
    for accounts in shards:
        for k, account in enumerate(accounts):
            if k == len(sums):
                sums.append(Account(account.step))
            sums[k].merge(account)
    for account in sums:
        account.samples = {reason: sorted(x, key=_order) for reason, x in sorted(account.samples.items())}
    return sums


def _order(sample: dict[str, Any]) -> bytes:
    return blake2b(f"{sample['id']}\n{sample['detail']}".encode(), digest_size=8).digest()


def _add(sums: dict[str, list[int]], reason: str, count: int, size: int) -> None:
    before = sums.setdefault(reason, [0, 0])
    before[0] += count
    before[1] += size
