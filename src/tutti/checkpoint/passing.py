"""Send files that a rank wrote to another rank, while receiving files from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from tutti.checkpoint.failures import reason
from tutti.checkpoint.folder import METADATA, Files, Outside, file_in

CHUNK = 1 << 26  # bytes per message


def pass_on(folder: Path, mine: Files, target: int, sources: Mapping[int, Files], group: dist.ProcessGroup) -> None:
    """Send this rank's files in `folder` to rank `target`, and write the received files into the same folder here.

    sources: the files of each rank that sends to this one. Collective over the group. Raises OSError if a file could
    not be read or written, but only after all messages are exchanged, so that no other rank blocks.
    """
    faults: list[str] = []

    def keep(name: str, part: bytes | memoryview, mode: str = "ab") -> None:
        try:
            with open(file_in(folder, name), mode) as file:
                file.write(part)
        except (OSError, Outside) as error:
            faults.append(reason(error))

    for name in (name for files in sources.values() for name, _ in _tensors(files)):
        keep(name, b"", "wb")
    try:
        outgoing = list(_contents(folder, mine))
    except (OSError, RuntimeError) as error:  # torch.from_file raises the latter
        faults.append(reason(error))
        anything = torch.zeros(CHUNK, dtype=torch.uint8)
        outgoing = [anything[:count] for _, count in _chunks(mine)]
    incoming = {rank: list(_chunks(files)) for rank, files in sources.items()}
    for i in range(max(len(outgoing), *map(len, incoming.values()), 0)):
        work = dist.isend(outgoing[i], target, group) if i < len(outgoing) else None
        for rank, chunks in incoming.items():
            if i < len(chunks):
                name, count = chunks[i]
                part = torch.empty(count, dtype=torch.uint8)
                dist.recv(part, rank, group)
                keep(name, part.numpy().data)
        if work:
            work.wait()
    if faults:
        raise OSError(faults[0])


def _tensors(files: Files) -> list[tuple[str, int]]:
    """The tensor files and their bytes."""
    return [(name, int(entry["bytes"])) for name, entry in sorted(files.items()) if name != METADATA]


def _chunks(files: Files) -> Iterator[tuple[str, int]]:
    """The messages of these files in order: file name and bytes."""
    for name, count in _tensors(files):
        yield from ((name, min(CHUNK, count - begin)) for begin in range(0, count, CHUNK))


def _contents(folder: Path, files: Files) -> Iterator[torch.Tensor]:
    """The contents of these messages."""
    for name, count in _tensors(files):
        if count:
            yield from torch.from_file(str(folder / name), size=count, dtype=torch.uint8).split(CHUNK)
