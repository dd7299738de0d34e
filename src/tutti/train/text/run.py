"""A training run on text: `tutti.Trainer` with the options of a `Config`. `command.py` starts it."""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import PrinterCallback, TrainerControl

from tutti.api.step import Step
from tutti.data.loader import Loader, batch_at, held_out_batches
from tutti.data.prefetch import Prefetch
from tutti.data.tokenizer import load_tokenizer
from tutti.exec.nonfinite import NonFinite
from tutti.launch.launch import Interrupted, rank, world_size
from tutti.launch.watchdog import Watchdog
from tutti.observe.board import Board
from tutti.observe.diagnosis import DATA, MONITOR, STEP
from tutti.observe.phases import Phases
from tutti.plan.explain import mesh_name
from tutti.tracing.batch import Batch
from tutti.train.stop import StopSignal
from tutti.train.text.config import Config
from tutti.train.text.history import History
from tutti.train.text.memory import PeakMemory, peak_bytes
from tutti.train.text.model import build_model, build_optimizer, model_config, precision
from tutti.train.text.prepare import Prepared
from tutti.train.text.progress import Display
from tutti.train.text.run_checkpoints import RunCheckpoints
from tutti.train.text.schedule import WarmupCosine
from tutti.train.trainer.arguments import TrainingArguments
from tutti.train.trainer.trainer import Trainer
from tutti.train.values import NamedValues, Rows
from tutti.whole_files import write_text


def train(config: Config, prepared: Prepared) -> None:
    """Train until the last step, or until a signal. Every rank of the job calls this.

    A checkpoint has all state, so a resumed run has the same losses bit for bit, however often it was interrupted.
    Raises Interrupted after a signal, once a checkpoint is saved.
    """
    with _locked(Path(config.out)) if rank() == 0 else nullcontext():
        display = Display(silent=rank() > 0)
        with display.warnings(), display.logs():
            one = Run(config, prepared, display)
            hang = config.parallel.hang
            with Watchdog(hang, one.folder / "stacks") if hang and world_size() > 1 else nullcontext():
                one.run()


