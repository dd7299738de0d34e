"""A step of a pipeline on a clock: its parts are simulated one by one, then each device goes through its actions.

What is sent travels while devices compute on, as if it had its links alone, and is waited for where it is read. A
device holds what its stages keep (parameters, optimizer state), the values of microbatches under way, sums of
gradients, and while a part runs what that needs beside its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from tutti.analysis.memory import Memory, input_kind
from tutti.hardware import Cluster
from tutti.ir.step_graph import StepGraph
from tutti.lower.actions import ONCE, Action, Message, actions_of
from tutti.lower.cut import Cut, Place
from tutti.lower.program import Program
from tutti.lower.stage_parts import passed_layouts, pipeline_of, sizes_of, with_values
from tutti.plan.layout import Layout, devices
from tutti.plan.plan import PIPELINE, Plan
from tutti.plan.search import Progress
from tutti.plan.slots import Schedule
from tutti.plan.tier import DEVICE
from tutti.sim.simulate import Simulation, simulate
from tutti.sim.step import RANK, DryRun, Part, lowered, peak_of

# kinds of memory that a device holds whichever part runs
KEPT = ("parameters", "optimizer state", "buffers", "numbers", "activations", "accumulated gradients")


@dataclass(frozen=True)
class Span:
    """An action of a device, from begin to end, in seconds."""

    device: int
    action: Action
    begin: float
    end: float

    @property
    def work(self) -> str:
        """What is done: "forward", "backward", "gradients" of single parameters, "update"; empty for passing on."""
        place = self.action.place
        return {"F": "forward", "B": "backward", "W": "gradients"}.get(place.kind, "update") if place else ""

    @property
    def name(self) -> str:
        place = self.action.place
        if place is None:
            return "pass on"
        microbatch = "" if self.action.microbatch == ONCE else f" of microbatch {self.action.microbatch}"
        return f"{place}{microbatch}"


class Held(NamedTuple):
    """Bytes of a rank of a device while it takes an action, in all and by kind; the call that needs most."""

    total: int
    kinds: Counter[str]
    at: str


@dataclass(frozen=True)
class PipelineDryRun(DryRun):
    """A `DryRun` of a pipeline. places: of `parts`. spans: of all devices. sent: by device."""

    places: tuple[Place, ...] = ()
    place: tuple[int, ...] = ()  # the device of each stage
    spans: tuple[Span, ...] = ()
    sent: tuple[tuple[int, int], ...] = ()  # messages, and bytes of each of its ranks
    courses: tuple[tuple[Held, ...], ...] = ()  # by device: at each of its spans
    away: tuple[Mapping[str, int], ...] = ()  # by device: bytes of inputs on other tiers

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)

    @cached_property
    def busiest(self) -> int:
        """The device that works longest."""
        work = [0.0] * len(self.courses)
        for span in self.spans:
            work[span.device] += span.end - span.begin
        return work.index(max(work))

    @property
    def counted(self) -> list[Part]:
        """Those of the busiest device."""
        return [part for place, part in zip(self.places, self.parts, strict=True)
                if self.place[place.stage] == self.busiest]  # fmt: skip

    @property
    def bubble(self) -> float:
        return self.seconds - sum(part.seconds for part in self.counted)

    @cached_property
    def memories(self) -> list[Memory]:
        """By device, at the action at which it needs most."""
        worst = [max(course, key=lambda held: held.total) for course in self.courses]
        return [Memory(held.total, dict(held.kinds.most_common()), (), held.at, dict(away))
                for held, away in zip(worst, self.away, strict=True)]  # fmt: skip

    @cached_property
    def fullest(self) -> int:
        """The device that needs most memory."""
        peaks = [memory.peak for memory in self.memories]
        return peaks.index(max(peaks))

    @property
    def memory(self) -> Memory:
        return self.memories[self.fullest]

    def communication(self) -> dict[tuple[str, str], tuple[int, int, float, float]]:
        count, size = self.sent[self.busiest]
        return super().communication() | ({("send", PIPELINE): (count, size, 0.0, 0.0)} if count else {})


def dry_run(graph: StepGraph, plan: Plan, cluster: Cluster, level: str, overlaps: bool, progress: Progress) -> DryRun:
    """Lower and simulate the parts of one rank of each device. Arguments as of `dryrun.dry_run`."""
    made, schedule = pipeline_of(graph, plan, plan.accumulate)
    inner = with_values(plan.replace(mesh=plan.inner), made)
    width = devices(plan.inner)
    within = cluster.of(width)
    sizes = sizes_of(made, inner)
    away: list[Counter[str]] = [Counter() for _ in range(plan.mesh[PIPELINE])]  # by device: bytes on other tiers
    for name, stage in made.homes.items():
        tier = plan.tiers.get(graph.inputs[name].meta["label"], DEVICE)
        if tier != DEVICE:
            away[schedule.place[stage]][tier] += sizes.get(name, 0)
            sizes[name] = 0
    parts: dict[Place, Part] = {}
    known: dict[tuple, tuple[Program, Simulation]] = {}  # of parts that are alike, as those of equal stages
    for place, part in made.parts.items():
        asked = passed_layouts(made, part, inner)
        signature = _signature(part, inner, asked)
        if signature not in known:
            progress(f"simulating {place}")
            program = lowered(part, inner, asked, level, within if overlaps else None)
            known[signature] = program, simulate([program], within, level)
        program, played = known[signature]
        once = place.kind.startswith("U")
        sums = sum(sizes[name] for name in part.outputs if name.startswith("grad:"))  # read twice and written once
        extra = cluster.device.stream_seconds(3 * sums) if sums and plan.accumulate * plan.sequence_chunks > 1 else 0.0
        parts[place] = Part(str(place), program, played, 1 if once else plan.accumulate, extra)
    actions = actions_of(made, schedule)

    def travel(message: Message) -> float:
        return cluster.time("shift", sizes[message.name], width, plan.mesh[PIPELINE])

    spans = _clock(actions, {place: part.simulation.seconds + part.extra for place, part in parts.items()}, travel)
    sent = tuple(
        (len(messages), sum(sizes[m.name] for m in messages))
        for messages in ([m for action in todo for m, _ in action.sends] for todo in actions)
    )
    courses = tuple(tuple(_course(d, todo, made, schedule, parts, sizes)) for d, todo in enumerate(actions))
    peak = peak_of(next(iter(parts.values())).program, cluster)
    return PipelineDryRun(
        tuple(parts.values()), graph.flops * plan.accumulate, peak, cluster, level,
        tuple(parts), schedule.place, tuple(spans), sent, courses, tuple(away),
    )  # fmt: skip


def _signature(part: StepGraph, plan: Plan, asked: Mapping[str, Layout]) -> tuple:
    """All that a part's Program depends on, but for the names of what passes between parts."""
    place = {node: f"%{i}" for i, node in enumerate(part.graph.nodes)}
    lines = []
    for node in part.graph.nodes:
        meta = node.meta
        where = plan.input_layout(meta["label"]) if node.op == "placeholder" else meta.get("label")
        arguments = fx.map_arg((node.args, node.kwargs), place.__getitem__)
        lines.append((node.op, str(node.target) if node.op == "call_function" else "", str(where), repr(arguments),
                      str(meta.get("val")), meta.get("phase")))  # fmt: skip
    inputs = [(place[node], input_kind(name)) for name, node in part.inputs.items()]
    outputs = [
        (place[node], str(asked.get(name)), place.get(part.inputs.get(name))) for name, node in part.outputs.items()
    ]
    return tuple(lines), tuple(inputs), tuple(outputs)


