"""Measures of generated peptides, and how often they are what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tutti.science.peptides.conditions import OPEN
from tutti.science.peptides.properties import counts
from tutti.science.peptides.similarity import diversity, nearest

__all__ = ["assess", "divergence", "lift", "shift"]

NEAR = 0.8  # identity from which a peptide is a near-copy
DRAWS = 10_000  # of the bootstrap


def assess(samples: Sequence[str], training: Sequence[str], reference: Sequence[str],
           lengths: tuple[int, int]) -> dict[str, float]:  # fmt: skip
    """Measures of samples, of which "" are those that are no peptide.

    validity: fraction that are peptides of a length within `lengths`. Among these, uniqueness: fraction that differ;
    novelty: fraction that are not training peptides; and over the different ones nearest identity: median of the
    identity with the nearest training peptide; near copies: fraction of those of 0.8 or more; diversity: mean of 1 -
    identity over pairs; composition divergence: Jensen-Shannon divergence (Lin 1991) of residues from the
    reference's, in bits.
    """
    valid = [x for x in samples if lengths[0] <= len(x) <= lengths[1]]
    measures = {"samples": float(len(samples)), "validity": len(valid) / max(1, len(samples))}
    if not valid:
        return measures
    trained_on, different = set(training), list(dict.fromkeys(valid))
    near = nearest(different, list(training))
    return measures | {
        "uniqueness": len(different) / len(valid),
        "novelty": sum(x not in trained_on for x in valid) / len(valid),
        "nearest identity": float(np.median(near)),
        "near copies": float((near >= NEAR).mean()),
        "diversity": diversity(different),
        "composition divergence": divergence(different, reference),
    }


def divergence(peptides: Sequence[str], reference: Sequence[str]) -> float:
    """Jensen-Shannon divergence of residue frequencies, in bits: from 0 for equal ones to 1."""
    p, q = (counts(x).sum(0) / max(1, counts(x).sum()) for x in (peptides, reference))
    middle = (p + q) / 2

    def relative(x: np.ndarray) -> float:
        some = x > 0
        return float((x[some] * np.log2(x[some] / middle[some])).sum())

    return (relative(p) + relative(q)) / 2


def hits(bins: np.ndarray, target: np.ndarray) -> np.ndarray:
    """(peptides,) bool: whether bins (peptides, properties) are those of a target, where it is not open."""
    return ((bins == target) | (target == OPEN)).all(1)


def lift(asked: int, of: int, plain: int, of_plain: int, seed: int = 0) -> dict[str, Any]:
    """How much more often samples hit a condition when they are asked for it, with 95 % bootstrap intervals.

    asked, plain: hits among `of` samples with the condition, and among `of_plain` without. ratio: None without hits of
    the latter; an upper end of the interval is None where a resampled baseline has no hit.
    """
    draw = np.random.default_rng(seed)
    a, b = draw.binomial(of, asked / of, DRAWS) / of, draw.binomial(of_plain, plain / of_plain, DRAWS) / of_plain
    ratios = np.divide(a, b, out=np.full(DRAWS, np.inf), where=b > 0)
    ends = np.quantile(ratios, [0.025, 0.975], method="nearest").tolist()
    return {
        "rate": asked / of, "plain rate": plain / of_plain,
        "ratio": asked / of / (plain / of_plain) if plain else None,
        "interval": [x if np.isfinite(x) else None for x in ends],
        "difference": [float(x) for x in np.quantile(a - b, [0.025, 0.975])],
    }  # fmt: skip


def shift(asked: np.ndarray, plain: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Difference of mean predictions of two sets of peptides, with a 95 % bootstrap interval; NaN is left out.

    None where a set has no prediction.
    """
    a, b = asked[np.isfinite(asked)], plain[np.isfinite(plain)]
    if not len(a) or not len(b):
        return {"shift": None, "interval": [None, None]}
    draw = np.random.default_rng(seed)
    means = [x[draw.integers(0, len(x), (DRAWS // 10, len(x)))].mean(1) for x in (a, b)]
    ends = np.quantile(means[0] - means[1], [0.025, 0.975])
    return {"shift": float(a.mean() - b.mean()), "interval": [float(x) for x in ends]}
