"""The executor: runs the actions of a schedule (`lower.parts.actions`) on the ranks of this process.

A plan without a pipeline has one device and one stage. The devices of a pipeline lie along the mesh axis `pp`, the
outermost. Each device is a mesh of the other axes, on which the Programs of its stages run. A value that crosses stages
is sent from each rank to the rank with the same coordinates on the other device, in the layout it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from tutti.analysis.memory import CPU, Platform
from tutti.compile.compiled import Arguments, Compiled, compile_ahead, uncompiled
from tutti.exec.device import Device, InputsOf, Part
from tutti.exec.messages import LocalMessages, ProcessMessages
from tutti.exec.nonfinite import Inspector
from tutti.exec.observed import Observed
from tutti.exec.runtimes.runtime import Virtual
from tutti.exec.stores.memory_budget import MemoryBudget
from tutti.exec.stores.tensor_store import TensorStore
from tutti.exec.stores.transfer_engine import TransferEngine
from tutti.hardware import Cluster
from tutti.ir.kind import path_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.lower.parts.actions import actions_of
from tutti.lower.parts.cut import PREPARATION, Place
from tutti.lower.parts.schedule_parts import label_of, schedule_of, sizes_of, with_values
from tutti.lower.program import Collective
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import PIPELINE, Plan

if TYPE_CHECKING:
    from tutti.observe.recorder import Recorder


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
            self.ranks, self.mail = list(range(self.width)), LocalMessages()
            self.driver = Virtual(self.mesh) if len(self.actions) > 1 else store.runtime
        else:
            self.ranks, self.driver = [store.runtime.rank % self.width], store.runtime
            self.mail = ProcessMessages(self, store.runtime) if len(self.actions) > 1 else LocalMessages()
        self.local_devices = {d: Device(self, d, tensors) for d, tensors in tensors_of.items()}
        places = [place for place in self.cut.parts if self.device(place) in self.local_devices]
        self.parts = {place: Part(self, place, level) for place in places}
        self.pairs: dict[tuple[Place, ...], Part] = {
            (action.place, action.second[0]): Part(self, action.place, level, action.second[0])
            for number in self.local_devices
            for action in self.actions[number]
            if action.place and action.second
        }

    @property
    def first(self) -> Part:
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
        recorder: recorder of this process's rank.
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

    def part(self, place: Place, microbatch: int) -> Part:
        """The Programs that run a part for a microbatch."""
        return self.of(microbatch).parts[place]

    def of(self, microbatch: int) -> Executor:
        """The executor whose parts run a microbatch."""
        return self.each[microbatch] if self.each and microbatch >= 0 else self

    def beside(self, other: Executor) -> list[tuple[Part, Part]]:
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
