"""Checkpoints of a run: all ranks write them together, in the background, while training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tutti.run.checkpoint import folder as folders
from tutti.run.checkpoint.held import Held
from tutti.run.checkpoint.write import Copies, copies, write


class SaveError(OSError):
    """A checkpoint could not be written; the ones before it are intact."""


class Checkpoints:
    """The folder in which a run keeps its checkpoints. Every rank of a job makes one, and calls the same.

    root: a folder that all ranks see. keep: how many of the newest stay there. second: another such folder, to which
    each checkpoint is copied. At most one is being written at a time, from a copy of the state in the host's memory.
    """

    def __init__(self, root: str | Path, keep: int = 2, second: str | Path | None = None):
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint has to stay")
        self.roots = [Path(root), *([Path(second)] if second else [])]
        self.root, self.keep = self.roots[0], keep
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.group: Any = dist.new_group(backend="gloo") if several else None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._copies: Copies = {}
        self._thread: Thread | None = None
        self._outcome: Path | SaveError | None = None

    def latest(self, say: Callable[[str], None] = lambda said: None) -> Path | None:
        """The newest complete checkpoint, or None; rank 0 is told of newer ones that are skipped.

        Files are looked into by one rank each. What was never finished is dropped.
        """
        self.wait()
        for root in self.roots:
            found, skipped = None, []
            for candidate in self._same(folders.folders(root)):
                faults = self._all(folders.find_fault(candidate, self.rank, self.ranks))
                if not any(faults):
                    found = candidate
                    break
                fault = next(fault for fault in faults if fault)
                skipped.append(f"checkpoint {candidate} is not complete: {fault}: skipped")
            if self.rank == 0:
                if (step := folders.unfinished(root)) is not None:
                    say(f"the checkpoint of step {step} was not finished: skipped")
                for line in skipped:
                    say(line)
                folders.clear(root)
            self._all(None)
            if found:
                return found
        return None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Held],
        facts: Mapping[str, Any] | None = None,
        fill: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Begin to write the checkpoint of so many completed steps; returns when the state is copied.

        facts: of the manifest. fill: writes more files into the folder, on rank 0. Waits for an earlier one, and
        raises SaveError where that could not be written.
        """
        self.wait()
        self._copies = copies(tensors, self._copies)
        self._thread = Thread(target=self._run, args=(step, dict(facts or {}), fill), daemon=True, name="checkpoint")
        self._thread.start()

    def done(self) -> Path | None:
        """The checkpoint that was begun last, once, when it is complete; None before. Raises SaveError as `wait`."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Path | None:
        """The checkpoint that was begun last, when it is complete. Raises SaveError where it could not be written."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, outcome, self._outcome = None, self._outcome, None
        if isinstance(outcome, SaveError):
            raise outcome
        return outcome

    def _run(self, step: int, facts: dict[str, Any], fill: Callable[[Path], None]) -> None:
        try:
            why = self._write(step, facts, fill)
        except Exception as error:  # told by `wait`, in the thread of the run
            why = _reason(error)
        if why is None:
            self._outcome = self.root / f"step-{step:08d}"
            return
        before = folders.latest(self.root)
        still = f"{before} is intact" if before else "there is no checkpoint before it"
        self._outcome = SaveError(f"could not save the checkpoint of step {step} in {self.root}: {why}; {still}")

    def _write(self, step: int, facts: dict[str, Any], fill: Callable[[Path], None]) -> str | None:
        """What went wrong, the same on all ranks, or None."""
        made, why, mine = folders.scratch(self.root, step), None, {}
        try:
            mine = write(made, self._copies, self.group)
        except (Exception, CheckpointException) as error:
            why = _reason(error)
        everyone = self._all((why, mine))
        whys = [theirs for theirs, _ in everyone if theirs]
        verdict = whys[0] if whys else None
        if self.rank == 0:
            try:
                if verdict is None:
                    self._finish(made, step, {k: v for _, files in everyone for k, v in files.items()}, facts, fill)
            except Exception as error:
                verdict = _reason(error)
            if verdict is not None:
                shutil.rmtree(made, ignore_errors=True)
        return self._same(verdict)

    def _finish(self, made: Path, step: int, files: folders.Files, facts, fill: Callable[[Path], None]) -> None:
        fill(made)
        for path in sorted(made.iterdir()):
            if path.name not in files:
                folders.to_disk(path)
                files[path.name] = folders.describe(path)
        complete = folders.commit(self.root, step, files, facts)
        for other in self.roots[1:]:
            other.mkdir(parents=True, exist_ok=True)
            copy = folders.scratch(other, step)
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(complete, copy)
            for path in copy.iterdir():
                folders.to_disk(path)
            folders.commit(other, step, files, facts)
        for root in self.roots:
            for old in folders.folders(root)[self.keep :]:
                shutil.rmtree(old, ignore_errors=True)

    def _all(self, mine: Any) -> list[Any]:
        """What each rank gives, on all ranks."""
        if self.group is None:
            return [mine]
        given: list[Any] = [None] * self.ranks
        dist.all_gather_object(given, mine, self.group)
        return given

    def _same(self, mine: Any) -> Any:
        """What rank 0 gives."""
        if self.group is None:
            return mine
        box = [mine]
        dist.broadcast_object_list(box, 0, self.group)
        return box[0]


def _reason(error: BaseException) -> str:
    """Why, in a line; of what several ranks report the first."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(cause)}" if len(error.failures) > 1 or rank else _reason(cause)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
