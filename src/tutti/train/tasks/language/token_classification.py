"""A label for each word: named entities, parts of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.data.rows import BadRow
from tutti.train.tasks.scores import IGNORED, arrays, class_scores, entity_scores
from tutti.train.tasks.task import Task, check_class_labels, check_length, classes_of, length_of, padded, without_index
from tutti.train.values import Outputs


@dataclass(frozen=True)
class TokenClassification(Task):
    """One label for each word. The first token of a word has its label, the others and special tokens have -100.

    words: column of lists of words.
    labels: column of lists of integers, as long.
    all_tokens: whether the other tokens of a word have its label too.
    names: the names of the labels, such as ("O", "B-PER", "I-PER"), by which `metrics` finds entities; by default those
        of the model's config (`id2label`), if they begin with B- and I-.
    length: longest sequence; by default the tokenizer's `model_max_length`.
    buckets: lengths to which batches are padded; None: the longest of the batch.

    It needs a fast tokenizer, which knows the words of its tokens.
    """

    words: str = "tokens"
    labels: str = "labels"
    all_tokens: bool = False
    names: Sequence[str] | None = None
    length: int | None = None
    buckets: Sequence[int] | None = None

    name = "token-classification"
    model_class = "AutoModelForTokenClassification"

    def columns(self):
        return self.words, self.labels

    def feature(self, row, processor):
        words, labels = row[self.words], row[self.labels]
        if len(words) != len(labels):
            raise BadRow(f"{len(words)} words with {len(labels)} labels; there must be one for each")
        if not processor.is_fast:
            raise ValueError("token-classification needs a fast tokenizer, which knows the words of its tokens")
        encoded = processor(
            words, is_split_into_words=True, truncation=True, max_length=length_of(self.length, processor)
        )
        word_labels, before = [], None
        for word in encoded.word_ids():
            labelled = word is not None and (word != before or self.all_tokens)
            word_labels.append(labels[word] if labelled else IGNORED)
            before = word
        return {**encoded, "labels": word_labels}

    def batch(self, features, processor):
        from transformers import DataCollatorForTokenClassification

        collated = DataCollatorForTokenClassification(processor, return_tensors="pt")(without_index(features))
        return padded(collated, processor, self.buckets)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` and `f1` (mean over classes) of the tokens that have a label.

        With `names` also `entity_precision`, `entity_recall` and `entity_f1`: an entity is right if its type, its first
        and its last token are.
        """
        predictions, labels = arrays(prediction)
        if predictions.ndim == labels.ndim + 1:
            predictions = predictions.argmax(-1)
        counted = labels != IGNORED
        if not counted.any():
            return {}
        scores = class_scores(predictions[counted], labels[counted])
        return scores if self.names is None else scores | entity_scores(predictions, labels, self.names)

    def fitted(self, model, processor):
        named = getattr(getattr(model, "config", None), "id2label", None) or {}
        names = tuple(named[i] for i in sorted(named))
        return self.but(names=names) if self.names is None and any(n.startswith("B-") for n in names) else self

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)
        count = classes_of(model)
        if self.names is not None and count is not None and len(self.names) != count:
            raise ValueError(f"names has {len(self.names)} labels, and the model has {count} (num_labels in its "
                             "config): name each")  # fmt: skip

    def _check_labels(self, model, rows) -> None:
        check_class_labels(rows, self.labels, classes_of(model), ignored=IGNORED)
