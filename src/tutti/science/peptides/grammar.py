"""A synthetic language of helical peptides, with a synthetic activity: data whose truth is known.

A peptide has two hidden numbers. `strict` says how strictly hydrophobic residues face one side of the helix (100
degrees a residue), `positive` how many of its polar residues are basic. The activity is 1 with the probability

    1 / (1 + exp(-12 (strict + positive - 1.2)))

so that no predictor can be perfect, and the best one follows from hidden numbers that no peptide shows exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from tutti.science.peptides.data import Peptides

__all__ = ["grammar", "perplexity"]

SHORTEST, LONGEST = 10, 24
HYDROPHOBIC, POLAR = "AILMFWV", "KRHEDNQST"
ACTIVITY = "active"


def grammar(count: int, seed: int = 0) -> Peptides:
    """Different peptides of 10 to 24 residues with the column `active`, 0 or 1."""
    draw = np.random.default_rng(seed)
    labels: dict[str, float] = {}
    while len(labels) < count:
        strict, positive = draw.random(2)
        places = np.arange(int(draw.integers(SHORTEST, LONGEST + 1)))
        hydrophobic = draw.random(len(places)) < _hydrophobic(strict, places)
        nonpolar = draw.choice(list(HYDROPHOBIC), len(places))
        polar = draw.choice(list(POLAR), len(places), p=_polar(positive))
        active = draw.random() < 1 / (1 + math.exp(-12 * (strict + positive - 1.2)))
        labels.setdefault("".join(np.where(hydrophobic, nonpolar, polar)), float(active))
    return Peptides(tuple(labels), {ACTIVITY: np.array(list(labels.values()))})


def _hydrophobic(strict: float | np.ndarray, places: np.ndarray) -> np.ndarray:
    """Probability that the residue at a place is hydrophobic."""
    return strict * (np.cos(np.radians(100) * places) > 0) + (1 - strict) / 2


def _polar(positive: float) -> np.ndarray:
    """Probabilities of `POLAR`."""
    weights = np.array([3 * positive + 0.3, 2 * positive + 0.2, 0.3, 1 - positive, 1 - positive, 1, 1, 1, 1])
    return weights / weights.sum()


def perplexity(peptides: Sequence[str], nodes: int = 32) -> float:
    """The perplexity of peptides under the grammar itself, residues and ends: no model can be expected to do better.

    The integral over the two hidden numbers is a Gauss-Legendre sum of nodes x nodes points.
    """
    points, weights = np.polynomial.legendre.leggauss(nodes)
    points, log_weights = (points + 1) / 2, np.log(weights / 2)
    log_polar = np.log(np.stack([_polar(x) for x in points]))  # (positive, residue)
    total, count = 0.0, 0
    for peptide in peptides:
        inside = np.array([x in HYDROPHOBIC for x in peptide])
        facing = _hydrophobic(points[:, None], np.arange(len(peptide)))  # (strict, place)
        of_strict = np.log(np.where(inside, facing, 1 - facing)).sum(1)
        of_positive = log_polar[:, [POLAR.index(x) for x in peptide if x in POLAR]].sum(1)
        joint = (of_strict + log_weights)[:, None] + of_positive + log_weights
        total += logsumexp(joint) - inside.sum() * math.log(len(HYDROPHOBIC)) - math.log(LONGEST + 1 - SHORTEST)
        count += len(peptide) + 1
    return math.exp(-total / count)