class Run(Trainer):
    """A run on one rank. It measures each step, shows and writes what it measured, and stops at a signal."""

    equal_items, plans_first = True, True
    model: PreTrainedModel
    step: Step
    lr_scheduler: WarmupCosine
    checkpoints: RunCheckpoints

    def __init__(self, config: Config, prepared: Prepared, display: Display):
        self.config, self.folder, self.display = config, Path(config.out), display
        self.first_rank, self.signal = rank() == 0, 0
        size, seq = config.batch.size, config.batch.seq
        loader, self.text = Loader(prepared.train.open(), size, seq, config.seed), prepared.held_out.open()
        windows = held_out_batches(self.text, size, seq, config.eval.batches)
        self.tokenizer = load_tokenizer(prepared.tokenizer, seq)
        self.dtype = precision(config.parallel.precision, world_size())
        args = arguments(config, self.dtype)  # joins the job
        kind = model_config(config.model, len(self.tokenizer), seq)
        model = build_model(kind, config.seed, self.dtype, args.device)
        super().__init__(
            model,
            args,
            train_dataset=loader,
            eval_dataset=windows,
            callbacks=[Stop(self)],
            optimizers=(build_optimizer(model, config.optimizer), None),
        )
        self.remove_callback(PrinterCallback)
        self.checkpoints, self.batches = RunCheckpoints(self), Batches(self)
        self.recent: deque[float] = deque(maxlen=20)  # seconds of a step
        self.waits: deque[float] = deque(maxlen=20)  # those of them in which it waited for its batch

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return 0 if self.step is None else self.step.steps

    def run(self) -> None:
        """Train from the newest checkpoint on, if there is one."""
        with ExitStack() as self.opened:
            self.train(resume_from_checkpoint=True)
        if self.signal:
            self.display.say("the same command again continues from here")
            raise Interrupted(self.signal)

    # -- what the Trainer takes from a run ---------------------------------------------------------------------------

    def get_train_dataloader(self) -> Batches:
        return self.batches

    def get_eval_dataloader(self, eval_dataset: Rows = None) -> Prefetch:
        windows, seq = self.eval_dataset, self.config.batch.seq
        return Prefetch(lambda i: batch_at(self.text, windows[i], seq), range(len(windows)))

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> WarmupCosine:
        self.lr_scheduler = WarmupCosine(self._made_optimizer(), self.config.schedule)
        return self.lr_scheduler

    def make_step(self, model: nn.Module, optimizer: Optimizer, batch: Batch, **options: Any) -> Step:
        with self.display.stage("plan") as stage:
            step = super().make_step(model, optimizer, batch, **options)
            stage.result(describe(step))
        self.peak_seconds = step.flops / step.cluster.peak(self.dtype)  # seconds of a step at peak FLOP/s
        return step

    def begin(self) -> None:
        """Open the files and the display of the run."""
        done, steps, parallel = self.done, self.config.schedule.steps, self.config.parallel
        if self.first_rank:
            self.step.plan.save(self.folder / "plan.json")
            write_text(self.folder / "step.json", json.dumps(self._facts()), durable=True)
        self._record(steps - done)
        self.history = history = self.opened.enter_context(History(self.folder, done, write=self.first_rank))
        logs = Board(self.folder / "tensorboard" / f"rank-{rank()}", done)
        self.opened.callback(logs.close)
        self.phases = self.opened.enter_context(Phases(self.folder / MONITOR, rank(), done, logs.add_scalar))
        display = self.display.training(
            steps, done, parallel.level not in ("O0", "auto"), str(self.dtype).removeprefix("torch.")
        )
        self.bar = self.opened.enter_context(display)
        self.stop = self.opened.enter_context(StopSignal())
        report = (lambda peak: history.add(self.done, peak_bytes=peak)) if self.first_rank else None
        self.memory = PeakMemory(report)
        self.args.eval_on_start = done == 0

    def run_step(self, batch: NamedValues) -> Tensor:
        before = self.step.skipped
        try:
            with self.phases(STEP):
                loss = self.memory(super().run_step, batch)
                loss.item()  # wait for it
        except NonFinite as error:
            raise NonFinite(f"{error}; {self._advice()}") from None
        self.recent.append(time.perf_counter() - self.batches.began)
        self.skipped = self.step.skipped > before
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write and show the numbers of a step, or of an evaluation."""
        if "loss" in logs:
            self._measured(logs.pop("loss"), logs)
        elif "eval_loss" in logs:
            self.history.add(self.done, held_out_loss=logs["eval_loss"])
            self.display.say(f"step {self.done}  held-out loss {logs['eval_loss']:.4f}")

    def _measured(self, loss: float, logs: dict[str, float]) -> None:
        seconds, waited, tokens = self.recent[-1], self.waits[-1], self.config.batch.size * self.config.batch.seq
        if self.skipped:
            logs.pop("grad_norm", None)
        self.history.add(
            self.done,
            **({"skipped": self.step.skipped} if self.skipped else {"loss": loss}),
            **logs,
            seconds=seconds,
            data_seconds=waited,
            data_share=waited / seconds,
            tokens_per_second=tokens / seconds,
            fraction_of_peak=self.peak_seconds / seconds,
        )
        typical, share = median_low(self.recent), sum(self.waits) / sum(self.recent)
        self.bar.step(self.done, loss, typical, tokens, self.peak_seconds, share)
        if self.skipped:
            self.display.say(f"step {self.done}  left out: loss or gradients are not finite")
        elif not math.isfinite(loss):
            raise ValueError(f"the loss of step {self.done} is {loss}; {self._advice()}")

    def evaluate(self, eval_dataset: Rows = None, ignore_keys: list[str] | None = None,
                 metric_key_prefix: str = "eval") -> dict[str, float]:  # fmt: skip
        with self.phases("evaluation"):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def between(self, control: TrainerControl) -> None:
        """Decide with all ranks whether to stop after this step, and compare what they replicate."""
        compare = self.config.parallel.compare
        self.signal = self.stop.agreed()
        if self.signal:
            control.should_save = control.should_training_stop = True
        if compare and (control.should_training_stop or self.done % compare == 0):
            self.step.compare_replicas()

    def end_step(self) -> None:
        self.checkpoints.end_step()
        self.phases.end(self.done, peak_bytes=peak_bytes())

    # -- details -----------------------------------------------------------------------------------------------------

    def _facts(self) -> NamedValues:
        """What the report says about the step besides its plan."""
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return {
            "cluster": str(self.step.cluster),
            "dtype": str(self.dtype).removeprefix("torch."),
            "plan": describe(self.step),
            "explain": self.step.plan.explain(),
            "parameters": sum(math.prod(shape) for shape in shapes.values()),
            "shapes": shapes,
            "flops": self.step.flops,
            "peak_seconds": self.peak_seconds,
        }

    def _record(self, steps: int) -> None:
        """Record the next steps, for `tutti diagnose`."""
        every = self.config.monitor.every
        virtual = len(self.step.runtime.ranks) > 1  # devices that take turns
        if every and not virtual and (self.done + steps) // every - self.done // every >= 2:
            self.step.record(self.folder / MONITOR, every)

    def _advice(self) -> str:
        lower = f"a lower optimizer.lr than {self.config.optimizer.lr} may help"
        return f"the newest checkpoint is of step {self.checkpoints.saved}; {lower}"


class Stop(TrainerCallback):
    """Opens a run's files when training begins, and stops it at a signal."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.run.begin()

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        self.run.between(control)


