"""Sharding: from the unsplit graph and a plan to the Program of one rank.

Each operator runs on its shards, in the layouts of its choices. Where a value has another layout, the cheapest reshard
is inserted, once for all readers in that layout. A value that had to be *gathered* is gathered again in the backward
pass instead of being kept: this is what saves memory in ZeRO-3 and sequence parallelism.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tutti.ir.costs import FREE
from tutti.ir.loops import LOOPS
from tutti.ir.op_info import ARGUMENTS, BY_TOKEN, CONTIGUOUS, DENSE, LOCAL
from tutti.ir.spec import Spec
from tutti.ir.step_graph import FORWARD, StepGraph
from tutti.lower.emit import ORIGIN
from tutti.lower.local_context import LocalContext
from tutti.lower.loops import local_loop
from tutti.lower.move import move
from tutti.lower.program import Program
from tutti.ops import Rule, operands, replicated, rule_of, source, specs
from tutti.plan.layouts.choice import Choices, check, factor_digits, layouts
from tutti.plan.layouts.layout import Layout, Partial, coordinates_of
from tutti.plan.layouts.reshard import ReshardStep, reshard
from tutti.plan.plan import Plan
from tutti.tracing.trace.inline import paste, template

REPLICATED = Layout()
TRACED: dict[tuple, fx.Graph] = {}  # traced local computations, by all that they depend on
MOST_TRACED = 4096


def shard(
    step: StepGraph,
    plan: Plan,
    rank: int,
    outputs: Mapping[str, Layout] | None = None,
    rules: Callable[[fx.Node], Rule | None] = rule_of,
) -> Program:
    """The Program of one rank.

    outputs: required layouts by name. By default the successor of an input gets the input's layout, and other outputs
    (loss, gradients) are replicated. rules: the function that gives the rule of a call.
    """
    sharder = Sharder(step, plan, rank, rules)
    inputs = {name: (plan.input_layout(node.meta["label"]), node.meta["val"]) for name, node in step.inputs.items()}
    for name, node in step.inputs.items():
        sharder.place(name, node, inputs[name][0])
    for node in step.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            sharder.call(node)
    results, returned = {}, {}
    for name, node in step.outputs.items():
        layout = (outputs or {}).get(name) or (inputs[name][0] if name in inputs else REPLICATED)
        results[name] = sharder.version(node, layout, node.meta["phase"])
        returned[name] = (layout, node.meta["val"])
    sharder.graph.output(tuple(results.values())).meta["names"] = list(results)
    sharder.graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure())
    for node in sharder.graph.nodes if plan.tiers else ():
        passes = node.op == "placeholder" or (node.meta.get("phase") == FORWARD and node.target not in FREE)
        if passes and node.meta.get("label") in plan.tiers:
            node.meta["tier"] = plan.tiers[node.meta["label"]]
    return Program(sharder.graph, plan.mesh, rank, inputs, returned, plan.overlap_chunks)


def made_in(node: fx.Node, plan: Plan) -> Layout:
    """The layout in which a node's result is computed."""
    maker, index = source(node)
    choices = plan.choices(maker.meta["label"])
    rule = rule_of(maker) if choices else replicated(maker)
    return REPLICATED if rule is None else layouts(rule, choices)[1][index]


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor if its last dim has stride 1, else a contiguous copy."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def by_token(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, tokens, width), in memory as (batch, tokens, heads, width)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# the columns of operands that must be arranged in memory, and what arranges them
ARRANGED = (CONTIGUOUS, torch.ops.aten.contiguous.default), (DENSE, dense), (BY_TOKEN, by_token)


def arrangements(node: fx.Node, number: int) -> list[Callable]:
    """Return the functions that arrange an operand of a call in memory as its kernel needs it."""
    places = {number, number - len(operands(node))}
    return [arrange for table, arrange in ARRANGED if not places.isdisjoint(table.get(node.target, ()))]


