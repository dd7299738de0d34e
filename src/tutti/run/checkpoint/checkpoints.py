"""Checkpoints of a run: all ranks write them together, in the background, while training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from tutti.run.checkpoint import folder as folders
from tutti.run.checkpoint.gathered import Gathered
from tutti.run.checkpoint.held import Held
from tutti.run.checkpoint.peers import Peers
from tutti.run.checkpoint.together import Together
from tutti.run.checkpoint.write import Copies, copies, reason, write


class SaveError(OSError):
    """A checkpoint could not be written; the ones before it are intact."""


class Checkpoints:
    """The folder in which a run keeps its checkpoints. Every rank of a job makes one, and calls the same.

    root: a folder that all ranks see. keep: how many of the newest stay there. second: another such folder, to which
    each checkpoint is copied. memory: a folder in the memory of each machine, /dev/shm for one, for copies that outlive
    the processes (`peers`); `forget` gives it back. At most one is being written at a time, from a copy of the state in
    the host's memory.
    """

    def __init__(
        self, root: str | Path, keep: int = 2, second: str | Path | None = None, memory: str | Path | None = None
    ):
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint has to stay")
        self.roots = [Path(root), *([Path(second)] if second else [])]
        self.root, self.keep = self.roots[0], keep
        self.together = Together()
        self.peers = Peers(Path(memory), self.root, self.together) if memory else None
        self.copying = bool(memory)  # until memory does not suffice
        self._copies: Copies = {}
        self._thread: Thread | None = None
        self._outcome: Path | SaveError | None = None

    def latest(self, say: Callable[[str], None] = lambda said: None) -> Path | Gathered | None:
        """The newest complete checkpoint, in memory or on disk, or None; rank 0 is told of newer ones that are skipped.

        Files are looked into by one rank each. What was never finished is dropped.
        """
        self.wait()
        kept = self.peers.newest(say) if self.peers else None
        for root in self.roots:
            found, skipped = None, []
            for candidate in self.together.same(folders.folders(root)):
                if kept and kept.step >= folders.step_of(candidate):
                    break
                faults = self.together.all(folders.find_fault(candidate, self.together.rank, self.together.ranks))
                if not any(faults):
                    found = candidate
                    break
                fault = next(fault for fault in faults if fault)
                skipped.append(f"checkpoint {candidate} is not complete: {fault}: skipped")
            if self.together.rank == 0:
                if (step := folders.unfinished(root)) is not None:
                    say(f"the checkpoint of step {step} was not finished: skipped")
                for line in skipped:
                    say(line)
                folders.clear(root)
            self.together.all(None)
            if found:
                return found
        return kept

    def save(
        self,
        step: int,
        tensors: Mapping[str, Held],
        facts: Mapping[str, Any] | None = None,
        fill: Callable[[Path], None] = lambda folder: None,
        in_memory: bool = False,
    ) -> None:
        """Begin to write the checkpoint of so many completed steps; returns when the state is copied.

        facts: of the manifest. fill: writes more files into the folder, on rank 0; not those `in_memory`. Waits for an
        earlier one, and raises SaveError where that could not be written.
        """
        self.wait()
        if in_memory and not self.copying:
            raise ValueError("no copies are kept in memory: Checkpoints(..., memory='/dev/shm') says where")
        self._copies = copies(tensors, self._copies)
        work = self._keep if in_memory else self._run
        self._thread = Thread(target=work, args=(step, dict(facts or {}), fill), daemon=True, name="checkpoint")
        self._thread.start()

    def done(self) -> Path | None:
        """The checkpoint on disk that was begun last, once, when it is complete; None before. Raises as `wait`."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Path | None:
        """The checkpoint that was begun last, if on disk, when it is complete. Raises SaveError where it could not be
        written."""
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
            why = reason(error)
        if why is None:
            self._outcome = self.root / f"step-{step:08d}"
            return
        before = folders.latest(self.root)
        still = f"{before} is intact" if before else "there is no checkpoint before it"
        self._outcome = SaveError(f"could not save the checkpoint of step {step} in {self.root}: {why}; {still}")

    def _keep(self, step: int, facts: dict[str, Any], _fill) -> None:
        assert self.peers
        try:
            why = self.peers.save(step, self._copies, facts)
        except Exception as error:  # told by `wait`
            why = reason(error)
        if why is not None:
            self.copying = False
            self._outcome = SaveError(f"could not keep step {step} in memory: {why}; no more copies are kept there")

    def forget(self) -> None:
        """Give back the memory of all machines that copies take; for the end of a job."""
        self.wait()
        if self.peers:
            self.peers.forget()

    def _write(self, step: int, facts: dict[str, Any], fill: Callable[[Path], None]) -> str | None:
        """What went wrong, the same on all ranks, or None."""
        made, why, mine = folders.scratch(self.root, step), None, {}
        try:
            mine = write(made, self._copies, self.together.group)
        except (Exception, CheckpointException) as error:
            why = reason(error)
        everyone = self.together.all((why, mine))
        whys = [theirs for theirs, _ in everyone if theirs]
        verdict = whys[0] if whys else None
        if self.together.rank == 0:
            try:
                if verdict is None:
                    self._finish(made, step, {k: v for _, files in everyone for k, v in files.items()}, facts, fill)
            except Exception as error:
                verdict = reason(error)
            if verdict is not None:
                shutil.rmtree(made, ignore_errors=True)
        return self.together.same(verdict)

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
            done = [x for x in folders.folders(root) if folders.step_of(x) <= step]  # later ones may be damaged
            for old in done[self.keep :]:
                shutil.rmtree(old, ignore_errors=True)
