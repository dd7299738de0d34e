"""One call of `tutti.Trainer.train`: epochs, steps, logs, evaluations and checkpoints as `transformers` has them."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
import transformers
from torch import Tensor
from transformers import optimization
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy, TrainOutput, has_length, set_seed, speed_metrics

from tutti.api.step import Step
from tutti.train.boost import Boost
from tutti.train.trainer import checkpointing
from tutti.train.trainer.arguments import option, rows_of_microbatch, seed_of_data
from tutti.train.trainer.batches import Order, joined
from tutti.train.trainer.draws import Draws
from tutti.train.trainer.loss import items_of
from tutti.train.trainer.protocols import ResumableLoader, TakesEpoch
from tutti.train.values import Inputs, NamedValues

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer

FROM_METRICS = tuple(  # schedules that step after an evaluation
    filter(None, (torch.optim.lr_scheduler.ReduceLROnPlateau, getattr(optimization, "GreedyLR", None)))
)
STORED = ("logging", "eval", "save")  # of which `trainer_state.json` has the number of steps


class Training:
    """A run of a Trainer's training loop. ignored: outputs that evaluations do not return."""

    def __init__(self, trainer: Trainer, ignored: tuple[str, ...]):
        self.trainer, self.args, self.ignored = trainer, trainer.args, ignored
        self.parts: int = self.args.gradient_accumulation_steps
        self.resumed: NamedValues | None = None  # random states of data in the checkpoint

    def run(self, resume: str | bool | None) -> TrainOutput:
        """Train from the beginning, or from a checkpoint."""
        trainer, args = self.trainer, self.args
        checkpoint = trainer.checkpoints.find(resume)
        if trainer.model_init is not None and trainer.step is not None:
            set_seed(args.seed)
            trainer.model, trainer.optimizer, trainer.lr_scheduler = trainer.model_init(), None, None
        trainer.step, trainer._forward = None, None
        trainer.draws = Draws(seed_of_data(args))
        self.loader = trainer.get_train_dataloader()
        self.resumable = cast(ResumableLoader, self.loader) if hasattr(self.loader, "go_on") else None
        self.count()
        trainer.model.train()
        self._add_noise()
        self.boost = Boost.parse(option(args, "boost"))
        if self.boost.algorithms:
            self.boost.prepare_model(trainer.model, self.first_batch(), trainer.objective, self.steps)
        if trainer.own_schedule:  # of an earlier call
            trainer.lr_scheduler = None
        trainer.own_schedule = trainer.lr_scheduler is None
        trainer.create_optimizer_and_scheduler(self.steps)
        trainer.state = trainer._new_state()
        trainer.state.train_batch_size = rows_of_microbatch(args)
        trainer.state.compute_steps(args, self.steps)
        if checkpoint is not None:
            asked = trainer.state
            self.resumed = trainer.checkpoints.restore(checkpoint)
            _compare(args, asked, trainer.state)
        trainer.state.max_steps, trainer.state.num_train_epochs = self.steps, self.epochs
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer.callback_handler.train_dataloader = self.loader  # pyright: ignore[reportAttributeAccessIssue]
        self.checkpoint, self.first = checkpoint, trainer.state.global_step
        self.begin, self.total, self.recent = time.time(), 0.0, []
        self.logged = self.first
        if checkpoint is not None or trainer.plans_first:
            self.parallelize(self.with_items(self.first_batch()))
        self._call("on_train_begin")
        if args.eval_on_start:
            trainer.evaluate(ignore_keys=list(self.ignored) or None)
        for epoch in range(self.seek(), self.epochs):
            if trainer.state.global_step >= self.steps:
                break
            self.epoch(epoch)
            if trainer.control.should_training_stop:
                break
        return self.finish()

    def seek(self) -> int:
        """The epoch to begin in. `skipped` counts its microbatches that were read before."""
        epoch, self.skipped = 0, self.first * self.reads
        if has_length(self.loader):
            epoch, self.skipped = self.first // self.updates, self.first % self.updates * self.reads
        elif self.checkpoint is not None and self.resumable is None:
            position = checkpointing.position(self.checkpoint)
            epoch, self.skipped = position["epoch"], position["microbatches"]
        if self.args.ignore_data_skip:
            self.skipped = 0
        return epoch

    def count(self) -> None:
        """Steps in an epoch and in all."""
        args, loader = self.args, self.loader
        self.reads = 1 if getattr(loader, "whole", False) else self.parts  # for a step
        if has_length(self.loader):
            self.microbatches = len(self.loader)
            if not self.microbatches:
                raise ValueError(f"the train_dataset has fewer rows than a batch ({rows_of_microbatch(args)}), and "
                                 "dataloader_drop_last drops it")  # fmt: skip
            self.updates = -(-self.microbatches // self.reads)
            self.steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self.updates)
            self.epochs = -(-self.steps // self.updates)
            self.rows = self.trainer.num_examples(loader) * self.steps / self.updates
        else:
            self.updates, self.microbatches = args.max_steps, args.max_steps * self.reads
            self.steps, self.epochs = args.max_steps, sys.maxsize
            self.rows = args.max_steps * rows_of_microbatch(args) * self.parts

    def epoch(self, epoch: int) -> None:
        """One pass over the data, or what is left of it."""
        trainer, before, resumes = self.trainer, self.trainer.state.global_step, self.skipped > 0
        self._call("on_epoch_begin")
        with closing(self.batches(epoch)) as batches:
            for batch, microbatches, seen in batches:
                self._call("on_step_begin")
                value = self.advance(batch, microbatches)
                trainer.state.global_step += 1
                trainer.state.epoch = epoch + seen / self.microbatches
                trainer.state.total_flos += trainer.floating_point_ops(batch)
                trainer.position = {"epoch": epoch, "microbatches": seen}
                self.recent.append(value)
                self._call("on_step_end")
                self.log_evaluate_save()
                trainer.end_step()
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
        if trainer.state.global_step == before and not resumes:
            trainer.control.should_training_stop = True  # a stream has ended
        self._call("on_epoch_end")
        self.log_evaluate_save()

    def batches(self, epoch: int) -> Generator[tuple[NamedValues, int, int], None, None]:
        """For each step left in an epoch: the batch, its microbatches, and those of the epoch so far."""
        loader, pads = self.loader, self.trainer._pads()
        order = getattr(loader, "batch_sampler", None)
        for sampler in {id(x): x for x in (loader, order, getattr(loader, "dataset", None))}.values():
            if hasattr(sampler, "set_epoch"):
                cast(TakesEpoch, sampler).set_epoch(epoch)
        draws, seen, self.skipped = self.trainer.draws, self.skipped, 0
        if isinstance(order, Order):
            order.first = seen
        if not seen:  # the iterator of an epoch draws a seed
            self._draw_as_before()
        with draws:
            stream = iter(loader)
            if self.resumable is not None:
                if seen:
                    self.resumable.go_on(self.checkpoint, self.first)
            elif not isinstance(order, Order):
                for _ in range(seen):
                    next(stream, None)
        self._draw_as_before()
        while True:
            with draws:
                parts = list(islice(stream, self.reads))
            if not parts:
                return
            seen += len(parts)
            batch = joined(parts, pads)
            self._count_tokens(batch)
            yield self.trainer._bucketed(batch), len(parts), seen

    def _draw_as_before(self) -> None:
        """Let data go on with the random numbers of the checkpoint, once."""
        if self.resumed is not None:
            self.trainer.draws.states, self.resumed = self.resumed, None

    def first_batch(self) -> NamedValues:
        """The first batch of the data, without a trace in random numbers or in the order."""
        draws = self.trainer.draws
        before = draws.states
        with draws:
            loader = self.resumable
            parts = list(islice(self.loader, self.reads)) if loader is None else loader.example(self.reads)
        draws.states = before
        return self.trainer._bucketed(joined(parts, self.trainer._pads()))

    def with_items(self, batch: NamedValues) -> NamedValues:
        """The batch, and by how many items the loss of each of its microbatches is divided."""
        if self.trainer.equal_items:
            return batch
        step = self.trainer.step
        parts = self.parts if step is None else step.accumulate
        divides = len(next(iter(batch.values()))) % parts == 0  # else the step takes the batch as a whole
        return batch | items_of(batch, self.trainer.shifts_labels, parts if divides else 1)

    def advance(self, batch: NamedValues, microbatches: int) -> Tensor:
        """One optimizer step. Returns its loss."""
        trainer = self.trainer
        counted = self.with_items(batch)
        trainer.objective.wanted = False
        trainer.objective.look()
        if trainer.step is None:
            self.parallelize(counted)
        value: Tensor = trainer.run_step(counted)
        for event in ["on_substep_end"] * (microbatches - 1) + ["on_pre_optimizer_step", "on_optimizer_step"]:
            self._call(event)
        self.rate = self._rate()
        if not isinstance(trainer.lr_scheduler, FROM_METRICS):
            trainer._made_schedule().step()
        return value

    def parallelize(self, batch: NamedValues) -> None:
        """Make the step, with the values of the checkpoint if the run resumes."""
        trainer, args = self.trainer, self.args
        plan = option(args, "plan")
        recompute = ("layers",) if args.activation_checkpointing and plan != "auto" else ()
        with trainer.autocast():
            make = self.boost.make_step if self.boost.algorithms else trainer.make_step
            step = make(
                trainer.model,
                trainer._made_optimizer(),
                dict(batch),
                loss=trainer.objective,
                cluster=option(args, "cluster"),
                plan=plan,
                level=option(args, "level"),
                clip_norm=args.max_grad_norm or None,
                accumulate=self.parts if len(next(iter(batch.values()))) % self.parts == 0 else 1,
                seed=args.seed,
                memory=option(args, "memory"),
                recompute=recompute,
                fp32_master_weights=option(args, "fp32_master_weights"),
                stochastic_rounding=option(args, "stochastic_rounding"),
                max_nonfinite_steps=option(args, "max_nonfinite_steps"),
            )
        trainer.step = cast(Step, step)  # an algorithm of Boost passes on what a Step has
        if self.checkpoint is not None:
            trainer.checkpoints.load(self.checkpoint)

    def log_evaluate_save(self) -> None:
        """Do what callbacks have asked for."""
        trainer, state = self.trainer, self.trainer.state
        if trainer.control.should_log and state.global_step > self.logged:
            logs = {"loss": self._drained() / (state.global_step - self.logged)}
            if self.args.max_grad_norm:
                logs["grad_norm"] = float(trainer._made_step().grad_norm())
            logs["learning_rate"] = self.rate
            self.logged = state.global_step
            trainer.log(logs, self.begin)
        if trainer.control.should_evaluate:
            metrics = trainer.evaluate(ignore_keys=list(self.ignored) or None)
            if isinstance(schedule := trainer._made_schedule(), FROM_METRICS):
                name = self.args.metric_for_best_model
                assert name is not None
                schedule.step(_metric(metrics, name))
            best = self._is_best(metrics)
            if self.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = best
        if trainer.control.should_save:
            trainer.checkpoints.save()
            self._call("on_save")

    def finish(self) -> TrainOutput:
        """Log the totals, and end with the best values or the averages."""
        trainer, state = self.trainer, self.trainer.state
        self._drained()
        done = state.global_step - self.first
        mean = self.total / max(done, 0.001)
        rows = self.rows * done / max(self.steps, 1)
        metrics = speed_metrics("train", self.begin, num_samples=rows, num_steps=done)
        metrics |= {"total_flos": state.total_flos, "train_loss": mean}
        trainer.log(metrics)
        trainer.checkpoints.finish()
        self._call("on_train_end")
        return TrainOutput(state.global_step, mean, metrics)

    # -- details ---------------------------------------------------------------------------------------------------

    def _drained(self) -> float:
        """The sum of the losses since the last call, without those that are not finite if `logging_nan_inf_filter`."""
        values = [float(x) for x in self.recent]
        self.recent = []
        if self.args.logging_nan_inf_filter:
            finite = [x for x in values if math.isfinite(x)]
            values = [x if math.isfinite(x) else sum(finite) / max(len(finite), 1) for x in values]
        self.total += sum(values)
        return sum(values)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        args, state = self.args, self.trainer.state
        if args.metric_for_best_model is None:
            return False
        value, best = _metric(metrics, args.metric_for_best_model), state.best_metric
        best = (-math.inf if args.greater_is_better else math.inf) if best is None else best
        if not (value > best if args.greater_is_better else value < best):
            return False
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
        return True

    def _rate(self) -> float:
        scheduler = self.trainer._made_schedule()
        if isinstance(scheduler, FROM_METRICS):
            return float(self.trainer._made_optimizer().param_groups[0]["lr"])
        return float(scheduler.get_last_lr()[0])

    def _count_tokens(self, batch: Inputs) -> None:
        how, state = self.args.include_num_input_tokens_seen, self.trainer.state
        ids = batch.get(getattr(self.trainer.model, "main_input_name", "input_ids"))
        if how != "no" and isinstance(ids, Tensor):
            mask = batch.get("attention_mask")
            state.num_input_tokens_seen += int(
                mask.sum() if how == "non_padding" and isinstance(mask, Tensor) else ids.numel()
            )

    def _add_noise(self) -> None:
        """Add noise to embeddings in training (NEFTune, Jain et al. 2023), if asked for."""
        if self.args.neftune_noise_alpha is not None:
            from transformers.integrations.neftune import neftune_post_forward_hook

            embeddings = cast(transformers.PreTrainedModel, self.trainer.model).get_input_embeddings()
            setattr(embeddings, "neftune_noise_alpha", self.args.neftune_noise_alpha)  # noqa: B010
            self.trainer._hook = embeddings.register_forward_hook(neftune_post_forward_hook)

    def _call(self, event: str) -> None:
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(self.args, trainer.state, trainer.control)


def _metric(metrics: Mapping[str, float], name: str) -> float:
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        raise KeyError(f"metric_for_best_model is {name!r}, but the evaluation gave {', '.join(metrics)}: "
                       "compute_metrics must return it")  # fmt: skip
    return metrics[key]


def _compare(args: transformers.TrainingArguments, asked: TrainerState, stored: TrainerState) -> None:
    """Warn of arguments that differ from those of the run that wrote a checkpoint. asked, stored: the state of each, in
    which shares of the run are numbers of steps."""
    names = [f"{what}_steps" for what in STORED if getattr(args, f"{what}_strategy") == "steps"]
    pairs = [(name, getattr(asked, name), getattr(stored, name)) for name in names]
    differ = [f"{name} was {then} and is {now}" for name, now, then in pairs if now and then and now != then]
    if differ:
        warnings.warn(f"the checkpoint is of a run with other arguments: {', '.join(differ)}", stacklevel=4)
