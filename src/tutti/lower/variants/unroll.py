"""Unrolling: cut a step's sequence into chunks that are computed one after the other, or its batch into copies that are
computed side by side.

This is parallelism in time instead of space. The step is sharded over an axis with one rank per part (`cp` or `dp` of
`plan.textbook`). The graphs of all ranks are merged into one, in which each collective is replaced by its meaning: a
sum, or another part's value. Every call has its chunk in meta["slice"], or its copy in meta["copy"].

    forward    a chunk reads itself and the chunks before: keys and values of causal attention
    backward   itself and the chunks after
    update     unchanged

A model in which tokens see later ones cannot be cut into chunks. Pipelines of chunks have fewer activations alive and
shorter bubbles than pipelines of full sequences (`plan.pipeline.schedule`).

Copies can run in any order: one computes while another communicates (`analysis.overlap`). Their gradients are summed
before they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tutti.hardware import Cluster
from tutti.ir.kind import Kind
from tutti.ir.labels import annotate_labels
from tutti.ir.step_graph import BACKWARD, FORWARD, UPDATE, Call, StepGraph
from tutti.lower.collectives import COLLECTIVES, parse_ppermute
from tutti.lower.emit import Emitter, Shape
from tutti.lower.overlap.order import sort
from tutti.lower.shard import REPLICATED, Sharder
from tutti.ops import source
from tutti.ops.attention import attention
from tutti.ops.costs import annotate_costs
from tutti.plan.pipeline.reads import Reads
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner
from tutti.plan.textbook import Textbook
from tutti.tracing.rewrite.like_operators import make_without_operands
from tutti.tracing.rewrite.remove_redundant import simplify

aten = torch.ops.aten
MUCH = 0.01  # fraction of the FLOPs
COMBINE = {"sum": aten.add.Tensor, "avg": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default}


def unroll(step: StepGraph, sequence_chunks: int) -> StepGraph:
    """Cut the sequence of a step (dim 1 of the batch) into chunks. Returns the step itself for one chunk.

    Raises ValueError if they do not divide the sequence, or if tokens see later ones.
    """
    if sequence_chunks == 1:
        return step
    for node in step.calls:
        if node.target is attention.FORWARD and not attention.causal(node.args, 4):
            what = "has a mask" if "attn_mask" in node.kwargs else "is not causal"
            raise ValueError(f"the sequence cannot be cut into chunks: {node.meta['name']} {what}")
    unroller = _Unroller(step, sequence_chunks, Textbook(cp=sequence_chunks))
    result = unroller.unroll()
    unroller.order(result)
    annotate_labels(result)
    return result


def copy(step: StepGraph, batch_splits: int) -> StepGraph:
    """Cut the batch of a step (dim 0) into copies. Work on the full batch runs once. Returns the step itself for one.

    Raises ValueError if they do not divide the batch, or if the sequence is cut.
    """
    if batch_splits == 1:
        return step
    if step.sequence_chunks > 1:
        raise ValueError("a step cannot have both chunks of its sequence and copies of its batch; choose one")
    sizes = {name: step.spec(Kind.BATCH.at(name)).shape for name in step.names("batch")}
    for name, shape in sizes.items():
        if shape and shape[0] % batch_splits:
            raise ValueError(
                f"the batch cannot be cut into {batch_splits} copies: they do not divide dim 0 of {name}, {shape}"
            )
    result = _Unroller(step, batch_splits, Textbook(dp=batch_splits)).unroll()
    for node in result.graph.nodes:
        node.meta["copy"] = node.meta.pop("slice", 0)
        if node.op == "call_function" and "label" in node.meta:
            node.meta["of"] = node.meta["label"].rpartition("/")[2]
    annotate_labels(result)
    return result


class _Unroller:
    """sequence_chunks: number of parts; each call has its own in `slice`. book: the plan that splits the step."""

    def __init__(self, step: StepGraph, sequence_chunks: int, book: Textbook):
        self.step, self.sequence_chunks = step, sequence_chunks
        any_cluster = Cluster.parse(f"h100:{sequence_chunks}x1")
        self.plan = Planner(step, any_cluster).textbook(book, stripes=False).plan()
        for label, layout in self.plan.inputs.items():
            if any(split.unit for split in layout.splits.values()):
                raise ValueError(f"{label}: its sequence does not divide into {sequence_chunks} chunks")
        self.graph = fx.Graph()
        self.whole = False  # whether gradients are
        self.chunks = [_Chunk(step, self.plan, number, self.graph) for number in range(sequence_chunks)]

    def unroll(self) -> StepGraph:
        step, inputs = self.step, {}
        for name, node in step.inputs.items():
            inputs[name] = self.graph.placeholder(node.name)
            inputs[name].meta = {**node.meta, "slice": 0}
            for chunk in self.chunks:
                chunk.versions[node, 0] = {(REPLICATED, ""): inputs[name]}
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
        """Combine the gradients of all chunks in the backward pass, once for all readers."""
        for name in () if self.whole else self.step.gradient_names:
            node = self.step.outputs[name]
            totals = self.together(lambda chunk, n=node: chunk.version(n, REPLICATED, BACKWARD), BACKWARD)
            for chunk, whole in zip(self.chunks, totals, strict=True):
                chunk.versions[source(node)][REPLICATED, ""] = whole
        self.whole = True

    def together(self, write: Callable[[_Chunk], Any], phase: str) -> list[Any]:
        """Call `write` for all chunks, in the order in which they run, and resolve the collectives between them.

        Returns the result for each chunk.
        """
        by_chunk = {}
        for chunk in reversed(self.chunks) if phase == BACKWARD else self.chunks:
            by_chunk[chunk.number] = write(chunk), self.sign(chunk.number)
        results, collectives = zip(*(by_chunk[i] for i in range(self.sequence_chunks)), strict=True)
        for group in zip(*collectives, strict=True):
            for node, value in zip(group, self.results_of(group, phase), strict=True):
                node.target, node.args = aten.alias.default, (value,)
        return list(results)

    def sign(self, number: int) -> list[Call]:
        """Assign the nodes appended since the last call to one chunk. Returns the collectives among them."""
        collectives = []
        for node in reversed(self.graph.nodes):
            if "slice" in node.meta:
                break
            node.meta = {"path": "", **node.meta, "slice": number}
            if node.target in COLLECTIVES:
                collectives.insert(0, node)
        return collectives

    def results_of(self, group: Sequence[Call], phase: str) -> list[fx.Node]:
        """Return the result of a collective for each chunk. group: the node of the collective in each chunk."""
        kind, (_, _, *how) = COLLECTIVES[group[0].target], group[0].args
        operands = [node.args[0] for node in group]
        emit = Emitter(self.graph, {**group[0].meta, "val": operands[0].meta["val"]})
        local = operands[0].meta["val"].shape
        last = self.sequence_chunks - 1 if phase == FORWARD else 0
        if kind == "ppermute":
            by, edge = parse_ppermute(how[0])
            results = []
            for i in range(self.sequence_chunks):
                within = edge is None or 0 <= i - by < self.sequence_chunks
                other = operands[(i - by) % self.sequence_chunks]
                results.append(other if within else self.full(emit, local, edge or 0.0))
        elif kind == "all_reduce":
            results = [self.combined(emit, operands, how[0], phase)] * self.sequence_chunks
        elif kind == "all_gather":
            results = [self.stacked(emit, operands)] * self.sequence_chunks
        else:  # row i is for chunk i
            places = range(self.sequence_chunks)
            rows = [[emit(aten.select.int, (x, 0, i), local[1:]) for x in operands] for i in places]
            if kind == "reduce_scatter":
                results = [self.combined(emit, row, how[0], phase) for row in rows]
            else:
                results = [self.stacked(emit, row) for row in rows]
        self.sign(last)
        return results

    def full(self, emit: Emitter, shape: Shape, number: float) -> fx.Node:
        node = emit(aten.full.default, (list(shape), number), shape)
        node.kwargs = {"dtype": emit.dtype, "device": self.step.device, "pin_memory": False}
        return node

    def stacked(self, emit: Emitter, values: Sequence[fx.Node]) -> fx.Node:
        shape = values[0].meta["val"].shape
        rows = [emit(aten.unsqueeze.default, (x, 0), (1, *shape)) for x in values]
        return emit(aten.cat.default, (rows, 0), (len(rows), *shape))

    def combined(self, emit: Emitter, values: Sequence[fx.Node], op: str, phase: str) -> fx.Node:
        """Reduce the values of chunks, in the order in which these run."""
        total, *others = reversed(values) if phase == BACKWARD else values
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
        result = StepGraph(
            graph, inputs, dict(zip(step.outputs, output.args[0], strict=True)), step.constants, step.device
        )
        annotate_costs(result)
        return result

    def order(self, result: StepGraph) -> None:
        """Assign nodes that read chunks which run later, such as sums over all tokens, to the last of these chunks.

        Raises ValueError if that is much of the work.
        """
        reads, late = Reads(result), []
        for node in reads.calls:
            phase, own = node.meta["phase"], node.meta["slice"]
            if phase != UPDATE:
                read = [x.meta["slice"] for x in reads.of(node) if x.op == "call_function" and x.meta["phase"] == phase]
                node.meta["slice"] = max([own, *read]) if phase == FORWARD else min([own, *read])
            if node.meta["slice"] != own:
                late.append(node)
        if sum(node.meta["flops"] for node in late) > MUCH * result.flops:
            name = max(late, key=lambda node: node.meta["flops"]).meta["label"]
            raise ValueError(f"the sequence cannot be cut into chunks: {name} needs all of it at once")


class _Chunk(Sharder):
    """Appends one chunk's (or copy's) part, laid out in memory as the runtime will have it."""

    def __init__(self, step: StepGraph, plan: Plan, number: int, graph: fx.Graph):
        super().__init__(step, plan, number)
        self.number, self.graph = number, graph

    def arranged(self, part: fx.Node, arrange: Callable) -> fx.Node:
        return part
