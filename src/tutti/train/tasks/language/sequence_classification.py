"""Classification (or regression) of a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.data.rows import BadRow
from tutti.train.tasks.scores import arrays, class_scores, multi_label_scores, number_scores
from tutti.train.tasks.task import (
    Task,
    check_class_labels,
    check_length,
    classes_of,
    labels_of,
    length_of,
    padded,
    without_index,
)
from tutti.train.values import Outputs


@dataclass(frozen=True)
class SequenceClassification(Task):
    """One label for a text, or for a pair of texts.

    Integer labels are classes. A model with one output (`num_labels=1`) learns a number: regression. Lists, with a
    number for each output, are several labels a row if all are 0 or 1, and otherwise numbers; set `problem_type` in the
    model's config to "multi_label_classification" or "regression".

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
        label = row[self.label]
        return {**encoded, "labels": [float(x) for x in label] if isinstance(label, list) else label}

    def batch(self, features, processor):
        from transformers import DataCollatorWithPadding

        collated = DataCollatorWithPadding(processor, return_tensors="pt")(without_index(features))
        return padded(collated, processor, self.buckets)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` and `f1` (mean over classes).

        Of several labels a row: `accuracy`, `f1` and `f1_macro` of `multi_label_scores`. Of numbers: `mse`, `pearson`.
        """
        predictions, labels = arrays(prediction)
        if labels.ndim == 2 and predictions.shape == labels.shape and labels.shape[1] > 1:
            return (
                multi_label_scores(predictions, labels)
                if np.isin(labels, (0, 1)).all()
                else number_scores(predictions, labels)
            )
        if predictions.ndim == 2 and predictions.shape[1] > 1:
            return class_scores(predictions.argmax(-1), labels)
        if predictions.ndim == 1 and np.issubdtype(predictions.dtype, np.integer):
            return class_scores(predictions, labels)
        return number_scores(predictions.reshape(labels.shape), labels)

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)
        if processor.pad_token_id is not None and getattr(model.config, "pad_token_id", 0) is None:  # pyright: ignore
            raise ValueError(
                "the model's config has no pad_token_id, by which it finds the last token; "
                f"set model.config.pad_token_id = {processor.pad_token_id}"
            )

    def _check_labels(self, model, rows) -> None:
        count, first = classes_of(model), rows[0][self.label]
        if isinstance(first, list):
            for where, label in labels_of(rows, self.label):
                if not isinstance(label, list) or len(label) != count:
                    raise BadRow(f"{where}: {self.label} is {label!r}; it must be a list of {count} numbers, one for "
                                 "each output of the model (num_labels in its config)")  # fmt: skip
        elif count != 1 and not isinstance(first, float):
            check_class_labels(rows, self.label, count)
