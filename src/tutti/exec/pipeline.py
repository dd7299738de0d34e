"""Running a pipeline: each device goes through its actions (`lower.actions`), and sends on what others wait for.

Devices of a pipeline lie along the mesh axis `pp`, the outermost; each is a mesh of the other axes, on which the parts
of its stages run like any Program. What crosses stages goes from each rank to the one with the same coordinates on the
other device, as it lies.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.analysis.memory import CPU, Platform
from tutti.exec.levels import prepare
from tutti.exec.memory_budget import MemoryBudget
from tutti.exec.nonfinite import Inspector
from tutti.exec.observed import Observed, is_observed
from tutti.exec.runtime import Distributed, Virtual, own_part, raw
from tutti.exec.state import State
from tutti.exec.transfer_engine import TransferEngine
from tutti.hardware import Cluster
from tutti.ir.step_graph import Spec, StepGraph
from tutti.launch.heartbeat import HEARTBEAT, Meeting
from tutti.lower.actions import ONCE, Action, Message, actions_of, had, orders
from tutti.lower.cut import Place
from tutti.lower.program import Collective, Program
from tutti.lower.shard import shard
from tutti.lower.stage_parts import label_of, passed_layouts, pipeline_of, sizes_of, with_values
from tutti.plan.layout import devices
from tutti.plan.plan import PIPELINE, Plan

if TYPE_CHECKING:
    from tutti.observe.recorder import Recorder

Row = list[torch.Tensor]  # a tensor for each held rank of a device
Given = Callable[[int], Mapping[str, torch.Tensor]]  # the whole inputs that every stage is given for a microbatch


class Pipeline:
    """A step, or a part of one, on the devices that this process holds.

    count: of microbatches. state: what is kept between steps; replaced where a step makes successors. homes: the stage
    that keeps each input. engine: of what a plan keeps on outer tiers. hidden: the cluster, where communication is
    hidden (`analysis.overlap`). on: the platform whose memory is accounted for. inspector: looks at all that is made.
    """

    def __init__(self, graph: StepGraph, plan: Plan, count: int, level: str, state: State, homes: Mapping[str, int],
                 engine: TransferEngine | None = None, hidden: Cluster | None = None, on: Platform = CPU,
                 inspector: Inspector | None = None):  # fmt: skip
        self.on, self.inspector = on, inspector
        self.hidden = hidden.of(devices(plan.inner)) if hidden else None
        self.count, self.mesh, self.width, self.state = count, plan.inner, devices(plan.inner), state
        self.engine = engine
        self.cut, self.schedule = pipeline_of(graph, plan, count, homes)
        self.plan = with_values(plan.replace(mesh=self.mesh), self.cut)
        self.actions = actions_of(self.cut, self.schedule)
        self.recorder: Recorder | None = None
        kept: dict[int, list[dict[str, torch.Tensor]]] = {}  # by device
        for rank, tensors in zip(state.runtime.ranks, state.parts, strict=True):
            kept.setdefault(rank // self.width, []).append(tensors)
        if isinstance(state.runtime, Virtual):
            self.ranks, self.driver, self.mail = list(range(self.width)), Virtual(self.mesh), _Mail()
        else:
            self.ranks, self.driver = [state.runtime.rank % self.width], state.runtime
            self.mail = _Posted(self, state.runtime)
        self.held = {d: _Device(self, d, tensors) for d, tensors in kept.items()}
        held = [place for place in self.cut.parts if self.device(place) in self.held]
        self.parts = {place: _Part(self, place, level) for place in held}

    def device(self, place: Place) -> int:
        """That on which a part runs."""
        return self.schedule.place[place.stage]

    def budget(self, device: int, rank: int) -> MemoryBudget | None:
        """Of one rank of a held device, where memory is accounted for."""
        if not self.state.budgets:
            return None
        return self.state.budgets[self.state.runtime.ranks.index(device * self.width + rank)]

    def run(self, given: Given, recorder: Recorder | None = None) -> None:
        """Let all held devices act until all is done. recorder: of the rank that this process holds."""
        given, self.recorder = cache(given), recorder
        for device in self.held.values():
            device.begin()
        while going := [device for device in self.held.values() if device.todo]:
            acted = [device.act(given) for device in going]
            assert any(acted), "devices of the pipeline wait for one another"
        self.mail.over()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the last run, by the names of parameters: full CPU tensors."""
        found, step = {}, self.cut.step
        for name in step.gradient_names:
            home = self.device(self.cut.makers[name])
            parts = {home * self.width + rank: x for device in self.held.values() if device.number == home
                     for rank, x in zip(self.ranks, device.sums[name], strict=True)}  # fmt: skip
            layout = self.plan.input_layout(label_of(self.cut, name))
            total = self.state.assemble(parts, home, layout, step.outputs[name].meta["val"])
            found[name.removeprefix("grad:")] = total / self.count
        return found

    def loss(self) -> torch.Tensor:
        """The mean loss of the last run, everywhere."""
        step, home = self.cut.step, self.device(self.cut.makers["loss"])
        total = self.held[home].loss if home in self.held else torch.zeros((), device=step.device)
        return self.mail.shared((total / self.count).to(step.outputs["loss"].meta["val"].dtype), home * self.width)

    def observed(self, observed: Observed) -> Observed:
        """Give the metrics and checks of the last run to an Observed, everywhere."""
        for name in self.cut.step.observed_names:
            home, spec = self.device(self.cut.makers[name]), self.cut.step.outputs[name].meta["val"]
            for i in range(self.count):
                empty = torch.empty(spec.shape, dtype=spec.dtype, device=self.cut.step.device)
                known = self.held[home].observed[name][i] if home in self.held else empty
                observed.keep(name, self.mail.shared(known, home * self.width))
        return observed

    def skipped(self) -> bool:
        """Whether the last run, of a step that is guarded, has left out the update."""
        home = self.device(self.cut.makers["skipped"])
        known = self.held[home].skipped if home in self.held else torch.zeros((), device=self.cut.step.device)
        return bool(self.mail.shared(known, home * self.width))

    def collectives(self) -> list[Collective]:
        """What one run of each part of the first held device communicates, and what that sends to other devices."""
        found: dict[str, list[Collective]] = {}
        sizes = sizes_of(self.cut, self.plan)
        for action in self.actions[min(self.held)]:
            if action.place:
                found.setdefault(str(action.place), self.parts[action.place].programs[0].collectives)
            for name in (message.name for message, _ in action.sends):
                found.setdefault(name, [Collective("send", PIPELINE, sizes[name], name)])
        return [c for several in found.values() for c in several]

    def spec(self, name: str) -> Spec:
        """The local part of what a held part reads."""
        return next(part.local[name] for part in self.parts.values() if name in part.local)


