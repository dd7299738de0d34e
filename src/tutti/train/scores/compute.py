"""Metrics by name, for `compute_metrics` of a Trainer and for `tutti eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

import numpy as np

from tutti.train.scores.classes import accuracy, f1
from tutti.train.scores.text import bleu, perplexity, rouge
from tutti.train.tasks.scores import IGNORED, arrays
from tutti.train.values import Outputs, Processor

METRICS = ("accuracy", "f1", "f1_macro", "perplexity", "bleu", "rouge")
"""Names of `compute_metrics`. `f1` is that of class 1; `rouge` gives rouge1, rouge2 and rougeL."""
OF_TEXT = ("bleu", "rouge")


def compute_metrics(
    names: Sequence[str], tokenizer: Processor = None, shift: int = 0
) -> Callable[[Outputs], dict[str, float]]:
    """A function from a `transformers.EvalPrediction` to scores, for `Trainer(compute_metrics=...)`.

        Trainer(model, args, eval_dataset=rows, compute_metrics=compute_metrics(["accuracy", "f1_macro"]))

    names: names of `METRICS`.
    tokenizer: decodes predictions and labels for `bleu` and `rouge`. Predictions are then tokens, or logits.
    shift: how many positions before its label a prediction stands: 1 for causal models.

    Raises ValueError for an unknown name, or for a score of text without a tokenizer.
    """
    for name in names:
        if name not in METRICS:
            near = get_close_matches(name, METRICS, 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"there is no metric {name!r}{hint}; the metrics are {', '.join(METRICS)}")
        if name in OF_TEXT and tokenizer is None:
            raise ValueError(f"{name} compares texts: give the tokenizer")

    def compute(prediction: Outputs) -> dict[str, float]:
        predictions, labels = arrays(prediction)
        if shift:
            predictions, labels = predictions[:, :-shift], labels[:, shift:]
        scores: dict[str, float] = {}
        for name in names:
            scores |= _score(name, predictions, labels, tokenizer)
        return scores

    return compute


def _score(name: str, predictions: np.ndarray, labels: np.ndarray, tokenizer: Processor) -> dict[str, float]:
    if name == "accuracy":
        return {name: accuracy(predictions, labels)}
    if name in ("f1", "f1_macro"):
        return {name: f1(predictions, labels, "macro" if name == "f1_macro" else "binary")}
    if name == "perplexity":
        return {name: perplexity(predictions, labels, shift=0)}
    tokens = predictions.argmax(-1) if predictions.ndim == labels.ndim + 1 else predictions
    texts = decoded(tokens, tokenizer), decoded(labels, tokenizer)
    return {name: bleu(*texts)} if name == "bleu" else rouge(*texts)


def decoded(tokens: np.ndarray, tokenizer: Processor) -> list[str]:
    """The text of each row of tokens; -100 is padding."""
    tokens = np.where(tokens == IGNORED, tokenizer.pad_token_id, tokens)
    return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
