"""Simulate a step of a pipeline: simulate its parts one by one, then run the actions of each device on a clock.

Sends overlap with computation, do not contend for links, and are awaited where they are read. A device holds the state
of its stages (parameters, optimizer state), the values of microbatches in flight, sums of gradients, and the memory
that the running part needs besides its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tutti.analysis.memory import Memory, input_kind
from tutti.ir.kind import Kind, kind_of
from tutti.lower.parts.actions import ONCE, Action, Message, actions_of
from tutti.lower.parts.cut import Cut, Place
from tutti.plan.layouts.layout import devices
from tutti.plan.pipeline.slots import Schedule
from tutti.plan.plan import PIPELINE, Plan
from tutti.plan.tier import DEVICE
from tutti.sim.step import RANK, DryRun, SimulatedPart

# by kind of part
WORK = {"P": "preparation", "F": "forward", "B": "backward", "W": "gradients", "U": "update", "C": "call"}
PAIR = "forward and backward"
# kinds of memory that a device holds throughout
RESIDENT = ("parameters", "optimizer state", "buffers", "numbers", "activations", "accumulated gradients")


@dataclass(frozen=True)
class ActionSpan:
    """An action of a device, from begin to end, in seconds."""

    device: int
    action: Action
    begin: float
    end: float

    @property
    def work(self) -> str:
        """The kind of work: "preparation", "forward", "backward", "gradients" (of weights), "update", "call" (of a
        function), "forward and backward" at once, or "" for a send or receive."""
        place = self.action.place
        if self.action.second:
            return PAIR
        return WORK[place.kind[0]] if place else ""

    @property
    def name(self) -> str:
        names = [
            f"{place}" + ("" if microbatch == ONCE else f" of microbatch {microbatch}")
            for place, microbatch in self.action.runs
        ]
        return " with ".join(names) or "pass on"


class MemoryState(NamedTuple):
    """Bytes of a device's rank during an action: total, by kind, and the call with the highest peak."""

    total: int
    kinds: Counter[str]
    at: str


@dataclass(frozen=True)
class PipelineDryRun(DryRun):
    """A `DryRun` of a pipeline. places: place of each of `parts`. spans: spans of all devices. sent: what each device
    sends. pairs: parts that run together, with the places of both."""

    places: tuple[Place, ...] = ()
    place: tuple[int, ...] = ()  # the device of each stage
    spans: tuple[ActionSpan, ...] = ()
    sent: tuple[tuple[int, int], ...] = ()  # messages, and bytes of each of its ranks
    courses: tuple[tuple[MemoryState, ...], ...] = ()  # by device: at each of its spans
    away: tuple[Mapping[str, int], ...] = ()  # by device: bytes of inputs on other tiers
    pairs: tuple[tuple[Place, Place, SimulatedPart], ...] = ()

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)

    @cached_property
    def busiest(self) -> int:
        """The device with the most work."""
        work = [0.0] * len(self.courses)
        for span in self.spans:
            work[span.device] += span.end - span.begin
        return work.index(max(work))

    @property
    def counted(self) -> list[SimulatedPart]:
        """The parts of the busiest device. Those that run together count once as such."""
        pairs = [pair for pair in self.pairs if self.place[pair[0].stage] == self.busiest]
        together: Counter[Place] = Counter()
        for first, second, part in pairs:
            together.update({first: part.runs, second: part.runs})
        alone = [replace(part, runs=part.runs - together[place])
                 for place, part in zip(self.places, self.parts, strict=True)
                 if self.place[place.stage] == self.busiest]  # fmt: skip
        return [part for part in (*alone, *(part for *_, part in pairs)) if part.runs]

    @property
    def bubble(self) -> float:
        return self.seconds - sum(part.seconds for part in self.counted)

    @cached_property
    def memories(self) -> list[Memory]:
        """The memory of each device, at its peak."""
        idle = MemoryState(0, Counter(), "")
        worst = [max(course, key=lambda state: state.total, default=idle) for course in self.courses]
        return [Memory(state.total, dict(state.kinds.most_common()), (), state.at, dict(away))
                for state, away in zip(worst, self.away, strict=True)]  # fmt: skip

    @cached_property
    def fullest(self) -> int:
        """The device with the highest peak memory."""
        peaks = [memory.peak for memory in self.memories]
        return peaks.index(max(peaks))

    @property
    def memory(self) -> Memory:
        return self.memories[self.fullest]

    def communication(self) -> dict[tuple[str, str], tuple[int, int, float, float]]:
        count, size = self.sent[self.busiest]
        return super().communication() | ({("send", PIPELINE): (count, size, 0.0, 0.0)} if count else {})