class _Part:
    """The Programs of one part, for the held ranks of its device."""

    def __init__(self, pipeline: Pipeline, place: Place, level: str):
        graph, plan = pipeline.cut.parts[place], pipeline.plan
        asked = passed_layouts(pipeline.cut, graph, plan)
        self.programs: list[Program] = [shard(graph, plan, rank, asked) for rank in pipeline.ranks]
        self.local = {n.meta["input"]: n.meta["val"] for n in self.programs[0].graph.nodes if n.op == "placeholder"}
        self.outputs = list(graph.outputs)
        self.budgets = [pipeline.budget(pipeline.device(place), rank) for rank in pipeline.ranks]
        self.ready = prepare(self.programs, level, pipeline.hidden, pipeline.driver.agree, pipeline.engine,
                             [budget for budget in self.budgets if budget], pipeline.on,
                             pipeline.inspector and pipeline.inspector.shifted(
                                 pipeline.device(place) * pipeline.width))  # fmt: skip


class _Device:
    """One device: what its held ranks keep, and what is there of the microbatches under way."""

    def __init__(self, pipeline: Pipeline, number: int, kept: list[dict[str, torch.Tensor]]):
        self.pipeline, self.number, self.kept = pipeline, number, kept
        self.todo: deque[Action] = deque()
        self.values: dict[Message, Row] = {}
        self.sums: dict[str, Row] = {}
        self.observed: dict[str, list[torch.Tensor]] = {}  # metrics and checks, of each microbatch
        self.loss = self.skipped = torch.zeros(())
        self.divided = False

    def begin(self) -> None:
        self.todo.extend(self.pipeline.actions[self.number])
        self.loss = torch.zeros((), device=self.pipeline.cut.step.device)
        self.values, self.sums, self.divided, self.observed = {}, {}, False, {}

    def act(self, given: Given) -> bool:
        """Take the next action, if what it needs is there."""
        action, mail = self.todo[0], self.pipeline.mail
        if not all(mail.there(message, source, self.number) for message, source in action.receives):
            return False
        self.todo.popleft()
        if action.microbatch == ONCE and self.sums and not self.divided:
            self.divided = True
            for total in (x for row in self.sums.values() for x in row):
                total.div_(self.pipeline.count)
        for message, source in action.receives:
            recorder = self.pipeline.recorder
            with recorder.waiting(message.name, source) if recorder else nullcontext():
                self.values[message] = self.counted(mail.receive(message, source, self.number))
        if action.place:
            self.run(action, given(max(action.microbatch, 0)))
        for message, target in action.sends:
            mail.send(message, self.row(message), self.number, target)
        for message in action.drops:
            del self.values[message]
        return True

    def counted(self, row: Row) -> Row:
        """The tensors, on the account of the ranks that hold them."""
        for rank, x in zip(self.pipeline.ranks, row, strict=True):
            if budget := self.pipeline.budget(self.number, rank):
                budget.hold(x)
        return row

    def row(self, message: Message) -> Row:
        """What is here under a name, of each held rank."""
        name = message.name
        if message in self.values:
            return self.values[message]
        if name in self.sums:
            return self.sums[name]
        return [kept[name] for kept in self.kept]

    def run(self, action: Action, given: Mapping[str, torch.Tensor]) -> None:
        """Run a part, and keep what it makes."""
        pipeline, part, rows = self.pipeline, self.pipeline.parts[action.place], []  # pyright: ignore[reportArgumentType]
        for i, (program, rank) in enumerate(zip(part.programs, pipeline.ranks, strict=True)):
            row = []
            for name, (layout, _) in program.inputs.items():
                if name in given:
                    row.append(own_part(name, given[name], layout, pipeline.mesh, rank, pipeline.cut.step.device))
                else:
                    row.append(self.row(_message(name, action, self.values))[i])
            rows.append(row)
            if budget := part.budgets[i]:
                budget.admit(part.ready[i].peaks)
        runs = [ready.run for ready in part.ready]
        if pipeline.recorder:
            runs = [pipeline.recorder.watch(str(action.place), part.programs[0], part.ready[0])]
        with torch.no_grad():
            results = pipeline.driver.run(runs, rows)
        for name, row in zip(part.outputs, zip(*results, strict=True), strict=True):
            self.keep(name, list(row), action.microbatch)

    def keep(self, name: str, row: Row, microbatch: int) -> None:
        if name.startswith("value:"):
            self.values[Message(name, microbatch)] = row
        elif name == "loss":
            self.loss = self.loss + row[0]
        elif name == "skipped":
            self.skipped = row[0]
        elif is_observed(name):
            self.observed.setdefault(name, []).append(row[0])
        elif name.startswith("grad:"):
            known = self.sums.get(name)
            if known is None:  # a copy: two gradients may be one tensor, or a broadcast one
                self.sums[name] = self.counted([x.clone(memory_format=torch.contiguous_format) for x in row])
            else:
                self.sums[name] = [total.add_(x) for total, x in zip(known, row, strict=True)]
        else:
            for kept, x in zip(self.kept, row, strict=True):
                kept[name] = x


