"""The planning problem: a StepGraph with repeated layers folded, so that its size does not depend on depth.

Nodes with the same label become one `Operator`. Inputs are operators without operands, and their dims are factors. An
edge connects two labels if any of their nodes are connected.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from string import ascii_lowercase
from types import MappingProxyType

from torch import fx

from tutti.hardware.operators import keeps_rows, lies_transposed
from tutti.ir.coupling import coupled
from tutti.ir.kind import Kind, kind_of
from tutti.ir.losses import made_with
from tutti.ir.op_info import SECONDS
from tutti.ir.spec import Spec
from tutti.ir.step_graph import BACKWARD, UPDATE, Call, StepGraph
from tutti.ops import operands, replicated, rule_of, source, specs
from tutti.ops.rule import Rule
from tutti.ops.workspaces import workspace_pairs
from tutti.plan.layouts.choice import WHOLE, Position

Tensor = tuple[str, int]  # label of the operator that makes it, and index of the output


@dataclass
class Operator:
    """All nodes with one label."""

    label: str
    rule: Rule
    outputs: list[Spec]
    phase: str
    flops: int  # FLOPs of one node
    bytes: int
    node: Call = None  # one of the nodes; None for an input
    count: int = 0
    workspace: int = 0  # bytes that a node's forward pass keeps for the backward pass beside its outputs, unsplit
    one_program: object = None  # the operator of its place if the forward pass is in the same Program

    @cached_property
    def operands(self) -> list[Spec]:
        """Specs of its operands, in order."""
        return [] if self.node is None else [x.meta["val"] for x in operands(self.node)]

    @cached_property
    def signature(self) -> tuple:
        """All that the price of its parts depends on. Equal operators of different layers have equal signatures."""
        if self.node is None:
            return (self.kind,)
        arguments = fx.map_arg((self.node.args, self.node.kwargs), lambda x: "operand")
        facts = self.flops, self.bytes, self.transposed, self.in_rows, self.brings_gradients, self.one_program
        return self.target, repr(arguments), tuple(self.operands), tuple(self.outputs), *facts

    @cached_property
    def transposed(self) -> bool:
        """Whether the first matrix of a matrix product is a transposed view."""
        return self.node is not None and lies_transposed(self.node)

    @cached_property
    def in_rows(self) -> bool:
        """Whether neighbours in the last dim of the first operand are neighbours in memory."""
        first = next(iter(operands(self.node)), None) if self.node is not None else None
        return first is None or keeps_rows(first)

    @cached_property
    def brings_gradients(self) -> bool:
        """Whether this is a loss that is computed together with its gradients if its vocabulary is not split."""
        return self.node is not None and made_with(self.node) is not None

    @property
    def is_input(self) -> bool:
        return self.node is None

    @property
    def target(self) -> object:
        return self.node and self.node.target

    @property
    def kind(self) -> str:
        """The kind of an input (param, buffer, batch, ...); the phase of an operator."""
        return kind_of(self.label) if self.is_input else self.phase


@dataclass(frozen=True)
class Edge:
    """A tensor and an operand that reads it. `operand` -1 marks the successor of an input."""

    tensor: Tensor
    reader: str
    operand: int


@dataclass
class Problem:
    """Operators, edges with multiplicities, and where each factor may be split (`cuts`)."""

    operators: dict[str, Operator]
    edges: Mapping[Edge, int]
    outputs: Mapping[Tensor, int]  # outputs that leave the step replicated: the loss
    without_rule: list[str] = field(default_factory=list)  # operators that no rule splits
    cuts: dict[str, dict[str, set[Position]]] = field(default_factory=dict)
    coupled: bool = False  # whether updates wait for gradients of other parameters

    @cached_property
    def weights(self) -> set[str]:
        """Parameters, and views and casts of them."""
        params = {label for label, o in self.operators.items() if o.kind == "param"}
        views = self.reached_from("param") - self.reached_from("batch")
        return params | {v for v in views if self.operators[v].phase != UPDATE}

    @cached_property
    def weight_operand(self) -> dict[str, int]:
        """The index of the operand that is a weight, for each operator that reads one."""
        return {e.reader: e.operand for e in self.edges if e.tensor[0] in self.weights and e.operand >= 0}

    @cached_property
    def gradients(self) -> set[str]:
        """Labels of backward operators that the update reads, and of operands of those that are views."""
        labels: set[str] = set()
        todo = [label for label, o in self.operators.items() if o.phase == UPDATE]
        makers = defaultdict(list)
        for edge in self.edges:
            makers[edge.reader].append(edge.tensor[0])
        while todo:
            for maker in makers[todo.pop()]:
                o = self.operators[maker]
                if o.phase == BACKWARD and maker not in labels:
                    labels.add(maker)
                    todo += [maker] if not o.bytes else []
        return labels

    @cached_property
    def handed_on(self) -> set[tuple[str, int]]:
        """The outputs (label, index) in `gradients` that are gradients of parameters, and operands of their views."""
        views = {label for label in self.gradients if not self.operators[label].bytes}
        return {e.tensor for e in self.edges if e.tensor[0] in self.gradients
                and (e.reader in views or self.operators[e.reader].phase == UPDATE)}  # fmt: skip

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, unsplit."""
        makers = ((self.operators[label], i) for label, i in self.handed_on)
        return sum(o.count * o.outputs[i].bytes for o, i in makers if o.bytes)  # views have no memory of their own

    def weight_factors(self, o: Operator) -> set[str]:
        """The factors of an operator that are dims of its weight; empty if it reads none."""
        if o.label not in self.weight_operand:
            return set()
        return {factor for dim in o.rule.inputs[self.weight_operand[o.label]] for factor in dim}

    def reached_from(self, kind: str) -> set[str]:
        """The operators whose values depend on an input of this kind."""
        readers: dict[str, list[str]] = defaultdict(list)
        for edge in self.edges:
            if edge.operand >= 0:
                readers[edge.tensor[0]].append(edge.reader)
        reached, todo = set(), [label for label, o in self.operators.items() if o.is_input and o.kind == kind]
        while todo:
            new = [r for r in readers[todo.pop()] if r not in reached]
            reached.update(new)
            todo += new
        return reached


