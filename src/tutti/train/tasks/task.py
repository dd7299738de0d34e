"""What a task is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn

from tutti.data.buckets import pad_to_bucket
from tutti.data.rows import SAMPLE, BadRow, Mapped, no_column
from tutti.data.sources.open import open_source
from tutti.data.sources.source import MappedStream, StreamingSource
from tutti.tracing.batch import Batch
from tutti.train.values import Outputs, Processor, Row, Rows

Feature = Row
Collator = Callable[[list[Feature]], dict[str, Tensor]]

CHECKED = 10_000  # rows whose labels `check` reads


@dataclass(frozen=True)
class Task:
    """A way to train a model: rows -> features -> batches -> loss -> metrics.

    The fields are the options. `prepare` and `collator` also take them as keyword arguments, for this call.

    name: the key in `tutti.train.tasks.TASKS`.
    model_class: the Auto class of transformers that loads its models, or "" if the models are not of transformers.
    loss: None if the model's output has a `.loss`; otherwise `loss(model, batch)` gives a 0-d tensor, and
        `outputs(model, batch)` what `metrics` reads.
    seed: seed of what a collator draws. A draw is a function of the seed and the feature's `sample_index`, which
        `tutti.data.Stream` counts and `tutti.data.Numbered` sets; without one, of the seed and the content.
    """

    seed: int = 0

    name: ClassVar[str] = ""
    model_class: ClassVar[str] = ""
    loss: ClassVar[Callable | None] = None

    def but(self, **options: Any) -> Self:
        """The task with other options. Raises ValueError for an unknown one."""
        names = [f.name for f in fields(self)]
        for key in options:
            if key not in names:
                near = get_close_matches(key, names, 1)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise ValueError(f"{self.name} has no option {key!r}{hint}; its options are {', '.join(names)}")
        return replace(self, **options)

    # -- what a trainer calls ------------------------------------------------------------------------------------

    def prepare(self, rows: Rows, processor: Processor, **options: Any) -> Rows:
        """Features of the rows: a sequence of dicts, to be read by the collator; a streaming source of a streaming one.

        rows: a `tutti.data` source, a `datasets.Dataset`, or a list of dicts.
        processor: a tokenizer, an image processor, a feature extractor or a processor, as `model_class` needs.

        Raises ValueError if there are no rows or a column does not exist.
        """
        task = self.but(**options)
        if isinstance(rows, StreamingSource):
            task._check_first(rows)
            return task._streamed(rows, processor)
        task._check_rows(rows)
        return task._prepared(rows, processor)

    def collator(self, processor: Processor, **options: Any) -> Collator:
        """A function from a list of features to a batch of tensors. It can be pickled."""
        return Collate(self.but(**options), processor)

    def metrics(self, prediction: Outputs) -> dict[str, float]:
        """Scores of a `transformers.EvalPrediction` (arrays `predictions` and `label_ids`)."""
        return {}

    def fitted(self, model: nn.Module, processor: Processor) -> Self:
        """The task with options that it takes from the model, where none are given."""
        return self

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Named predictions for `metrics`, of a task that has its own `loss`. By default there are none."""
        return {}

    def check(self, model: nn.Module, processor: Processor, dataset: Rows) -> None:
        """Raise ValueError if the model, the processor or the raw rows do not fit this task."""
        self._check_model(model)
        self._check_processor(model, processor)
        if isinstance(dataset, StreamingSource):
            self._check_first(dataset)
        else:
            self._check_rows(dataset)
            self._check_texts(dataset)
            self._check_labels(model, dataset)

    # -- what a task defines -------------------------------------------------------------------------------------

    def columns(self) -> tuple[str, ...]:
        """Columns that rows must have."""
        return ()

    def texts(self) -> tuple[str, ...]:
        """Columns whose values must be texts."""
        return ()

    def feature(self, row: Row, processor: Processor) -> Feature:
        """The feature of a row, where a row makes one feature."""
        raise NotImplementedError(f"{type(self).__name__}.feature")

    def batch(self, features: list[Feature], processor: Processor) -> dict[str, Tensor]:
        """The batch of some features."""
        raise NotImplementedError(f"{type(self).__name__}.batch")

    def _prepared(self, rows: Rows, processor: Processor) -> Rows:
        return Mapped(rows, Featured(self, processor))

    def _streamed(self, rows: StreamingSource, processor: Processor) -> StreamingSource:
        return MappedStream(rows, Featured(self, processor))

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_rows(self, rows: Rows) -> None:
        if not hasattr(rows, "__len__"):
            raise ValueError(
                f"{self.name} reads rows by index, and {type(rows).__name__} has no length; "
                "tutti.data.open_source opens files with one"
            )
        if len(rows) == 0:
            raise ValueError(f"{self.name}: the dataset is empty")
        self._check_columns(rows[0])

    def _check_first(self, rows: StreamingSource) -> None:
        """`_check_rows` of the first row of a streaming source."""
        every = (row for shard in range(rows.shards) for row in rows.open(shard, 0))
        first = next((row for row in every if not isinstance(row, BadRow)), None)
        if first is None:
            raise ValueError(f"{self.name}: the dataset is empty")
        self._check_columns(first)

    def _check_columns(self, first: Row) -> None:
        for name in self.columns():
            if name not in first:
                raise ValueError(f"{self.name}: {no_column(name, list(first), 'the dataset')}")

    def _check_model(self, model: nn.Module) -> None:
        import transformers

        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
        if not self.model_class or not isinstance(inner, transformers.PreTrainedModel):
            return
        kind = type(inner).__name__
        classes = class_names(self.model_class)
        if kind in classes or any(base.__name__ in classes for base in type(inner).__mro__):
            return
        wanted = classes.get(inner.config.model_type) if isinstance(classes, dict) else None
        remedy = f"use {wanted}" if wanted else f"models of type {inner.config.model_type!r} have none for this task"
        raise ValueError(f"{kind} does not fit {self.name}, whose models are of {self.model_class}; {remedy}")

    def _check_processor(self, model: nn.Module, processor: Processor) -> None:
        """Raise ValueError if a tokenizer has more tokens than the model's embedding."""
        config = getattr(model, "config", None)
        size = getattr(config, "vocab_size", None)
        if size is not None and hasattr(processor, "convert_tokens_to_ids") and len(processor) > size:
            raise ValueError(
                f"the tokenizer has {len(processor)} tokens, the model's embedding {size}; "
                f"call model.resize_token_embeddings({len(processor)})"
            )

    def _check_texts(self, rows: Rows) -> None:
        """Raise BadRow for a value that is not a text."""
        for column in self.texts():
            for where, value in labels_of(rows, column):
                if not isinstance(value, str):
                    raise BadRow(f"{where}: {column} is {value!r}, not a text; fill it in, or leave the row out")

    def _check_labels(self, model: nn.Module, rows: Rows) -> None:
        """Raise ValueError for labels that the model has no output for."""


