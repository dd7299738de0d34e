"""Unrolling: a step whose sequence is cut into chunks that are computed one after the other, or whose batch is cut
into copies of the model that are computed beside each other.

That is parallelism in time instead of space: the step is sharded over an axis of as many ranks as there are parts
(`cp` or `dp` of `plan.textbook`), and all ranks' graphs become one, in which a collective is what it means: a sum of
values, another part's value. Every call knows its chunk (`meta["slice"]`) or copy (`meta["copy"]`).

    forward    a chunk reads of itself and of those before: keys and values, where attention is causal
    backward   of itself and of those behind
    update     as it was

A model in which a token sees later ones cannot be cut so. Pipelines of chunks hold fewer activations at once and have
shorter bubbles than pipelines of whole sequences (`plan.schedule`).

Copies may be computed in any order: one computes while another communicates (`analysis.overlap`). Their gradients are
summed before they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tutti.hardware import Cluster
from tutti.ir.costs import annotate_costs
from tutti.ir.labels import annotate_labels
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE, Call, StepGraph
from tutti.lower.collectives import COLLECTIVES, parse_ppermute
from tutti.lower.emit import Emitter, Shape
from tutti.lower.order import sort
from tutti.lower.shard import REPLICATED, Sharder
from tutti.ops import attention, source
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.stages import Reads
from tutti.plan.textbook import Textbook
from tutti.tracing.anew import make_without_operands
from tutti.tracing.simplify import simplify

aten = torch.ops.aten
MUCH = 0.01  # of the work
COMBINE = {"sum": aten.add.Tensor, "avg": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default}


def unroll(step: StepGraph, sequence_chunks: int) -> StepGraph:
    """The step with its sequence, dim 1 of the batch, in so many chunks; itself for one.

    Raises ValueError for a length that they do not divide, and where a token sees later ones.
    """
    if sequence_chunks == 1:
        return step
    for node in step.calls:
        if node.target is attention.FORWARD and not attention.causal(node.args, 4):
            what = "has a mask" if "attn_mask" in node.kwargs else "is not causal"
            raise ValueError(f"the sequence cannot be cut into chunks: {node.meta['name']} {what}")
    unroller = _Unroller(step, sequence_chunks, Textbook(cp=sequence_chunks))
    made = unroller.unroll()
    unroller.order(made)
    annotate_labels(made)
    return made


def copy(step: StepGraph, batch_splits: int) -> StepGraph:
    """The step with its batch, dim 0, in so many copies; itself for one. What needs the whole batch is done once.

    Raises ValueError for a batch that they do not divide, and for a step whose sequence is cut.
    """
    if batch_splits == 1:
        return step
    if step.sequence_chunks > 1:
        raise ValueError("a step is cut into chunks of its sequence or into copies of its batch, not into both")
    sizes = {name: step.spec(f"batch:{name}").shape for name in step.names("batch")}
    for name, shape in sizes.items():
        if shape and shape[0] % batch_splits:
            raise ValueError(
                f"the batch cannot be cut into copies: {name} of {shape} does not divide into {batch_splits}"
            )
    made = _Unroller(step, batch_splits, Textbook(dp=batch_splits)).unroll()
    for node in made.graph.nodes:
        node.meta["copy"] = node.meta.pop("slice", 0)
        if node.op == "call_function" and "label" in node.meta:
            node.meta["of"] = node.meta["label"].rpartition("/")[2]
    annotate_labels(made)
    return made


class _Unroller:
    """sequence_chunks: how many parts; each call knows its own as `slice`. book: the plan that splits the step."""

    def __init__(self, step: StepGraph, sequence_chunks: int, book: Textbook):
        self.step, self.sequence_chunks = step, sequence_chunks
        any_cluster = Cluster.parse(f"h100:{sequence_chunks}x1")
        self.plan = Planner(step, any_cluster).textbook(book).plan()
        self.graph = fx.Graph()
        self.whole = False  # whether gradients are
        self.chunks = [_Chunk(step, self.plan, number, self.graph) for number in range(sequence_chunks)]

    def unroll(self) -> StepGraph:
        step, inputs = self.step, {}
        for name, node in step.inputs.items():
            inputs[name] = self.graph.placeholder(node.name)
            inputs[name].meta = {**node.meta, "slice": 0}
            for chunk in self.chunks:
                chunk.made[node, 0] = {(REPLICATED, ""): inputs[name]}
        for node in sorted(step.calls, key=lambda node: node.meta["phase"] == UPDATE):
            if node.meta["phase"] == UPDATE:
                self.gradients()
            if node.target is not operator.getitem:
                self.together(lambda chunk, node=node: chunk.call(node), node.meta["phase"])
        outputs = []
        for node in step.outputs.values():
            phase = node.meta["phase"]
            outputs += self.together(lambda chunk, n=node, phase=phase: chunk.version(n, REPLICATED, phase), phase)[:1]
        self.graph.output(tuple(outputs)).meta = {"path": "", "phase": UPDATE, "val": None, "slice": 0}
        return self.finished(inputs)

    def gradients(self) -> None:
        """Put together what chunks have of gradients: once for all who read them, as work of the backward pass."""
        for name in () if self.whole else self.step.gradient_names:
            node = self.step.outputs[name]
            found = self.together(lambda chunk, n=node: chunk.version(n, REPLICATED, BACKWARD), BACKWARD)
            for chunk, whole in zip(self.chunks, found, strict=True):
                chunk.made[source(node)][REPLICATED, ""] = whole
        self.whole = True

    def together(self, write: Callable[[_Chunk], Any], phase: str) -> list[Any]:
        """Let all chunks write the same thing, in the order in which they are computed, and resolve the collectives
        between them. What each has written."""
        found = {}
        for chunk in reversed(self.chunks) if phase == BACKWARD else self.chunks:
            found[chunk.number] = write(chunk), self.sign(chunk.number)
        results, collectives = zip(*(found[i] for i in range(self.sequence_chunks)), strict=True)
        for group in zip(*collectives, strict=True):
            for node, value in zip(group, self.meant(group, phase), strict=True):
                node.target, node.args = aten.alias.default, (value,)
        return list(results)

    def sign(self, number: int) -> list[Call]:
        """Mark what has been written since this was called last as one chunk's; the collectives in it."""
        found = []
        for node in reversed(self.graph.nodes):
            if "slice" in node.meta:
                break
            node.meta = {"path": "", **node.meta, "slice": number}
            if node.target in COLLECTIVES:
                found.insert(0, node)
        return found

    def meant(self, group: Sequence[Call], phase: str) -> list[fx.Node]:
        """What each chunk gets of a collective in which these are all chunks' parts."""
        kind, (_, _, *how) = COLLECTIVES[group[0].target], group[0].args
        given = [node.args[0] for node in group]
        emit = Emitter(self.graph, {**group[0].meta, "val": given[0].meta["val"]})
        local = given[0].meta["val"].shape
        last = self.sequence_chunks - 1 if phase == FORWARD else 0
        if kind == "ppermute":
            by, edge = parse_ppermute(how[0])
            found = []
            for i in range(self.sequence_chunks):
                within = edge is None or 0 <= i - by < self.sequence_chunks
                found.append(given[(i - by) % self.sequence_chunks] if within else self.full(emit, local, edge or 0.0))
        elif kind == "all_reduce":
            found = [self.combined(emit, given, how[0], phase)] * self.sequence_chunks
        elif kind == "all_gather":
            found = [self.stacked(emit, given)] * self.sequence_chunks
        else:  # the i-th row is for the i-th chunk
            rows = [[emit(aten.select.int, (x, 0, i), local[1:]) for x in given] for i in range(self.sequence_chunks)]
            if kind == "reduce_scatter":
                found = [self.combined(emit, row, how[0], phase) for row in rows]
            else:
                found = [self.stacked(emit, row) for row in rows]
        self.sign(last)
        return found

    def full(self, emit: Emitter, shape: Shape, number: float) -> fx.Node:
        made = emit(aten.full.default, (list(shape), number), shape)
        made.kwargs = {"dtype": emit.dtype, "device": self.step.device, "pin_memory": False}
        return made

    def stacked(self, emit: Emitter, given: Sequence[fx.Node]) -> fx.Node:
        shape = given[0].meta["val"].shape
        rows = [emit(aten.unsqueeze.default, (x, 0), (1, *shape)) for x in given]
        return emit(aten.cat.default, (rows, 0), (len(rows), *shape))

    def combined(self, emit: Emitter, given: Sequence[fx.Node], op: str, phase: str) -> fx.Node:
        """In the order in which the chunks are computed."""
        total, *others = reversed(given) if phase == BACKWARD else given
        for x in others:
            total = emit(COMBINE[op], (total, x), x.meta["val"].shape)
            total.meta["joins"] = op == "sum"
        return emit(aten.div.Scalar, (total, self.sequence_chunks), total.meta["val"].shape) if op == "avg" else total

    def finished(self, inputs: dict[str, fx.Node]) -> StepGraph:
        graph, step = self.graph, self.step
        sort(graph)
        make_without_operands(graph, step.device)
        simplify(graph)
        (output,) = (n for n in graph.nodes if n.op == "output")
        made = StepGraph(
            graph, inputs, dict(zip(step.outputs, output.args[0], strict=True)), step.constants, step.device
        )
        annotate_costs(made)
        return made

    def order(self, made: StepGraph) -> None:
        """What reads of chunks that are computed later belongs to the last of them: sums over all tokens.

        Raises ValueError where that is much of the work.
        """
        reads, late = Reads(made), []
        for node in reads.calls:
            phase, own = node.meta["phase"], node.meta["slice"]
            if phase != UPDATE:
                read = [x.meta["slice"] for x in reads.of(node) if x.op == "call_function" and x.meta["phase"] == phase]
                node.meta["slice"] = max([own, *read]) if phase == FORWARD else min([own, *read])
            if node.meta["slice"] != own:
                late.append(node)
        if sum(node.meta["flops"] for node in late) > MUCH * made.flops:
            name = max(late, key=lambda node: node.meta["flops"]).meta["label"]
            raise ValueError(f"the sequence cannot be cut into chunks: {name} needs all of it at once")


class _Chunk(Sharder):
    """Writes one chunk's (or copy's) part, which lies in memory as the runtime will arrange it."""

    def __init__(self, step: StepGraph, plan: Plan, number: int, graph: fx.Graph):
        super().__init__(step, plan, number)
        self.number, self.graph = number, graph

    def arranged(self, part: fx.Node, arrange: Callable) -> fx.Node:
        return part
