"""The checkpoints of a run. All ranks write them together, in the background, while training continues."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from tutti.checkpoint import folder as folders
from tutti.checkpoint.consensus import Consensus
from tutti.checkpoint.copies import Copies, copies
from tutti.checkpoint.failures import reason
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.checkpoint.peers import Peers
from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.launch.heartbeat import HEARTBEAT


class SaveError(OSError):
    """A checkpoint could not be written. Earlier ones are intact.

    why: the reason, in one line.
    """

    def __init__(self, why: str, what: str, remains: str = ""):
        super().__init__(f"{what}: {why}{remains}")
        self.why = why


class Checkpoints:
    """The checkpoints of a run. Every rank of a job creates one and makes the same calls.

    root: a folder that all ranks see.
    keep: how many of the newest checkpoints stay there.
    second: another such folder, to which each checkpoint is copied.
    memory: a folder in the memory of each machine, such as /dev/shm, for copies that survive the processes. `forget`
        frees it.
    together: how the ranks agree, of other Checkpoints that are not in use meanwhile; None makes a process group.

    At most one checkpoint is written at a time, from a copy of the state in host memory.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int = 2,
        second: str | Path | None = None,
        memory: str | Path | None = None,
        together: Consensus | None = None,
    ):
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        self.roots = [Path(root), *([Path(second)] if second else [])]
        self.root, self.keep = self.roots[0], keep
        self.together = together or Consensus()
        self.peers = Peers(Path(memory), self.root, self.together) if memory else None
        self.copying = bool(memory)  # until the memory does not suffice
        self._copies: Copies = {}
        self._thread: Thread | None = None
        self._outcome: Path | SaveError | None = None
        self._not_copied: str | None = None  # why the copy to the second folder failed; on rank 0

    @HEARTBEAT.working("loads a checkpoint")
    def latest(self, say: Callable[[str], None] = lambda said: None) -> Path | PeerCheckpoint | None:
        """The newest complete checkpoint, in memory or on disk, or None. Rank 0 reports skipped ones with `say`.

        Each file is checked by one rank. Unfinished checkpoints are deleted. If both folders have the same step, the
        first folder is used.
        """
        self.wait()
        in_memory = self.peers.newest(say) if self.peers else None
        candidates, said = self.together.one(self._candidates)
        newest: Path | PeerCheckpoint | None = in_memory
        for candidate in candidates:
            if in_memory and in_memory.step >= folders.step_of(candidate):
                break
            faults = self.together.all(folders.find_fault(candidate, self.together.rank, self.together.ranks))
            if not any(faults):
                newest = candidate
                break
            fault = next(fault for fault in faults if fault)
            said.append(f"checkpoint {candidate} is not complete: {fault}: skipped")
        if self.together.rank == 0:
            for line in said:
                say(line)
        return newest

    def _candidates(self) -> tuple[list[Path], list[str]]:
        """Checkpoints of all folders, newest first, and messages about folders that cannot be read. Deletes unfinished
        ones."""
        paths, said = [], []
        for root in self.roots:
            try:
                if (step := folders.unfinished(root)) is not None:
                    said.append(f"the checkpoint of step {step} was not finished: skipped")
                folders.clear(root)
                paths += folders.folders(root)
            except OSError as error:
                said.append(f"{root} cannot be read: {reason(error)}: skipped")
        return sorted(paths, key=folders.step_of, reverse=True), said  # stable: equal steps keep the folders' order

    def save(
        self,
        step: int,
        tensors: Mapping[str, ShardedTensor],
        facts: Mapping[str, Any] | None = None,
        fill: Callable[[Path], None] = lambda folder: None,
        in_memory: bool = False,
    ) -> None:
        """Start to write the checkpoint after `step` completed steps. Returns when the state is copied.

        facts: entries of the manifest. fill: writes more files into the folder, on rank 0; ignored if `in_memory`.
        Waits for the checkpoint before, and raises SaveError if that could not be written.
        """
        self.wait()
        if in_memory and not self.copying:
            raise ValueError("in_memory=True needs a folder in memory: Checkpoints(..., memory='/dev/shm')")
        self._copies = copies(tensors, self._copies)
        work = self._keep if in_memory else self._run
        self._thread = Thread(target=work, args=(step, dict(facts or {}), fill), daemon=True, name="checkpoint")
        self._thread.start()

    def done(self) -> Path | None:
        """The last checkpoint on disk, once, when it is complete; None before. Raises as `wait`."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    @HEARTBEAT.working("saves a checkpoint")
    def wait(self) -> Path | None:
        """Wait for the last checkpoint and return its folder, or None if it is in memory. Raises SaveError if it could
        not be written. Warns if it could not be copied to the second folder."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, outcome, self._outcome = None, self._outcome, None
        why, self._not_copied = self._not_copied, None
        if isinstance(outcome, SaveError):
            raise outcome
        if why:
            warnings.warn(f"{outcome} is complete, and has no second copy: {why}", stacklevel=3)
        return outcome

    def _run(self, step: int, facts: dict[str, Any], fill: Callable[[Path], None]) -> None:
        final = folders.step_folder(self.root, step)
        draft = folders.scratch(final)
        try:
            from tutti.checkpoint.write import write  # see there

            everyone = self.together.each(lambda: write(draft, self._copies, self.together.group))
            files = {name: entry for theirs in everyone for name, entry in theirs.items()}
            self._outcome = self.together.one(lambda: self._finish(final, files, {"step": step, **facts}, fill))
        except Exception as error:  # `wait` raises it in the training thread
            what = f"could not save the checkpoint of step {step} in {self.root}"
            remains = what_remains(self.root, folders.folders) if self.together.rank == 0 else ""
            self._outcome = SaveError(reason(error), what, remains)

    def _keep(self, step: int, facts: dict[str, Any], _fill) -> None:
        assert self.peers
        try:
            self.peers.save(step, self._copies, facts)
        except Exception as error:  # `wait` warns of it
            what = f"could not keep step {step} in memory"
            self.copying, self._outcome = False, SaveError(reason(error), what, "; no more copies are kept there")

    def forget(self) -> None:
        """Free the memory that in-memory copies take on all machines. Call it at the end of a job."""
        self.wait()
        if self.peers:
            self.peers.forget()

    def _finish(self, final: Path, files: folders.Files, facts: dict[str, Any], fill: Callable[[Path], None]) -> Path:
        fill(folders.scratch(final))
        complete, step = folders.commit(final, files, facts), folders.step_of(final)
        folders.prune(self.root, step, self.keep)
        for root in self.roots[1:]:
            copy = root / final.name
            try:
                _copy(complete, folders.scratch(copy))
                folders.commit(copy, folders.manifest(complete)["files"], facts)
                folders.prune(root, step, self.keep)
            except OSError as error:
                self._not_copied = f"{root}: {reason(error)}"
                with suppress(OSError):
                    folders.clear(root)
        return complete


def what_remains(root: Path, listed: Callable[[Path], Iterable[Path]]) -> str:
    """Delete what an error left of a checkpoint, and return the end of the message of its SaveError: the newest
    checkpoint that has all its files. listed: the checkpoints of a folder, newest first."""
    try:
        folders.clear(root)
        before = next((x for x in listed(root) if folders.find_fault(x, parts=0) is None), None)
    except OSError:
        return "; the ones before cannot be read"
    return f"; {before} is intact" if before else "; there is no checkpoint before it"


def _copy(complete: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(complete, to)
    for path in to.iterdir():
        folders.to_disk(path)
