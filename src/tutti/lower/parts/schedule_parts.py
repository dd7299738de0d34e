"""The parts and the schedule of a plan, and the layouts of what one part hands to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tutti.ir.kind import Kind, kind_of, path_of
from tutti.ir.spec import Spec
from tutti.ir.step_graph import StepGraph
from tutti.lower.parts.cut import WITH_LAYERS, Cut, cut, undivided
from tutti.lower.parts.gradient_sums import WIDE, add_in_float32, add_to_sums
from tutti.lower.program import Program
from tutti.lower.shard import made_in, shard
from tutti.plan.layouts.layout import Layout
from tutti.plan.pipeline.schedule import forward
from tutti.plan.pipeline.slots import Schedule, Slot
from tutti.plan.plan import PIPELINE, Plan


def schedule_of(
    graph: StepGraph, plan: Plan, count: int, homes: Mapping[str, int] | None = None
) -> tuple[Cut, Schedule]:
    """Cut a graph into parts and schedule them. An evaluation has forward passes only; parts of a function run once.

    count: number of microbatches. homes: the stages of inputs that are placed already.
    """
    once = count > 1 and not (plan.reround or plan.tiers)
    if not plan.stages:
        parts = undivided(graph, count, once)
        if plan.sum_dtype:
            add_in_float32(parts)
        (kind,) = (place.kind for place in parts.parts if place.kind in WITH_LAYERS)
        return parts, Schedule("flat", (tuple(Slot(kind, 0, i) for i in range(count)),), (0,))
    if not graph.repeats:
        check_called(plan)
        count, parts = plan.mesh[PIPELINE], cut(graph, plan.stages, homes=homes)
        check_offloaded(parts, plan)
        return parts, Schedule("call", ((),) * count, tuple(range(count)))
    schedule = plan.pipe.of(plan.accumulate, plan.durations)
    if not graph.gradient_names:
        schedule = forward(schedule.place, count, graph.sequence_chunks)
    parts = cut(graph, plan.stages, schedule.split, homes, once)
    if plan.sum_dtype:
        add_in_float32(parts)
    return parts, schedule


def homes_of(
    graph: StepGraph, plan: Plan, count: int, homes: Mapping[str, int] | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the stage that stores each input of a graph, and its device. Both are empty without a pipeline.

    homes: the stages of inputs that are placed already.
    """
    if not plan.stages:
        return {}, {}
    cut, schedule = schedule_of(graph, plan, count, homes)
    return cut.homes, {name: schedule.place[stage] for name, stage in cut.homes.items()}


def check_called(plan: Plan) -> None:
    """Raise ValueError if a plan with a pipeline does not suit a function: a call runs each stage once."""
    count, stages = plan.mesh[PIPELINE], 1 + max(plan.stages.values())
    has = {
        f"the schedule {plan.schedule}": bool(plan.schedule),
        f"{plan.accumulate} microbatches": plan.accumulate > 1,
        f"{plan.sequence_chunks} chunks of the sequence": plan.sequence_chunks > 1,
        f"{stages} stages": stages > count,
    }
    if reasons := [what for what, true in has.items() if true]:
        raise ValueError(
            f"the plan has {reasons[0]}, but a call of a function runs one stage on each of {count} devices, once: "
            f"give plan='pp{count}', or train with tutti.parallelize"
        )


def check_offloaded(cut: Cut, plan: Plan) -> None:
    """Raise ValueError if a plan with tensors on other tiers would write into a tensor while other parts need it."""
    users = Counter(name for part in cut.parts.values() for name in {**part.inputs, **part.outputs})
    for part in cut.parts.values() if plan.tiers else ():
        for name, node in part.inputs.items():
            split = users[name] > 1 and node.meta["label"] in plan.tiers
            if split or (name in part.outputs and node.meta.get("read_later")):
                raise ValueError(
                    f"several parts of the pipeline read or write {name} in a call, which excludes tensors outside the "
                    "device: leave out offload, or the pipeline"
                )


def passed(name: str) -> bool:
    """Return whether a part's input or output is passed between parts."""
    return kind_of(name) in (Kind.VALUE, Kind.GRAD)


def label_of(cut: Cut, name: str) -> str:
    """The label under which a plan has the layout of a passed value."""
    return cut.step.gradient_label(path_of(name)) if kind_of(name) == Kind.GRAD else name


def output_layouts(cut: Cut, part: StepGraph, plan: Plan) -> dict[str, Layout]:
    """The layouts of the values that a part passes on, and of the stored tensors that it makes.

    An update makes parameters that it does not read if they have float32 master weights.
    """
    stored = {name: node.meta["label"] for name, node in cut.step.inputs.items() if name in part.outputs}
    passed_on = {name: label_of(cut, name) for name in part.outputs if passed(name)}
    return {name: plan.input_layout(label) for name, label in {**stored, **passed_on}.items()}


def program_of(cut: Cut, part: StepGraph, plan: Plan, rank: int) -> Program:
    """The Program of a part for one rank."""
    return add_to_sums(shard(part, plan, rank, output_layouts(cut, part, plan)), cut.wide_sums)


def with_values(plan: Plan, cut: Cut) -> Plan:
    """The plan with the layouts of values passed between parts: as computed; for sums of gradients, as planned."""
    layouts = {
        label_of(cut, name): made_in(node, plan)
        for part in cut.parts.values()
        for name, node in part.outputs.items()
        if kind_of(name) == Kind.VALUE or (kind_of(name) == Kind.GRAD and plan.accumulate == 1)
    }
    return plan.replace(inputs={**layouts, **plan.inputs})


def sizes_of(cut: Cut, plan: Plan) -> dict[str, int]:
    """Return the local bytes of every input, of every value passed between parts, and of sums of gradients."""
    sizes = {}
    for part in cut.parts.values():
        handed = [(name, node) for name, node in part.outputs.items() if passed(name)]
        for name, node in [*part.inputs.items(), *handed]:
            label = label_of(cut, name) if passed(name) else node.meta["label"]
            spec: Spec = node.meta["val"]
            dtype = WIDE if name in cut.wide_sums else spec.dtype
            sizes[name] = Spec(plan.input_layout(label).local_shape(spec.shape, plan.mesh), dtype).bytes
    return sizes
