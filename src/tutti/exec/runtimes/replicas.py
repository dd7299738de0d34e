"""Silent data corruption: replicas of a tensor that should hold the same bits and do not.

Each rank sums the bytes of its parts as integers; one flipped bit changes the sum. Ranks whose coordinates agree on all
axes that split a tensor hold the same part of it. The error names the minority whose sums differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist

from tutti.exec.stores.tensor_store import TensorStore
from tutti.launch.heartbeat import HEARTBEAT
from tutti.plan.layouts.layout import coordinates_of


class Corrupted(RuntimeError):
    """Replicas of a tensor differ. The message names the tensor and the ranks."""


def checksum(x: torch.Tensor) -> int:
    """The sum of a tensor's memory, four bytes at a time where that divides it."""
    raw = x.detach().contiguous().view(-1).view(torch.uint8)
    return int((raw if raw.numel() % 4 else raw.view(torch.int32)).sum(dtype=torch.int64))


def compare(store: TensorStore) -> None:
    """Raise Corrupted on all ranks if replicas differ on any two. Every rank of a job must call it."""
    ranks = {rank: {name: checksum(x) for name, x in tensors.items() if _replicated(store, name)}
             for rank, tensors in zip(store.runtime.ranks, store.parts, strict=True)}  # fmt: skip
    if dist.is_initialized() and len(ranks) < dist.get_world_size() > 1:
        gathered: list = [None] * dist.get_world_size()
        with HEARTBEAT.within("all_gather", "checksums"):
            dist.all_gather_object(gathered, ranks)
        ranks = {rank: sums for theirs in gathered for rank, sums in theirs.items()}
    if faults := differing(store, ranks):
        raise Corrupted("; ".join(faults))


def differing(store: TensorStore, sums: Mapping[int, Mapping[str, int]]) -> list[str]:
    """A message for each tensor whose replicas differ. sums: checksums by rank and name."""
    replicas: dict[tuple, dict[int, int]] = defaultdict(dict)
    for rank, its in sums.items():
        where = coordinates_of(rank, store.mesh)
        for name, total in its.items():
            splits = store.tensors[name].layout.splits
            device = store.tensors[name].device  # of a pipeline
            replicas[name, device, *(where[axis] for axis in splits)][rank] = total
    said = []
    for (name, *_), totals in replicas.items():
        (common, count), *others = Counter(totals.values()).most_common()
        if others:
            clear = count > others[0][1]
            odd = [rank for rank, total in totals.items() if not clear or total != common]
            than = f"other bits than on the {count} others" if clear else "different bits, and no majority tells whose"
            said.append(f"{name} holds on rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} {than}")
    return said


def _replicated(store: TensorStore, name: str) -> bool:
    stored = store.tensors[name]
    mesh = store.mesh if stored.device is None else store.inner
    return not stored.layout.partials and any(
        size > 1 for axis, size in mesh.items() if axis not in stored.layout.splits
    )
