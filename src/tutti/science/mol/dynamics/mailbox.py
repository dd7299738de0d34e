"""Messages between processes of one machine through memory that they share, which takes less time than sockets.

Each process has a box with a flag and two buffers, which it fills in turns. A message is read when the flag has its
number. Every process reads all others' messages before it posts its next one, so a buffer is free again two messages
later.
"""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol import native

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.exchange import Exchange

HEAD = 8  # numbers before the buffers: a cache line for the flag
YIELDS = 20_000  # times that a waiting process gives way before it looks for signals and for processes that have ended
PATIENCE = 1800.0  # seconds


class Mailboxes:
    """The boxes of all processes. capacity: most numbers in a message to all. All processes make them together. Raises
    OSError in all of them if there is no room for the boxes, or if the processes are on several machines."""

    def __init__(self, exchange: Exchange, capacity: int) -> None:
        self.rank, self.capacity, self.number = exchange.rank, capacity, 0
        folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        processes = exchange.gather_objects((uuid.uuid4().hex, socket.gethostname(), _boot(), os.getpid()))
        name, self.processes = processes[0][0], [pid for *_, pid in processes]
        paths = [folder / f"tutti-{name}-{rank}" for rank in range(exchange.size)]
        size, error = HEAD + 2 * capacity, ""
        try:
            if any(there[1:3] != processes[0][1:3] for there in processes):
                raise OSError("the processes are on several machines")
            file = os.open(paths[self.rank], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, 8 * size)
            finally:
                os.close(file)
        except OSError as raised:
            error = str(raised)
        failed = any(exchange.gather_objects(error))
        if not failed:
            self.boxes = [torch.from_file(str(path), True, size, dtype=torch.float64) for path in paths]
            exchange.gather_objects(None)  # all have opened them
        paths[self.rank].unlink(missing_ok=True)
        if failed:
            raise OSError(error or "another process cannot share memory")
        self.flags = (ctypes.c_void_p * len(paths))(*[box.data_ptr() for box in self.boxes])

    def swap(self, into: Tensor, out: Tensor, received: Sequence[int], starts: Sequence[int]) -> None:
        """Post what is for all processes, and take from each what is for this one: so many numbers from a place."""
        self.number += 1
        begin = HEAD + self.number % 2 * self.capacity
        self.boxes[self.rank][begin : begin + len(out)] = out
        library, deadline = native.library(), time.monotonic() + PATIENCE
        library.mailbox_post(self.flags[self.rank], self.number)
        while (late := library.mailbox_wait(self.flags, len(self.boxes), self.number, YIELDS)) >= 0:
            if not _runs(self.processes[late]) or time.monotonic() > deadline:
                raise RuntimeError(f"process {late}, which shares the simulation, has ended or hangs")
        at = 0
        for box, count, start in zip(self.boxes, received, starts, strict=True):
            into[at : at + count] = box[begin + start : begin + start + count]
            at += count


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str:
    """A number of this machine since it was started, where there is one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
