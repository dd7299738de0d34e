"""One rank of a training run, from the model to the last checkpoint. `command.py` starts it."""

import fcntl
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

import tutti
from tutti.checkpoint.checkpoints import Checkpoints, SaveError
from tutti.checkpoint.folder import CHECKPOINTS, manifest, step_of
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.data.loader import Loader, batch_at, held_out_batches
from tutti.data.prefetch import Prefetch
from tutti.data.tokenizer import load_tokenizer
from tutti.exec.nonfinite import NonFinite
from tutti.launch.launch import Interrupted, local_rank, machine_memory, rank, world_size
from tutti.launch.watchdog import Watchdog
from tutti.observe.diagnosis import DATA, MONITOR, STEP
from tutti.observe.phases import Phases
from tutti.plan.explain import mesh_name
from tutti.train.config import Config, changes, is_fixed
from tutti.train.history import History, tensorboard
from tutti.train.memory import PeakMemory, peak_bytes
from tutti.train.model import build_model, build_optimizer, model_config, precision
from tutti.train.prepare import Prepared
from tutti.train.progress import Display
from tutti.train.schedule import learning_rate
from tutti.train.stop import StopSignal


def train(config: Config, prepared: Prepared) -> None:
    """Train until the last step, or until a signal. Every rank of the job calls this.

    A checkpoint has all state, so a resumed run has the same losses bit for bit, however often it was interrupted.
    Raises Interrupted after a signal, once a checkpoint is saved.
    """
    with _locked(Path(config.out)) if rank() == 0 else nullcontext():
        display = Display(silent=rank() > 0)
        with display.warnings():
            one = Run(config, prepared, display)
            hang = config.parallel.hang
            with Watchdog(hang, one.folder / "stacks") if hang and world_size() > 1 else nullcontext():
                one.resume()
                one.run()


