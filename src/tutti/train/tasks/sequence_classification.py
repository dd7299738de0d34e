"""Classification (or regression) of a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.train.tasks.scores import arrays, class_scores
from tutti.train.tasks.task import Task, check_class_labels, check_length, classes_of, length_of, padded, without_index


@dataclass(frozen=True)
class SequenceClassification(Task):
    """One label for a text, or for a pair of texts.

    Integer labels are classes. A model with one output (`num_labels=1`) learns a number: regression.

    text: column of texts.
    pair: column of second texts, or None.
    label: column of labels.
    length: longest sequence; by default the tokenizer's `model_max_length`.
    buckets: lengths to which batches are padded; None: the longest of the batch.
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    length: int | None = None
    buckets: Sequence[int] | None = None

    name = "sequence-classification"
    model_class = "AutoModelForSequenceClassification"

    def columns(self):
        return (self.text, self.label) if self.pair is None else (self.text, self.pair, self.label)

    def texts(self):
        return self.columns()[:-1]

    def feature(self, row, processor):
        second = None if self.pair is None else row[self.pair]
        encoded = processor(row[self.text], second, truncation=True, max_length=length_of(self.length, processor))
        return {**encoded, "labels": row[self.label]}

    def batch(self, features, processor):
        from transformers import DataCollatorWithPadding

        made = DataCollatorWithPadding(processor, return_tensors="pt")(without_index(features))
        return padded(made, processor, self.buckets)

    def metrics(self, prediction: Any) -> dict[str, float]:
        """`accuracy` and `f1` (mean over classes), or of one output `mse` and `pearson`."""
        made, labels = arrays(prediction)
        if made.ndim == 2 and made.shape[1] > 1:
            return class_scores(made.argmax(-1), labels)
        if made.ndim == 1 and np.issubdtype(made.dtype, np.integer):
            return class_scores(made, labels)
        made = made.reshape(labels.shape).astype(np.float64)
        spread = made.std() > 0 and labels.std() > 0
        return {
            "mse": float(np.square(made - labels).mean()),
            "pearson": float(np.corrcoef(made.ravel(), labels.ravel())[0, 1]) if spread else 0.0,
        }

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)
        if processor.pad_token_id is not None and getattr(model.config, "pad_token_id", 0) is None:  # pyright: ignore
            raise ValueError(
                "the model's config has no pad_token_id, by which it finds the last token; "
                f"set model.config.pad_token_id = {processor.pad_token_id}"
            )

    def _check_labels(self, model, rows) -> None:
        count = classes_of(model)
        if count != 1 and not isinstance(rows[0][self.label], float | list):
            check_class_labels(rows, self.label, count)