def pipeline_run(
    run: DryRun, cut: Cut, schedule: Schedule, parts: Mapping[Place, SimulatedPart], plan: Plan, sizes: dict[str, int],
    pair: Callable[[Place, Place], SimulatedPart],
) -> PipelineDryRun:  # fmt: skip
    """The dry run of a pipeline from that of its parts. sizes: local bytes of inputs and of what crosses parts. pair:
    gives two parts that run together."""
    sizes, width = dict(sizes), devices(plan.inner)
    away: list[Counter[str]] = [Counter() for _ in schedule.devices]  # by device: bytes on other tiers
    for name, stage in cut.homes.items():
        tier = plan.tiers.get(cut.step.inputs[name].meta["label"], DEVICE)
        if tier != DEVICE:
            away[schedule.place[stage]][tier] += sizes.get(name, 0)
            sizes[name] = 0
    actions = actions_of(cut, schedule)

    def travel(message: Message) -> float:
        return run.cluster.time("ppermute", sizes[message.name], width, plan.mesh[PIPELINE])

    together = Counter((a.place, a.second[0]) for todo in actions for a in todo if a.place and a.second)
    pairs = {places: replace(pair(*places), runs=count) for places, count in together.items()}
    seconds: dict[tuple[Place, ...], float] = {(place,): part.simulation.seconds for place, part in parts.items()}
    spans = _clock(actions, seconds | {(a, b): pair.simulation.seconds for (a, b), pair in pairs.items()}, travel)
    sent = tuple(
        (len(messages), sum(sizes[m.name] for m in messages))
        for messages in ([m for action in todo for m, _ in action.sends] for todo in actions)
    )
    courses = tuple(tuple(_course(d, todo, cut, schedule, parts, pairs, sizes)) for d, todo in enumerate(actions))
    paired = tuple((a, b, pair) for (a, b), pair in pairs.items())
    return PipelineDryRun(
        run.parts, run.flops, run.peak, run.cluster, run.level, tuple(parts), schedule.place, tuple(spans), sent,
        courses, tuple(away), paired,
    )  # fmt: skip


def _clock(
    actions: Sequence[list[Action]], seconds: Mapping[tuple[Place, ...], float], travel: Callable[[Message], float]
) -> list[ActionSpan]:
    """When each device runs each of its actions. Raises ValueError if devices wait for one another."""
    at, free = [0] * len(actions), [0.0] * len(actions)
    arrived: dict[tuple[Message, int], float] = {}
    spans: list[ActionSpan] = []
    going = True
    while going:
        going = False
        for d, todo in enumerate(actions):
            while at[d] < len(todo) and all((m, d) in arrived for m, _ in todo[at[d]].receives):
                action = todo[at[d]]
                begin = max([free[d], *(arrived[m, d] for m, _ in action.receives)])
                end = begin + (seconds[tuple(place for place, _ in action.runs)] if action.place else 0.0)
                arrived |= {(m, target): end + travel(m) for m, target in action.sends}
                spans.append(ActionSpan(d, action, begin, end))
                free[d], at[d], going = end, at[d] + 1, True
    if any(at[d] < len(todo) for d, todo in enumerate(actions)):
        raise ValueError("devices of the pipeline wait for one another")
    return spans


def _course(device: int, actions: list[Action], cut: Cut, schedule: Schedule, parts: Mapping[Place, SimulatedPart],
            pairs: Mapping[tuple[Place, ...], SimulatedPart],
            sizes: Mapping[str, int]) -> Iterator[MemoryState]:  # fmt: skip
    """The memory of one rank of a device during each of its actions."""
    resident = Counter()
    for name, stage in cut.homes.items():
        if schedule.place[stage] == device and name in sizes:
            resident[input_kind(name)] += sizes[name]
    for name in cut.step.inputs:  # and what never changes is everywhere
        if name not in cut.homes and kind_of(name) in (Kind.BUFFER, Kind.CONSTANT):
            resident[input_kind(name)] += sizes.get(name, 0)
    now = resident.copy()  # the messages that are held are added to it one by one: there are many
    alive: dict[Message, int] = {}
    summed: set[str] = set()
    accumulated, added = 0, set[Place]()
    gradients = {place: [name for name in part.outputs if kind_of(name) == Kind.GRAD]
                 for place, part in cut.parts.items()}  # fmt: skip
    inputs_of = {place: sum(sizes[name] for name in (*part.inputs, *gradients[place])
                       if kind_of(name) not in (Kind.BATCH, Kind.COMMON))
            for place, part in cut.parts.items() if schedule.place[place.stage] == device}  # fmt: skip

    def hold(message: Message) -> None:
        if message not in alive:
            alive[message] = sizes[message.name]
            now[input_kind(message.name)] += alive[message]

    for action in actions:
        for message, _ in action.receives:
            hold(message)
        for place in (place for place, _ in action.runs if place not in added):
            added.add(place)
            accumulated += sum(sizes[name] for name in gradients[place] if name not in summed)
            summed.update(gradients[place])
        here = Counter({kind: n for kind, n in now.items() if n > 0})
        if accumulated:
            here["accumulated gradients"] += accumulated
        total = sum(here.values())
        if action.place is None:
            yield MemoryState(total, here, "")
        else:
            places = tuple(place for place, _ in action.runs)
            part = pairs[places] if action.second else parts[action.place]
            memory = part.simulation.memory[RANK]
            here.update({k: n for k, n in memory.kinds.items() if k not in RESIDENT})
            inputs = sum(inputs_of[place] for place in places)
            yield MemoryState(total + max(memory.peak - inputs, 0), here, f"{part.name}: {memory.at}")
            for place, microbatch in action.runs:
                for name in cut.parts[place].outputs:
                    if kind_of(name) == Kind.VALUE:
                        hold(Message(name, microbatch))
        for message in action.drops:
            now[input_kind(message.name)] -= alive.pop(message)
