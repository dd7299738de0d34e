"""What a restart reads: the bytes that `Step.load` would, of each device and machine, and how long that takes.

Bytes are counted as they are read, by the boxes of `plan.boxes`; of ranks that lie alike along the axes that split a
tensor one is looked at. Ranks of a machine that read the same bytes have them from the storage once: the pages of a
file are shared. From copies in memory (`checkpoint.peers`) a rank has what lies on its machine, and is sent the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tutti.ir.step_graph import GIVEN, Spec, StepGraph
from tutti.lower.schedule_parts import schedule_of
from tutti.plan.boxes import boxes, turn_of
from tutti.plan.layout import Layout, Mesh, coordinates_of, devices, rank_at
from tutti.plan.plan import Plan

CHUNK = 1 << 22  # pairs of boxes that are looked at at once


@dataclass(frozen=True)
class Storage:
    """Bytes per second."""

    process: float = 3.9e9
    """That a process reads of what its machine has in memory (benchmarks/checkpoint.py)."""
    machine: float = 40e9
    """That a machine reads from the file system (NVIDIA's DGX SuperPOD reference architecture for the H100)."""
    files: float = 1e9
    """That the file system gives each machine when all read at once (Llama 3: 2 TB/s for 16,000 GPUs in eights)."""
    network: float = 12.5e9
    """That a machine is sent by others (assumed: over one port of 100 Gbit/s, by TCP)."""
    checksum: float = 1.5e9
    """Of which a process takes checksums (SHA-256 with the processor's instructions for it)."""


USUAL = Storage()


@dataclass(frozen=True)
class Restart:
    """What is read.

    state: bytes of all, once. devices: bytes of each. machines: bytes of each machine, each byte once. sent: bytes
    that each machine is sent where the state is in memory, and one of the machines before was lost. storage: speeds.
    """

    state: int
    devices: list[int]
    machines: list[int]
    sent: list[int]
    storage: Storage

    @property
    def times(self) -> float:
        """How often the storage is asked for a byte, in the mean."""
        return sum(self.machines) / self.state

    @property
    def reading(self) -> float:
        """Seconds to read from the storage: the slowest process, the busiest machine, or all at once."""
        s = self.storage
        total = sum(self.machines) / (s.files * len(self.machines))
        return max(max(self.devices) / s.process, max(self.machines) / s.machine, total)

    @property
    def checking(self) -> float:
        """Seconds before, in which each file is held against its checksum by one of the processes."""
        s, each = self.storage, self.state / len(self.devices)
        here = self.state / len(self.machines)
        return max(each / s.checksum, here / s.machine, here / s.files)

    @property
    def receiving(self) -> float:
        """Seconds to read from memory, and to be sent what is not there."""
        return max(max(self.devices) / self.storage.process, max(self.sent) / self.storage.network)

    @property
    def checking_memory(self) -> float:
        """Seconds before, in which a machine's own files and its neighbour's are held against their checksums."""
        return 2 * self.state / len(self.devices) / self.storage.checksum


def restart(graph: StepGraph, plan: Plan, width: int, before: Plan | None = None, storage: Storage = USUAL,
            lost: int = 0) -> Restart:  # fmt: skip
    """What going on under a plan reads, of a state that another wrote (`before`, by default the same).

    width: devices of a machine. lost: the machine that is not there any more, where there were several; an empty one
    has its place if there are as many as before. Raises ValueError where a plan does not fit the graph.
    """
    before = before or plan
    plan.check(graph)
    labels = {node.meta["label"] for node in graph.inputs.values()}
    if foreign := {x for x in before.inputs if x.startswith("param:")} - labels:
        raise ValueError(f"the plan before is of another model: it says how {min(foreign)!r} lies")
    specs = {name: graph.spec(name) for name in graph.inputs if name.partition(":")[0] not in GIVEN}
    now, then = _lying(graph, plan), _lying(graph, before)
    count, machines, had = devices(plan.mesh), _machines(plan, width), _machines(before, width)
    per_device, per_machine = np.zeros(count, np.int64), np.zeros(machines, np.int64)
    sent, places = np.zeros(machines, np.int64), _places(machines, had, lost if had > 1 else None)
    pieces = cache(_pieces)
    for number, (name, spec) in enumerate(specs.items()):
        if spec.bytes:
            reads, wrote = now(name), then(name)
            held = sum(box.numel for box in boxes(reads.layout, spec.shape, reads.mesh, 0)) * spec.dtype.itemsize
            per_device[reads.ranks] += held
            at, times = reads.distinct(width)
            per_machine[at] += held * times
            rank, owner, sizes = pieces(spec, reads, wrote)
            turn = turn_of(wrote.layout, wrote.mesh, number)
            written = (owner + rank_at({axis: turn.get(axis, 0) for axis in wrote.mesh}, wrote.mesh)) // width
            place = places[rank // width]
            elsewhere = (place != written) & (place != (written + 1) % had)
            np.add.at(sent, rank[elsewhere] // width, sizes[elsewhere])
    state = sum(spec.bytes for spec in specs.values())
    return Restart(state, per_device.tolist(), per_machine.tolist(), sent.tolist(), storage)


@dataclass(frozen=True)
class _Lying:
    """How a tensor lies: on a mesh whose first rank is `first`."""

    layout: Layout
    axes: tuple[tuple[str, int], ...]
    first: int

    @property
    def mesh(self) -> Mesh:
        return dict(self.axes)

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(self.first, self.first + devices(self.mesh))

    @property
    def alike(self) -> np.ndarray:
        """For each rank of the mesh the first of those that hold the same."""
        where = (coordinates_of(rank, self.mesh) for rank in range(devices(self.mesh)))
        split = self.layout.splits
        return np.array(
            [rank_at({axis: x if axis in split else 0 for axis, x in at.items()}, self.mesh) for at in where]
        )

    def distinct(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Machines, and how many different parts each holds."""
        pairs = np.unique(np.stack([self.ranks // width, self.alike]), axis=1)
        return np.unique(pairs[0], return_counts=True)


def _lying(graph: StepGraph, plan: Plan) -> Callable[[str], _Lying]:
    """How kept inputs lie, by name; of a pipeline on its device alone where it has a home."""
    homes: dict[str, int] = {}
    if plan.stages:
        cut, schedule = schedule_of(graph, plan, plan.accumulate)
        homes = {name: schedule.place[stage] for name, stage in cut.homes.items()}

    def lying(name: str) -> _Lying:
        mesh = plan.inner if name in homes else plan.mesh
        layout = plan.input_layout(graph.inputs[name].meta["label"])
        return _Lying(layout, tuple(mesh.items()), homes.get(name, 0) * devices(plan.inner))

    return lying


def _machines(plan: Plan, width: int) -> int:
    return -(-devices(plan.mesh) // width)


def _places(machines: int, had: int, lost: int | None) -> np.ndarray:
    """Which machine of before each one is; -1 for one that was none."""
    if machines == had:
        return np.array([-1 if i == lost else i for i in range(had)])
    left = [i for i in range(had) if i != lost][:machines]
    return np.array(left + [-1] * (machines - len(left)))


def _pieces(spec: Spec, reads: _Lying, wrote: _Lying) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whatever a rank reads of one block: the rank, the first of those that held the block, and bytes."""
    mine, begin, end = _boxes(spec, reads)
    theirs, low, high = _boxes(spec, wrote)
    found = []
    rows = max(1, CHUNK // len(theirs))
    for i in range(0, len(mine), rows):
        part = slice(i, i + rows)
        sizes = np.minimum(end[part, None], high[None]) - np.maximum(begin[part, None], low[None])
        shared = np.maximum(sizes, 0).prod(-1)
        a, b = shared.nonzero()
        found.append((mine[part][a], theirs[b], shared[a, b] * spec.dtype.itemsize))
    first, owner, count = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(first, kind="stable")
    alike = reads.alike
    low, high = (np.searchsorted(first[order], alike, side) for side in ("left", "right"))
    taken = order[np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])]
    return np.repeat(reads.ranks, high - low), owner[taken] + wrote.first, count[taken]


def _boxes(spec: Spec, lying: _Lying) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each block once: the first rank that holds it, where it begins, and where it ends."""
    found = [(rank, box) for rank in np.unique(lying.alike).tolist()
             for box in boxes(lying.layout, spec.shape, lying.mesh, rank)]  # fmt: skip
    begin = np.array([box.whole for _, box in found]).reshape(len(found), -1)
    return (
        np.array([rank for rank, _ in found]),
        begin,
        begin + np.array([box.sizes for _, box in found]).reshape(len(found), -1),
    )