def problem_of(step: StepGraph) -> Problem:
    """The planning problem of a step."""
    operators: dict[str, Operator] = {}
    edges: Counter[Edge] = Counter()
    outputs: Counter[Tensor] = Counter()
    without: set[str] = set()
    for node in step.graph.nodes:
        if node.op == "output" or node.target is operator.getitem:
            continue
        label = node.meta["label"]
        if label not in operators:
            is_input = node.op == "placeholder"
            rule = _input_rule(node.meta["val"]) if is_input else rule_of(node)
            if rule is None:
                without.add(str(node.target))
                rule = replicated(node)
            operators[label] = Operator(
                label,
                rule,
                specs(node),
                node.meta["phase"],
                node.meta["flops"],
                node.meta["bytes"],
                None if is_input else node,
            )
        operators[label].count += 1
        for i, x in enumerate(operands(node) if node.op == "call_function" else ()):
            edges[Edge(_tensor(x), label, i)] += 1
    for forward, backward, rule in workspace_pairs(step.graph):
        operators[forward.meta["label"]].workspace = rule.size(forward)
        if rule.backward in SECONDS:
            operators[backward.meta["label"]].one_program = rule.backward
    for name, node in step.outputs.items():
        if name in step.inputs:
            edges[Edge(_tensor(node), step.inputs[name].meta["label"], -1)] += 1
        elif kind_of(name) != Kind.GRAD:
            outputs[_tensor(node)] += 1
    problem = Problem(operators, edges, outputs, sorted(without), coupled=coupled(step.graph))
    problem.cuts = _cuts(problem)
    return problem


def _tensor(node) -> Tensor:
    maker, index = source(node)
    return maker.meta["label"], index


def _input_rule(spec: Spec) -> Rule:
    letters = ascii_lowercase[: len(spec.shape)]
    return Rule(
        f"-> {' '.join(letters)}",
        (),
        (tuple((c,) for c in letters),),
        dict(zip(letters, spec.shape, strict=True)),
    )


def striped(problem: Problem, labels: Iterable[str], parts: int) -> Problem:
    """The problem in which dim 1 of some inputs, and what follows from it, may also be split into stripes: every
    `parts`-th element goes to the same part."""
    seeds = {}
    for label in labels:
        rule = problem.operators[label].rule
        factor = rule.outputs[0][1][0]
        seeds[label] = factor, (rule.sizes[factor] // parts, 1)
    return replace(problem, cuts=_cuts(problem, seeds))


def _cuts(
    problem: Problem, seeds: Mapping[str, tuple[str, Position]] = MappingProxyType({})
) -> dict[str, dict[str, set[Position]]]:
    """Where each factor may be split: as a whole, and as follows from neighbours' dims. seeds: other positions of
    factors, by label.

    A dim of (heads, head size) can be split between heads, unevenly in units of the head size, or inside the heads. A
    matmul that makes this dim as a single factor learns this from the reshape that follows. Cuts propagate along
    tensors in both directions until none is new.
    """
    cuts = {label: {f: {WHOLE} for f in o.rule.sizes} for label, o in problem.operators.items()}
    for label, (factor, position) in seeds.items():
        cuts[label][factor].add(position)
    dims: dict[Tensor, dict[int, set[Position]]] = defaultdict(lambda: defaultdict(lambda: {WHOLE}))
    places: dict[str, list[tuple[Tensor, tuple]]] = defaultdict(list)  # operator -> its tensors, with their dims
    for label, o in problem.operators.items():
        places[label] += [((label, i), out) for i, out in enumerate(o.rule.outputs)]
    for edge in problem.edges:
        rule = problem.operators[edge.reader].rule
        places[edge.reader].append((edge.tensor, rule.outputs[0] if edge.operand < 0 else rule.inputs[edge.operand]))
    changed = True
    while changed:
        changed = False
        for label, touched in places.items():
            rule = problem.operators[label].rule
            for tensor, operand in touched:
                for factor, own in cuts[label].items():
                    position = rule.position(operand, factor)
                    if position is None or factor in rule.whole:
                        continue
                    dim, before, after = position
                    shared, size = dims[tensor][dim], rule.sizes[factor]
                    learned = {
                        (outer // before, max(unit // after, 1))
                        for outer, unit in shared
                        if not outer % before
                        and not (unit % after and after % unit)
                        and _divides(outer // before, max(unit // after, 1), size)
                    } - own
                    taught = {(outer * before, unit * after) for outer, unit in own} - shared
                    own |= learned
                    shared |= taught
                    changed |= bool(learned or taught)
    return cuts


def _divides(outer: int, unit: int, size: int) -> bool:
    return 1 <= outer * unit < size and size % (outer * unit) == 0
