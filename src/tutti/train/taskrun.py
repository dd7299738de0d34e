"""`tutti train` with a config that names a task: a thin layer over `tutti.Trainer`.

    out = "out/reviews"
    task = "masked-lm"                     # a name of tutti.train.tasks.TASKS

    [options]                              # of the task
    probability = 0.2

    [model]
    type = "bert"                          # or folder = "out/other/model", a folder of save_pretrained
    hidden_size = 128

    [tokenizer]                            # learned from the training texts; or folder = "..."
    kind = "wordpiece"                     # or "bytes"
    vocab_size = 4000

    [data]
    train = "reviews.jsonl"                # whatever tutti.data.open_source opens, or a table of weights
    held_out = "held-out.jsonl"

    [trainer]                              # of tutti.TrainingArguments
    max_steps = 1000
    learning_rate = 3e-4

    [parallel]
    processes = 2

Options over the file, such as `--trainer.max_steps 10`, are options of `tutti train`. The same command continues an
interrupted run. The trained model lies in `out/model`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tutti.keywords import check_name
from tutti.launch.launch import launch, rank, under_launcher
from tutti.train.values import NamedValues, Processor, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tutti.train.tasks import Task

TEXTS = 20_000  # rows that a tokenizer is learned from


@dataclass(frozen=True)
class TaskData:
    """train, held_out: whatever `tutti.data.open_source` opens; train may be a table of weights of several."""

    train: str | dict[str, float]
    held_out: str | None = None


@dataclass(frozen=True)
class TaskTokenizer:
    """folder: folder of a tokenizer; without one, it is learned from a column of the training texts."""

    kind: Literal["bytes", "wordpiece"] = "bytes"
    vocab_size: int = 4096
    folder: str | None = None
    column: str | None = None


@dataclass(frozen=True)
class TaskParallel:
    """restarts: how often processes that fail are started again."""

    processes: int = 1
    restarts: int = 0


@dataclass(frozen=True)
class TaskRun:
    """The sections of the config; the docstring of this file shows them."""

    task: str
    data: TaskData
    out: str = "out/run"
    seed: int = 0
    options: NamedValues = field(default_factory=dict)
    model: NamedValues = field(default_factory=dict)
    tokenizer: TaskTokenizer | None = None
    processor: str | None = None
    trainer: NamedValues = field(default_factory=dict)
    parallel: TaskParallel = TaskParallel()

    def check(self) -> None:
        """Raise ValueError for numbers that no run can have."""
        for name, value, least in (("processes", self.parallel.processes, 1), ("restarts", self.parallel.restarts, 0)):
            if value < least:
                raise ValueError(f"parallel.{name} is {value}; it must be at least {least}")


def run(config: TaskRun, file: str) -> None:
    """Train on this machine, in as many processes as the config says. Every rank of a job may call it."""
    if under_launcher() or config.parallel.processes == 1:
        train(config, file)
    else:
        launch(train, config.parallel.processes, config, file, restarts=config.parallel.restarts)


def train(config: TaskRun, file: str) -> None:
    """Build everything, train, evaluate and save, as one rank of a job."""
    import tutti
    from tutti.data import Mixture, open_source
    from tutti.train.stop import train_until_stopped
    from tutti.train.tasks import get_task
    from tutti.train.trainer.arguments import TrainingArguments

    out, task = Path(config.out), get_task(config.task, **config.options)
    source = config.data.train
    rows = Mixture(source) if isinstance(source, dict) else open_source(source)
    processor = _processor(config, task, rows.sources[0] if isinstance(rows, Mixture) else rows)
    model = _model(config, task, processor, file)
    strategies = {f"{what}_strategy": "steps" for what in ("save", "eval") if f"{what}_steps" in config.trainer}
    options = {"report_to": "none", "seed": config.seed, "save_strategy": "epoch", **strategies, **config.trainer}
    for key in options:
        names = [f.name for f in fields(TrainingArguments)]
        check_name(key, names, f"{file}: tutti.TrainingArguments has no option {key!r} ([trainer])")
    held_out = config.data.held_out
    trainer = tutti.Trainer(model, TrainingArguments(str(out), **options), train_dataset=rows, task=task,
                            eval_dataset=None if held_out is None else open_source(held_out),
                            processing_class=processor)  # fmt: skip
    train_until_stopped(trainer, resume=any(out.glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(str(out / "model"))
    metrics = trainer.evaluate() if held_out is not None else {}
    if rank() == 0:
        (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
        trainer.save_state()
        for name, value in metrics.items():
            print(f"{name:30} {value:.6g}" if isinstance(value, float) else f"{name:30} {value}")
        print(f"model                          {out / 'model'}", flush=True)


def _processor(config: TaskRun, task: Task, rows: Rows) -> Processor:
    """The tokenizer or processor of a folder, or a tokenizer learned from the rows and kept in the run's folder."""
    from transformers import AutoProcessor, AutoTokenizer

    from tutti.data.tokenizer import train_tokenizer, train_wordpiece

    if config.processor is not None:
        return AutoProcessor.from_pretrained(config.processor)
    options = config.tokenizer
    if options is None:
        return None
    folder = Path(options.folder or Path(config.out, "tokenizer"))
    if not folder.exists():
        if options.folder:
            raise ValueError(f"there is no tokenizer in {folder} ([tokenizer] folder)")
        learn = train_wordpiece if options.kind == "wordpiece" else train_tokenizer
        column = options.column or getattr(task, "text", "text")
        if rank() == 0:
            learn(_texts(rows, column), options.vocab_size).save_pretrained(folder)
    _wait()
    return AutoTokenizer.from_pretrained(folder)


def _texts(rows: Rows, column: str) -> Iterator[str]:
    source = (rows[i] for i in range(len(rows))) if hasattr(rows, "__len__") else rows.rows()
    for row in islice(source, TEXTS):
        if column not in row:
            raise ValueError(f"the rows have no column {column!r}, but {', '.join(row)}: give [tokenizer] column")
        yield str(row[column])


def _wait() -> None:
    """Until all ranks are here."""
    if under_launcher():
        import torch
        import torch.distributed as dist

        from tutti.exec.runtimes.runtime import join_job

        join_job(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        dist.barrier()


def _model(config: TaskRun, task: Task, processor: Processor, file: str) -> PreTrainedModel:
    """The model of the config, with weights from a folder or from the seed."""
    import torch
    import transformers

    from tutti.exec.stores.weights import check_weights

    options = dict(config.model)
    folder, kind = options.pop("folder", None), options.pop("type", None)
    if not task.model_class:
        raise ValueError(f"{file}: models of the task {task.name} are not of transformers: use tutti.Trainer in Python")
    auto = getattr(transformers, task.model_class)
    if folder is not None:
        check_weights(Path(folder))
        return auto.from_pretrained(folder, **options)
    if kind is None:
        raise ValueError(f'{file}: [model] needs type = "bert" (a model type of transformers), or folder = "..."')
    if processor is not None and hasattr(processor, "pad_token_id"):
        usual = {"vocab_size": len(processor), "pad_token_id": processor.pad_token_id}
        usual |= {"bos_token_id": processor.bos_token_id, "eos_token_id": processor.eos_token_id}
        options = {key: x for key, x in usual.items() if x is not None or key == "pad_token_id"} | options
    torch.manual_seed(config.seed)
    return auto.from_config(transformers.AutoConfig.for_model(kind, **options))
