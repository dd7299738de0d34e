"""Scores of predictions, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.train.values import Outputs

IGNORED = -100


def arrays(prediction: Outputs) -> tuple[np.ndarray, np.ndarray]:
    """The predictions (the first, if a model has several outputs) and labels of an EvalPrediction."""
    predictions = prediction.predictions
    if isinstance(predictions, tuple | list):
        predictions = predictions[0]
    labels = prediction.label_ids
    if isinstance(labels, tuple | list):
        labels = labels[0]
    return np.asarray(predictions), np.asarray(labels)


def next_token_scores(prediction: Outputs, shift: int) -> dict[str, float]:
    """Accuracy over labels that are not -100, and perplexity if predictions are logits (rows, length, vocabulary).

    shift: how many positions before its label a prediction stands.
    """
    predictions, labels = arrays(prediction)
    if shift:
        predictions, labels = predictions[:, :-shift], labels[:, shift:]
    counted = labels != IGNORED
    if not counted.any():
        return {}
    if predictions.ndim == labels.ndim:  # ids
        return {"accuracy": float((predictions == labels)[counted].mean())}
    logits, wanted = predictions[counted].astype(np.float64), labels[counted]
    high = logits.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(logits - high).sum(-1)) + high[:, 0]
    loss = (logsumexp - logits[np.arange(len(wanted)), wanted]).mean()
    return {"accuracy": float((logits.argmax(-1) == wanted).mean()), "perplexity": float(np.exp(loss))}


def multi_label_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of several labels a row, each predicted where its probability is above one half.

    logits, labels: (rows, labels), labels 0 or 1.

    Returns `accuracy` (rows whose labels are all right), `f1` (of all labels together) and `f1_macro` (mean over
    labels; 0 of one that is neither predicted nor true).
    """
    predicted, wanted = logits > 0, labels > 0.5
    both, either = (predicted & wanted).sum(0), predicted.sum(0) + wanted.sum(0)
    return {
        "accuracy": float((predicted == wanted).all(-1).mean()),
        "f1": float(2 * both.sum() / max(either.sum(), 1)),
        "f1_macro": float(np.mean(2 * both / np.maximum(either, 1))),
    }


def class_scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, and F1 averaged over the classes that occur in either."""
    scores = []
    for label in np.union1d(predicted, labels):
        both = ((predicted == label) & (labels == label)).sum()
        scores.append(2 * both / ((predicted == label).sum() + (labels == label).sum()))
    return {"accuracy": float((predicted == labels).mean()), "f1": float(np.mean(scores))}


def number_scores(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Mean squared error and Pearson correlation; the correlation is 0 where either does not vary."""
    predicted = predicted.astype(np.float64)
    spread = predicted.std() > 0 and labels.std() > 0
    return {
        "mse": float(np.square(predicted - labels).mean()),
        "pearson": float(np.corrcoef(predicted.ravel(), labels.ravel())[0, 1]) if spread else 0.0,
    }


def entity_scores(predicted: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Precision, recall and F1 of entities, as the script of CoNLL-2000 and seqeval count them.

    predicted, labels: (rows, length) numbers of tags; labels of -100 do not count. names: the tags by number.
    """
    right = true_count = predicted_count = 0
    for row, wanted in zip(predicted, labels, strict=True):
        present = wanted != IGNORED
        mine, theirs = (entities([str(names[i]) for i in tags[present]]) for tags in (row, wanted))
        right += len(mine & theirs)
        true_count, predicted_count = true_count + len(theirs), predicted_count + len(mine)
    precision, recall = right / max(predicted_count, 1), right / max(true_count, 1)
    return {
        "entity_precision": precision,
        "entity_recall": recall,
        "entity_f1": 2 * right / max(predicted_count + true_count, 1),
    }


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first, last) of each entity in tags "B-type", "I-type" and "O". An I- after another type begins one."""
    spans, begin, before = set(), 0, ""
    for i, tag in enumerate([*tags, "O"]):
        kind = tag[2:] if tag[:2] in ("B-", "I-") else ""
        if before and (tag[:2] == "B-" or kind != before):
            spans.add((before, begin, i - 1))
            before = ""
        if kind and not before:
            begin, before = i, kind
    return spans
