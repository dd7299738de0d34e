"""Overlap: reorder a Program so that most of its communication is hidden behind computation.

Units (`lower.overlap.compute_units`) become jobs with the prices of a dry run. A list scheduler orders them
(`lower.overlap.jobs`), and collectives are awaited where their results are read (`lower.overlap.waits`). Ranks run
equal Programs except for numbers, so they find the same order; if not, the order is kept (`exec.kernels.levels`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

from torch import fx

from tutti.analysis.kernels import fuse
from tutti.analysis.memory import peak, platform
from tutti.analysis.prices import Prices
from tutti.analysis.replay import Replay, Storage, replay
from tutti.analysis.segments import BREAKS
from tutti.hardware import Cluster
from tutti.ir.kind import Kind, kind_of
from tutti.ir.op_info import FLOPS
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.memory.transfers import TRANSFERS
from tutti.lower.overlap.compute_units import Unit, needs, take_back_views, units
from tutti.lower.overlap.jobs import Job, headroom, makespan, overlapped
from tutti.lower.overlap.order import arrange
from tutti.lower.overlap.waits import insert_waits
from tutti.lower.program import Program

GAIN = 0.99  # of the seconds with synchronous collectives: a new order must be at least this fast
ROOM = 0.75  # fraction of a device's memory that an order may use
BESIDE = 0.02  # fraction that the order of a part of a pipeline may use beyond what the given order needs
FULL = 0.97  # fraction that it may use if the given order needs nearly as much
UNIT = "unit"  # key in the meta of a node


Order = list[tuple[int, Unit]]  # units with their indices, which are equal on all ranks


def order(program: Program, cluster: Cluster, level: str) -> Order:
    """Find an order of a Program's units that hides communication. Does not change the graph.

    Returns an empty list if there is no communication to hide, if only the original order fits into memory, or if the
    Program uses tiers, whose transfers must keep their order.
    """
    graph = program.graph
    original = list(graph.nodes)
    if not any(n.target in COLLECTIVES for n in graph.nodes) or any(n.target in TRANSFERS for n in graph.nodes):
        return []
    prices = Prices(cluster, program)
    before = _played(program, level)
    waiting = _seconds(before, prices)
    all_units = units(graph, lambda node: node.target in BREAKS or node.target in FLOPS)
    arrange([*_inputs(graph), *(node for unit in all_units for node in unit), graph.output_node()])
    _number(all_units)
    played = _played(program, level)
    jobs, sizes, live_out = jobs_of(all_units, played, prices)
    inputs = sum(storage.bytes for storage in played.inputs.values())
    needed, free = peak(before, platform(cluster.device)) - inputs, cluster.device.memory - inputs
    room = free - (1 - ROOM) * cluster.device.memory - sum(sizes[v] for v in live_out)
    if _is_part(program):
        room = min(room, needed + BESIDE * cluster.device.memory)
    best = overlapped(jobs, sizes, live_out, room, max(room, needed, min(needed + headroom(needed), FULL * free)))
    if not any(node.users.keys() - {graph.output_node()} - set(all_units[-1]) for node in all_units[-1]):
        best.sort(key=lambda i: i == len(all_units) - 1)  # copies of outputs stay at the end
    gains = bool(best) and makespan(jobs, best) < GAIN * waiting
    if not gains:
        take_back_views(graph)
    _restore(graph, original)
    return [(i, all_units[i]) for i in best] if gains else []


def _is_part(program: Program) -> bool:
    """Return whether a Program is a part of a pipeline, while a device also holds the values of other microbatches."""
    return any(kind_of(name) == Kind.VALUE for name in (*program.inputs, *program.outputs))


def _played(program: Program, level: str) -> Replay:
    return fuse(replay(program), level)


def _seconds(played: Replay, prices: Prices) -> float:
    """Seconds of a Program with synchronous collectives."""
    return sum(prices.communicate(e) + prices.copies(e) if e.collective else prices.compute(e) for e in played.events)


def digest(order: Order) -> str:
    """A digest of an order's collectives, which all ranks must agree on."""
    said = [f"{i} {n.target} {n.args[1]} {n.args[-1]}" for i, unit in order for n in unit if n.target in COLLECTIVES]
    return hashlib.sha1("\n".join(said).encode()).hexdigest()


def apply(graph: fx.Graph, order: Order) -> None:
    """Reorder a graph by units, in place, and await collectives late."""
    if order:
        units = [unit for _, unit in order]
        arrange([*_inputs(graph), *(node for unit in units for node in unit), graph.output_node()])
        _number(units)
        insert_waits(graph, units)


def jobs_of(units: list[Unit], played: Replay, prices: Prices) -> tuple[list[Job], list[int], set[int]]:
    """Return the units as jobs, the sizes of the values that they compute, and the indices of returned values."""
    seconds, streams = [0.0] * len(units), [""] * len(units)
    makes: dict[int, list[Storage]] = defaultdict(list)
    readers: dict[Storage, set[int]] = defaultdict(set)
    makers: dict[Storage, int] = {}
    awaits = needs(units)
    behind: dict[int, set[int]] = defaultdict(set)
    for i, before in enumerate(awaits):
        for j in before:
            behind[j].add(i)
    for event in played.events:
        i: int = event.node.meta[UNIT]
        if event.collective:
            streams[i], seconds[i] = str(event.node.args[1]), prices.communicate(event)
            operand = event.reads[0].storage
            if event.collective != "all_reduce":  # an all-reduce works in a copy
                readers[operand] |= behind[i]  # kept until the collective completes
            if copies := prices.copies(event):
                seconds[makers.get(operand, min(awaits[i], default=i))] += copies
        else:
            seconds[i] += prices.compute(event)
        for operand in event.reads:
            readers[operand.storage].add(i)
        for storage in event.allocated:
            makes[i].append(storage)
            makers[storage] = i
    number = {storage: v for v, storage in enumerate(makers)}
    reads: dict[int, list[int]] = defaultdict(list)
    for storage, those in readers.items():
        for i in those if storage in number else ():
            reads[i].append(number[storage])
    returned = set(played.outputs)
    holds = [storages for event in played.events for node, storages in event.holds.items() if node in returned]
    ended = {s for storages in holds for s in storages}
    live_out = {number[storage] for storage in ended if storage in number}
    jobs = [Job(streams[i], seconds[i], tuple(sorted(awaits[i])), tuple(number[s] for s in makes[i]), tuple(reads[i]))
            for i in range(len(units))]  # fmt: skip
    return jobs, [storage.bytes for storage in makers], live_out


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _restore(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Restore a graph's order. Copies of views are placed right before their readers."""
    placed: dict[fx.Node, None] = {}
    originals = set(nodes)

    def place(node: fx.Node) -> None:
        for x in node.all_input_nodes:
            if x not in originals and x not in placed:
                place(x)
        placed[node] = None

    for node in nodes:
        place(node)
    arrange(placed)
    for node in placed:
        node.meta.pop(UNIT, None)


def _number(units: list[Unit]) -> None:
    for i, unit in enumerate(units):
        for node in unit:
            node.meta[UNIT] = i
