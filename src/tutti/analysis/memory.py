"""The memory of one rank while it runs a Program: the values that are live at each call, in program order.

    peak = max over calls of (inputs + live values + results of the call + its workspace)

The caller holds the inputs (parameters, optimizer state, batch) throughout. In-place updates need no second copy, and
values that share memory count once. Memory on other tiers is counted separately. A collective needs a contiguous
operand and a separate result, which the runtime holds until the next collective completes
(`tutti.exec.runtimes.runtime`). An asynchronous collective holds both until it is awaited, plus the copies of the
backend. Memory that libraries allocate inside operators is counted only as far as `memory_inside` reports it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from torch import fx

from tutti.analysis.replay import Event, Replay, Storage
from tutti.hardware.device import Device
from tutti.ir.kind import kind_of
from tutti.ir.op_info import WORKSPACE
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE
from tutti.lower.collectives import is_begun, wait
from tutti.plan.tier import DEVICE

INPUTS = {"param": "parameters", "buffer": "buffers", "batch": "batch", "grad": "accumulated gradients",
          "value": "activations"}  # fmt: skip
NUMBERS = ("lr", "step", "count", "seed", "constant")
BLOCK = 512  # bytes: granularity of CUDA's caching allocator, c10/cuda/CUDACachingAllocator.cpp


@dataclass(frozen=True)
class Alive:
    """The tensors of one label that are live at the peak. bytes: their total size."""

    label: str
    kind: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Memory:
    """Peak memory of a run. peak: bytes on the device. kinds: these bytes by kind of tensor. alive: tensors that are
    live then, by label, the largest first. at: label of the call at the peak. tiers: peak bytes on each other tier."""

    peak: int
    kinds: Mapping[str, int]
    alive: tuple[Alive, ...]
    at: str
    tiers: Mapping[str, int] = field(default_factory=dict)


def exactly(count: int) -> int:
    """Sizes on a CPU: not rounded."""
    return count


def in_blocks(count: int) -> int:
    """Sizes in CUDA's caching allocator: multiples of 512 bytes."""
    return -(-count // BLOCK) * BLOCK


@dataclass(frozen=True)
class Platform:
    """rounded: how the allocator rounds sizes. copied: collectives whose operand the backend copies. inside: whether
    memory that operators allocate internally is known (`memory_inside`)."""

    rounded: Callable[[int], int]
    copied: tuple[str, ...] = ()
    inside: bool = False


CPU = Platform(exactly, ("reduce_scatter",), True)  # Gloo reduces a copy of the operand: ProcessGroupGloo.cpp
CUDA = Platform(in_blocks)  # NCCL's own buffers are outside the allocator


def platform(device: Device) -> Platform:
    """Gloo on a CPU; NCCL or a similar library on other devices."""
    return CPU if device.name.startswith("cpu") else CUDA


def memory(replay: Replay, on: Platform = CPU) -> Memory:
    """Compute the peak memory of a Program's run, and the values that are live at the peak."""
    highest, worst = 0, -1
    for i, (total, *_) in enumerate(walk(replay, on)):
        if total > highest:
            highest, worst = total, i
    kinds = _kinds(replay)
    sizes: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for i, (_, event, live, workspace, _) in enumerate(walk(replay, on)):  # second pass: what is live at the peak
        if i == worst:
            for storage, size in _sizes(event, live, workspace, on):
                if storage is None:
                    _add(sizes, event.label, "workspace", size)
                else:
                    label, kind = storage.node.meta.get("label", storage.node.name), kinds.get(storage, "communication")
                    _add(sizes, label, kind, size)
            break
    else:
        event = None
    alive = [Alive(label, kind, size, count) for (label, kind), (size, count) in sizes.items() if size]
    by_kind: Counter[str] = Counter()
    for a in alive:
        by_kind[a.kind] += a.bytes
    return Memory(
        sum(by_kind.values()),
        dict(by_kind.most_common()),
        tuple(sorted(alive, key=lambda a: (-a.bytes, a.label))),
        event.label if event else "",
        _elsewhere(replay),
    )


def peak(replay: Replay, on: Platform = CPU) -> int:
    """The peak of a Program's run in bytes, as in `memory`."""
    return max((total for total, *_ in walk(replay, on)), default=0)


def on_device(storage: Storage) -> bool:
    return storage.tier == DEVICE


def _elsewhere(replay: Replay) -> dict[str, int]:
    """Return the peak bytes on each tier except the device."""
    tiers = {storage.tier for event in replay.events for storage in event.allocated}
    tiers |= {storage.tier for storage in replay.inputs.values()}
    return {
        tier: max((total - workspace for total, _, _, workspace, _ in walk(replay, CPU, tier)), default=0)
        for tier in sorted(tiers - {DEVICE})
    }


def spans(replay: Replay, on: Platform) -> dict[fx.Node, tuple[int, int, int]]:
    """Return for each call the index of its event, bytes live before it, and bytes live while it runs."""
    by_call = {}
    for i, (total, event, _, workspace, new) in enumerate(walk(replay, on)):
        by_call |= dict.fromkeys(event.nodes, (i, total - workspace - new, total))
    return by_call


def course(replay: Replay, on: Platform, points: int = 400) -> list[tuple[int, Counter[str]]]:
    """Return (call index, live bytes by kind) over a run, downsampled to about `points` calls with the most memory."""
    totals = [total for total, *_ in walk(replay, on)]
    stretch = -(-len(totals) // points)
    chosen = {max(range(i, min(i + stretch, len(totals))), key=totals.__getitem__)
              for i in range(0, len(totals), max(1, stretch))}  # fmt: skip
    kinds, samples = _kinds(replay), []
    for i, (_, event, live, workspace, _) in enumerate(walk(replay, on)):
        if i in chosen:
            now = Counter[str]()
            for storage, size in _sizes(event, live, workspace, on):
                now["workspace" if storage is None else kinds.get(storage, "communication")] += size
            samples.append((i, now))
    return samples


def _sizes(event: Event, live: Iterable[Storage], workspace: int, on: Platform) -> Iterator[tuple[Storage | None, int]]:
    """Yield the bytes of each live storage on the device while a call runs, and of its workspace (None).

    A result that overwrites an operand counts as the operand.
    """
    reused = event.reuses
    for storage in filter(on_device, live):
        size = on.rounded(storage.bytes)
        shared = min(size, reused) if storage in event.allocated else 0
        reused -= shared
        yield storage, size - shared
    yield None, workspace + event.reuses - reused


def _add(sizes: dict[tuple[str, str], list[int]], label: str, kind: str, count: int) -> None:
    entry = sizes[label, kind]
    entry[:] = entry[0] + count, entry[1] + 1


def walk(
    replay: Replay, on: Platform, tier: str = DEVICE
) -> Iterator[tuple[int, Event, Mapping[Storage, int], int, int]]:
    """Yield for each call: bytes live on the tier while it runs, the call, reference counts of storages, bytes of its
    workspace, and newly allocated bytes."""
    ref_counts: Counter[Storage] = Counter(replay.inputs.values())

    @cache
    def counted(storage: Storage) -> int:
        return on.rounded(storage.bytes) if storage.tier == tier else 0

    total = sum(map(counted, ref_counts))
    values: dict[fx.Node, list[Storage]] = {node: [s] for node, s in replay.inputs.items()}
    for node in replay.inputs:  # one reference by the Program, one by the caller
        ref_counts[replay.inputs[node]] += 1
    answer: list[Storage] = []  # results of the last collective, held by the runtime

    def release(storages: list[Storage]) -> int:
        freed = 0
        for storage in storages:
            ref_counts[storage] -= 1
            if not ref_counts[storage]:
                del ref_counts[storage]
                freed += counted(storage)
        return freed

    for event in replay.events:
        before = total
        for node, storages in event.holds.items():
            values[node] = storages
            for storage in storages:
                if storage not in ref_counts:
                    total += counted(storage)
                ref_counts[storage] += 1
        needed = workspaces(event, on)
        if event.collective and is_begun(event.node):
            more = [Storage(count, event.node) for count in needed]
            if event.reads[0].contiguous and event.collective != "all_reduce":  # an all-reduce works in its result
                more.append(event.reads[0].storage)
            values[event.node], needed = [*values[event.node], *more], []
            for storage in more:
                total += 0 if storage in ref_counts else counted(storage)
                ref_counts[storage] += 1
        workspace = sum(map(on.rounded, needed)) - event.reuses
        yield total + workspace, event, ref_counts, workspace, total - before
        if event.collective or event.node.target is wait:
            total -= release(answer)
            answer = list(values[event.node])
            ref_counts.update(answer)
        for node in event.dies:
            total -= release(values.pop(node))


def workspaces(event: Event, on: Platform) -> list[int]:
    """Bytes needed only while a call runs: a contiguous copy of a collective's operand, and the backend's copies."""
    kind = event.collective
    if not kind:
        return [WORKSPACE[node.target](event) for node in event.nodes if on.inside and node.target in WORKSPACE]
    operand = event.reads[0]
    arranged = kind != "all_reduce" and not operand.contiguous  # an all-reduce works in its result
    return [operand.spec.bytes] * (arranged + (kind in on.copied))


def _kinds(replay: Replay) -> dict[Storage, str]:
    """Return the kind of each storage, from the call that allocates it and its readers."""
    readers: dict[Storage, set[str]] = defaultdict(set)
    makers: dict[Storage, Event] = {}
    for event in replay.events:
        for operand in event.reads:
            readers[operand.storage].add("collective" if event.collective else event.phase)
        makers.update(dict.fromkeys(event.allocated, event))
    kinds = {s: input_kind(node.meta["input"]) for node, s in replay.inputs.items()}
    for storage, event in makers.items():
        if event.collective or "collective" in readers[storage]:
            kinds[storage] = "communication"
        elif event.phase == FORWARD and BACKWARD in readers[storage]:
            kinds[storage] = "activations"
        elif event.phase == BACKWARD and UPDATE in readers[storage]:
            kinds[storage] = "gradients"
        else:
            kinds[storage] = "temporaries"
    return kinds


@cache
def input_kind(name: str) -> str:
    """The memory kind of a Program's input."""
    kind = kind_of(name)
    return "numbers" if kind in NUMBERS else INPUTS.get(kind, "optimizer state")