class Run:
    """A run on one rank. `done` counts completed steps, `saved` those in the newest checkpoint."""

    def __init__(self, config: Config, prepared: Prepared, display: Display):
        self.config, self.folder, self.display = config, Path(config.out), display
        self.done = self.saved = 0
        self.first_rank = rank() == 0
        size, seq = config.batch.size, config.batch.seq
        self.loader = Loader(prepared.train.open(), size, seq, config.seed)
        self.text = prepared.held_out.open()
        self.windows = held_out_batches(self.text, size, seq, config.eval.batches)
        self.tokenizer = load_tokenizer(prepared.tokenizer, seq)
        with self.display.stage("plan") as stage:
            self._parallelize()
            stage.result(describe(self.step))
        keep, second = config.checkpoint.keep, config.checkpoint.second
        memory = machine_memory() if config.checkpoint.memory_every else None
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, keep, second, memory)

    def _parallelize(self) -> None:
        config, parallel = self.config, self.config.parallel
        dtype = precision(parallel.precision, world_size())
        kind = model_config(config.model, len(self.tokenizer), config.batch.seq)
        device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        self.model = build_model(kind, config.seed, dtype, device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.step = tutti.parallelize(
            self.model,
            self.optimizer,
            self.loader(0),
            cluster=parallel.cluster,
            plan=parallel.plan,
            level=parallel.level,
            clip_norm=config.optimizer.clip_norm,
            accumulate=config.batch.accumulate,
            fp32_master_weights=dtype is not torch.float32 and not config.optimizer.stochastic_rounding,
            stochastic_rounding=config.optimizer.stochastic_rounding,
            seed=config.seed,
            max_nonfinite_steps=config.optimizer.max_nonfinite_steps,
            memory=parallel.memory,
        )
        self.dtype = str(dtype).removeprefix("torch.")
        self.peak_seconds = self.step.flops / self.step.cluster.peak(dtype)  # seconds of a step at peak FLOP/s

    def _facts(self) -> dict[str, Any]:
        """What the report says about the step besides its plan."""
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        return {
            "cluster": str(self.step.cluster),
            "dtype": self.dtype,
            "plan": describe(self.step),
            "explain": self.step.plan.explain(),
            "parameters": sum(math.prod(shape) for shape in shapes.values()),
            "shapes": shapes,
            "flops": self.step.flops,
            "peak_seconds": self.peak_seconds,
        }

    def resume(self) -> None:
        """Resume from the newest complete checkpoint, if there is one."""
        found = self.checkpoints.latest(self.display.say)
        if found is not None:
            self._check_same(found.about if isinstance(found, PeerCheckpoint) else manifest(found))
            self.step.load(found)
            self.done = self.saved = self.step.steps
            self.display.say(f"continuing after step {self.done}, from {found}")

    def _check_same(self, about: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another run. A checkpoint in memory may be its only trace."""
        differs = changes(about["config"], json.loads(json.dumps(asdict(self.config))))
        if other := [text for key, text in differs.items() if is_fixed(key)]:
            raise ValueError(f"{self.folder} holds another run: {'; '.join(other)}; choose another --out")

    def run(self) -> None:
        """The loop: step, measure, and at intervals evaluate and save."""
        if self.first_rank:
            self.step.plan.save(self.folder / "plan.json")
            (self.folder / "step.json").write_text(json.dumps(self._facts()))
        config, steps = self.config, self.config.schedule.steps
        tokens = config.batch.size * config.batch.seq
        recent: deque[float] = deque(maxlen=20)  # (seconds of a step, seconds of it waiting for its batch)
        waits: deque[float] = deque(maxlen=20)
        logs = tensorboard(self.folder / "tensorboard" / f"rank-{rank()}", self.done)
        self._record(steps - self.done)
        with (
            History(self.folder, self.done, write=self.first_rank) as history,
            Phases(self.folder / MONITOR, rank(), self.done, logs.add_scalar) as self.phases,
            closing(logs),
            Prefetch(self.loader, range(self.done, steps), config.data.ahead) as self.batches,
            self.display.training(steps, self.done, config.parallel.level != "O0", self.dtype) as bar,
            StopSignal() as stop,
        ):
            report = (lambda peak: history.add(self.done, peak_bytes=peak)) if self.first_rank else None
            memory = PeakMemory(report, self.model.parameters())
            if self.done == 0:
                history.add(0, held_out_loss=self._evaluate())
            while self.done < steps:
                rate = learning_rate(self.done, config.optimizer.lr, config.schedule)
                start = time.perf_counter()
                loss, skipped = memory(self._advance, rate)
                recent.append(time.perf_counter() - start)
                waits.append(self.batches.waited)
                data = {"data_seconds": waits[-1], "data_share": waits[-1] / recent[-1]}
                measured = {"skipped": self.step.skipped} if skipped else {"loss": loss}
                speed = {"tokens_per_second": tokens / recent[-1], "fraction_of_peak": self.peak_seconds / recent[-1]}
                history.add(self.done, **measured, learning_rate=rate, seconds=recent[-1], **data, **speed)
                bar.step(self.done, loss, median_low(recent), tokens, self.peak_seconds, sum(waits) / sum(recent))
                if skipped:
                    self.display.say(f"step {self.done}  left out: loss or gradients are not finite")
                else:
                    self._check(loss)
                if self.done % config.eval.every == 0 or self.done == steps:
                    history.add(self.done, held_out_loss=self._evaluate())
                signal = stop.agreed()
                last = self.done == steps or bool(signal)
                if config.parallel.compare and (last or self.done % config.parallel.compare == 0):
                    self.step.compare_replicas()
                self._tell(last=False, wait=False)
                if self.done % config.checkpoint.every == 0 or last:
                    self._save(last)
                elif self.checkpoints.copying and self.done % config.checkpoint.memory_every == 0:
                    self._keep()
                self.phases.end(self.done, peak_bytes=peak_bytes())
                if signal:
                    self.display.say("the same command again continues from here")
                    raise Interrupted(signal)

    def _advance(self, rate: float) -> tuple[float, bool]:
        """Run one optimizer step. Returns its loss, and whether its update was skipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        before = self.step.skipped
        with self.phases(DATA):
            batch = next(self.batches)
        try:
            with self.phases(STEP):
                loss = self.step(batch).item()
        except NonFinite as error:
            raise NonFinite(f"{error}; {self._advice()}") from None
        self.done += 1
        return loss, self.step.skipped > before

    def _evaluate(self) -> float:
        """Mean loss over the held-out windows."""
        seq, windows = self.config.batch.seq, self.windows
        with (
            self.phases("evaluation"),
            Prefetch(lambda i: batch_at(self.text, windows[i], seq), range(len(windows))) as batches,
        ):
            losses = [self.step.evaluate(batch).item() for batch in batches]
        loss = sum(losses) / len(losses)
        self.display.say(f"step {self.done}  held-out loss {loss:.4f}")
        return loss

    def _save(self, last: bool) -> None:
        """Start a checkpoint of this step. Wait for it if it is the `last`."""
        self._tell(last=False, wait=True)  # about the one before

        def fill(folder: Path) -> None:
            self.model.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

        with self.phases("checkpoint"):
            self.step.save(self.checkpoints, {"config": asdict(self.config)}, fill)
            if last:
                self._tell(last=True, wait=True)
                self.checkpoints.forget()

    def _keep(self) -> None:
        """Start a copy of this step in memory, unless memory did not suffice for the one before."""
        with self.phases("copy in memory"):
            self._tell(last=False, wait=True)
            if self.checkpoints.copying:
                self.step.save(self.checkpoints, {"config": asdict(self.config)}, in_memory=True)

    def _record(self, steps: int) -> None:
        """Record the next steps, for `tutti diagnose`."""
        every = self.config.monitor.every
        virtual = len(self.step.runtime.ranks) > 1  # devices that take turns
        if every and not virtual and (self.done + steps) // every - self.done // every >= 2:
            self.step.record(self.folder / MONITOR, every)

    def _tell(self, last: bool, wait: bool) -> None:
        """Report the outcome of the checkpoint in progress. If the disk is full, training continues, unless this is the
        `last`."""
        try:
            saved = self.checkpoints.wait() if wait else self.checkpoints.done()
        except SaveError as e:
            if last:
                raise
            self.display.say(f"{e}; training continues")
            return
        if saved is not None:
            self.saved = step_of(saved)
            self.display.say(f"step {self.saved}  saved {saved}")

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {self.done} is {loss}; {self._advice()}")

    def _advice(self) -> str:
        lower = f"a lower optimizer.lr than {self.config.optimizer.lr} may help"
        return f"the newest checkpoint is of step {self.saved}; {lower}"


def describe(step: "tutti.Step") -> str:
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
