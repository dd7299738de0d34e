"""Span corruption, the objective of T5 (Raffel et al. 2020, section 3.3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.train.tasks.draw import composition, generator
from tutti.train.tasks.language.text import stacked, with_mask
from tutti.train.tasks.scores import next_token_scores
from tutti.train.tasks.task import Task, length_of, padded
from tutti.train.values import Outputs, Processor, Row


@dataclass(frozen=True)
class SpanCorruption(Task):
    """Reconstruct spans of tokens that a sentinel has replaced.

    "Thank you for inviting me" with the spans "for" and "me" becomes the input "Thank you <X> inviting <Y> </s>" and
    the label "<X> for <Y> me <Z> </s>". Sentinels are the tokens `<extra_id_0>`, `<extra_id_1>`, ...

    text: column of texts.
    length: longest text in tokens, before corruption and without the end; by default the tokenizer's maximum less one.
    density: fraction of tokens in spans.
    span: mean length of a span. Lengths of spans and of the text between them are uniform among all partitions.
    buckets: lengths to which batches are padded; None: the longest of the batch.
    """

    text: str = "text"
    length: int | None = None
    density: float = 0.15
    span: float = 3.0
    buckets: Sequence[int] | None = None

    name = "span-corruption"
    model_class = "AutoModelForSeq2SeqLM"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1:
            raise ValueError(f"density is {self.density}; it must be between 0 and 1")
        if self.span < 1:
            raise ValueError(f"span is {self.span}; it must be at least 1")

    def columns(self):
        return (self.text,)

    texts = columns

    def feature(self, row, processor):
        limit = length_of(self.length, processor) - (self.length is None)
        ids = processor(row[self.text], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": ids[:limit]}

    def batch(self, features, processor):
        pairs = [self.corrupted(f, processor) for f in features]
        collated = {**with_mask([a for a, _ in pairs], processor), "labels": stacked([b for _, b in pairs], -100)}
        return padded(collated, processor, self.buckets)

    def corrupted(self, feature: Row, processor: Processor) -> tuple[list[int], list[int]]:
        """(input, label) token ids of a feature, both with an end."""
        ids = list(feature["input_ids"])
        end = [processor.eos_token_id] if processor.eos_token_id is not None else []
        if len(ids) < 2:
            raise ValueError("span corruption needs texts of at least 2 tokens; filter shorter ones")
        sentinels = sentinels_of(processor)
        starts, lengths = self.spans(generator(self.seed, feature, ids), len(ids))
        if len(starts) + 1 > len(sentinels):
            raise ValueError(
                f"{len(starts)} spans need {len(starts) + 1} sentinels, the tokenizer has {len(sentinels)}; "
                "lower length or density, or add tokens"
            )
        inputs: list[int] = []
        labels: list[int] = []
        at = 0
        for sentinel, start, length in zip(sentinels, starts, lengths, strict=False):
            inputs += [*ids[at:start], sentinel]
            labels += [sentinel, *ids[start : start + length]]
            at = start + length
        return [*inputs, *ids[at:], *end], [*labels, sentinels[len(starts)], *end]

    def spans(self, draw: np.random.Generator, length: int) -> tuple[list[int], list[int]]:
        """Starts and lengths of the spans of a sequence. The first span does not begin at 0."""
        noise = min(max(1, round(self.density * length)), length - 1)
        count = min(max(1, round(noise / self.span)), noise, length - noise)
        lengths, gaps = composition(draw, noise, count), composition(draw, length - noise, count)
        starts = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        return starts.tolist(), lengths.tolist()

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` of the label's tokens; `perplexity` if the predictions are logits."""
        return next_token_scores(prediction, shift=0)

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        sentinels_of(processor)


def sentinels_of(tokenizer: Processor) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, ... Raises ValueError if there are none."""
    vocabulary = tokenizer.get_added_vocab()
    if "<extra_id_0>" not in vocabulary:
        raise ValueError(
            "the tokenizer has no sentinels; tokenizer.add_tokens([f'<extra_id_{i}>' for i in range(100)], "
            "special_tokens=True) adds them; then resize the model's embedding"
        )
    ids = []
    while (name := f"<extra_id_{len(ids)}>") in vocabulary:
        ids.append(vocabulary[name])
    return ids
