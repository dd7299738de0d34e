"""Measures of an oracle on held-out peptides: ROC-AUC, MCC, Brier and calibration of labels, R2 and coverage of
scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import rankdata

from tutti.science.peptides.oracle import Prediction

__all__ = ["assess", "matthews", "reliability", "roc_auc"]

BINS = 10  # of predicted probabilities, for the calibration


def roc_auc(probability: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a peptide of label 1 ranks above one of label 0, ties by half (Mann and Whitney 1947).

    NaN if there is only one label.
    """
    positive = labels == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return float("nan")
    return float((rankdata(probability)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation of labels 0 and 1 (Matthews 1975); 0 if either has only one value."""
    if predicted.std() == 0 or labels.std() == 0:
        return 0.0
    return float(np.corrcoef(predicted, labels)[0, 1])


def reliability(probability: np.ndarray, labels: np.ndarray) -> list[tuple[float, float, int]]:
    """(mean probability, fraction of label 1, count) of bins of equal width that are not empty."""
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    rows = [bins == i for i in range(BINS)]
    return [(float(probability[r].mean()), float(labels[r].mean()), int(r.sum())) for r in rows if r.any()]


def assess(prediction: Prediction, targets: np.ndarray, binary: bool) -> dict[str, Any]:
    """Scores over the peptides inside of the domain, and how many those are; only this where their targets are equal.

    calibration error: mean of |mean probability - fraction of label 1| over bins, weighted by counts (Naeini et al.
    2015). Brier: mean squared error of probabilities; Brier base: the error of the constant that is right on average.
    """
    inside = prediction.inside
    values: dict[str, Any] = {"peptides": len(targets), "inside": int(inside.sum())}
    mean, aims = prediction.mean[inside], np.asarray(targets, float)[inside]
    if len(set(aims.tolist())) < 2:
        return values
    if binary:
        bins = reliability(mean, aims)
        error = sum(n * abs(p - f) for p, f, n in bins) / len(aims)
        return values | {
            "ROC-AUC": roc_auc(mean, aims), "MCC": matthews((mean > 0.5).astype(float), aims),
            "Brier": float(np.mean((mean - aims) ** 2)), "Brier base": float(aims.var()),
            "calibration error": error, "bins": bins,
        }  # fmt: skip
    covered = (aims >= prediction.low[inside]) & (aims <= prediction.high[inside])
    return values | {"R2": 1 - float(np.mean((mean - aims) ** 2) / aims.var()), "coverage": float(covered.mean())}
