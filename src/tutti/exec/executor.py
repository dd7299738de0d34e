"""The executor: runs the actions of a schedule (`lower.parts.actions`) on the ranks of this process.

A plan without a pipeline has one device and one stage. The devices of a pipeline lie along the mesh axis `pp`, the
outermost. Each device is a mesh of the other axes, on which the Programs of its stages run. A value that crosses stages
is sent from each rank to the rank with the same coordinates on the other device, in the layout it has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tutti.analysis.memory import CPU, Platform
from tutti.compile.compiled import Arguments, Compiled, Described, compile_ahead, uncompiled
from tutti.exec.kernels.levels import prepare
from tutti.exec.nonfinite import Inspector
from tutti.exec.observed import Observed, is_observed
from tutti.exec.runtimes.runtime import Distributed, Virtual, own_part, raw
from tutti.exec.stores.memory_budget import MemoryBudget
from tutti.exec.stores.tensor_store import TensorStore
from tutti.exec.stores.transfer_engine import TransferEngine
from tutti.hardware import Cluster
from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import UPDATE_METRICS, StepGraph
from tutti.launch.heartbeat import HEARTBEAT, Meeting
from tutti.lower.overlap.join import joined
from tutti.lower.parts.actions import ONCE, Action, Message, actions_of, had, orders
from tutti.lower.parts.cut import PREPARATION, Place
from tutti.lower.parts.schedule_parts import label_of, passed, program_of, schedule_of, sizes_of, with_values
from tutti.lower.program import Collective, Program
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import PIPELINE, Plan

if TYPE_CHECKING:
    from tutti.observe.recorder import Recorder

Row = list[torch.Tensor]  # a tensor for each held rank of a device
InputsOf = Callable[[int], Mapping[str, torch.Tensor]]  # the whole inputs that every stage is given for a microbatch


class Executor:
    """Runs a graph as a plan says, on the devices of the schedule that this process holds.

    count: number of microbatches. store: the stored tensors; outputs of the same name replace them. homes: the stage
    that keeps each input. engine: transfers of tensors on outer tiers. hidden: the cluster, if communication is hidden
    (`analysis.overlap`). on: the platform whose allocator is modelled. inspector: sees all intermediate values.
    """

    def __init__(self, graph: StepGraph, plan: Plan, count: int, level: str, store: TensorStore,
                 homes: Mapping[str, int], engine: TransferEngine | None = None, hidden: Cluster | None = None,
                 on: Platform = CPU, inspector: Inspector | None = None):  # fmt: skip
        self.on, self.inspector, self.engine = on, inspector, engine
        self.hidden = hidden.of(devices(plan.inner)) if hidden and plan.stages else hidden
        self.count, self.mesh, self.width, self.store = count, plan.inner, devices(plan.inner), store
        self.graph, (self.cut, self.schedule) = graph, schedule_of(graph, plan, count, homes)
        self.repeats = graph.repeats
        self.plan = with_values(plan.replace(mesh=self.mesh), self.cut)
        self.actions = actions_of(self.cut, self.schedule)
        self.recorder: Recorder | None = None
        self.each: Sequence[Executor] = ()
        tensors_of: dict[int, list[dict[str, torch.Tensor]]] = {}  # by device
        for rank, tensors in zip(store.runtime.ranks, store.parts, strict=True):
            tensors_of.setdefault(rank // self.width, []).append(tensors)
        if isinstance(store.runtime, Virtual):
            self.ranks, self.mail = list(range(self.width)), _Mail()
            self.driver = Virtual(self.mesh) if len(self.actions) > 1 else store.runtime
        else:
            self.ranks, self.driver = [store.runtime.rank % self.width], store.runtime
            self.mail = _Posted(self, store.runtime) if len(self.actions) > 1 else _Mail()
        self.local_devices = {d: _Device(self, d, tensors) for d, tensors in tensors_of.items()}
        places = [place for place in self.cut.parts if self.device(place) in self.local_devices]
        self.parts = {place: _Part(self, place, level) for place in places}
        self.pairs: dict[tuple[Place, ...], _Part] = {
            (action.place, action.second[0]): _Part(self, action.place, level, action.second[0])
            for number in self.local_devices
            for action in self.actions[number]
            if action.place and action.second
        }

    @property
    def first(self) -> _Part:
        """The first local part that microbatches run."""
        return next(part for place, part in self.parts.items() if place.kind != PREPARATION)

    def device(self, place: Place) -> int:
        """The device that runs a part."""
        return self.schedule.place[place.stage]

    def budget(self, device: int, rank: int) -> MemoryBudget | None:
        """The memory budget of a rank of a local device; None if memory is not limited."""
        if not self.store.budgets:
            return None
        return self.store.budgets[self.store.runtime.ranks.index(device * self.width + rank)]

    def run(self, inputs_of: InputsOf, recorder: Recorder | None = None, each: Sequence[Executor] = ()) -> None:
        """Run the actions of all local devices to completion.

        inputs_of: the inputs that are not stored, by microbatch.
        recorder: of this process's rank.
        each: by microbatch, the executor whose parts run it, where microbatches need different graphs; by default this
            one.

        Raises RuntimeError if an earlier run ended with an error between messages of processes.
        """
        inputs_of, self.recorder, self.each = cache(inputs_of), recorder, each
        self.mail.begin()
        for device in self.local_devices.values():
            device.begin()
        while waiting := [device for device in self.local_devices.values() if device.todo]:
            acted = [device.act(inputs_of) for device in waiting]
            assert any(acted), "devices of the pipeline wait for one another"
        self.mail.over()
        for device in self.local_devices.values():
            device.replace()
        if any(place.kind.startswith("U") for place in self.cut.parts):
            self._free_sums()

    def _free_sums(self) -> None:
        for device in self.local_devices.values():
            device.sums = {}

    def part(self, place: Place, microbatch: int) -> _Part:
        """The Programs that run a part for a microbatch."""
        return self.of(microbatch).parts[place]

    def of(self, microbatch: int) -> Executor:
        """The executor whose parts run a microbatch."""
        return self.each[microbatch] if self.each and microbatch >= 0 else self

    def beside(self, other: Executor) -> list[tuple[_Part, _Part]]:
        """The Programs of this executor and of another one of the same graph that have run."""
        every = [(part, other.parts[place]) for place, part in self.parts.items()]
        return [*every, *((part, other.pairs[places]) for places, part in self.pairs.items())]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last run by parameter name, as full CPU tensors. They are freed."""
        gradients_by_name, step = {}, self.cut.step
        for name in step.gradient_names:
            home = self.device(self.cut.makers[name])
            parts = {home * self.width + rank: x for device in self.local_devices.values() if device.number == home
                     for rank, x in zip(self.ranks, device.sums[name], strict=True)}  # fmt: skip
            layout = self.plan.input_layout(label_of(self.cut, name))
            spec = step.outputs[name].meta["val"]
            total = self.store.assemble(parts, home if len(self.actions) > 1 else None, layout, spec)
            gradients_by_name[path_of(name)] = total / self.count
        self._free_sums()
        return gradients_by_name

    def loss(self) -> torch.Tensor:
        """The mean loss of the last run, on all ranks."""
        step, home = self.cut.step, self.device(self.cut.makers["loss"])
        dtype = step.outputs["loss"].meta["val"].dtype
        total = self.local_devices[home].loss if home in self.local_devices else None
        if total is None:
            total = torch.zeros((), dtype=dtype, device=step.device)
        return self.mail.shared((total / self.count).to(dtype), home * self.width)

    def observed(self, observed: Observed) -> Observed:
        """Add the metrics and checks of the last run to an Observed, on all ranks."""
        for name in self.cut.step.observed_names:
            for i in range(self.count):
                observed.keep(name, self.value(name, i))
        return observed

    def value(self, name: str, microbatch: int = 0) -> torch.Tensor:
        """A metric, a check or a result of the last run, on all ranks."""
        home, spec = self.device(self.cut.makers[name]), self.cut.step.outputs[name].meta["val"]
        if home in self.local_devices:
            local = self.local_devices[home].observed[name][microbatch]
        else:
            local = torch.empty(spec.shape, dtype=spec.dtype, device=self.cut.step.device)
        return self.mail.shared(local, home * self.width)

    def skipped(self) -> bool:
        """Whether the last run skipped the update, because values were not finite."""
        return bool(self.reported("skipped"))

    def reported(self, name: str) -> torch.Tensor:
        """A number that the update of the last run returned (`UPDATE_METRICS`), 0-d, on all ranks."""
        home, dtype = self.device(self.cut.makers[name]), self.cut.step.outputs[name].meta["val"].dtype
        local = self.local_devices[home].reported[name] if home in self.local_devices else torch.zeros((), dtype=dtype)
        return self.mail.shared(local.to(self.cut.step.device), home * self.width)

    def collectives(self) -> list[Collective]:
        """The collectives of one run of each part of the first local device, and what it sends to other devices."""
        by_part: dict[str, list[Collective]] = {}
        sizes = sizes_of(self.cut, self.plan)
        for action in self.actions[min(self.local_devices)]:
            for place, _ in action.runs:
                by_part.setdefault(str(place), self.parts[place].programs[0].collectives)
            for name in (message.name for message, _ in action.sends):
                by_part.setdefault(name, [Collective("send", PIPELINE, sizes[name], name)])
        return [c for several in by_part.values() for c in several]

    def uncompiled(self, like: Executor) -> list[tuple[Compiled, Arguments]]:
        """The functions that this executor calls and that are not compiled yet, each once, for the inputs of the last
        run of an executor of the same graph at another level."""
        functions = {}
        for part, other in self.beside(like):
            for ready, inputs in zip(part.ready, other.inputs, strict=True):
                functions |= {id(function): (function, args) for function, args in uncompiled(ready.graph, inputs)}
        return list(functions.values())

    def compile_like(self, like: Executor) -> None:
        """Compile all functions now, for the inputs of the last run of an executor as in `uncompiled`."""
        for part, other in self.beside(like):
            for ready, inputs in zip(part.ready, other.inputs, strict=True):
                compile_ahead(ready.graph, inputs)

    def spec(self, name: str) -> Spec:
        """Shape and dtype of the local part of an input of a local part."""
        return next(part.local[name] for part in self.parts.values() if name in part.local)


