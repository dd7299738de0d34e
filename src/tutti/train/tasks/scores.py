"""Scores of predictions, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

IGNORED = -100


def arrays(prediction: Any) -> tuple[np.ndarray, np.ndarray]:
    """The predictions (the first, if a model has several outputs) and labels of an EvalPrediction."""
    made = prediction.predictions
    if isinstance(made, tuple | list):
        made = made[0]
    labels = prediction.label_ids
    if isinstance(labels, tuple | list):
        labels = labels[0]
    return np.asarray(made), np.asarray(labels)


def next_token_scores(prediction: Any, shift: int) -> dict[str, float]:
    """Accuracy over labels that are not -100, and perplexity if predictions are logits (rows, length, vocabulary).

    shift: how many positions before its label a prediction stands.
    """
    made, labels = arrays(prediction)
    if shift:
        made, labels = made[:, :-shift], labels[:, shift:]
    counted = labels != IGNORED
    if not counted.any():
        return {}
    if made.ndim == labels.ndim:  # ids
        return {"accuracy": float((made == labels)[counted].mean())}
    logits, wanted = made[counted].astype(np.float64), labels[counted]
    high = logits.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(logits - high).sum(-1)) + high[:, 0]
    loss = (logsumexp - logits[np.arange(len(wanted)), wanted]).mean()
    return {"accuracy": float((logits.argmax(-1) == wanted).mean()), "perplexity": float(np.exp(loss))}


def class_scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, and F1 averaged over the classes that occur in either."""
    scores = []
    for label in np.union1d(predicted, labels):
        both = ((predicted == label) & (labels == label)).sum()
        scores.append(2 * both / ((predicted == label).sum() + (labels == label).sum()))
    return {"accuracy": float((predicted == labels).mean()), "f1": float(np.mean(scores))}
