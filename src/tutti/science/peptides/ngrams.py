"""Baselines of perplexity: n-grams of residues with Witten-Bell smoothing (Witten and Bell 1991)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from tutti.models.peptides import RESIDUES

__all__ = ["perplexity"]

END = "."


def perplexity(n: int, training: Sequence[str], peptides: Sequence[str]) -> float:
    """The perplexity of peptides under an n-gram of the training peptides; residues and ends count, as for the language
    model.

    P(x | h) = (c(h x) + d(h) P(x | h')) / (c(h) + d(h)), where d(h) is the number of different successors of h, and h'
    is h without its first residue; below the unigram, all 20 residues and the end are equally likely.
    """
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for peptide in training:
        for history, x in _steps(n, peptide):
            for k in range(n):
                after[history[k:]][x] += 1

    def probability(history: str, x: str) -> float:
        rest = probability(history[1:], x) if history else 1 / (len(RESIDUES) + 1)
        seen = after.get(history)
        return (seen[x] + len(seen) * rest) / (seen.total() + len(seen)) if seen else rest

    steps = [step for peptide in peptides for step in _steps(n, peptide)]
    return math.exp(-sum(math.log(probability(*step)) for step in steps) / len(steps))


def _steps(n: int, peptide: str) -> list[tuple[str, str]]:
    """(n - 1 symbols before, symbol) of residues and end."""
    text = "^" * (n - 1) + peptide + END
    return [(text[i : i + n - 1], text[i + n - 1]) for i in range(len(peptide) + 1)]