class _Part:
    """The Programs of one part, or of two that run together, for the local ranks of their device."""

    def __init__(self, executor: Executor, place: Place, level: str, second: Place | None = None):
        graph, plan = executor.cut.parts[place], executor.plan
        self.programs: list[Program] = [program_of(executor.cut, graph, plan, rank) for rank in executor.ranks]
        if second:
            others = [program_of(executor.cut, executor.cut.parts[second], plan, rank) for rank in executor.ranks]
            self.programs = [joined(*both) for both in zip(self.programs, others, strict=True)]
        self.local = {n.meta["input"]: n.meta["val"] for n in self.programs[0].graph.nodes if n.op == "placeholder"}
        self.outputs = [(name, _kind(name)) for name in graph.outputs]
        self.summed = [name for name, kind in self.outputs if kind == Kind.GRAD]
        number, homes = executor.device(place), executor.cut.homes
        self.stored = {name for name in self.programs[0].inputs if not passed(name)
                       and (name not in homes or executor.schedule.place[homes[name]] == number)}  # fmt: skip
        self.budgets = [None if executor.inspector else executor.budget(number, rank)
                        for rank in executor.ranks]  # fmt: skip
        self.ready = prepare(self.programs, level, executor.hidden, executor.driver.agree, executor.engine,
                             [budget for budget in self.budgets if budget], executor.on,
                             executor.inspector and executor.inspector.shifted(number * executor.width))  # fmt: skip
        self.inputs: list[list[Described]] = []  # of the first run, for each local rank


