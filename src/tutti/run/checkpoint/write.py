"""Writing the tensors of a checkpoint, as `torch.distributed.checkpoint` lays them out: each block once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from tutti.graph.step_graph import Spec
from tutti.plan.boxes import Shape
from tutti.run.checkpoint.held import Held

Copies = dict[str, tuple[Spec, dict[Shape, torch.Tensor]]]  # of owned blocks: what the whole is, and where each begins


def copies(tensors: Mapping[str, Held], known: Copies | None = None) -> Copies:
    """Copies in the host's memory of what this process is to write, in that of earlier ones where they fit."""
    made: Copies = {}
    for name, held in tensors.items():
        before = known[name][1] if known and name in known else {}
        blocks = {begin: held.blocks[begin][0] for begin in held.owned}
        made[name] = held.spec, {begin: _like(x, before.get(begin)).copy_(x) for begin, x in blocks.items()}
    return made


def _like(block: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    if known is not None and known.shape == block.shape and known.dtype == block.dtype:
        return known
    return torch.empty(block.shape, dtype=block.dtype)


def write(folder: Path, tensors: Copies, group: dist.ProcessGroup | None = None) -> None:
    """Write the file of this process, and with the last the `.metadata` of all. Every rank of the group calls it.

    Raises `CheckpointException` on all ranks where one of them fails; without a group, what failed.
    """
    if group is None:
        write_each(folder, [tensors])
    else:
        save(dict(tensors), storage_writer=FileSystemWriter(folder), planner=_Planner(), process_group=group)


def write_each(folder: Path, ranks: Iterable[Copies]) -> None:
    """Write what several ranks are to write, one after the other, and the `.metadata` of all."""
    writer, planner, plans, results = FileSystemWriter(folder), _Planner(), [], []
    for rank, tensors in enumerate(ranks):
        planner.set_up_planner(dict(tensors))
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        named = writer.prepare_global_plan(plans)[rank]  # whose place in the list names its file
        results.append(writer.write_data(named, planner).value())
    _, metadata = planner.create_global_plan(plans)
    writer.finish(metadata, results)


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
