"""Sampling and mixing by domain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus.documents import Outcome
from tutti.data.corpus.files import fraction
from tutti.data.corpus.steps.step import Step


@dataclass(frozen=True)
class Mix(Step):
    """Sample documents so that domains have given shares of the bytes of text.

    weights: the share of each domain, relative; a domain that is not named is dropped.
    size: bytes of the result; 0: as many as there are without taking a document twice.
    seed: seed of the hashes of documents. Those with the lowest are taken, so a larger sample contains a smaller one.
    """

    kind: ClassVar[str] = "mix"
    weights: dict[str, float] = field(default_factory=dict)
    size: int = 0
    seed: int = 0

    def __post_init__(self):
        if not self.weights or min(self.weights.values()) < 0 or not sum(self.weights.values()) > 0:
            raise ValueError(f"mix: weights are {self.weights}; give each domain a share of 0 or more")

    def fractions(self, available: dict[str, int]) -> dict[str, float]:
        """The fraction of each domain's documents to take, from its bytes. Raises ValueError if it has too few."""
        missing = [d for d, w in self.weights.items() if w > 0 and not available.get(d)]
        if missing:
            raise ValueError(f"mix: there are no documents of {', '.join(missing)}; there are {', '.join(available)}")
        shares = {d: w / sum(self.weights.values()) for d, w in self.weights.items() if w > 0}
        most = min(available[d] / share for d, share in shares.items())
        if self.size > most:
            short = min(shares, key=lambda d: available[d] / shares[d])
            raise ValueError(
                f"mix: {self.size} bytes with these weights need more of {short} than its {available[short]} bytes; "
                f"at most {int(most)} bytes can be made"
            )
        size = self.size or most
        return {d: min(1.0, size * share / available[d]) for d, share in shares.items()}

    def apply(self, batch: pa.RecordBatch, fractions: dict[str, float]) -> Outcome:
        reasons: list[str | None] = []
        for id, source, domain in zip(*(batch.column(c).to_pylist() for c in ("id", "source", "domain")), strict=True):
            share = fractions.get(domain)
            if share is None:
                reasons.append("domain_not_in_mix")
            else:
                reasons.append(None if fraction(f"{self.seed}\n{source}\n{id}") < share else "not_sampled")
        return Outcome(batch, reasons)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "weights": sorted(self.weights.items())}


def domain_bytes(batch: pa.RecordBatch, sizes: np.ndarray) -> dict[str, int]:
    """The bytes of text of each domain in a batch."""
    sums: dict[str, int] = {}
    for domain, size in zip(batch.column("domain").to_pylist(), sizes, strict=True):
        sums[domain] = sums.get(domain, 0) + int(size)
    return sums