class _Device:
    """One device: the stored tensors of its local ranks, and the values of microbatches in flight."""

    def __init__(self, executor: Executor, number: int, stored: list[dict[str, torch.Tensor]]):
        self.executor, self.number, self.stored = executor, number, stored
        self.todo: deque[Action] = deque()
        self.values: dict[Message, Row] = {}
        self.sums: dict[str, Row] = {}
        self.observed: dict[str, list[torch.Tensor]] = {}  # metrics and checks, of each microbatch
        self.successors: dict[str, Row] = {}  # of stored tensors, which a function replaces when all parts have run
        self.loss: torch.Tensor | None = None
        self.reported: dict[str, torch.Tensor] = {}  # by the update
        self.divided = False
        self.prepared: dict[Executor, dict[str, Row]] = {}  # what microbatches of other graphs share

    def begin(self) -> None:
        self.todo = deque(self.executor.actions[self.number])  # an interrupted run leaves some
        self.loss, self.values, self.sums, self.divided, self.observed = None, {}, {}, False, {}
        self.successors, self.prepared = {}, {}

    def act(self, inputs_of: InputsOf) -> bool:
        """Run the next action if its inputs have arrived; whether it did."""
        action, mail = self.todo[0], self.executor.mail
        if not all(mail.there(message, source, self.number) for message, source in action.receives):
            return False
        self.todo.popleft()
        if action.microbatch == ONCE and self.sums and not self.divided:
            self.divided, self.prepared = True, {}
            torch._foreach_div_([x for row in self.sums.values() for x in row], self.executor.count)  # pyright: ignore[reportPrivateImportUsage]
            self.round_sums()
        for message, source in action.receives:
            recorder = self.executor.recorder
            with recorder.waiting(message.name, source) if recorder else nullcontext():
                self.values[message] = self.counted(mail.receive(message, source, self.number))
        if action.place:
            self.run(action, inputs_of)
        for message, target in action.sends:
            mail.send(message, self.row(message), self.number, target)
        for message in action.drops:
            del self.values[message]
        return True

    def round_sums(self) -> None:
        """Round float32 sums that the update reads in the dtype of the gradients."""
        cut = self.executor.cut
        for name in self.sums.keys() & {name for name, wide in cut.wide_sums.items() if not wide}:
            dtype = cut.step.outputs[name].meta["val"].dtype
            self.sums[name] = self.counted([x.to(dtype) for x in self.sums[name]])

    def counted(self, row: Row) -> Row:
        """Count tensors in the memory budgets of the ranks that hold them."""
        if self.executor.store.budgets:
            for rank, x in zip(self.executor.ranks, row, strict=True):
                self.executor.budget(self.number, rank).hold(x)  # pyright: ignore[reportOptionalMemberAccess]
        return row

    def row(self, message: Message) -> Row:
        """The tensor of a name on each local rank."""
        name = message.name
        if message in self.values:
            return self.values[message]
        if name in self.sums:
            return self.sums[name]
        return [tensors[name] for tensors in self.stored]

    def run(self, action: Action, inputs_of: InputsOf) -> None:
        """Run a part, or two together, and keep the outputs."""
        executor = self.executor
        parts = [executor.part(place, microbatch) for place, microbatch in action.runs]
        numbers = [microbatch for _, microbatch in action.runs]
        for microbatch in numbers:
            self.prepare(microbatch, inputs_of)
        whole = parts[0] if len(parts) == 1 else executor.pairs[tuple(place for place, _ in action.runs)]
        name = " with ".join(str(place) for place, _ in action.runs)
        results = self.compute(parts, numbers, whole, name, inputs_of)
        for part, microbatch, rows in zip(parts, numbers, results, strict=True):
            for (output, kind), row in zip(part.outputs, rows, strict=True):
                self.keep(output, kind, row, microbatch)

    def prepare(self, microbatch: int, inputs_of: InputsOf) -> None:
        """Run what microbatches of another graph share, before the first of them. A pipeline mixes no graphs."""
        other = self.executor.of(microbatch)
        if other is self.executor or other in self.prepared:
            return
        self.prepared[other] = {}
        for place, part in other.parts.items():
            if place.kind == PREPARATION:
                (rows,) = self.compute([part], [ONCE], part, str(place), inputs_of)
                self.prepared[other] |= {name: row for (name, _), row in zip(part.outputs, rows, strict=True)}

    def compute(self, parts: list[_Part], microbatches: list[int], whole: _Part, name: str,
                inputs_of: InputsOf) -> list[list[Row]]:  # fmt: skip
        """The outputs of parts that are one Program, `whole`."""
        executor = self.executor
        inputs = [self.inputs(part, microbatch, inputs_of(max(microbatch, 0)))
                  for part, microbatch in zip(parts, microbatches, strict=True)]  # fmt: skip
        rows = [[x for row in each for x in row] for each in zip(*inputs, strict=True)]
        for i, budget in enumerate(whole.budgets):
            if budget:
                budget.admit(whole.ready[i].peaks)
        whole.inputs = whole.inputs or [[Described.of(x) for x in row] for row in rows]
        runs = [ready.run for ready in whole.ready]
        if executor.recorder:
            runs = [executor.recorder.watch(name, whole.programs[0], whole.ready[0])]
        device_type = executor.cut.step.device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):  # the graph holds its own casts
            results = iter(zip(*executor.driver.run(runs, rows), strict=True))
        return [[list(next(results)) for _ in part.outputs] for part in parts]

    def inputs(
        self, part: _Part, microbatch: int, whole_inputs: Mapping[str, torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """The inputs of a part on each local rank."""
        executor, rows = self.executor, []
        prepared = self.prepared.get(executor.of(microbatch), {})
        for name in part.summed:
            if name not in self.sums:
                self.sums[name] = self.counted([self.zeros(program, name) for program in part.programs])
        for i, (program, rank) in enumerate(zip(part.programs, executor.ranks, strict=True)):
            tensors, row = self.stored[i], []
            for name, (layout, _) in program.inputs.items():
                if name in whole_inputs:
                    row.append(
                        own_part(name, whole_inputs[name], layout, executor.mesh, rank, executor.cut.step.device)
                    )
                elif name in part.stored:
                    row.append(tensors[name])
                elif name in prepared:
                    row.append(prepared[name][i])
                else:
                    row.append(self.row(_message(name, microbatch, self.values))[i])
            rows.append(row)
        return rows

    def replace(self) -> None:
        """Replace stored tensors by their successors."""
        for name, row in self.successors.items():
            for tensors, x in zip(self.stored, row, strict=True):
                if name in tensors:
                    self.executor.store.replace(tensors, name, x)
        self.successors = {}

    def keep(self, name: str, kind: str, row: Row, microbatch: int) -> None:
        if kind == "stored":
            self.successors[name] = row
            if self.executor.repeats:  # the next microbatch reads them
                self.replace()
        elif kind == "value":
            self.values[Message(name, microbatch)] = row
        elif kind == "loss":
            self.loss = row[0] if self.loss is None else self.loss + row[0]
        elif kind == "reported":
            self.reported[name] = row[0]
        elif kind == "observed":
            self.observed.setdefault(name, []).append(row[0])
        else:  # a sum of gradients, to which the part has added in place
            self.sums[name] = row

    def zeros(self, program: Program, name: str) -> torch.Tensor:
        """The local part of a sum of gradients before the first microbatch."""
        layout, spec = program.inputs[name]
        shape = layout.local_shape(spec.shape, program.mesh, program.where)
        return torch.zeros(shape, dtype=spec.dtype, device=self.executor.cut.step.device)


class _Mail:
    """Messages between devices of one process."""

    def __init__(self):
        self.posted: dict[tuple[Message, int], Row] = {}

    def begin(self) -> None:
        self.posted = {}  # an interrupted run leaves some

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

    def __init__(self, executor: Executor, runtime: Distributed):
        self.executor, self.rank = executor, runtime.rank
        self.groups: dict[bool, Any] = runtime.directions
        self.orders, self.delivered = orders(executor.actions), had(executor.actions)
        self.coming: dict[int, deque[Message]] = {}
        self.under_way: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self.sent: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}  # by receiver
        self.over_with: Counter[int] = Counter()  # how many of those sent to a receiver are known to be there
        self.unfinished = False

    def begin(self) -> None:
        if self.unfinished:
            raise RuntimeError(
                "an earlier run of this pipeline ended with an error while messages were under way, so its processes "
                "no longer agree: start the job again from a checkpoint"
            )
        self.unfinished = True

    def peer(self, device: int) -> int:
        return device * self.executor.width + self.rank % self.executor.width

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
        for _ in range(self.delivered[source, target][message] - self.over_with[source]):
            self.sent[source].popleft()[0].wait()  # Gloo does not say otherwise that a message has been sent
            self.over_with[source] += 1
        HEARTBEAT.leave()
        return [x]

    def post(self, message: Message, source: int, target: int) -> None:
        spec = self.executor.spec(message.name)
        x = torch.empty(spec.shape, dtype=spec.dtype, device=self.executor.cut.step.device)
        work = dist.irecv(raw(x), self.peer(source), self.groups[source < target])
        self.under_way[message] = work, x  # pyright: ignore[reportArgumentType]

    def over(self) -> None:
        for target, sent in self.sent.items():
            HEARTBEAT.enter(Meeting("send", PIPELINE, "the last messages of the step", self.peer(target)))
            for work, _ in sent:
                work.wait()
            HEARTBEAT.leave()
        self.sent, self.over_with, self.unfinished = {}, Counter(), False

    def shared(self, value: torch.Tensor, source: int) -> torch.Tensor:
        with HEARTBEAT.within("broadcast", "what one rank knows of the step"):
            value = value.contiguous()
            dist.broadcast(raw(value), source)
        return value


def _kind(name: str) -> str:
    """What happens to an output of a part."""
    if is_observed(name) or kind_of(name) == Kind.OUTPUT:
        return "observed"
    kind = kind_of(name)
    if name in UPDATE_METRICS:
        return "reported"
    return kind if kind in ("value", "loss", "grad") else "stored"


def _message(name: str, microbatch: int, values: Mapping[Message, Row]) -> Message:
    """As what a part's input is here: of this microbatch, or once in the step."""
    own = Message(name, microbatch)
    return own if own in values else Message(name, ONCE)
