"""A replayed Program as tasks for the clock: the stream of each, its seconds and its dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tutti.analysis.prices import Prices, flops, moved
from tutti.analysis.replay import Event, Replay, Storage
from tutti.lower.collectives import is_begun, wait
from tutti.lower.memory.transfers import TRANSFERS, bring, fetch, lend, put, store
from tutti.plan.tier import DEVICE, HOST

COMPUTE = "compute"
OUT, IN, HOST_COMPUTES = "the outer link, outwards", "the outer link, inwards", "the host"  # streams private to a rank
_TRANSFERS: dict[Any, str] = dict(TRANSFERS)


@dataclass(frozen=True)
class Task:
    """stream: "compute", the mesh axis of a collective, or the link or host of a transfer or an offloaded update.
    name: the operator's label.

    kind: kind of the collective or transfer, else "". levels: levels of the cluster whose links it uses. waits: tasks
    on other streams whose results it reads. bytes: bytes read and written, or sent by a collective. event: index of the
    call in its replay. blocks: whether the rank is blocked until the collective ends.
    """

    stream: str
    name: str
    phase: str
    seconds: float
    kind: str = ""
    levels: frozenset[int] = frozenset()
    waits: tuple[int, ...] = ()
    flops: int = 0
    bytes: int = 0
    event: int = -1
    blocks: bool = False


def tasks_of(replay: Replay, prices: Prices) -> list[Task]:
    """The tasks of a replay, in the order in which a rank issues them."""
    tasks: list[Task] = []
    task_of: dict[Storage, int] = {}  # collectives
    due: set[int] = set()  # collectives that the Program has awaited
    for i, event in enumerate(replay.events):
        if event.node.target is wait:
            due |= {task_of[o.storage] for o in event.reads}
            continue
        waits = tuple(sorted(due | {task_of[o.storage] for o in event.reads if o.storage in task_of}))
        if event.collective:
            copies = prices.copies(event)
            if copies:
                name, moves = f"copy for {event.label}", 2 * event.reads[0].spec.bytes
                tasks.append(Task(COMPUTE, name, event.phase, copies, waits=waits, bytes=moves, event=i))
                waits = ()
            tasks.append(_collective(event, prices, waits, i))
            task_of.update(dict.fromkeys(event.allocated, len(tasks) - 1))
            due = set()
        elif (stream := stream_of(event)) and event.computes:
            due = set()
            seconds, moves = prices.beside(event, stream != HOST_COMPUTES)
            kind = _TRANSFERS.get(event.node.target, "update")
            tasks.append(Task(stream, event.label, event.phase, seconds, kind, waits=waits, bytes=moves, event=i))
            changed = [o.storage for o in event.reads] if stream == HOST_COMPUTES else []
            task_of.update(dict.fromkeys([*event.allocated, *changed], len(tasks) - 1))
        elif event.computes:
            due = set()
            took = prices.compute(event)
            task = Task(COMPUTE, event.label, event.phase, took, "", frozenset(), waits, flops(event), moved(event), i)
            tasks.append(task)
    return tasks


def stream_of(event: Event) -> str:
    """The stream of a transfer or of an operator on the host; "" for the device."""
    node = event.node
    if node.target in (fetch, bring):
        return IN
    if node.target in (put, lend):
        return OUT
    if node.target is store:
        home, value = (operand.storage.tier for operand in event.reads)
        return HOST_COMPUTES if home == value else IN if home == DEVICE else OUT
    return HOST_COMPUTES if node.meta.get("host") == HOST else ""


def _collective(event: Event, prices: Prices, waits: tuple[int, ...], i: int) -> Task:
    axis = str(event.node.args[1])
    return Task(
        axis,
        event.label,
        event.phase,
        prices.communicate(event),
        event.collective,
        prices.levels(event),
        waits,
        bytes=prices.sent(event),
        event=i,
        blocks=not is_begun(event.node),
    )
