"""The raw rows of a task in `tutti.Trainer`: features, checks, and streams of which each process reads its part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import nn

from tutti.data import Mixture, Numbered, Stream, StreamingSource, open_source
from tutti.exec.runtimes.runtime import in_job, join_job
from tutti.launch.launch import rank, world_size
from tutti.tracing.capture import device_of
from tutti.train.tasks import Task
from tutti.train.trainer.arguments import rows_of_microbatch, seed_of_data
from tutti.train.trainer.batches import joined
from tutti.train.trainer.checkpointing import STREAM
from tutti.train.values import NamedValues, Processor, Row, Rows

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer

LARGE = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")  # predictions: the vocabulary


def take(trainer: Trainer, task: Task, collates: bool) -> None:
    """Let a task prepare the datasets of a Trainer. Raises ValueError for what does not fit the task."""
    processor = trainer.processing_class
    task = trainer.task = _with_length(task, trainer.model, processor).fitted(trainer.model, processor)
    train, held_out = trainer.train_dataset, trainer.eval_dataset
    if train is not None and not isinstance(train, Mixture | Stream):
        train = open_source(train)
        if not isinstance(train, StreamingSource):
            task.check(trainer.model, processor, train)
            trainer.train_dataset = Numbered(task.prepare(train, processor))
        else:
            trainer.train_dataset = task.prepare(train, processor)
    elif isinstance(train, Mixture):
        for source in train.sources:
            if not isinstance(source, StreamingSource):
                task.check(trainer.model, processor, source)
        pairs = [(task.prepare(x, processor), w) for x, w in zip(train.sources, train.weights, strict=True)]
        trainer.train_dataset = Mixture(pairs)
    if isinstance(held_out, dict):
        trainer.eval_dataset = {name: _prepared(task, x, trainer) for name, x in held_out.items()}
    elif held_out is not None:
        trainer.eval_dataset = _prepared(task, held_out, trainer)
    if collates:
        trainer.data_collator = task.collator(processor)
    if trainer.compute_metrics is None and task.model_class not in LARGE and type(task).metrics is not Task.metrics:
        trainer.compute_metrics = task.metrics


def _with_length(task: Task, model: nn.Module, processor: Processor) -> Task:
    """The task with the model's longest sequence as its length, if neither it nor the tokenizer has one."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    unknown = getattr(processor, "model_max_length", 0) > 10**9 and getattr(task, "length", 0) is None
    return task.but(length=limit) if unknown and limit is not None else task


def _prepared(task: Task, dataset: Rows, trainer: Trainer) -> Numbered:
    source = open_source(dataset)
    task.check(trainer.model, trainer.processing_class, source)
    return Numbered(task.prepare(source, trainer.processing_class))


def stream(trainer: Trainer) -> StreamLoader:
    """The microbatches of a stream, or of a mixture or a source that is streamed."""
    args, data = trainer.args, trainer.train_dataset
    if isinstance(data, Stream):
        return StreamLoader(data, 1, trainer)
    size = rows_of_microbatch(args)
    processes = min(world_size(), size)
    samples = Stream(
        data, size, seed_of_data(args), min(rank(), processes - 1), processes,
        collate=trainer.data_collator, workers=args.dataloader_num_workers,
    )  # fmt: skip
    return StreamLoader(samples, processes, trainer)


class StreamLoader:
    """Microbatches of a Stream. Each process reads its part; then the processes exchange them.

    parts: 1 if each process reads whole batches.
    """

    whole = False

    def __init__(self, source: Stream, parts: int, trainer: Trainer):
        self.source, self.parts, self.trainer = source, parts, trainer
        self.first = source.state_dict()

    def __iter__(self) -> Iterator[Row]:
        while True:
            own = next(self.source, None)
            if self.parts > 1:
                if in_job():
                    join_job(device_of(self.trainer.model))
                every: list[Row | None] = [None] * world_size()
                dist.all_gather_object(every, own)
                own = (
                    joined(cast(list[Row], every[: self.parts]), self.trainer._pads()) if every[0] is not None else None
                )
            if own is None:
                return
            yield own

    def go_on(self, folder: Path, step: int) -> None:
        """Continue after the last batch of a checkpoint, which is that of this step."""
        self.source.load_state_dict(json.loads((folder / STREAM).read_text()))

    def example(self, count: int) -> list[Row]:
        """The first microbatches of the stream, which goes on from where it was when this was made."""
        rows = list(islice(iter(self), count))
        self.source.load_state_dict(self.first)
        return rows

    def state_dict(self) -> NamedValues:
        """The state of the stream after the last batch."""
        return self.source.state_dict()
