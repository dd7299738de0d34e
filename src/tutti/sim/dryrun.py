"""The dry run: predict the time and memory of a step without running it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import fx

from tutti.analysis.memory import input_kind
from tutti.hardware import Cluster
from tutti.ir.garbage import uncollected
from tutti.ir.step_graph import StepGraph
from tutti.lower.overlap.join import joined
from tutti.lower.overlap.regions import check_divided
from tutti.lower.parts.cut import WITH_LAYERS, Place
from tutti.lower.parts.schedule_parts import output_layouts, program_of, schedule_of, sizes_of, with_values
from tutti.lower.program import Program
from tutti.plan.layouts.layout import Layout, devices
from tutti.plan.plan import Plan
from tutti.progress import Say, silent
from tutti.sim.pipeline import pipeline_run
from tutti.sim.simulate import Simulation, simulate
from tutti.sim.step import DryRun, SimulatedPart, lowered, peak_of


@uncollected()
def dry_run(
    graph: StepGraph,
    plan: Plan,
    cluster: Cluster,
    level: str = "O0",
    *,
    overlaps: bool | None = None,
    progress: Say = silent,
) -> DryRun:
    """Lower a plan for one rank of each device and simulate it, as `tutti.parallelize` would run it.

    graph: graph of one microbatch. overlaps: whether communication is hidden (`analysis.overlap`); by default it is if
    the devices compute while collectives run. progress: called with what is being done. Raises ValueError if plan,
    graph and cluster do not fit together.
    """
    if devices(plan.mesh) != cluster.size:
        raise ValueError(f"the plan is for {devices(plan.mesh)} devices, {cluster} has {cluster.size}")
    plan.check(graph)
    overlaps = cluster.device.computes_on if overlaps is None else overlaps
    cut, schedule = schedule_of(graph, plan, plan.accumulate)
    inner, flat = with_values(plan.replace(mesh=plan.inner), cut), not plan.stages
    within = cluster if flat else cluster.of(devices(plan.inner))
    sizes = sizes_of(cut, inner)
    parts: dict[Place, SimulatedPart] = {}
    simulated: dict[tuple, tuple[Program, Simulation]] = {}  # of parts that are alike, as those of equal stages
    for place, part in cut.parts.items():
        layouts = output_layouts(cut, part, inner)
        runs = 1 if place.once else plan.accumulate
        signature = (place,) if flat else _signature(part, inner, layouts)
        if signature not in simulated:
            progress(f"simulating {place}")
            make = partial(program_of, cut, part, inner)
            program = lowered(make, level, within if overlaps else None)
            simulated[signature] = program, simulate([program], within, level)
        program, simulation = simulated[signature]
        if flat and place.kind in WITH_LAYERS:
            check_divided(program, plan.overlap_chunks)
        parts[place] = SimulatedPart(str(place), program, simulation, runs)
    peak = peak_of((part.program for part in parts.values()), cluster)
    run = DryRun(tuple(parts.values()), graph.flops * plan.accumulate, peak, cluster, level)
    if flat:
        return run

    def pair(first: Place, second: Place) -> SimulatedPart:
        """Two parts that run together."""
        key = id(parts[first].program), id(parts[second].program)
        if key not in simulated:
            progress(f"simulating {first} with {second}")

            def make(rank: int) -> Program:
                return joined(*(program_of(cut, cut.parts[place], inner, rank) for place in (first, second)))

            program = lowered(make, level, within if overlaps else None)
            simulated[key] = program, simulate([program], within, level)
        return SimulatedPart(f"{first} with {second}", *simulated[key])

    return pipeline_run(run, cut, schedule, parts, plan, sizes, pair)


def _signature(part: StepGraph, plan: Plan, layouts: Mapping[str, Layout]) -> tuple:
    """Everything that the Program of a part depends on, except the names of values that cross parts."""
    place = {node: f"%{i}" for i, node in enumerate(part.graph.nodes)}
    lines = []
    for node in part.graph.nodes:
        meta = node.meta
        where = plan.input_layout(meta["label"]) if node.op == "placeholder" else meta.get("label")
        arguments = fx.map_arg((node.args, node.kwargs), place.__getitem__)
        lines.append((node.op, str(node.target) if node.op == "call_function" else "", str(where), repr(arguments),
                      str(meta.get("val")), meta.get("phase"), meta.get("read_later")))  # fmt: skip
    inputs = [(place[node], input_kind(name)) for name, node in part.inputs.items()]
    outputs = [
        (place[node], str(layouts.get(name)), place.get(part.inputs.get(name))) for name, node in part.outputs.items()
    ]
    return tuple(lines), tuple(inputs), tuple(outputs)
