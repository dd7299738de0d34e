"""Checkpoints in the memory of machines. They survive the processes, and the loss of any one machine.

A folder in each machine's memory holds the files that its ranks wrote, copies of the files of the machine before it,
and the manifest. A checkpoint is complete while each of its files is intact on some machine.
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
from tutti.checkpoint.copies import Copies
from tutti.checkpoint.folder import METADATA, Files
from tutti.checkpoint.passing import pass_on
from tutti.checkpoint.peer_checkpoint import PeerCheckpoint
from tutti.hardware.machine import identity
from tutti.plan.explain import size

HEADERS = 4096  # upper bound on a block's bytes in a file besides its data
NAME = ".memory"  # a file next to the checkpoints on disk that names the folders in memory


class Peers:
    """The in-memory checkpoints of a run. Every rank of a job creates one and makes the same calls.

    memory: a folder in the memory of this machine; it also identifies the machine. root: the run's checkpoint folder on
    disk; deleting it orphans the copies in memory.
    """

    def __init__(self, memory: Path, root: Path, together: Consensus):
        self.together = together
        if not all(together.all(os.path.isdir(memory))):
            raise ValueError(f"memory={str(memory)!r}: no such folder; in-memory copies need one, such as /dev/shm")
        self.folder = memory / f"tutti-{together.one(lambda: _name(root))}"
        together.each(lambda: _make(self.folder))
        everywhere = together.each(lambda: _machine(self.folder))
        machines = list(dict.fromkeys(everywhere))
        self.members = [[rank for rank, x in enumerate(everywhere) if x == machine] for machine in machines]
        self.machine = machines.index(everywhere[together.rank])
        self.place = self.members[self.machine].index(together.rank)  # this rank's index on its machine

    def save(self, step: int, tensors: Copies, facts: Mapping[str, Any]) -> None:
        """Write the checkpoint after `step` completed steps, then delete the one before.

        Raises OSError on all ranks if one fails; then the one before stays.
        """
        final = folders.step_folder(self.folder, step)
        together, draft = self.together, folders.scratch(final)
        together.each(self._clear)
        try:
            self._check_room(tensors)
            from tutti.checkpoint.write import write  # see there

            files = together.each(lambda: write(draft, tensors, together.group))
            if len(self.members) > 1:
                together.each(lambda: self._pass_on(draft, files))
            manifest = together.one(lambda: ({"step": step, **facts}, (draft / METADATA).read_bytes()))
            together.each(
                lambda: self._commit(final, files, *manifest)
            )  # on every machine before any drops the one before
        except OSError:
            self._clear()
            raise
        together.each(lambda: self._drop_all_but(step))

    def newest(self, say: Callable[[str], None]) -> PeerCheckpoint | None:
        """The newest checkpoint all of whose files are intact on some machine. Rank 0 reports the newer ones.

        Each file is checked by one rank of its machine. Unfinished checkpoints are deleted.
        """
        self.together.each(self._clear)
        here: dict[tuple[int, str], dict[str, Any]] = {}
        self.together.each(lambda: here.update(self._manifests()))
        for key in sorted({key for keys in self.together.all(list(here)) for key in keys}, reverse=True):
            folder, about = folders.step_folder(self.folder, key[0]), here.get(key)
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
        """Delete all copies."""
        self.together.all(None)
        if self.place == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.together.all(None)

    def _clear(self) -> None:
        if self.place == 0:
            folders.clear(self.folder)

    def _check_room(self, tensors: Copies) -> None:
        """Raise OSError on all ranks if a machine lacks the memory for a checkpoint."""
        mine = sum(block.nbytes + HEADERS for _, owned in tensors.values() for block in owned.values())
        reports = self.together.each(lambda: (mine, _room(self.folder), str(self.folder)))
        for machine, members in enumerate(self.members):
            _, room, folder = reports[members[0]]
            writers = {*members, *self.members[machine - 1]}
            if (need := sum(reports[rank][0] for rank in writers)) > room:
                raise OSError(f"a copy needs {size(need)}; {folder} has {size(room)} left")

    def _commit(self, final: Path, files: Sequence[Files], facts: Mapping[str, Any], metadata: bytes) -> None:
        if self.place == 0:
            (folders.scratch(final) / METADATA).write_bytes(metadata)
            folders.commit(final, {k: v for theirs in files for k, v in theirs.items()}, facts)

    def _drop_all_but(self, step: int) -> None:
        for path in folders.folders(self.folder) if self.place == 0 else ():
            if folders.step_of(path) != step:  # later ones too: no run resumed from them
                shutil.rmtree(path, ignore_errors=True)

    def _pass_on(self, folder: Path, files: Sequence[Files]) -> None:
        """Send this rank's files to a rank of the next machine, and receive those of the machine before."""
        after = self.members[(self.machine + 1) % len(self.members)]
        own, me, group = self.members[self.machine], self.together.rank, self.together.group
        sources = [x for i, x in enumerate(self.members[self.machine - 1]) if own[i % len(own)] == me]
        pass_on(folder, files[me], after[self.place % len(after)], {x: files[x] for x in sources}, group)

    def _manifests(self) -> dict[tuple[int, str], dict[str, Any]]:
        """The manifests of the checkpoints here, by step and a key that tells checkpoints of one step apart."""
        manifests = {}
        for path in folders.folders(self.folder):
            with suppress(ValueError):
                about = folders.manifest(path)
                manifests[folders.step_of(path), sha256(json.dumps(about).encode()).hexdigest()] = about
        return manifests

    def _whole(self, path: Path, files: Files) -> list[str]:
        """The intact files among those that are here and assigned to this rank."""
        there = sorted(name for name in files if os.path.exists(path / name))
        mine = there[self.place :: len(self.members[self.machine])]
        return [name for name in mine if folders.fault_of(path / name, files[name]) is None]

    def _servers(self, whole: Sequence[Sequence[str] | None]) -> dict[str, int]:
        """The rank that reads each file that is only on other machines."""
        servers: dict[str, int] = {}
        for step in range(1, len(self.members)):
            members = self.members[self.machine - step]
            for name in {name for rank in members for name in whole[rank] or ()}:
                servers.setdefault(name, members[self.place % len(members)])
        here = {name for rank in self.members[self.machine] for name in whole[rank] or ()}
        return {name: rank for name, rank in servers.items() if name not in here}


def _name(root: Path) -> str:
    """The name of this run's folders in memory. It is unique: another run in the same folder gets another one."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / NAME
    if not path.exists() or not path.read_text():
        path.write_text(uuid.uuid4().hex)
    name = path.read_text()
    if not re.fullmatch("[0-9a-f]{32}", name):  # it is part of a path
        raise ValueError(f"{path} is damaged: expected 32 hexadecimal digits, found {name[:40]!r}; delete it")
    return name


def _make(folder: Path) -> None:
    """Create a folder that only this user can read. Raises OSError if it belongs to another user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
        raise OSError(f"{folder} belongs to another user: refused to keep copies of the state there")


def _machine(folder: Path) -> tuple[str, int, int]:
    """An identity shared by exactly the processes that see the same folder."""
    status = folder.stat()
    return identity(), status.st_dev, status.st_ino


def _room(folder: Path) -> int:
    """Bytes that can be written there: the free space of the file system, at most the machine's available memory."""
    free, meminfo = shutil.disk_usage(folder).free, Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return min([free, *(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))])