class Batches:
    """The batches of a run, which a thread makes ahead. whole: each is that of a step, with all its microbatches."""

    whole = True

    def __init__(self, run: Run):
        self.run, self.first, self.began = run, 0, 0.0

    def example(self, count: int) -> list[dict[str, Tensor]]:
        return [self.run.train_dataset(0)]

    def go_on(self, checkpoint: object, step: int) -> None:
        """Continue after this step."""
        self.first = step

    def state_dict(self) -> NamedValues:
        """Nothing: batches are a function of the step."""
        return {}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        run, steps = self.run, range(self.first, self.run.config.schedule.steps)
        with Prefetch(run.train_dataset, steps, run.config.data.ahead) as batches:
            for _ in steps:
                self.began = time.perf_counter()
                with run.phases(DATA):
                    batch = next(batches)
                run.waits.append(batches.waited)
                yield batch


def arguments(config: Config, dtype: torch.dtype) -> TrainingArguments:
    """The options of the Trainer for a config and the dtype of its model."""
    optimizer, parallel = config.optimizer, config.parallel
    return TrainingArguments(
        config.out,
        seed=config.seed,
        global_batch_size=config.batch.size,
        gradient_accumulation_steps=config.batch.accumulate,
        max_steps=config.schedule.steps,
        max_grad_norm=optimizer.clip_norm or 0.0,
        fp32_master_weights=dtype is not torch.float32 and not optimizer.stochastic_rounding,
        stochastic_rounding=optimizer.stochastic_rounding,
        ema_decay=optimizer.ema_decay,
        max_nonfinite_steps=optimizer.max_nonfinite_steps,
        cluster=parallel.cluster,
        plan=parallel.plan,
        level=parallel.level,
        memory=parallel.memory,
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=config.eval.every,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=config.checkpoint.every,
        report_to="none",
        disable_tqdm=True,
    )


def describe(step: Step) -> str:
    """A plan in one line: `dp 2 on cpu:2; expected 0.31 s a step, 0.42 GB a rank`."""
    mesh = mesh_name(step.plan.mesh)
    expected = step.plan.predicted
    costs = f"expected {expected.step_seconds:.3f} s a step, {expected.peak_bytes / 1e9:.2f} GB a rank"
    return f"{step.plan.name} ({mesh}) on {step.cluster}; {costs}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against a second job. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another job; wait for it, or choose another --out") from None
        yield
