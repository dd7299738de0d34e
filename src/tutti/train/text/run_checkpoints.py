"""The checkpoints of a run on text: folders `checkpoints/step-N`, written in the background, and copies in memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.checkpoint.checkpoints import Checkpoints, SaveError
from tutti.checkpoint.folder import CHECKPOINTS, manifest, os_errors, step_of
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.launch.launch import machine_memory
from tutti.train.text.config import changes, is_fixed
from tutti.train.values import NamedValues

if TYPE_CHECKING:
    from tutti.train.text.run import Run


class RunCheckpoints:
    """What a Trainer calls to save and resume, for a `Run`. `saved` is the step of the newest checkpoint."""

    def __init__(self, run: Run):
        self.run, self.saved, self.saving = run, 0, False
        self.options = run.config.checkpoint
        memory = machine_memory() if self.options.memory_every else None
        self.store = Checkpoints(run.folder / CHECKPOINTS, self.options.keep, self.options.second, memory)

    def find(self, resume: object) -> Path | PeerCheckpoint | None:
        """The newest complete checkpoint. Raises ValueError if it is of another run."""
        checkpoint = self.store.latest(self.run.display.say)
        if checkpoint is not None:  # a checkpoint in memory may be the only trace of its run
            about = checkpoint.about if isinstance(checkpoint, PeerCheckpoint) else manifest(checkpoint)
            differs = changes(about["config"], json.loads(json.dumps(self._facts()["config"])))
            if other := [text for key, text in differs.items() if is_fixed(key)]:
                raise ValueError(f"{self.run.folder} holds another run: {'; '.join(other)}; choose another --out")
        return checkpoint

    def restore(self, checkpoint: Path | PeerCheckpoint) -> None:
        """Restore the step number, of which the learning rate and the data are functions."""
        self.saved = checkpoint.step if isinstance(checkpoint, PeerCheckpoint) else step_of(checkpoint)
        self.run.state.global_step = self.saved
        self.run.lr_scheduler.go_to(self.saved)

    def load(self, checkpoint: Path | PeerCheckpoint) -> None:
        """Load the values of a checkpoint into the step."""
        self.run.step.load(checkpoint)
        self.run.display.say(f"continuing after step {self.saved}, from {checkpoint}")

    def save(self) -> None:
        """Start a checkpoint of this step. Wait for it if it is the last."""
        run, last = self.run, self.run.control.should_training_stop
        self.saving = True
        self.tell(wait=True)  # about the one before

        @os_errors()
        def fill(folder: Path) -> None:
            run.model.config.save_pretrained(folder)
            run.tokenizer.save_pretrained(folder)

        with run.phases("checkpoint"):
            run.step.save(self.store, self._facts(), fill)
            if last:
                self.tell(wait=True, last=True)
                self.store.forget()

    def end_step(self) -> None:
        """Report the outcome of the checkpoint in progress, and start a copy in memory if one is due. Copies end when
        memory does not suffice for one."""
        run, every = self.run, self.options.memory_every
        self.tell()
        if self.store.copying and not self.saving and run.done % every == 0:
            with run.phases("copy in memory"):
                self.tell(wait=True)
                if self.store.copying:
                    run.step.save(self.store, self._facts(), in_memory=True)
        self.saving = False

    def tell(self, wait: bool = False, last: bool = False) -> None:
        """Report the outcome of the checkpoint in progress. If the disk is full, training continues, unless this is the
        `last`."""
        try:
            saved = self.store.wait() if wait else self.store.done()
        except SaveError as e:
            if last:
                raise
            self.run.display.say(f"{e}; training continues")
            return
        if saved is not None:
            self.saved = step_of(saved)
            self.run.display.say(f"step {self.saved}  saved {saved}")

    def finish(self) -> None:
        """Everything is saved."""

    def _facts(self) -> NamedValues:
        return {"config": asdict(self.run.config)}