@dataclass(frozen=True)
class Featured:
    """`task.feature` with its processor."""

    task: Task
    processor: Processor

    def __call__(self, row: Row) -> Feature:
        return self.task.feature(row, self.processor)


@dataclass(frozen=True)
class Collate:
    """`task.batch` with its processor."""

    task: Task
    processor: Processor

    def __call__(self, features: list[Feature]) -> dict[str, Tensor]:
        if not features:
            raise ValueError(f"{self.task.name}: a batch of no features")
        return self.task.batch(features, self.processor)


def class_names(auto: str) -> dict[str, str]:
    """Model types and class names of an Auto class, and the class names themselves as keys."""
    import transformers

    mapping = getattr(transformers, auto)._model_mapping
    by_kind: dict[str, str] = {}
    for kind, names in mapping._model_mapping.items():
        for name in (names,) if isinstance(names, str) else names:
            by_kind.setdefault(kind, name)
            by_kind[name] = name
    for config, kind in mapping._extra_content.items():  # registered by others
        by_kind[config.model_type] = by_kind[kind.__name__] = kind.__name__
    return by_kind


def without_index(features: Sequence[Feature]) -> list[Feature]:
    """The features without their `sample_index`."""
    return [{k: v for k, v in f.items() if k != SAMPLE} for f in features]


def padded(batch: Batch, processor: Processor, buckets: Sequence[int] | None) -> dict[str, Tensor]:
    """A batch of text at the next of the buckets; unchanged if there are none."""
    batch = dict(batch)
    if buckets is None:
        return batch
    side = getattr(processor, "padding_side", "right")
    return pad_to_bucket(batch, buckets, pad_id=pad_id(processor), side=side)


def pad_id(tokenizer: Processor) -> int:
    """The padding token's id. Raises ValueError if the tokenizer has none."""
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token; set tokenizer.pad_token = tokenizer.eos_token")
    return tokenizer.pad_token_id


def length_of(length: int | None, tokenizer: Processor) -> int:
    """The option, or the tokenizer's maximum. Raises ValueError if neither is known."""
    if length is not None:
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        return length
    if tokenizer.model_max_length > 10**9:
        raise ValueError("give length: the tokenizer does not know the model's longest sequence")
    return tokenizer.model_max_length


def check_length(length: int | None, model: nn.Module, processor: Processor) -> None:
    """Raise ValueError if sequences are longer than the model's positions."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tokens = length
    if tokens is None and getattr(processor, "model_max_length", 10**30) < 10**9:
        tokens = processor.model_max_length
    if limit is not None and tokens is not None and tokens > limit:
        raise ValueError(f"sequences of {tokens} tokens are longer than the model's {limit} positions; lower length")


def labels_of(rows: Rows, name: str) -> Iterator[tuple[str, Any]]:
    """(name of the row, label) of the first rows."""
    source = open_source(rows)
    for i, value in enumerate(source.cells(name, CHECKED)):
        yield source.name(i), value


def classes_of(model: nn.Module) -> int | None:
    """`num_labels` of the model's config, or None."""
    return getattr(getattr(model, "config", None), "num_labels", None)


def check_class_labels(rows: Rows, name: str, count: int | None, ignored: int | None = None) -> None:
    """Raise ValueError if a label (or one of a list of labels) is not an integer in [0, count)."""
    if count is None:
        return
    for where, value in labels_of(rows, name):
        for label in np.ravel(value).tolist():
            if isinstance(label, bool) or not isinstance(label, int):
                raise BadRow(f"{where}: {name} is {label!r}; labels are integers in [0, {count})")
            if label != ignored and not 0 <= label < count:
                raise BadRow(
                    f"{where}: {name} is {label}, and the model has {count} classes (labels 0 to {count - 1}); "
                    "set num_labels in the model's config"
                )
