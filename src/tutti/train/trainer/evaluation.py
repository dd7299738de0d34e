"""Evaluation and prediction of `tutti.Trainer`: the loop of `transformers.Trainer.evaluation_loop`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import transformers
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size, nested_detach
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from tutti.train.trainer.arguments import seed_of_data
from tutti.train.trainer.draws import Draws
from tutti.train.trainer.loss import labels_of
from tutti.train.trainer.protocols import Loader
from tutti.train.values import Inputs, NamedValues, Outputs

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer

T = TypeVar("T")


def evaluation_loop(
    trainer: Trainer, loader: Loader, prefix: str, loss_only: bool, ignored: tuple[str, ...], predicts: bool = False
) -> EvalLoopOutput:
    """The mean loss over all rows, predictions, labels and metrics of a dataset.

    Losses of batches are weighted with their rows. Predictions of different lengths are padded with -100. Each
    evaluation draws the same random numbers. predicts: return predictions also where metrics are taken by batch.
    """
    args, concat = trainer.args, trainer.args.eval_do_concat_batches
    losses: list[tuple[float, int]] = []
    predictions, labels, inputs = (EvalLoopContainer(concat, padding_index=-100) for _ in range(3))
    metrics: NamedValues | None = None
    seen = 0
    for number, (batch, last) in enumerate(list_ahead(loader, Draws(seed_of_data(args))), 1):
        rows = find_batch_size(batch) or 0
        seen += rows
        loss, logits, targets = trainer.prediction_step(trainer.model, batch, loss_only, ignored)
        if loss is not None:
            losses.append((float(loss), rows))
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
        if (
            args.batch_eval_metrics
            and trainer.compute_metrics is not None
            and logits is not None
            and targets is not None
        ):
            more = _asked(args, batch, loss, trainer)
            metrics = trainer.compute_metrics(EvalPrediction(logits, targets, **more), compute_result=last)
            if not predicts:
                continue
        if logits is not None:
            predictions.add(logits)
        if targets is not None:
            labels.add(targets)
        if "inputs" in args.include_for_metrics:
            inputs.add(batch[getattr(trainer.model, "main_input_name", "input_ids")])
        if args.eval_accumulation_steps is not None and number % args.eval_accumulation_steps == 0:
            for gathered in (predictions, labels, inputs):
                gathered.to_cpu_and_numpy()
    if not seen:
        raise ValueError("the dataset to evaluate is empty")
    all_made: Outputs = predictions.get_arrays()
    all_labels: Outputs = labels.get_arrays()
    compute = None if args.batch_eval_metrics else trainer.compute_metrics
    of_task = trainer.task is not None and compute == trainer.task.metrics  # which knows whether it reads labels
    if compute is not None and all_made is not None and (all_labels is not None or of_task):
        more: NamedValues = {"inputs": inputs.get_arrays()} if "inputs" in args.include_for_metrics else {}
        if "loss" in args.include_for_metrics:
            more["losses"] = np.concatenate([np.full(rows, loss) for loss, rows in losses])
        metrics = compute(EvalPrediction(all_made, all_labels, **more))  # pyright: ignore[reportArgumentType]
    metrics = cast(NamedValues, denumpify_detensorize(metrics or {}))
    if losses:
        finite = [(loss, rows) for loss, rows in losses if np.isfinite(loss)] if args.logging_nan_inf_filter else []
        values, weights = zip(*(finite or losses), strict=True)
        metrics["loss"] = float(np.average(values, weights=weights))
    named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": x for key, x in metrics.items()}
    return EvalLoopOutput(all_made, all_labels, named, seen)  # pyright: ignore[reportArgumentType]


def list_ahead(loader: Iterable[T], draws: Draws) -> Iterator[tuple[T, bool]]:
    """Each batch, and whether it is the last."""
    with draws:
        batches = iter(loader)
        current = next(batches, None)
    while current is not None:
        with draws:
            following = next(batches, None)
        yield current, following is None
        current = following


def prediction_step(trainer: Trainer, batch: Inputs, loss_only: bool,
                    ignored: tuple[str, ...]) -> tuple[Tensor | None, Outputs, Outputs]:  # fmt: skip
    """Loss, outputs and labels of a batch, each of them if there are any."""
    labels = labels_of(batch, trainer.label_names)
    own = trainer.task is not None and trainer.task.loss is not None
    has_loss = labels is not None or own or (not trainer.label_names and trainer.can_return_loss)
    loss, outputs = trainer.forward(batch, has_loss=has_loss, wanted=not loss_only, ignored=ignored)
    if loss_only:
        return loss, None, None
    predicted = None if isinstance(outputs, tuple) and not outputs else outputs
    return loss, predicted, nested_detach(labels) if labels is not None else None


def _asked(args: transformers.TrainingArguments, batch: Inputs, loss: Tensor | None, trainer: Trainer) -> NamedValues:
    more: NamedValues = {}
    if "loss" in args.include_for_metrics:
        more["losses"] = loss
    if "inputs" in args.include_for_metrics:
        more["inputs"] = batch[getattr(trainer.model, "main_input_name", "input_ids")]
    return more


def cut(outputs: Outputs, padded: Inputs, batch: Inputs) -> Outputs:
    """Outputs without the positions that padding the batch to `padded` added to dim 1."""
    lengths = {}
    for key in ("attention_mask", "labels"):  # an output for each label is as long as these
        before, now = batch.get(key), padded.get(key)
        if isinstance(before, Tensor) and before.ndim == 2 and isinstance(now, Tensor):
            lengths[now.shape[1]] = before.shape[1]

    def shortened(x: T) -> T | Tensor:
        if not isinstance(x, Tensor) or x.ndim < 2:
            return x
        return x[:, : lengths.get(x.shape[1], x.shape[1])]

    return pytree.tree_map(shortened, outputs)
