"""Prepare a Program for execution at a level: apply the passes, compile segments, and generate the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import fx

from tutti.analysis import overlap
from tutti.analysis.kernels import fuse
from tutti.analysis.memory import CPU, Platform, spans
from tutti.analysis.passes import LEVELS, available, change
from tutti.analysis.replay import replay
from tutti.compile.compiled import compile_ahead
from tutti.compile.segment_calls import compile_segments
from tutti.exec.kernels import joined_rows, native
from tutti.exec.kernels.codegen import Inspect, Meter, Run, Stopwatch, generate
from tutti.exec.nonfinite import Inspector
from tutti.exec.stores.memory_budget import MemoryBudget
from tutti.exec.stores.transfer_engine import TransferEngine
from tutti.hardware import Cluster
from tutti.lower.overlap.regions import divide
from tutti.lower.program import Program
from tutti.nn import rows
from tutti.nn.attention import fused
from tutti.nn.experts import experts_rows
from tutti.nn.linear import linear_rows, linears_rows
from tutti.nn.loss import linear_cross_entropy

PAGED = torch.ops.tutti.paged_attention.default
SEQUENCES = torch.ops.tutti.sequence_attention.default  # with the bits of paged attention


@dataclass(frozen=True)
class Prepared:
    """An executable Program. timed: makes a version that calls a stopwatch. graph: what runs. peaks: label of each
    call, and the bytes that the device holds beyond the inputs."""

    run: Run
    timed: Callable[[Stopwatch], Run]
    graph: fx.Graph
    peaks: Sequence[tuple[str, int]] = ()


def prepare(
    programs: Sequence[Program],
    level: str,
    cluster: Cluster | None = None,
    agree: Callable[[list[str]], bool] = lambda said: True,
    engine: TransferEngine | None = None,
    budgets: Sequence[MemoryBudget] = (),
    on: Platform = CPU,
    inspector: Inspector | None = None,
) -> list[Prepared]:
    """Make the Programs of several ranks executable at a level. Their graphs are changed in place.

    cluster: as in `improve`. agree: whether all ranks of the mesh pass the same texts; communication is hidden if they
    agree on the order. engine: for Programs that use outer tiers. budgets: count the memory of the calls, as the
    allocator `on` a platform allocates it. Without a C++ compiler O1 and O2 become O0, with a warning. inspector: sees
    all intermediate values.
    """
    level = available(level)
    for program in programs:
        divide(program)
        change(program, LEVELS[level].before)
    if cluster:
        orders = [overlap.order(program, cluster, level) for program in programs]
        if agree([overlap.digest(order) for order in orders]):
            for program, order in zip(programs, orders, strict=True):
                overlap.apply(program.graph, order)
    for program in programs:
        change(program, LEVELS[level].after)
    each: Sequence[MemoryBudget | None] = budgets or [None] * len(programs)
    return [_prepared(program, level, engine, budget, on, inspector.of(program) if inspector else None)
            for program, budget in zip(programs, each, strict=True)]  # fmt: skip


def _prepared(program: Program, level: str, engine: TransferEngine | None, budget: MemoryBudget | None, on: Platform,
              inspect: Inspect | None) -> Prepared:  # fmt: skip
    graph, meter, peaks, measured = program.graph, None, [], {}
    if budget:
        measured = spans(fuse(replay(program), level), on)
        first = min((before for _, before, _ in measured.values()), default=0)
        peaks = [(node.meta.get("label", ""), total - first) for node, (_, _, total) in measured.items()]
    if level != "O0":
        fused.use(graph)
        if on is CPU:
            linear_cross_entropy.use_kernels(graph)
    if on is CPU and any(graph.find_nodes(op="call_function", target=x) for x in (PAGED, SEQUENCES)):
        linear_rows.use(graph, rows=inf)  # the bits of a request must not depend on the others
        experts_rows.use(graph)
        if level == "O0":  # the others compile them with what is around them
            rows.use(graph)
            if not inspect:
                native.use(graph)
    elif level == "O0" and graph.find_nodes(op="call_function", target=PAGED):
        rows.use(graph, on_cpu=False)
        linear_rows.use(graph, linears_rows.ROWS, on_cpu=False)
        joined_rows.use(graph)
    compile_segments(graph, level)
    if budget:
        meter = Meter(budget, _needs(graph, measured))
    graph.lint()
    make = partial(generate, graph, engine, meter, inspect)
    return Prepared(_ahead(graph, make()), lambda stopwatch: make(stopwatch=stopwatch), graph, peaks)


def _ahead(graph: fx.Graph, run: Run) -> Run:
    """A generator function that compiles the graph's functions together before the first run."""
    todo = [graph]

    def ahead(*inputs):
        if todo:
            compile_ahead(todo.pop(), inputs)
        return run(*inputs)

    return ahead


def _needs(graph: fx.Graph, measured: Mapping[fx.Node, tuple[int, int, int]]) -> dict[fx.Node, int]:
    """Bytes that each call allocates; for a compiled function its peak."""
    needs = {}
    for node in graph.nodes:
        parts = sorted(measured[n] for n in node.meta.get("inside", [node]) if n in measured)
        if parts and (count := max(total for *_, total in parts) - parts[0][1]) > 0:
            needs[node] = count
    return needs
