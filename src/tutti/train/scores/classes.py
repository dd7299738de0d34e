"""Scores of predicted classes."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from tutti.train.tasks.scores import IGNORED, class_scores


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Fraction of predictions that equal their label. Labels of -100 do not count.

    predictions: classes, of the shape of labels, or logits with the classes as last dim.

    Raises ValueError if no label counts or shapes differ.
    """
    predicted, wanted = counted(predictions, labels)
    return float((predicted == wanted).mean())


def f1(predictions: ArrayLike, labels: ArrayLike, average: Literal["binary", "macro"] = "binary") -> float:
    """F1, the harmonic mean of precision and recall: 2 TP / (2 TP + FP + FN). Labels of -100 do not count.

    average: "binary" is F1 of class 1, where labels are 0 and 1. "macro" is the mean of the F1 of each class that
        occurs in predictions or labels.

    Raises ValueError for an unknown average, and for "binary" with other classes.
    """
    predicted, wanted = counted(predictions, labels)
    if average == "macro":
        return class_scores(predicted, wanted)["f1"]
    if average != "binary":
        raise ValueError(f"average is {average!r}; it must be 'binary' or 'macro'")
    others = np.setdiff1d(np.union1d(predicted, wanted), (0, 1))
    if len(others):
        raise ValueError(f"binary F1 has classes 0 and 1, and there is {others[0]}; use average='macro'")
    hits, ones = ((predicted == 1) & (wanted == 1)).sum(), (predicted == 1).sum() + (wanted == 1).sum()
    return float(2 * hits / ones) if ones else 0.0


def counted(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Predicted classes and labels, (count,) int64 each, where labels are not -100."""
    predicted, wanted = np.asarray(predictions), np.asarray(labels)
    if predicted.ndim == wanted.ndim + 1:
        predicted = predicted.argmax(-1)
    if predicted.shape != wanted.shape:
        raise ValueError(f"predictions have the shape {predicted.shape} and labels {wanted.shape}")
    chosen = wanted != IGNORED
    if not chosen.any():
        raise ValueError("there is no label to compare with")
    return predicted[chosen], wanted[chosen]
