"""Contenders that train: what passes a turn's steps, and `transformers.Trainer` inside one long `train()`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import harness

LR, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 1.0


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    """As the Trainer makes it: vectors do not decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, **options)


def pass_turns(turns: harness.Turns, step: Callable[[], torch.Tensor], **facts: float) -> None:
    """Take all turns with a step that gives its loss. facts: what else is to be known."""
    first_loss = None
    while steps := turns.wait():
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            _finish()
            seconds.append(time.perf_counter() - start)
            first_loss = first_loss or loss.item()
        turns.done(seconds, first_loss=first_loss, **_device_peak(), **facts)


def train_in_a_loop(
    turns: harness.Turns,
    model: torch.nn.Module,
    batches: Iterator[dict[str, torch.Tensor]],
    score: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor],
) -> None:
    """What one writes by hand, with torch's fused AdamW. score: the loss of a batch."""
    optimizer = adamw(model, fused=True)

    def step() -> torch.Tensor:
        loss = score(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    pass_turns(turns, step)


def train_with_trainer(
    turns: harness.Turns, model: torch.nn.Module, data: Dataset, batch: int, arguments: dict[str, Any]
) -> None:
    """``transformers.Trainer``, which waits between turns."""
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=batch,
            max_steps=1 << 19,
            learning_rate=LR,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP_NORM,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **arguments,
        )
        pace = _Pace(turns)
        trainer = pace.trainer = _InOrder(model, options, train_dataset=data, callbacks=[pace])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class _Pace(TrainerCallback):
    """Times each step from the end of the one before to its own end, data loading included."""

    def __init__(self, turns: harness.Turns) -> None:
        self.turns, self.left, self.seconds, self.first_loss = turns, 0, [], float("nan")
        self.trainer: Trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.left, self.start = self.turns.wait(), time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        _finish()
        self.seconds.append(time.perf_counter() - self.start)
        if state.global_step == 1:
            self.first_loss = self.trainer._tr_loss.item()
        self.left -= 1
        if self.left == 0:
            self.turns.done(self.seconds, first_loss=self.first_loss, **_device_peak())
            self.left, self.seconds = self.turns.wait(), []
        control.should_training_stop = self.left == 0
        self.start = time.perf_counter()


class _InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_peak() -> dict[str, float]:
    """Bytes that a GPU's allocator has held at most."""
    return {"device_peak_bytes": torch.cuda.max_memory_reserved()} if torch.cuda.is_available() else {}