class Sharder:
    """Appends what one rank computes to a graph, call by call.

    versions: for each value (node, output), its versions by (layout, phase).
    """

    def __init__(self, step: StepGraph, plan: Plan, rank: int, rules: Callable[[fx.Node], Rule | None] = rule_of):
        self.step, self.plan, self.mesh, self.rules = step, plan, plan.mesh, rules
        self.where = coordinates_of(rank, plan.mesh)
        self.graph = fx.Graph()
        self.situations: dict[str, tuple] = {}
        self.copies: dict[tuple[fx.Node, Callable], fx.Node] = {}
        self.versions: dict[tuple[fx.Node, int], dict[tuple[Layout, str], fx.Node]] = {}

    def place(self, name: str, node: fx.Node, layout: Layout) -> None:
        """Append a placeholder for this rank's shard of an input."""
        spec: Spec = node.meta["val"]
        try:
            local = layout.local_shape(spec.shape, self.mesh, self.where)
        except ValueError as error:
            raise ValueError(f"{name} of shape {spec.shape}: {error}") from None
        copy = self.graph.placeholder(node.name)
        copy.meta = {**node.meta, "val": Spec(local, spec.dtype), "input": name}
        self.versions[node, 0] = {(layout, ""): copy}

    def call(self, node: fx.Node) -> None:
        """Append the local part of one operator."""
        rule, choices, ins, outs, shapes = self.situation(node)
        local_operands = [self.version(x, at, node.meta["phase"]) for x, at in zip(operands(node), ins, strict=True)]
        for i in range(len(local_operands)):
            for arrange in arrangements(node, i):
                local_operands[i] = self.arranged(local_operands[i], arrange)
        parts = iter(local_operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(parts))  # pyright: ignore
        wholes = specs(node)
        local = [Spec(shape, whole.dtype) for shape, whole in zip(shapes, wholes, strict=True)]
        if any(factor in rule.local for choice in choices.values() for factor, _ in choice.splits):
            here = LocalContext(rule, choices, outs, [s.shape for s in wholes], self.mesh, self.where,
                                self.plan.node_size, node.meta.get("routing"))  # fmt: skip
            result = self.compute(node.target, here, args, kwargs, [s.dtype for s in wholes])
        else:
            if node.target in ARGUMENTS:
                args = ARGUMENTS[node.target](args, shapes)
            result = self.graph.create_node("call_function", node.target, args, kwargs)
            result = self.weighted(self.outputs(node, result, local), rule, choices, outs)
        self.record(node, result, outs, local)

    def outputs(self, node: fx.Node, result: fx.Node, local: list[Spec]) -> list[fx.Node]:
        """The outputs of an appended operator one by one. Sets its meta."""
        if not isinstance(node.meta["val"], tuple):
            result.meta["val"] = local[0]
            return [result]
        result.meta["val"] = tuple(spec if spec.dtype else None for spec in local)
        return [self.graph.call_function(operator.getitem, (result, i)) for i in range(len(local))]

    def weighted(self, parts: list[fx.Node], rule: Rule, choices: Choices, outs: list[Layout]) -> list[fx.Node]:
        """Scale means over unequal parts by size / mean size, because `avg` weighs all ranks equally."""
        means = {c.factor for c in choices.values() if c.unit and rule.combine.get(c.factor) == "avg"}
        if not means:
            return parts
        weight = 1.0
        for factor in means:
            digits = factor_digits(rule, choices, factor, self.mesh)
            own = prod(digit.part(self.mesh, self.where)[1] for digit in digits)
            ranks = prod(self.mesh[axis] for axis, c in choices.items() if c.factor == factor)
            weight *= own * ranks / rule.sizes[factor]
        mean = Partial("avg")
        return [
            self.graph.call_function(torch.ops.aten.mul.Tensor, (part, weight))
            if any(placement == mean for _, placement in layout.placements)
            else part
            for part, layout in zip(parts, outs, strict=True)
        ]

    def arranged(self, part: fx.Node, arrange: Callable) -> fx.Node:
        """Return a copy arranged in memory as a kernel needs it: shards may be slices, and capture removes copies."""
        if (part, arrange) not in self.copies:
            self.copies[part, arrange] = self.graph.call_function(arrange, (part,))
            self.copies[part, arrange].meta["val"] = part.meta["val"]
        return self.copies[part, arrange]

    def situation(self, node: fx.Node) -> tuple[Rule, Choices, list[Layout], list[Layout], list[tuple[int, ...]]]:
        """Return rule, choices, layouts of operands and of outputs, and local shapes of outputs of a label."""
        label = node.meta["label"]
        if label not in self.situations:
            rule, choices = self.rule(node)
            ins, outs = layouts(rule, choices)
            shapes = [
                layout.local_shape(s.shape, self.mesh, self.where) for layout, s in zip(outs, specs(node), strict=True)
            ]
            self.situations[label] = rule, choices, ins, outs, shapes
        return self.situations[label]

    def rule(self, node: fx.Node) -> tuple[Rule, Choices]:
        label, choices = node.meta["label"], self.plan.choices(node.meta["label"])
        rule = self.rules(node) if choices else replicated(node)
        if rule is None:
            raise ValueError(f"{label}: {node.target} has no rule, so the plan cannot split it; see tutti.rule")
        check(rule, choices, self.mesh, label)
        return rule, choices

    def compute(self, target, here: LocalContext, args: tuple, kwargs: dict, dtypes: list[torch.dtype]):
        """Append a local computation. Its trace is shared by equal calls if it does not depend on the rank."""
        arguments = pytree.tree_map(lambda x: x.meta["val"] if isinstance(x, fx.Node) else x, (args, kwargs))
        function = local_loop(target, shard) if target in LOOPS else LOCAL[target]
        everywhere = function, here.situation, repr(arguments), repr(dtypes), self.step.device
        placed = *everywhere, tuple(self.where.items())
        traced = TRACED.get(everywhere) or TRACED.get(placed)
        if traced is None:

            def typed(*args, **kwargs):
                """Cast to the dtypes of the unsplit operator."""
                result = function(here, *args, **kwargs)
                if isinstance(result, torch.Tensor):
                    return result.to(dtypes[0])
                return tuple(x if x is None else x.to(t) for x, t in zip(result, dtypes, strict=True))

            traced = template(typed, args, kwargs, self.step.device)
            if len(TRACED) >= MOST_TRACED:
                TRACED.clear()
            TRACED[placed if here.asked_where else everywhere] = traced
        return paste(self.graph, traced, args, kwargs)

    def record(self, node: fx.Node, result, layouts: list[Layout], local: list[Spec]) -> None:
        """Record where the outputs of an operator are, and set the meta of the appended nodes."""
        if isinstance(result, fx.Node):
            result = self.outputs(node, result, local)
        origin = {key: node.meta[key] for key in ORIGIN if key in node.meta}
        for emitted in reversed(self.graph.nodes):
            if "label" in emitted.meta:
                break
            emitted.meta = {**emitted.meta, **origin}
        for i, (part, layout, spec) in enumerate(zip(result, layouts, local, strict=True)):
            if part is None:  # an optional output that is not computed
                continue
            val = part.meta.setdefault("val", spec)
            assert val == spec, f"{node.meta['label']}: the part of output {i} is {val}, not {spec}"
            self.versions[node, i] = {(layout, ""): part}

    def version(self, node: fx.Node, layout: Layout, phase: str) -> fx.Node:
        """Return a value in a layout: an existing version, or one resharded from the cheapest source."""
        versions = self.versions[source(node)]
        for key in ((layout, ""), (layout, phase)):
            if key in versions:
                return versions[key]
        spec: Spec = node.meta["val"]
        paths = [
            (reshard(at, layout, spec.shape, self.mesh, spec.dtype.itemsize), at, tag)
            for at, tag in versions
            if tag in ("", phase)
        ]
        steps, at, tag = min(paths, key=lambda p: self.cost(p[0], spec))
        part = versions[at, tag]
        for step in steps:
            part = move(self.graph, part, step, spec.shape, self.mesh, self.where)
            part.meta |= {"phase": phase, "label": node.meta["label"]}
            tag = phase if step.kind == "all_gather" else tag
            versions.setdefault((step.target, tag), part)
        return part

    def cost(self, steps: list[ReshardStep], spec: Spec) -> tuple[int, int]:
        return sum(s.sent(spec.shape, spec.dtype.itemsize, self.mesh) for s in steps), len(steps)
