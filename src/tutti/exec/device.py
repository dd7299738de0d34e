"""A device of the schedule: its stored tensors, the Programs of its parts, and the values of microbatches in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from tutti.compile.compiled import Described
from tutti.exec.kernels.levels import prepare
from tutti.exec.messages import Row
from tutti.exec.observed import is_observed
from tutti.exec.runtimes.runtime import own_part
from tutti.ir.kind import Kind, kind_of
from tutti.ir.step_graph import UPDATE_METRICS
from tutti.lower.overlap.join import joined
from tutti.lower.parts.actions import ONCE, Action, Message
from tutti.lower.parts.cut import PREPARATION, Place
from tutti.lower.parts.schedule_parts import passed, program_of
from tutti.lower.program import Program

if TYPE_CHECKING:
    from tutti.exec.executor import Executor

InputsOf = Callable[[int], Mapping[str, torch.Tensor]]  # the whole inputs that every stage is given for a microbatch


class Part:
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


class Device:
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

    def compute(self, parts: list[Part], microbatches: list[int], whole: Part, name: str,
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

    def inputs(self, part: Part, microbatch: int, whole_inputs: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
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
        elif kind == Kind.VALUE:
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


def _kind(name: str) -> str:
    """What happens to an output of a part."""
    if is_observed(name) or kind_of(name) == Kind.OUTPUT:
        return "observed"
    kind = kind_of(name)
    if name in UPDATE_METRICS:
        return "reported"
    return kind if kind in (Kind.VALUE, "loss", Kind.GRAD) else "stored"


def _message(name: str, microbatch: int, values: Mapping[Message, Row]) -> Message:
    """Return the message of a part's input: that of this microbatch if it is here, else the one of the whole step."""
    own = Message(name, microbatch)
    return own if own in values else Message(name, ONCE)
