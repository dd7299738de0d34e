"""Causal language modelling: predict each token from those before it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import nn

from tutti.data.packs import Packs, packed_batch
from tutti.data.rows import Mapped, column
from tutti.data.sources.source import MappedStream, Regrouped, StreamingSource
from tutti.data.windows import Windows
from tutti.train.tasks.language.text import stacked, token_ids, with_mask
from tutti.train.tasks.scores import next_token_scores
from tutti.train.tasks.task import Task, check_length, length_of, pad_id, padded
from tutti.train.values import NamedValues, Outputs, Processor, Row, Rows

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # types of layers that keep no state
LAYOUTS = ("windows", "packed", "padded")


@dataclass(frozen=True)
class CausalLM(Task):
    """Causal language modelling of a text column.

    text: column of texts. Rows that have `input_ids` instead are used as they are.
    length: tokens in a sequence; by default the tokenizer's `model_max_length`.
    layout: "windows": texts, each with an end-of-text token, follow one another and are cut into windows; attention
        crosses texts. "packed": whole texts share a row without attention or loss between them; longer texts are
        cut. "padded": one text a row, cut at `length` and padded.
    attention: how packed rows keep texts apart: "mask" or "positions" (`tutti.data.packed_batch`).
    window: texts among which packing looks for a fit.
    buckets: lengths to which padded batches are padded (`tutti.data.bucket_lengths`); None: the longest of the batch.
    """

    text: str = "text"
    length: int | None = None
    layout: str = "windows"
    attention: str = "mask"
    window: int = 1024
    buckets: Sequence[int] | None = None

    name = "causal-lm"
    model_class = "AutoModelForCausalLM"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; it must be one of {', '.join(LAYOUTS)}")

    def _check_texts(self, rows: Rows) -> None:
        if self.text in rows[0]:
            super()._check_texts(rows)

    def texts(self):
        return (self.text,)

    def _check_columns(self, first: Row) -> None:
        if not {"input_ids", "sequences"} & set(first):
            column(first, self.text, f"{self.name}: the dataset")

    def _prepared(self, rows: Rows, processor: Processor) -> Rows:
        if {"input_ids", "sequences"} & set(rows[0]):
            return rows
        length = length_of(self.length, processor)
        if self.layout == "padded":
            return Mapped(rows, _Cut(self, processor, length))
        ids = token_ids(processor, (rows[i][self.text] for i in range(len(rows))), end=True)
        if self.layout == "windows":
            return Windows(np.concatenate([np.asarray(row, np.int32) for row in ids]), length)
        return Packs([{"input_ids": piece} for piece in _pieces(ids, length)], length, self.window)

    def _streamed(self, rows: StreamingSource, processor: Processor) -> StreamingSource:
        length = length_of(self.length, processor)
        if self.layout == "padded":
            return MappedStream(rows, _Cut(self, processor, length))
        return Regrouped(rows, _Regroup(self, processor, length))

    def batch(self, features, processor):
        if "sequences" in features[0]:
            return packed_batch(
                features, length_of(self.length, processor), pad_id=pad_id(processor), attention=self.attention
            )
        rows = [list(f["input_ids"]) for f in features]
        labels = [list(f["labels"]) if "labels" in f else row for f, row in zip(features, rows, strict=True)]
        side = getattr(processor, "padding_side", "right")
        if self.layout == "windows" and len({len(row) for row in rows}) == 1:
            return {"input_ids": stacked(rows, 0), "labels": stacked(labels, -100)}
        collated = {**with_mask(rows, processor), "labels": stacked(labels, -100, side)}
        return padded(collated, processor, self.buckets)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """`accuracy` of the next token; `perplexity` if the predictions are logits."""
        return next_token_scores(prediction, shift=1)

    def check(self, model: nn.Module, processor: Processor, dataset: Rows) -> None:
        super().check(model, processor, dataset)
        check_length(self.length, model, processor)
        if self.layout == "packed":
            check_packing(model, length_of(self.length, processor), self.attention)


def check_packing(model: nn.Module, length: int, attention: str) -> None:
    """Raise ValueError if a model would see other texts of a packed row of `length` tokens, or see less of its own."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or layers - ATTENTION:
        raise ValueError(f"{kind} carries a state from token to token, which would go on from text to text in a packed "
                         "row: use layout='padded'")  # fmt: skip
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{kind} takes no position_ids, so positions would go on from text to text in a packed row: "
                         "use layout='padded'")  # fmt: skip
    chunk, window = (getattr(config, name, None) for name in ("attention_chunk_size", "sliding_window"))
    if isinstance(chunk, int) and chunk < length and "chunked_attention" in layers:
        raise ValueError(f"{kind} attends within chunks of {chunk} tokens of a row, wherever its texts begin: use "
                         f"layout='padded', or a length of at most {chunk}")  # fmt: skip
    if attention == "mask" and getattr(config, "_attn_implementation", None) == "eager":
        raise ValueError(f"{kind} adds its mask to scores (attn_implementation='eager'), and that of a packed row is "
                         "boolean: use attention='positions', or attn_implementation='sdpa'")  # fmt: skip
    slides = not layers or "sliding_attention" in layers
    if attention == "mask" and isinstance(window, int) and window < length and slides:
        raise ValueError(f"{kind} attends to windows of {window} tokens, which the mask of a packed row would replace: "
                         "use attention='positions'")  # fmt: skip


def _pieces(ids: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Texts, those longer than `length` in several pieces."""
    return (row[at : at + length] for row in ids for at in range(0, len(row), length))


@dataclass(frozen=True)
class _Regroup:
    """Windows or packs of the texts of a shard."""

    task: CausalLM
    processor: Processor
    length: int

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row]:
        ids = token_ids(self.processor, (row[self.task.text] for row in rows), end=True)
        if self.task.layout == "packed":
            pieces = _pieces(ids, self.length)
            while window := list(islice(pieces, self.task.window)):
                yield from Packs([{"input_ids": piece} for piece in window], self.length, self.task.window)
            return
        waiting: list[int] = []
        for row in ids:
            waiting += row
            while len(waiting) >= self.length:
                yield {"input_ids": waiting[: self.length]}
                del waiting[: self.length]


@dataclass(frozen=True)
class _Cut:
    task: CausalLM
    processor: Processor
    length: int

    def __call__(self, row: Row) -> NamedValues:
        ids = next(token_ids(self.processor, iter([row[self.task.text]]), end=True))
        return {"input_ids": ids[: self.length]}
