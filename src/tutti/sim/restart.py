"""Predict what a restart reads: the bytes that `Step.load` reads per device and machine, and the seconds.

Bytes are counted exactly, by the boxes of `plan.layouts.boxes`; ranks with equal shards are counted once and
multiplied. Ranks of one machine that read the same bytes share one read from storage, through the page cache. With
in-memory checkpoints (`checkpoint.peers`) a rank reads what its own machine has, and receives the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from tutti.ir.kind import CALL_INPUTS, Kind, kind_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.lower.parts.schedule_parts import schedule_of
from tutti.plan.layouts.boxes import boxes, turn_of
from tutti.plan.layouts.layout import Layout, Mesh, coordinates_of, devices, rank_at
from tutti.plan.plan import Plan

CHUNK = 1 << 22  # pairs of boxes to compare at once


@dataclass(frozen=True)
class Storage:
    """Speeds of storage, in bytes per second."""

    process: float = 3.9e9
    """Read rate of a process from its machine's page cache or memory (benchmarks/checkpoint.py)."""
    machine: float = 40e9
    """Read rate of a machine from the file system (NVIDIA's DGX SuperPOD reference architecture for the H100)."""
    files: float = 1e9
    """Read rate per machine when all read at once (Llama 3: 2 TB/s for 16,000 GPUs, 8 per machine)."""
    network: float = 12.5e9
    """Receive rate of a machine from others (assumed: one port of 100 Gbit/s, TCP)."""
    checksum: float = 1.5e9
    """Checksum rate of a process (SHA-256 with CPU instructions)."""


USUAL = Storage()


@dataclass(frozen=True)
class Restart:
    """The bytes read in a restart.

    state: bytes of the whole state. devices: bytes that each device reads. machines: distinct bytes that each machine
    reads. sent: bytes that each machine receives with in-memory checkpoints, after one machine was lost.
    """

    state: int
    devices: list[int]
    machines: list[int]
    sent: list[int]
    storage: Storage

    @property
    def times(self) -> float:
        """How often each byte is read from storage, on average."""
        return sum(self.machines) / self.state

    @property
    def reading(self) -> float:
        """Seconds to read from storage: the maximum over the slowest process, the busiest machine and all together."""
        s = self.storage
        total = sum(self.machines) / (s.files * len(self.machines))
        return max(max(self.devices) / s.process, max(self.machines) / s.machine, total)

    @property
    def checking(self) -> float:
        """Seconds to verify the checksums before; each file is read by one process."""
        s, each = self.storage, self.state / len(self.devices)
        here = self.state / len(self.machines)
        return max(each / s.checksum, here / s.machine, here / s.files)

    @property
    def receiving(self) -> float:
        """Seconds to read local memory and to receive the rest."""
        return max(max(self.devices) / self.storage.process, max(self.sent) / self.storage.network)

    @property
    def checking_memory(self) -> float:
        """Seconds to verify the checksums of a machine's own files and its neighbour's, in memory."""
        return 2 * self.state / len(self.devices) / self.storage.checksum