def _clock(actions: Sequence[list[Action]], seconds: Mapping[Place, float], travel: Callable[[Message], float]
           ) -> list[Span]:  # fmt: skip
    """When each device takes each of its actions. ValueError where devices wait for one another."""
    at, free = [0] * len(actions), [0.0] * len(actions)
    arrived: dict[tuple[Message, int], float] = {}
    spans: list[Span] = []
    going = True
    while going:
        going = False
        for d, todo in enumerate(actions):
            while at[d] < len(todo) and all((m, d) in arrived for m, _ in todo[at[d]].receives):
                action = todo[at[d]]
                begin = max([free[d], *(arrived[m, d] for m, _ in action.receives)])
                end = begin + (seconds[action.place] if action.place else 0.0)
                arrived |= {(m, target): end + travel(m) for m, target in action.sends}
                spans.append(Span(d, action, begin, end))
                free[d], at[d], going = end, at[d] + 1, True
    if any(at[d] < len(todo) for d, todo in enumerate(actions)):
        raise ValueError("devices of the pipeline wait for one another")
    return spans


def _course(device: int, actions: list[Action], cut: Cut, schedule: Schedule, parts: Mapping[Place, Part],
            sizes: Mapping[str, int]) -> Iterator[Held]:  # fmt: skip
    """What one rank of a device holds during each of its actions."""
    kept = Counter()
    for name, stage in cut.homes.items():
        if schedule.place[stage] == device and name in sizes:
            kept[input_kind(name)] += sizes[name]
    for name in cut.step.inputs:  # and what never changes is everywhere
        if name not in cut.homes and name.startswith(("buffer:", "constant:")):
            kept[input_kind(name)] += sizes.get(name, 0)
    now = kept.copy()  # the messages that are held are added to it one by one: there are many
    alive: dict[Message, int] = {}
    summed: dict[str, int] = {}
    held = {place: sum(sizes[name] for name in part.inputs if not name.startswith(("batch:", "common:")))
            for place, part in cut.parts.items() if schedule.place[place.stage] == device}  # fmt: skip

    def hold(message: Message) -> None:
        if message not in alive:
            alive[message] = sizes[message.name]
            now[input_kind(message.name)] += alive[message]

    for action in actions:
        for message, _ in action.receives:
            hold(message)
        here = now + Counter({"accumulated gradients": sum(summed.values())})
        total = sum(here.values())
        if action.place is None:
            yield Held(total, here, "")
        else:
            part = parts[action.place]
            memory = part.simulation.memory[RANK]
            here.update({k: n for k, n in memory.kinds.items() if k not in KEPT})
            yield Held(total + max(memory.peak - held[action.place], 0), here, f"{part.name}: {memory.at}")
            for name in cut.parts[action.place].outputs:
                if name.startswith("value:"):
                    hold(Message(name, action.microbatch))
                elif name.startswith("grad:"):
                    summed[name] = sizes[name]
        for message in action.drops:
            now[input_kind(message.name)] -= alive.pop(message)
