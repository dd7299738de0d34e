"""Sequence to sequence: translation, summarization and other text to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.train.tasks.scores import next_token_scores
from tutti.train.tasks.task import Task, length_of, padded, without_index
from tutti.train.values import Outputs


@dataclass(frozen=True)
class Seq2Seq(Task):
    """An encoder-decoder that writes `target` when it reads `source`. The model makes its decoder's input from labels.

    source, target: columns of texts.
    prefix: text before every source ("translate English to German: ").
    length, target_length: longest source and target in tokens; by default the tokenizer's `model_max_length`.
    buckets: lengths to which batches are padded; None: the longest of the batch.
    """

    source: str = "source"
    target: str = "target"
    prefix: str = ""
    length: int | None = None
    target_length: int | None = None
    buckets: Sequence[int] | None = None

    name = "seq2seq"
    model_class = "AutoModelForSeq2SeqLM"

    def columns(self):
        return self.source, self.target

    texts = columns

    def feature(self, row, processor):
        encoded = processor(
            self.prefix + row[self.source], truncation=True, max_length=length_of(self.length, processor)
        )
        limit = length_of(self.target_length, processor)
        labels = processor(text_target=row[self.target], truncation=True, max_length=limit)["input_ids"]
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}

    def batch(self, features, processor):
        from transformers import DataCollatorForSeq2Seq

        collated = DataCollatorForSeq2Seq(processor, return_tensors="pt")(without_index(features))
        return padded(collated, processor, self.buckets)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` of the target's tokens, given those before; `perplexity` if the predictions are logits."""
        return next_token_scores(prediction, shift=0)
