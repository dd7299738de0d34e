"""Extractive question answering: the span of a context that answers a question (Rajpurkar et al. 2016)."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.data.rows import BadRow
from tutti.data.sources.source import Regrouped
from tutti.train.tasks.task import Task, check_length, labels_of, length_of, padded, without_index
from tutti.train.values import Outputs, Processor, Row, Rows


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """Start and end of the answer in a context, in the columns of SQuAD.

    A context that is too long becomes several windows that overlap. A window without the whole answer, and a question
    without an answer, point to the first token.

    question, context: columns of texts.
    answers: column of `{"text": [...], "answer_start": [...]}`, starts in characters; the first is learned.
    length: tokens in a window; by default the tokenizer's `model_max_length`.
    stride: tokens that neighbouring windows share; by default a quarter of the length.
    buckets: lengths to which batches are padded; None: the longest of the batch.

    Features have input_ids, attention_mask, token_type_ids where the tokenizer makes them, start_positions,
    end_positions, and for `answers_of` also row and offsets.
    """

    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    length: int | None = None
    stride: int | None = None
    buckets: Sequence[int] | None = None

    name = "question-answering"
    model_class = "AutoModelForQuestionAnswering"

    def columns(self):
        return self.question, self.context, self.answers

    def texts(self):
        return self.question, self.context

    def _prepared(self, rows, processor):
        if not processor.is_fast:
            raise ValueError("question-answering needs a fast tokenizer, which knows the characters of its tokens")
        return [f for i in range(len(rows)) for f in self.windows(rows[i], processor, i)]

    def _streamed(self, rows, processor):
        return Regrouped(rows, _Windows(self, processor))

    def windows(self, row: Row, processor: Processor, number: int = 0) -> list[Row]:
        """The features of a row, one for each window. Each notes the `number` of its row."""
        length = length_of(self.length, processor)
        encoded = processor(
            row[self.question],
            row[self.context],
            truncation="only_second",
            max_length=length,
            stride=length // 4 if self.stride is None else self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        answers = row[self.answers]
        texts, starts = answers["text"], answers["answer_start"]
        features = []
        for w in range(len(encoded["input_ids"])):
            offsets = [
                pair if part == 1 else None
                for part, pair in zip(encoded.sequence_ids(w), encoded["offset_mapping"][w], strict=True)
            ]
            span = _span(offsets, starts[0], starts[0] + len(texts[0])) if texts else (0, 0)
            columns = ("input_ids", "attention_mask", "token_type_ids")
            feature = {key: encoded[key][w] for key in columns if key in encoded}
            features.append(feature | {"start_positions": span[0], "end_positions": span[1], "row": number,
                                   "offsets": offsets})  # fmt: skip
        return features

    def batch(self, features, processor):
        from transformers import DataCollatorWithPadding

        plain = [{k: v for k, v in f.items() if k not in ("row", "offsets")} for f in without_index(features)]
        collated = DataCollatorWithPadding(processor, return_tensors="pt")(plain)
        return padded(collated, processor, self.buckets)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """The scores of windows: `exact` (start and end right) and `f1` of their tokens.

        predictions: (start logits, end logits), each (windows, length); label_ids: (starts, ends).
        """
        start, end = (np.asarray(x) for x in prediction.predictions[:2])
        wanted = [np.asarray(x) for x in prediction.label_ids]
        spans = [_best(s, e) for s, e in zip(start, end, strict=True)]
        exact = [(a, b) == (c, d) for (a, b), c, d in zip(spans, *wanted, strict=True)]
        scores = []
        for (a, b), c, d in zip(spans, *wanted, strict=True):
            both = max(0, min(b, d) - max(a, c) + 1)
            scores.append(2 * both / (b - a + 1 + d - c + 1))
        return {"exact": float(np.mean(exact)), "f1": float(np.mean(scores))}

    def answers_of(self, rows: Rows, features: Sequence[Row], start: np.ndarray, end: np.ndarray) -> list[str]:
        """The answer to each row's question: the best span of all its windows, "" if pointing to the first token scores
        more in every window.

        rows: the raw rows. features: their windows, as `prepare` made them.
        start, end: logits, (windows, length).
        """
        best, none = [(-np.inf, "")] * len(rows), [np.inf] * len(rows)
        for feature, s, e in zip(features, np.asarray(start), np.asarray(end), strict=True):
            number, offsets = feature["row"], feature["offsets"]
            none[number] = min(none[number], float(s[0] + e[0]))
            a, b = _best(s[: len(offsets)], e[: len(offsets)], [pair is not None for pair in offsets])
            score = float(s[a] + e[b])
            if offsets[a] is not None and score > best[number][0]:
                best[number] = score, rows[number][self.context][offsets[a][0] : offsets[b][1]]
        return [text if score > null else "" for (score, text), null in zip(best, none, strict=True)]

    def check(self, model, processor, dataset) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)

    def _check_labels(self, model, rows) -> None:
        for i, (where, answers) in enumerate(labels_of(rows, self.answers)):
            for text, start in zip(answers["text"], answers["answer_start"], strict=True):
                if rows[i][self.context][start : start + len(text)] != text:
                    raise BadRow(
                        f"{where}: the answer {text!r} is not at character {start} of the context; correct answer_start"
                    )


@dataclass(frozen=True)
class _Windows:
    """The windows of the rows of a shard."""

    task: QuestionAnswering
    processor: Processor

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row]:
        return (f for i, row in enumerate(rows) for f in self.task.windows(row, self.processor, i))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is one of the answers, after SQuAD's normalization; "" is right if there are none."""
    return float(max((_normal(prediction) == _normal(a) for a in answers), default=prediction == ""))


def word_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 of words in common with an answer, after SQuAD's normalization."""
    if not answers:
        return float(prediction == "")
    scores = []
    for answer in answers:
        ours, theirs = Counter(_normal(prediction).split()), Counter(_normal(answer).split())
        both = (ours & theirs).total()
        scores.append(2 * both / max(1, ours.total() + theirs.total()))
    return max(scores)


def _normal(text: str) -> str:
    """Lower case, without punctuation and articles."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


def _span(offsets: list[tuple[int, int] | None], start: int, end: int) -> tuple[int, int]:
    """First and last token of the characters [start, end), or (0, 0) if they are not all there."""
    inside = [i for i, pair in enumerate(offsets) if pair and pair[0] < end and pair[1] > start]
    if not inside:
        return 0, 0
    first, last = inside[0], inside[-1]
    whole = offsets[first][0] <= start and offsets[last][1] >= end  # pyright: ignore[reportOptionalSubscript]
    return (first, last) if whole else (0, 0)


def _best(start: np.ndarray, end: np.ndarray, allowed: Sequence[bool] | None = None) -> tuple[int, int]:
    """The pair (a, b) with a <= b and the greatest start[a] + end[b], among allowed tokens."""
    s, e = start.astype(np.float64), end.astype(np.float64)
    if allowed is not None:
        s, e = np.where(allowed, s, -np.inf), np.where(allowed, e, -np.inf)
    best = np.maximum.accumulate(s)
    b = int((best + e).argmax())
    return int(s[: b + 1].argmax()), b