def restart(graph: StepGraph, plan: Plan, width: int, before: Plan | None = None, storage: Storage = USUAL,
            lost: int = 0) -> Restart:  # fmt: skip
    """What a restart under `plan` reads of a state saved under `before` (default: the same plan).

    width: devices per machine. lost: index of the lost machine, if there are several; an empty one replaces it.
    Raises ValueError if a plan does not fit the graph.
    """
    before = before or plan
    plan.check(graph)
    labels = {node.meta["label"] for node in graph.inputs.values()}
    if foreign := {x for x in before.inputs if kind_of(x) == Kind.PARAM} - labels:
        raise ValueError(f"the plan before is for another model: it has a layout for {min(foreign)!r}")
    specs = {name: graph.spec(name) for name in graph.inputs if kind_of(name) not in CALL_INPUTS}
    now, then = _placed(graph, plan), _placed(graph, before)
    count, machines, had = devices(plan.mesh), _machines(plan, width), _machines(before, width)
    per_device, per_machine = np.zeros(count, np.int64), np.zeros(machines, np.int64)
    sent, places = np.zeros(machines, np.int64), _places(machines, had, lost if had > 1 else None)
    pieces = cache(_pieces)
    for number, (name, spec) in enumerate(specs.items()):
        if spec.bytes:
            reads, wrote = now(name), then(name)
            shard_bytes = reads.shard_bytes(spec)
            per_device[reads.ranks] += shard_bytes
            at, shard = reads.distinct(width)
            np.add.at(per_machine, at, shard_bytes[shard])
            rank, owner, sizes = pieces(spec, reads, wrote)
            turn = turn_of(wrote.layout, wrote.mesh, number)
            written = (owner + rank_at({axis: turn.get(axis, 0) for axis in wrote.mesh}, wrote.mesh)) // width
            place = places[rank // width]
            elsewhere = (place != written) & (place != (written + 1) % had)
            np.add.at(sent, rank[elsewhere] // width, sizes[elsewhere])
    state = sum(spec.bytes for spec in specs.values())
    return Restart(state, per_device.tolist(), per_machine.tolist(), sent.tolist(), storage)


@dataclass(frozen=True)
class _Placed:
    """The layout of a tensor on a mesh whose first rank is `first`."""

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
        """For each rank of the mesh, the first rank with the same shard."""
        where = (coordinates_of(rank, self.mesh) for rank in range(devices(self.mesh)))
        split = self.layout.splits
        return np.array(
            [rank_at({axis: x if axis in split else 0 for axis, x in at.items()}, self.mesh) for at in where]
        )

    def shard_bytes(self, spec: Spec) -> np.ndarray:
        """The bytes of each rank's shard."""
        count = devices(self.mesh)
        different = self.layout.uneven(spec.shape, self.mesh)
        shapes = [
            self.layout.local_shape(spec.shape, self.mesh, coordinates_of(rank, self.mesh))
            for rank in (range(count) if different else range(1))
        ]
        return np.resize(np.array([prod(shape) * spec.dtype.itemsize for shape in shapes]), count)

    def distinct(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The distinct shards on each machine: (machine, the first rank that has the shard)."""
        machine, shard = np.unique(np.stack([self.ranks // width, self.alike]), axis=1)
        return machine, shard


def _placed(graph: StepGraph, plan: Plan) -> Callable[[str], _Placed]:
    """The layout of stored inputs by name. In a pipeline, an input may be on the device of one stage only."""
    homes: dict[str, int] = {}
    if plan.stages:
        cut, schedule = schedule_of(graph, plan, plan.accumulate)
        homes = {name: schedule.place[stage] for name, stage in cut.homes.items()}

    def placed(name: str) -> _Placed:
        mesh = plan.inner if name in homes else plan.mesh
        layout = plan.input_layout(graph.inputs[name].meta["label"])
        return _Placed(layout, tuple(mesh.items()), homes.get(name, 0) * devices(plan.inner))

    return placed


def _machines(plan: Plan, width: int) -> int:
    return -(-devices(plan.mesh) // width)


def _places(machines: int, had: int, lost: int | None) -> np.ndarray:
    """The previous index of each machine, or -1 for a new one."""
    if machines == had:
        return np.array([-1 if i == lost else i for i in range(had)])
    left = [i for i in range(had) if i != lost][:machines]
    return np.array(left + [-1] * (machines - len(left)))


def _pieces(spec: Spec, reads: _Placed, wrote: _Placed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All that ranks read of stored blocks: the reading rank, the first rank that wrote the block, and bytes."""
    mine, begin, end = _boxes(spec, reads)
    theirs, low, high = _boxes(spec, wrote)
    pieces = []
    rows = max(1, CHUNK // len(theirs))
    for i in range(0, len(mine), rows):
        part = slice(i, i + rows)
        sizes = np.minimum(end[part, None], high[None]) - np.maximum(begin[part, None], low[None])
        shared = np.maximum(sizes, 0).prod(-1)
        a, b = shared.nonzero()
        pieces.append((mine[part][a], theirs[b], shared[a, b] * spec.dtype.itemsize))
    first, owner, count = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(first, kind="stable")
    alike = reads.alike
    low, high = (np.searchsorted(first[order], alike, side) for side in ("left", "right"))
    taken = order[np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])]
    return np.repeat(reads.ranks, high - low), owner[taken] + wrote.first, count[taken]


def _boxes(spec: Spec, placed: _Placed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each distinct block: the first rank that has it, its begin and its end."""
    blocks = [(rank, box) for rank in np.unique(placed.alike).tolist()
             for box in boxes(placed.layout, spec.shape, placed.mesh, rank)]  # fmt: skip
    begin = np.array([box.whole for _, box in blocks]).reshape(len(blocks), -1)
    return (
        np.array([rank for rank, _ in blocks]),
        begin,
        begin + np.array([box.sizes for _, box in blocks]).reshape(len(blocks), -1),
    )
