"""Makes plans fit by offloading the tensors that cost least to store outside of the device
(`plan.search.offload_selection`).

Optimizer state is offloaded together with the update of its parameter. Parameters are fetched for the forward and the
backward pass. Activations are sent out and back. The cost model does not know which transfers computation hides. The
judge of the search predicts the actual time of each plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from tutti.hardware.device import Device
from tutti.ir.kind import Kind, kind_of, split_name
from tutti.ir.step_graph import StepGraph
from tutti.plan.layouts.layout import devices
from tutti.plan.plan import Plan
from tutti.plan.search.offload_selection import Pairs, Thing, place
from tutti.plan.search.recompute import Activations
from tutti.plan.tier import FIXED

if TYPE_CHECKING:
    from tutti.plan.search.search import Search

MOST = 4  # maximum number of plans to try
TRIES = 4  # attempts for each plan
MARGIN = 1.02  # offload this multiple of the excess bytes


class Offload:
    """Searches plans with offloading for a `Search` in which no plan fits."""

    def __init__(self, search: Search):
        self.of = search
        self.activations = cache(lambda planner: Activations(planner.step))

    def search(self) -> None:
        """Try the fastest plans and the smallest one, within the budget."""
        search = self.of
        if search.fastest is not None or not search.cluster.device.outside.memory:
            return
        on_device = [plan for plan in search.plans if not plan.tiers]
        fastest = sorted(on_device, key=lambda p: p.predicted.step_seconds)
        smallest = sorted(fastest[MOST:], key=lambda p: p.predicted.peak_bytes)[:1]
        for plan in [*fastest[:MOST], *smallest]:
            if search.late:
                return
            self.shrink(plan)

    def shrink(self, plan: Plan) -> None:
        """Offload more of a plan until it fits or everything is offloaded."""
        search = self.of
        planner = search.planner(plan.accumulate, plan.variant)
        device = search.cluster.device
        things, pairs = things_of(planner.step, plan, device, self.activations(planner))
        wanted, last = 0.0, None
        offloaded = plan
        for _ in range(TRIES):
            wanted += MARGIN * (offloaded.predicted.peak_bytes - search.memory)
            away = place(things, pairs, wanted)
            if away == last or search.late:
                return
            last = away
            tiers = {label: device.outer for i in sorted(away) for label in things[i].name.split("\n")}
            search.progress(f"{plan.name} with {len(tiers)} kinds of tensors on the {device.outer}")
            offloaded = search.judgement(plan.replace(tiers=tiers, name=f"{plan.name}xoffload"))
            if search.fits(offloaded):
                return


def things_of(step: StepGraph, plan: Plan, device: Device, activations: Activations) -> tuple[list[Thing], Pairs]:
    """The tensors that can be offloaded: parameters and their optimizer state by label, and results of the forward
    pass. The name of a thing lists its labels, one per line."""
    sizes: dict[str, int] = defaultdict(int)
    kinds: dict[str, list[str]] = defaultdict(list)  # path -> labels of optimizer state
    for name, node in step.inputs.items():
        label, spec = node.meta["label"], node.meta["val"]
        kind, path = split_name(label)
        if kind_of(name) in FIXED:
            continue
        if kind == "param":
            kinds[path] += []
        sizes[label] += prod(plan.input_layout(label).local_shape(spec.shape, plan.inner)) * spec.dtype.itemsize
        if kind != "param" and label not in kinds[path]:
            kinds[path].append(label)
    runs, outside = plan.accumulate, device.outside
    things: list[Thing] = []
    pairs: dict[tuple[int, int], float] = {}
    for path, labels in kinds.items():
        state, own = sum(sizes[label] for label in labels), sizes[Kind.PARAM.at(path)]
        moved = 2 * state + 3 * own  # state and parameter are read and written, the gradient is read
        param = Thing(Kind.PARAM.at(path), own, 2 * runs * own / outside.link)
        if not labels:  # the update needs only the gradient, which is sent out
            things.append(replace(param, outside=param.outside + own / outside.link))
            continue
        at = len(things)
        there = own / outside.link + moved / outside.bandwidth  # the gradient is sent out
        things.append(Thing("\n".join(labels), state, there, moved / device.bandwidth))
        things.append(param)
        pairs[at, at + 1] = own / outside.link  # the new parameter is sent back
        pairs[at + 1, at] = 2 * state / outside.link  # the state is sent to the update and back
    for label in sorted(activations.needed):
        count = activations.bytes[label] // devices(plan.inner)
        things.append(Thing(label, count, 2 * runs * count / outside.link))
    return things, pairs
