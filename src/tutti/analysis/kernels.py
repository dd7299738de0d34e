"""Predict which calls of a Program a level compiles into one kernel, and which values are then never written to memory.

The compiler fuses within a segment. Modelled: elementwise calls, reductions over rows, softmaxes, norms and look-ups
fuse if one reads the other's result, or if they read the same memory at the same size, unless a path between them has a
call that does not fuse. The depth of a call is the number of kernel-ending calls on the longest path to it; a kernel is
a connected set of calls of equal depth. It reads outside values once, and writes the values that others read, in place
of values of the same size that it is the last to read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from torch import fx

from tutti.analysis.fusing import ends, fuses
from tutti.analysis.replay import Event, Operand, Replay, Storage
from tutti.analysis.segments import segments


def fuse(replay: Replay, level: str) -> Replay:
    """The replay of the same Program at a level, with one event per kernel, in an executable order."""
    parts = segments(replay.program.graph, level)
    if not parts:
        return replay
    at = {event.node: event for event in replay.events}
    first, inside = {part[0]: part for part in parts}, {node for part in parts for node in part}
    readers, events = _readers(replay), []
    for event in replay.events:
        if event.node in first:
            events += _Segment([at[node] for node in first[event.node]], readers).kernels()
        elif event.node not in inside:
            events.append(event)
    return Replay(replay.program, replay.inputs, events, replay.outputs)


def _readers(replay: Replay) -> dict[Storage, set[fx.Node]]:
    """The readers of each storage. An output of the Program counts as a reader."""
    readers: dict[Storage, set[fx.Node]] = defaultdict(set)
    returned = set(replay.outputs)
    for event in replay.events:
        if event.computes or event.collective:
            for operand in event.reads:
                readers[operand.storage].add(event.node)
        for node, storages in event.holds.items():
            if node in returned:
                for storage in storages:
                    readers[storage].add(node.graph.output_node())
    return readers


class _Segment:
    """The events between two collectives."""

    def __init__(self, events: list[Event], readers: dict[Storage, set[fx.Node]]):
        self.events, self.readers = events, readers
        self.root = list(range(len(events)))  # union-find over events
        self.unwritten: set[Storage] = set()  # values that never leave a kernel
        self.last_reader: dict[Storage, Event] = {}

    def find(self, i: int) -> int:
        while self.root[i] != i:
            self.root[i] = self.root[self.root[i]]
            i = self.root[i]
        return i

    def kernels(self) -> list[Event]:
        maker: dict[Storage, int] = {}
        depth: list[int] = []
        beside: dict[tuple, int] = {}
        for i, event in enumerate(self.events):
            before = {maker[o.storage] for o in event.reads if o.storage in maker}
            depth.append(max((depth[j] + ends(self.events[j].node) for j in before), default=0))
            if event.computes and fuses(event.node):
                for j in before:
                    if depth[j] == depth[i] and fuses(self.events[j].node) and not ends(self.events[j].node):
                        self.root[self.find(i)] = self.find(j)
                for operand in event.reads:
                    key = operand.storage, (event.outputs[0] if event.outputs else operand.spec).numel, depth[i]
                    self.root[self.find(i)] = self.find(beside.setdefault(key, i))
            maker.update(dict.fromkeys(event.allocated, i))
        groups: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self.events)):
            groups[self.find(i)].append(i)
        return self.dropped_at_the_end([self.kernel(members) for members in self.ordered(groups, maker)])

    def ordered(self, groups: dict[int, list[int]], maker: dict[Storage, int]) -> Iterable[list[int]]:
        """Kernels in topological order; those that are complete first come first."""
        position = {i: g for g, members in groups.items() for i in members}
        waits: dict[int, set[int]] = {}
        for g, members in groups.items():
            read = {o.storage for i in members for o in self.events[i].reads if o.storage in maker}
            waits[g] = {position[maker[storage]] for storage in read} - {g}
        followers: dict[int, list[int]] = defaultdict(list)
        for g, needs in waits.items():
            for need in needs:
                followers[need].append(g)
        ready = [(members[-1], g) for g, members in groups.items() if not waits[g]]
        heapify(ready)
        done = 0
        while ready:
            _, g = heappop(ready)
            done += 1
            yield groups[g]
            for follower in followers[g]:
                waits[follower].discard(g)
                if not waits[follower]:
                    heappush(ready, (groups[follower][-1], follower))
        assert done == len(groups), "kernels wait for each other"

    def kernel(self, members: list[int]) -> Event:
        if len(members) == 1:
            return self.events[members[0]]
        parts = [self.events[i] for i in members]
        nodes = {event.node for event in parts}
        inner = {s for event in parts for s in event.allocated}
        written = {s for s in inner if self.readers[s] - nodes}
        reads: dict[Storage, Operand] = {}
        for operand in (o for event in parts for o in event.reads if o.storage not in inner):
            if operand.storage not in reads or reads[operand.storage].bytes < operand.bytes:
                reads[operand.storage] = operand
        self.unwritten |= inner - written
        holds = {node: storages for e in parts for node, storages in e.holds.items()}
        outputs = [spec for e in parts for spec in e.outputs if any(s in written for s in e.allocated)]
        allocated = [s for e in parts for s in e.allocated if s in written]
        writes = sum(e.writes for e in parts)
        return Event([e.node for e in parts], list(reads.values()), allocated, holds, outputs, writes, [])

    def dropped_at_the_end(self, kernels: list[Event]) -> list[Event]:
        """Set the values that die after each kernel.

        The caller of a compiled function holds the arguments until the function returns; values computed inside are
        freed after their last use.
        """
        own = {event.node for event in self.events}
        dead = [node for event in self.events for node in event.dies]
        last: dict[fx.Node, int] = {}
        for i, kernel in enumerate(kernels):
            for node in kernel.nodes:
                last[node] = i
                last.update(dict.fromkeys(node.all_input_nodes, i))
        dies: list[list[fx.Node]] = [[] for _ in kernels]
        for node in dead:
            dies[last[node] if node in own else -1].append(node)
        events = []
        for kernel, drops in zip(kernels, dies, strict=True):
            holds = {n: [s for s in storages if s not in self.unwritten] for n, storages in kernel.holds.items()}
            reuses = self.reused(kernel, kernels, own)
            events.append(Event(kernel.nodes, kernel.reads, kernel.allocated, holds, kernel.outputs, kernel.writes,
                                drops, reuses, kernel.collective))  # fmt: skip
        return events

    def reused(self, kernel: Event, kernels: list[Event], inside: set[fx.Node]) -> int:
        """Return the bytes of inputs that a kernel overwrites.

        These were computed in this segment, have the size of an output, and are read by no later kernel. inside: the
        calls of the segment.
        """
        if not kernel.computes or not fuses(kernel.node):
            return 0
        if not self.last_reader:
            for later in kernels:
                for operand in later.reads:
                    if later.computes:
                        self.last_reader[operand.storage] = later
        free = Counter(
            s.bytes
            for s in {operand.storage for operand in kernel.reads}
            if s.node in inside and self.last_reader[s] is kernel and self.readers[s] <= inside
        )
        return sum((free & Counter(s.bytes for s in kernel.allocated)).elements())
