"""Calls of a function that is one part on one device, without the queues and messages of an executor."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

import torch

from tutti.compile.compiled import Described
from tutti.exec.device import Part
from tutti.exec.executor import Executor
from tutti.exec.runtimes.runtime import Virtual
from tutti.ir.kind import NUMBERS, kind_of
from tutti.lower.parts.cut import PREPARATION, Place


class SinglePart:
    """The only part of an executor, on its only rank. A call takes less time than a run of the executor, which has the
    same results afterwards.

    inputs: names of the inputs that calls are given. The others are stored.
    """

    def __init__(self, executor: Executor, place: Place, inputs: Mapping[str, torch.Tensor]):
        self.executor, self.part = executor, executor.parts[place]
        (self.device,) = executor.local_devices.values()
        (self.stored,) = self.device.stored
        names = list(self.part.programs[0].inputs)
        self.call_inputs = [(i, name, kind_of(name) in NUMBERS) for i, name in enumerate(names) if name in inputs]
        self.stored_names = [name for name in names if name not in inputs]
        self.read_stored = (
            itemgetter(*self.stored_names)
            if len(self.stored_names) > 1
            else lambda stored: [stored[x] for x in self.stored_names]
        )

    @classmethod
    def of(cls, executor: Executor, inputs: Mapping[str, torch.Tensor]) -> SinglePart | None:
        """Calls of an executor, or None if it has several parts, devices or ranks, limits memory or inspects values."""
        actions = [action for each in executor.actions for action in each]
        if len(actions) != 1 or executor.width > 1 or not isinstance(executor.driver, Virtual):
            return None
        ((place, _),) = actions[0].runs or [(None, 0)]
        if place is None or place.kind == PREPARATION or not _is_plain(executor, executor.parts[place]):
            return None
        return cls(executor, place, inputs)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run the part. inputs: whole tensors."""
        executor, part, device, stored = self.executor, self.part, self.device, self.stored
        device.begin()
        on = executor.cut.step.device
        row = list(self.read_stored(stored))
        for i, name, is_number in self.call_inputs:
            row.insert(i, inputs[name] if is_number else inputs[name].to(on, non_blocking=True))
        part.inputs = part.inputs or [[Described.of(x) for x in row]]
        with torch.no_grad(), torch.autocast(on.type, enabled=False):  # the graph holds its own casts
            (results,) = executor.driver.run([part.ready[0].run], [row])
        for (name, kind), x in zip(part.outputs, results, strict=True):
            if kind != "stored":
                device.keep(name, kind, [x], 0)
            elif x is not stored[name]:
                executor.store.replace(stored, name, x)


def _is_plain(executor: Executor, part: Part) -> bool:
    """Whether a part needs nothing but its inputs."""
    return not (executor.store.budgets or executor.inspector or part.summed or executor.repeats or executor.each)
