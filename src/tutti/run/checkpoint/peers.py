"""Checkpoints in the memory of machines, each with the parts of the machine before it: they outlive the processes, and
the loss of any one machine.

In the memory of every machine a folder has the files that its ranks wrote, those of the machine before it, and the
manifest of all. A checkpoint is there as long as each of its files is on some machine as it was written.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from tutti.plan.explain import size
from tutti.run.checkpoint import folder as folders
from tutti.run.checkpoint.folder import METADATA, Files
from tutti.run.checkpoint.gathered import Gathered
from tutti.run.checkpoint.passing import pass_on
from tutti.run.checkpoint.together import Together
from tutti.run.checkpoint.write import Copies, reason, write

HEADERS = 4096  # bytes that a block takes in a file besides its numbers, at most
NAME = ".memory"  # a file next to the checkpoints on disk, with the name of the folders in memory


class Peers:
    """The checkpoints of a run in memory. Every rank of a job makes one, and calls the same.

    memory: a folder in the memory of this machine, by which machines are told apart. root: where the run keeps its
    checkpoints on disk; with it what is in memory is forgotten.
    """

    def __init__(self, memory: Path, root: Path, together: Together):
        self.together = together
        if not memory.is_dir():
            raise ValueError(f"there is no folder {memory}, in which copies of the state are to be kept in memory")
        self.folder = memory / f"tutti-{together.same(_name(root) if together.rank == 0 else None)}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        everywhere = together.all(_machine(self.folder))
        machines = list(dict.fromkeys(everywhere))
        self.members = [[rank for rank, x in enumerate(everywhere) if x == machine] for machine in machines]
        self.machine = machines.index(everywhere[together.rank])
        self.place = self.members[self.machine].index(together.rank)  # of this rank among those of its machine

    def save(self, step: int, tensors: Copies, facts: Mapping[str, Any]) -> str | None:
        """Write the checkpoint of so many completed steps, then drop the one before.

        What went wrong, the same on all ranks, or None; that one stays then.
        """
        if self.place == 0:
            folders.clear(self.folder)
        made, files = folders.scratch(self.folder, step), []
        why = self._lacking(tensors)
        if why is None:
            why, files = self._write(made, tensors)
        if why is None:
            facts, metadata = self.together.same((facts, _read(made / METADATA)))
            if self.place == 0:
                try:
                    (made / METADATA).write_bytes(metadata)
                    folders.commit(self.folder, step, {k: v for theirs in files for k, v in theirs.items()}, facts)
                except OSError as error:
                    why = reason(error)
        why = _first(self.together.all(why))  # every machine has it before any drops the one before
        if self.place == 0:
            folders.clear(self.folder)
            for other in folders.folders(self.folder) if why is None else ():
                if folders.step_of(other) != step:  # later ones, too: nobody could go on from them
                    shutil.rmtree(other, ignore_errors=True)
        return why

    def newest(self, say: Callable[[str], None]) -> Gathered | None:
        """The newest checkpoint of which every file is on some machine; rank 0 is told of newer ones.

        Each file is looked into by one rank of its machine. What was never finished is dropped.
        """
        if self.place == 0:
            folders.clear(self.folder)
        here = {key: path for path in folders.folders(self.folder) if (key := _key(path))}
        for key in sorted({key for keys in self.together.all(list(here)) for key in keys}, reverse=True):
            path = here.get(key)
            whole = self.together.all(self._whole(path) if path else None)  # files, by rank
            source = next(rank for rank, names in enumerate(whole) if names is not None)
            about = self.together.same(folders.manifest(path) if path else None, source)
            if lost := about["files"].keys() - {name for names in whole for name in names or ()}:
                if self.together.rank == 0:
                    say(f"the checkpoint of step {key[0]} in memory is not complete: {min(lost)} is lost: skipped")
                continue
            source = next(rank for rank, names in enumerate(whole) if names and METADATA in names)
            metadata = self.together.same(_read(path / METADATA) if path else b"", source)
            return Gathered(self.folder / f"step-{key[0]:08d}", about, metadata, self._servers(whole), self.together)
        return None

    def forget(self) -> None:
        """Drop all."""
        self.together.all(None)
        if self.place == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.together.all(None)

    def _lacking(self, tensors: Copies) -> str | None:
        """Where there is no room for a checkpoint."""
        blocks = [block for _, owned in tensors.values() for block in owned.values()]
        mine = sum(block.nbytes + HEADERS for block in blocks)
        told = self.together.all((mine, shutil.disk_usage(self.folder).free, str(self.folder)))
        for machine, members in enumerate(self.members):
            _, free, folder = told[members[0]]
            kept = {*members, *self.members[machine - 1]}
            if (need := sum(told[rank][0] for rank in kept)) > free:
                return f"{size(need)} do not fit into {folder}, which has {size(free)} left"
        return None

    def _write(self, made: Path, tensors: Copies) -> tuple[str | None, list[Files]]:
        """Write the files of all ranks, on their machine and on the next; what went wrong, and the files by rank."""
        why, mine = None, {}
        try:
            mine = write(made, tensors, self.together.group)
        except (Exception, CheckpointException) as error:
            why = reason(error)
        everyone = self.together.all((why, mine))
        whys, files = [why for why, _ in everyone], [theirs for _, theirs in everyone]
        if not any(whys) and len(self.members) > 1:
            whys = self.together.all(self._pass_on(made, files))
        return _first(whys), files

    def _pass_on(self, made: Path, files: Sequence[Files]) -> str | None:
        """Send what this rank wrote to one of the next machine, and keep what is sent here; what went wrong with it."""
        after = self.members[(self.machine + 1) % len(self.members)]
        own, me, group = self.members[self.machine], self.together.rank, self.together.group
        sources = [x for i, x in enumerate(self.members[self.machine - 1]) if own[i % len(own)] == me]
        return pass_on(made, files[me], after[self.place % len(after)], {x: files[x] for x in sources}, group)

    def _whole(self, path: Path) -> list[str]:
        """Of the files of a checkpoint that are here, and that this rank looks into, those that are as written."""
        files = folders.manifest(path)["files"]
        there = sorted(name for name in files if (path / name).exists())
        mine = there[self.place :: len(self.members[self.machine])]
        return [name for name in mine if folders.describe(path / name) == files[name]]

    def _servers(self, whole: Sequence[Sequence[str] | None]) -> dict[str, int]:
        """The rank that reads a file for this one, where it is on other machines alone."""
        found: dict[str, int] = {}
        for step in range(1, len(self.members)):
            members = self.members[self.machine - step]
            for name in {name for rank in members for name in whole[rank] or ()}:
                found.setdefault(name, members[self.place % len(members)])
        here = {name for rank in self.members[self.machine] for name in whole[rank] or ()}
        return {name: rank for name, rank in found.items() if name not in here}


def _first(faults: Sequence[str | None]) -> str | None:
    return next((fault for fault in faults if fault), None)


def _name(root: Path) -> str:
    """Of the folders in memory: of this run, and no other that had the same folder."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / NAME
    if not path.exists() or not path.read_text():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def _machine(folder: Path) -> tuple[str, int, int]:
    """The same for all processes that see the same folder, and for no others."""
    boot, told = Path("/proc/sys/kernel/random/boot_id"), folder.stat()
    return boot.read_text() if boot.exists() else socket.gethostname(), told.st_dev, told.st_ino


def _key(path: Path) -> tuple[int, str] | None:
    """The step of a checkpoint, and what tells it from another of that step; None where it has no whole manifest."""
    try:
        folders.manifest(path)
    except ValueError:
        return None
    return folders.step_of(path), sha256(_read(path / folders.MANIFEST)).hexdigest()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