class _Mail:
    """Messages between devices of one process."""

    def __init__(self):
        self.posted: dict[tuple[Message, int], Row] = {}

    def send(self, message: Message, row: Row, source: int, target: int) -> None:
        self.posted[message, target] = [x.clone() for x in row]

    def there(self, message: Message, source: int, target: int) -> bool:
        return (message, target) in self.posted

    def receive(self, message: Message, source: int, target: int) -> Row:
        return self.posted.pop((message, target))

    def over(self) -> None:
        assert not self.posted, f"nobody has received {list(self.posted)}"

    def shared(self, value: torch.Tensor, source: int) -> torch.Tensor:
        """A tensor of one rank, everywhere."""
        return value


class _Posted:
    """Messages between processes: point to point, one group for each direction, each pair in one order."""

    def __init__(self, pipeline: Pipeline, runtime: Distributed):
        self.pipeline, self.rank = pipeline, runtime.rank
        self.groups: dict[bool, Any] = runtime.directions
        self.orders, self.known = orders(pipeline.actions), had(pipeline.actions)
        self.coming: dict[int, deque[Message]] = {}
        self.under_way: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self.sent: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}  # by receiver
        self.over_with: Counter[int] = Counter()  # how many of those sent to a receiver are known to be there

    def peer(self, device: int) -> int:
        return device * self.pipeline.width + self.rank % self.pipeline.width

    def send(self, message: Message, row: Row, source: int, target: int) -> None:
        x = row[0].contiguous()
        work = dist.isend(raw(x), self.peer(target), self.groups[source < target])
        self.sent.setdefault(target, deque()).append((work, x))  # pyright: ignore[reportArgumentType]

    def there(self, message: Message, source: int, target: int) -> bool:
        return True  # one waits for it

    def receive(self, message: Message, source: int, target: int) -> Row:
        coming = self.coming.setdefault(source, deque())
        while message not in self.under_way:
            if not coming:  # of the next step
                coming.extend(self.orders[source, target])
            self.post(coming.popleft(), source, target)
        work, x = self.under_way.pop(message)
        HEARTBEAT.enter(Meeting("receive", PIPELINE, message.name, self.peer(source)))
        work.wait()
        for _ in range(self.known[source, target][message] - self.over_with[source]):
            self.sent[source].popleft()[0].wait()  # Gloo does not say otherwise that a message has been sent
            self.over_with[source] += 1
        HEARTBEAT.leave()
        return [x]

    def post(self, message: Message, source: int, target: int) -> None:
        spec = self.pipeline.spec(message.name)
        x = torch.empty(spec.shape, dtype=spec.dtype, device=self.pipeline.cut.step.device)
        work = dist.irecv(raw(x), self.peer(source), self.groups[source < target])
        self.under_way[message] = work, x  # pyright: ignore[reportArgumentType]

    def over(self) -> None:
        for target, sent in self.sent.items():
            HEARTBEAT.enter(Meeting("send", PIPELINE, "the last messages of the step", self.peer(target)))
            for work, _ in sent:
                work.wait()
            HEARTBEAT.leave()
        self.sent, self.over_with = {}, Counter()

    def shared(self, value: torch.Tensor, source: int) -> torch.Tensor:
        with HEARTBEAT.within("broadcast", "what one rank knows of the step"):
            dist.broadcast(value, source)
        return value


def _message(name: str, action: Action, values: Mapping[Message, Row]) -> Message:
    """As what a part's input is here: of this microbatch, or once in the step."""
    own = Message(name, action.microbatch)
    return own if own in values else Message(name, ONCE)
