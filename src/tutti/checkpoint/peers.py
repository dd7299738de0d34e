"""Checkpoints in the memory of machines, each with the parts of the machine before it: they outlive the processes, and
the loss of any one machine.

In the memory of every machine a folder has the files that its ranks wrote, those of the machine before it, and the
manifest of all. A checkpoint is there as long as each of its files is on some machine as it was written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from tutti.checkpoint import folder as folders
from tutti.checkpoint.consensus import Consensus
from tutti.checkpoint.folder import METADATA, Files
from tutti.checkpoint.passing import pass_on
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.checkpoint.write import Copies, write
from tutti.hardware.machine import identity
from tutti.plan.explain import size

HEADERS = 4096  # bytes that a block takes in a file besides its numbers, at most
NAME = ".memory"  # a file next to the checkpoints on disk, with the name of the folders in memory


class Peers:
    """The checkpoints of a run in memory. Every rank of a job makes one, and calls the same.

    memory: a folder in the memory of this machine, by which machines are told apart. root: where the run keeps its
    checkpoints on disk; with it what is in memory is forgotten.
    """

    def __init__(self, memory: Path, root: Path, together: Consensus):
        self.together = together
        if not all(together.all(os.path.isdir(memory))):
            raise ValueError(f"there is no folder {memory}, in which copies of the state are to be kept in memory")
        self.folder = memory / f"tutti-{together.one(lambda: _name(root))}"
        together.each(lambda: _make(self.folder))
        everywhere = together.each(lambda: _machine(self.folder))
        machines = list(dict.fromkeys(everywhere))
        self.members = [[rank for rank, x in enumerate(everywhere) if x == machine] for machine in machines]
        self.machine = machines.index(everywhere[together.rank])
        self.place = self.members[self.machine].index(together.rank)  # of this rank among those of its machine

    def save(self, step: int, tensors: Copies, facts: Mapping[str, Any]) -> None:
        """Write the checkpoint of so many completed steps, then drop the one before.

        Raises OSError on all ranks where one of them fails; the one before stays then.
        """
        together, made = self.together, folders.scratch(self.folder, step)
        together.each(self._clear)
        try:
            self._check_room(tensors)
            files = together.each(lambda: write(made, tensors, together.group))
            if len(self.members) > 1:
                together.each(lambda: self._pass_on(made, files))
            told = together.one(lambda: (facts, (made / METADATA).read_bytes()))
            together.each(lambda: self._commit(step, files, *told))  # on every machine before any drops the one before
        except OSError:
            self._clear()
            raise
        together.each(lambda: self._drop_all_but(step))

    def newest(self, say: Callable[[str], None]) -> PeerCheckpoint | None:
        """The newest checkpoint of which every file is on some machine; rank 0 is told of newer ones.

        Each file is looked into by one rank of its machine. What was never finished is dropped.
        """
        self.together.each(self._clear)
        here: dict[tuple[int, str], dict[str, Any]] = {}
        self.together.each(lambda: here.update(self._found()))
        for key in sorted({key for keys in self.together.all(list(here)) for key in keys}, reverse=True):
            folder, about = self.folder / f"step-{key[0]:08d}", here.get(key)
            whole = self.together.all(about and self._whole(folder, about["files"]))  # files, by rank
            about = self.together.same(about, next(rank for rank, names in enumerate(whole) if names is not None))
            if lost := about["files"].keys() - {name for names in whole for name in names or ()}:
                if self.together.rank == 0:
                    say(f"the checkpoint of step {key[0]} in memory is not complete: {min(lost)} is lost: skipped")
                continue
            source = next(rank for rank, names in enumerate(whole) if names and METADATA in names)
            metadata = self.together.one((folder / METADATA).read_bytes, source)
            return PeerCheckpoint(folder, about, metadata, self._servers(whole), self.together)
        return None

    def forget(self) -> None:
        """Drop all."""
        self.together.all(None)
        if self.place == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.together.all(None)

    def _clear(self) -> None:
        if self.place == 0:
            folders.clear(self.folder)

    def _check_room(self, tensors: Copies) -> None:
        """OSError on all ranks where one machine has no room for a checkpoint."""
        mine = sum(block.nbytes + HEADERS for _, owned in tensors.values() for block in owned.values())
        told = self.together.each(lambda: (mine, _room(self.folder), str(self.folder)))
        for machine, members in enumerate(self.members):
            _, room, folder = told[members[0]]
            kept = {*members, *self.members[machine - 1]}
            if (need := sum(told[rank][0] for rank in kept)) > room:
                raise OSError(f"{size(need)} do not fit into {folder}, which has {size(room)} left")

    def _commit(self, step: int, files: Sequence[Files], facts: Mapping[str, Any], metadata: bytes) -> None:
        if self.place == 0:
            (folders.scratch(self.folder, step) / METADATA).write_bytes(metadata)
            folders.commit(self.folder, step, {k: v for theirs in files for k, v in theirs.items()}, facts)

    def _drop_all_but(self, step: int) -> None:
        for other in folders.folders(self.folder) if self.place == 0 else ():
            if folders.step_of(other) != step:  # later ones, too: nobody could go on from them
                shutil.rmtree(other, ignore_errors=True)

    def _pass_on(self, made: Path, files: Sequence[Files]) -> None:
        """Send what this rank wrote to one of the next machine, and keep what is sent here."""
        after = self.members[(self.machine + 1) % len(self.members)]
        own, me, group = self.members[self.machine], self.together.rank, self.together.group
        sources = [x for i, x in enumerate(self.members[self.machine - 1]) if own[i % len(own)] == me]
        pass_on(made, files[me], after[self.place % len(after)], {x: files[x] for x in sources}, group)

    def _found(self) -> dict[tuple[int, str], dict[str, Any]]:
        """Manifests of the checkpoints here that have one, by step and by what tells it from another of that step."""
        found = {}
        for path in folders.folders(self.folder):
            with suppress(ValueError):
                about = folders.manifest(path)
                found[folders.step_of(path), sha256(json.dumps(about).encode()).hexdigest()] = about
        return found

    def _whole(self, path: Path, files: Files) -> list[str]:
        """Of the files of a checkpoint that are here, and that this rank looks into, those that are as written."""
        there = sorted(name for name in files if os.path.exists(path / name))
        mine = there[self.place :: len(self.members[self.machine])]
        return [name for name in mine if folders.fault_of(path / name, files[name]) is None]

    def _servers(self, whole: Sequence[Sequence[str] | None]) -> dict[str, int]:
        """The rank that reads a file for this one, where it is on other machines alone."""
        found: dict[str, int] = {}
        for step in range(1, len(self.members)):
            members = self.members[self.machine - step]
            for name in {name for rank in members for name in whole[rank] or ()}:
                found.setdefault(name, members[self.place % len(members)])
        here = {name for rank in self.members[self.machine] for name in whole[rank] or ()}
        return {name: rank for name, rank in found.items() if name not in here}


def _name(root: Path) -> str:
    """Of the folders in memory: of this run, and no other that had the same folder."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / NAME
    if not path.exists() or not path.read_text():
        path.write_text(uuid.uuid4().hex)
    name = path.read_text()
    if not re.fullmatch("[0-9a-f]{32}", name):  # it is part of a path
        raise ValueError(f"{path} is damaged: it holds {name[:40]!r} instead of 32 hexadecimal digits; remove it")
    return name


def _make(folder: Path) -> None:
    """Make a folder that only this user can read. Raises OSError where another user made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
        raise OSError(f"{folder} was made by another user: copies of the state are not kept there")


def _machine(folder: Path) -> tuple[str, int, int]:
    """The same for all processes that see the same folder, and for no others."""
    told = folder.stat()
    return identity(), told.st_dev, told.st_ino


def _room(folder: Path) -> int:
    """Bytes that may be written there: what its file system allows, and no more than the machine has memory for."""
    free, told = shutil.disk_usage(folder).free, Path("/proc/meminfo")
    lines = told.read_text().splitlines() if told.exists() else []
    return min([free, *(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))])
