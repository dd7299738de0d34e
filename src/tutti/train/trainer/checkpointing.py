"""The checkpoints of `tutti.Trainer`: folders `checkpoint-N` as `transformers` writes them, resumable by any plan.

Each has the model for `from_pretrained`, `trainer_state.json`, the schedule, the states of random number generators,
and in `state/` all state of the step, sharded, which resuming reads. A folder is complete or absent, and its manifest
has the checksums of all files (`tutti.checkpoint.folder`).
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, TrainerState

from tutti.checkpoint import folder as folders
from tutti.checkpoint.checkpoints import Checkpoints, SaveError, what_remains
from tutti.checkpoint.consensus import Consensus
from tutti.checkpoint.failures import reason
from tutti.checkpoint.folder import MANIFEST, TRAINER_JSON, TRAINER_STATE, trainer_checkpoints
from tutti.checkpoint.tensor_file import write_tensors
from tutti.checkpoint.values import read_values, write_values
from tutti.launch.launch import rank
from tutti.optim.ema import ema_state_dict, restart_averages
from tutti.train.trainer import draws
from tutti.train.trainer.arguments import output_folder
from tutti.train.trainer.protocols import Pretrained, ResumableLoader, Schedule
from tutti.train.values import NamedValues

if TYPE_CHECKING:
    from tutti.train.trainer.trainer import Trainer

SCHEDULE, RANDOM, ARGUMENTS, STREAM = "scheduler.pt", "rng_state.pth", "training_args.bin", "stream.json"
ADAPTERS = "adapter_config.json"  # of a model of peft
DATA = "data"  # the entry of random states that data draws from


class TrainerCheckpoints:
    """The checkpoints of a Trainer. Every rank of a job makes the same calls."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    @cached_property
    def together(self) -> Consensus:
        return Consensus()

    def find(self, resume: str | bool | None) -> Path | None:
        """The checkpoint to resume from; with True the newest one that is not damaged, with a warning for each newer
        one. Raises ValueError if there is none, or if the one that was asked for is damaged."""
        if not resume:
            return None
        together, output_dir = self.together, output_folder(self.trainer.args)
        together.one(lambda: folders.clear(Path(output_dir)))
        if resume is True:
            candidates = trainer_checkpoints(output_dir)[::-1]
        else:
            candidates = [Path(resume)]
            if not (candidates[0] / MANIFEST).exists():
                hint = ". from_pretrained reads the model of a checkpoint of transformers.Trainer, to train it anew"
                raise ValueError(f"{resume} is no checkpoint of tutti.Trainer: it has no {MANIFEST}"
                                 f"{hint if (candidates[0] / TRAINER_JSON).exists() else ''}")  # fmt: skip
        for folder in candidates:
            faults = together.all(folders.find_fault(folder, together.rank, together.ranks))
            if not any(faults):
                return folder
            damage = f"{folder} is damaged: {next(filter(None, faults))}"
            if resume is not True:
                raise ValueError(f"{damage}; resume_from_checkpoint=True takes the newest one that is not")
            if together.rank == 0:
                warnings.warn(f"{damage}: skipped", stacklevel=2)
        raise ValueError(f"resume_from_checkpoint=True, but {output_dir} has no whole folder checkpoint-N")

    def restore(self, folder: Path) -> NamedValues:
        """Restore counts, callbacks, the schedule and random numbers. Returns the states that data goes on with."""
        trainer = self.trainer
        trainer.state = state = TrainerState.load_from_json(str(folder / TRAINER_JSON))
        if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
            state.best_model_checkpoint = None
        if trainer.args.restore_callback_states_from_checkpoint:
            _restore_callbacks(trainer)
        if not (folder / SCHEDULE).exists():
            raise ValueError(f"{folder} has no {SCHEDULE} (save_only_model=True, or a schedule that cannot be saved), "
                             "so no run resumes from it; load it with from_pretrained and train anew")  # fmt: skip
        schedule = trainer._made_schedule()
        schedule.load_state_dict(read_values(folder / SCHEDULE))
        for group, rate in zip(trainer._made_optimizer().param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        random = read_values(folder / RANDOM)
        draws.set_states(random)
        return random[DATA]

    def load(self, folder: Path) -> None:
        """Load the values of a checkpoint into the step: all state, or the model's alone if there is no more."""
        state, step = _state_of(folder), self.trainer._made_step()
        step.load(state or folder)
        if state is None and self.trainer.ema_decay is not None:
            restart_averages(step)

    def save(self) -> None:
        """Save a checkpoint of this step. Raises SaveError on all ranks if one fails; earlier ones are intact then."""
        trainer, together = self.trainer, self.together
        final = Path(output_folder(trainer.args), f"checkpoint-{trainer.state.global_step}")
        draft = folders.scratch(final)
        if trainer.state.best_global_step == trainer.state.global_step:
            trainer.state.best_model_checkpoint = str(final)
        try:
            together.one(lambda: folders.clear(final.parent))
            values = _values(trainer)
            together.one(lambda: _write_model(trainer, draft, values))
            if not trainer.args.save_only_model:
                checkpoints = Checkpoints(draft / TRAINER_STATE, keep=1, together=together)
                trainer._made_step().save(checkpoints)
                checkpoints.wait()
            together.one(lambda: self._finish(draft, final))
        except OSError as error:
            newest_first = lambda root: trainer_checkpoints(root)[::-1]  # noqa: E731
            remains = what_remains(final.parent, newest_first) if together.rank == 0 else ""
            why = error.why if isinstance(error, SaveError) else reason(error)
            raise SaveError(why, f"could not save {final}", remains) from error
        rotate(trainer)

    def _finish(self, draft: Path, final: Path) -> None:
        """Write what is left of a checkpoint, and commit it."""
        trainer = self.trainer
        state = trainer.state
        if not trainer.args.save_only_model:
            _save_schedule(trainer._made_schedule(), draft)
            write_values({**draws.states(), DATA: trainer.draws.states}, draft / RANDOM)
            loader = trainer.callback_handler.train_dataloader
            resumable = cast(ResumableLoader, loader) if hasattr(loader, "go_on") else None
            position = trainer.position if resumable is None else resumable.state_dict()
            (draft / STREAM).write_text(json.dumps(position))
        cast(NamedValues, state.stateful_callbacks).update(_callback_states(trainer))
        state.save_to_json(str(draft / TRAINER_JSON))
        files: folders.Files = {}
        if inner := _state_of(draft):
            described = folders.manifest(inner)["files"].items()
            files = {f"{inner.relative_to(draft).as_posix()}/{name}": about for name, about in described}
        folders.commit(final, files, {"step": state.global_step})

    def finish(self) -> None:
        """Give the model its averages, or the best values if `args.load_best_model_at_end`."""
        trainer = self.trainer
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        adapters = trainer.args.save_only_model and Path(best or "", ADAPTERS).exists()
        if trainer.step is not None:
            if best and not adapters:
                self.load(Path(best))
            if trainer.ema_decay is not None:
                trainer.model.load_state_dict(ema_state_dict(trainer.step), strict=False)
            if best and adapters:
                from peft import load_peft_weights, set_peft_model_state_dict

                set_peft_model_state_dict(trainer.model, load_peft_weights(best, device="cpu"))
        rotate(trainer, last=True)


def position(folder: Path) -> dict[str, int]:
    """The position in the training data, as a checkpoint has it."""
    return json.loads((folder / STREAM).read_text())


def _state_of(folder: Path) -> Path | None:
    """The checkpoint of the step inside a checkpoint; None if it has the model alone."""
    return next(iter(folders.folders(folder / TRAINER_STATE)), None)


def save_model(trainer: Trainer, folder: Path, without: str = "") -> None:
    """Save the model and the processing class for `from_pretrained`. Every rank of a job calls it.

    without: the beginning of names of values that are left out.
    """
    values = {name: x for name, x in _values(trainer).items() if not (without and name.startswith(without))}
    if rank() == 0:
        _write_model(trainer, folder, values)


def _values(trainer: Trainer) -> dict[str, Tensor]:
    """The values of the model to save. Every rank of a job calls it."""
    return _trained(trainer) if trainer._trains() else trainer.model.state_dict()


@folders.os_errors()
def _write_model(trainer: Trainer, folder: Path, values: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(trainer.model, "save_pretrained"):
        cast(Pretrained, trainer.model).save_pretrained(folder, state_dict=values)
    else:
        own = {x.data_ptr(): name for name, x in reversed(values.items())}  # the first name of tied tensors
        tensors = {name: x for name, x in values.items() if own[x.data_ptr()] == name or not x.numel()}
        write_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(folder)
    buffer = io.BytesIO()  # torch.save into a file does not say why it failed
    torch.save(trainer.args, buffer)
    (folder / ARGUMENTS).write_bytes(buffer.getvalue())


def _save_schedule(scheduler: Schedule, folder: Path) -> None:
    """Save the schedule. Warn if its state holds objects: a checkpoint without the schedule cannot be resumed."""
    try:
        write_values(scheduler.state_dict(), folder / SCHEDULE)
    except ValueError as error:
        warnings.warn(f"{error}. Runs cannot resume from {folder}: keep to numbers, strings and tensors in the "
                      "scheduler's state_dict()", stacklevel=2)  # fmt: skip


def _callback_states(trainer: Trainer) -> NamedValues:
    """The states of callbacks that have one, by the names of their classes: a list where a class has several."""
    states = defaultdict[str, list[NamedValues]](list)
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states[type(callback).__name__].append(callback.state())
    return {name: each[0] if len(each) == 1 else each for name, each in states.items()}


def _restore_callbacks(trainer: Trainer) -> None:
    """Restore the callbacks of each class, in their order. Warn of states without a callback."""
    callbacks = trainer.callback_handler.callbacks
    for name, states in cast(NamedValues, trainer.state.stateful_callbacks).items():
        states = states if isinstance(states, list) else [states]
        places = [i for i, x in enumerate(callbacks) if type(x).__name__ == name and isinstance(x, ExportableState)]
        for i, state in zip(places, states, strict=False):
            callbacks[i] = type(callbacks[i]).from_state(state)
        if len(places) < len(states) and name != "TrainerControl":
            warnings.warn(f"the checkpoint has the state of {len(states)} callbacks {name}, and the Trainer has "
                          f"{len(places)}: the others are ignored", stacklevel=3)  # fmt: skip


def _trained(trainer: Trainer) -> dict[str, Tensor]:
    """The values that the step has trained, averaged with `args.ema_decay`."""
    step = trainer._made_step()
    return step.state_dict() if trainer.ema_decay is None else ema_state_dict(step)


def rotate(trainer: Trainer, last: bool = False) -> None:
    """Delete the oldest checkpoints beyond `args.save_total_limit`, never the best one. last: keep only the best if the
    limit is 1."""
    limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
    if rank() != 0 or limit is None or limit <= 0:
        return
    checkpoints = trainer_checkpoints(output_folder(trainer.args))
    if best is not None:
        checkpoints.sort(key=lambda x: x.resolve() == Path(best).resolve())
        if limit == 1 and not last:
            limit = 2  # the newest, to resume from, beside the best
    for folder in checkpoints[:-limit]:
        shutil.rmtree(folder, ignore_errors=True)
