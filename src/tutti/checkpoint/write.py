"""Write the tensors of a checkpoint in the format of `torch.distributed.checkpoint`, each block once.

Importing this module takes more than half a second, so that others import it when they write.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from tutti.checkpoint.copies import Copies
from tutti.checkpoint.folder import Files
from tutti.ir.spec import Spec
from tutti.plan.layouts.boxes import Shape

AHEAD = 1 << 25  # bytes in the page cache before write-back is started


def write(folder: Path, tensors: Copies, group: dist.ProcessGroup | None = None) -> Files:
    """Write the file of this process; the coordinator also writes `.metadata`. Every rank of the group calls it.

    Returns size and checksum of the files this process wrote, by name. If a rank fails, all raise CheckpointException;
    without a group, the error itself.
    """
    if group is None:
        return write_each(folder, [tensors])
    writer = _Writer(folder)
    with _own_checksums():
        save(dict(tensors), storage_writer=writer, planner=_Planner(), process_group=group)
    return writer.fs.files


def write_each(folder: Path, ranks: Iterable[Copies]) -> Files:
    """Write the files of several ranks, one after the other, and their `.metadata`."""
    writer, planner, plans, results = _Writer(folder), _Planner(), [], []
    with _own_checksums():
        for rank, tensors in enumerate(ranks):
            planner.set_up_planner(dict(tensors))
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            named = writer.prepare_global_plan(plans)[rank]  # the index in the list names the file
            results.append(writer.write_data(named, planner).value())
        _, metadata = planner.create_global_plan(plans)
        writer.finish(metadata, results)
    return writer.fs.files


@contextmanager
def _own_checksums() -> Iterator[None]:
    """Turn off torch.save's CRC per tensor: the manifest has a checksum per file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Writer(FileSystemWriter):
    """Computes the checksums of files while writing them."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fs = _Files()


class _Files(FileSystem):
    def __init__(self):
        self.files: Files = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as file:
            stream = _Summed(file) if "w" in mode else file
            try:
                yield stream
            except RuntimeError:  # torch's writer of archives says of any failure that a position is not the expected
                if isinstance(stream, _Summed) and stream.error is not None:
                    raise stream.error from None
                raise
        if isinstance(stream, _Summed):
            self.files[Path(path).name] = {"bytes": stream.at, "sha256": stream.digest.hexdigest()}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Summed(io.RawIOBase):
    """A file that is written sequentially, with a running checksum."""

    def __init__(self, file):
        self.file, self.digest, self.at, self.asked = file, hashlib.sha256(), 0, 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            count = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.at += count
        if self.at - self.asked >= AHEAD:
            self.file.flush()
            _begin_to_write(self.file.fileno(), self.asked, self.at - self.asked)
            self.asked = self.at
        return count

    def tell(self) -> int:
        return self.at

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        self.flush()
        return self.file.fileno()


def _begin_to_write(file: int, begin: int, count: int) -> None:
    """Start write-back early (POSIX_FADV_DONTNEED)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, begin, count, os.POSIX_FADV_DONTNEED)


class _Planner(DefaultSavePlanner):
    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [x for name, (spec, blocks) in self.state_dict.items() for x in _items(name, spec, blocks)]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn][1][tuple(index.offset or ())]


def _items(name: str, spec: Spec, blocks: Mapping[Shape, torch.Tensor]) -> Iterable[WriteItem]:
    properties, whole = TensorProperties(dtype=spec.dtype), torch.Size(spec.shape)
    for begin, block in blocks.items():
        chunk = ChunkStorageMetadata(torch.Size(begin), block.shape)
        index = MetadataIndex(name, torch.Size(begin))
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, whole))
