"""Which of several texts fits a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.data.rows import BadRow
from tutti.train.tasks.scores import arrays
from tutti.train.tasks.task import Task, check_length, labels_of, length_of, padded, without_index
from tutti.train.values import Outputs


@dataclass(frozen=True)
class MultipleChoice(Task):
    """Choose among several endings of a context. All rows of a dataset have the same number of choices.

    context: column of texts.
    choices: column of lists of texts.
    label: column of integers, the index of the right choice.
    length: longest sequence; by default the tokenizer's `model_max_length`.
    buckets: lengths to which batches are padded; None: the longest of the batch.

    Batches are (batch, choices, length).
    """

    context: str = "context"
    choices: str = "choices"
    label: str = "label"
    length: int | None = None
    buckets: Sequence[int] | None = None

    name = "multiple-choice"
    model_class = "AutoModelForMultipleChoice"

    def columns(self):
        return self.context, self.choices, self.label

    def texts(self):
        return (self.context,)

    def feature(self, row, processor):
        choices = list(row[self.choices])
        limit = length_of(self.length, processor)
        encoded = processor([row[self.context]] * len(choices), choices, truncation=True, max_length=limit)
        return {**encoded, "labels": row[self.label]}

    def batch(self, features, processor):
        from transformers import DataCollatorForMultipleChoice

        counts = {len(f["input_ids"]) for f in features}
        if len(counts) > 1:
            raise ValueError(f"rows have {' and '.join(map(str, sorted(counts)))} choices; all must have as many")
        collated = DataCollatorForMultipleChoice(processor, return_tensors="pt")(without_index(features))
        return padded(collated, processor, self.buckets)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` of the choice."""
        predictions, labels = arrays(prediction)
        return {
            "accuracy": float(((predictions.argmax(-1) if predictions.ndim == 2 else predictions) == labels).mean())
        }

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)

    def _check_labels(self, model, rows) -> None:
        for i, (where, label) in enumerate(labels_of(rows, self.label)):
            count = len(rows[i][self.choices])
            if not isinstance(label, int) or not 0 <= label < count:
                raise BadRow(f"{where}: {self.label} is {label!r}, and the row has {count} choices (0 to {count - 1})")
