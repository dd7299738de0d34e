"""Conditions as control tokens: bins of properties, a token for each, in front of a peptide.

A peptide is `<bos> <charge:4> <moment:2> K W K ... <eos>`. `<mask>` in place of a token leaves that property open, so
that one model draws with any of the conditions or with none (control codes: Keskar et al. 2019; dropped conditions:
Ho and Salimans 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tutti.models.peptides import peptide_tokenizer

__all__ = ["Conditions"]

OPEN = -1
"""In place of a bin: any value."""
UNKNOWN = -2


@dataclass(frozen=True)
class Conditions:
    """edges: property -> ascending inner edges of its bins. Bin i holds edges[i - 1] <= value < edges[i]."""

    edges: dict[str, tuple[float, ...]]

    @classmethod
    def fit(cls, values: Mapping[str, np.ndarray], bins: Mapping[str, int | Sequence[float]]) -> Conditions:
        """bins: property -> a number of bins of equally many peptides, or edges.

        Raises ValueError for edges that do not ascend, quantiles that coincide, and bins without a peptide.
        """
        edges = {}
        for name, choice in bins.items():
            if isinstance(choice, int):
                if choice < 2:
                    raise ValueError(f"condition.bins.{name} = {choice} should be 2 or more bins, or a list of edges")
                inner = np.quantile(values[name], np.arange(1, choice) / choice).tolist()
            else:
                inner = [float(x) for x in choice]
            if not inner or any(b <= a for a, b in pairwise(inner)):
                raise ValueError(f"condition.bins.{name}: the edges {_shown(inner)} should ascend; give fewer bins, or"
                                 " edges")  # fmt: skip
            edges[name] = tuple(inner)
            empty = np.bincount(np.searchsorted(inner, values[name], "right"), minlength=len(inner) + 1) == 0
            if empty.any():
                raise ValueError(f"condition.bins.{name}: no training peptide is in bin {empty.argmax()} of the edges"
                                 f" {_shown(inner)}; give fewer bins, or other edges")  # fmt: skip
        return cls(edges)

    @property
    def tokens(self) -> list[str]:
        """Control tokens of all properties."""
        return [f"<{name}:{i}>" for name, inner in self.edges.items() for i in range(len(inner) + 1)]

    def bins(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """(peptides, properties) int64 bins of values; of NaN one that no target asks for."""
        columns = [np.where(np.isnan(values[name]), UNKNOWN, np.searchsorted(inner, values[name], "right"))
                   for name, inner in self.edges.items()]  # fmt: skip
        return np.stack(columns, 1).astype(np.int64)

    def target(self, asked: Mapping[str, int]) -> np.ndarray:
        """(properties,) int64 bins that are asked for, `OPEN` for others. Raises ValueError for those there are not."""
        for name, i in asked.items():
            if name not in self.edges:
                raise ValueError(f"there is no condition {name!r}; there are {', '.join(self.edges)}")
            if not 0 <= i <= len(self.edges[name]):
                raise ValueError(f"{name} = {i} is no bin; there are 0 to {len(self.edges[name])}")
        return np.array([asked.get(name, OPEN) for name in self.edges], np.int64)

    def said(self, target: np.ndarray) -> str:
        """What bins ask for, in words."""
        parts = []
        for (name, inner), i in zip(self.edges.items(), target.tolist(), strict=True):
            low, high = ("", *(f"{x:.3g} <= " for x in inner))[i], (*(f" < {x:.3g}" for x in inner), "")[i]
            parts += [f"{low}{name}{high}"] if i != OPEN else []
        return ", ".join(parts) or "any peptide"


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in numbers)


def condition_tokenizer(conditions: Conditions) -> Any:
    """The tokenizer of peptides with the control tokens."""
    tokenizer = peptide_tokenizer()
    tokenizer.add_tokens(conditions.tokens, special_tokens=True)
    return tokenizer


def prefix(tokenizer: Any, conditions: Conditions, target: np.ndarray) -> list[int]:
    """Token ids in front of a peptide with these bins, `<bos>` first. Negative bins are open."""
    words = [f"<{name}:{i}>" if i >= 0 else "<mask>"
             for name, i in zip(conditions.edges, target.tolist(), strict=True)]  # fmt: skip
    return tokenizer.convert_tokens_to_ids(["<bos>", *words])
