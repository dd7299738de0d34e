"""Levels: how a Program becomes something that runs.

O0 runs it operator by operator. O1 compiles what fuses into one kernel, O2 whole layers (`run.segments`). Where devices
compute on while collectives are under way, the order of the Program is one that hides them (`run.overlap`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from tutti.cluster import Cluster
from tutti.lower.bucket import bucket
from tutti.lower.inplace import update_in_place
from tutti.lower.one_pass import make_losses_in_one_pass
from tutti.lower.overwrite import write_over
from tutti.lower.program import Program
from tutti.lower.regions import divide
from tutti.lower.tiers import use_tiers
from tutti.lower.workspace import keep_workspaces
from tutti.lower.write_out import write_out
from tutti.nn import attention, linear_cross_entropy
from tutti.run import overlap
from tutti.run.carrier import Carrier
from tutti.run.code import Inspect, Meter, Run, Stopwatch, generate
from tutti.run.compiled import compile_ahead
from tutti.run.ledger import Ledger
from tutti.run.memory import CPU, Platform, spans
from tutti.run.nonfinite import Inspector
from tutti.run.segment_calls import compile_segments
from tutti.run.segments import gather_kernels, gather_layers, gather_parts
from tutti.run.simulated.kernels import fuse
from tutti.run.simulated.replay import replay

Pass = Callable[[fx.Graph], None]


@dataclass(frozen=True)
class Level:
    """What is done to a Program's graph before an order is looked for in which communication is hidden, and after; then
    its segments are compiled, if the level has any."""

    summary: str
    before: tuple[Pass, ...]
    after: tuple[Pass, ...]


ALL = make_losses_in_one_pass, keep_workspaces, bucket, use_tiers, update_in_place

LEVELS = {
    "O0": Level("operator by operator", ALL, (write_over,)),
    "O1": Level("what fuses into one kernel is compiled", (*ALL, write_out), (gather_parts, gather_kernels)),
    "O2": Level("whole layers are compiled", (*ALL, write_out), (gather_parts, gather_layers)),
}


def check_level(level: str) -> None:
    """ValueError where there is no such level."""
    if level not in LEVELS:
        raise ValueError(f"no level {level!r}; there are {', '.join(LEVELS)}")


def available(level: str) -> str:
    """The level, but O0, with a warning, where it compiles and there is no C++ compiler."""
    if level != "O0" and not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn(f"level {level} needs a C++ compiler (g++, clang++); running operator by operator", stacklevel=4)
        return "O0"
    return level


@dataclass(frozen=True)
class Prepared:
    """What runs a Program. timed: makes what also tells a stopwatch. peaks: of each call the label, and bytes that the
    device then holds beyond the inputs."""

    run: Run
    timed: Callable[[Stopwatch], Run]
    peaks: Sequence[tuple[str, int]] = ()


def improve(program: Program, level: str, cluster: Cluster | None = None) -> Program:
    """Apply the passes of a level, all but compilation, in place: the form in which a Program is simulated.

    cluster: on whose devices communication is to be hidden.
    """
    divide(program)
    _change(program, LEVELS[level].before)
    if cluster:
        overlap.apply(program.graph, overlap.order(program, cluster, level))
    _change(program, LEVELS[level].after)
    return program


def _change(program: Program, passes: tuple[Pass, ...]) -> None:
    for change in passes:
        change(program.graph)


def prepare(
    programs: Sequence[Program],
    level: str,
    cluster: Cluster | None = None,
    agree: Callable[[list[str]], bool] = lambda said: True,
    carrier: Carrier | None = None,
    ledgers: Sequence[Ledger] = (),
    on: Platform = CPU,
    inspector: Inspector | None = None,
) -> list[Prepared]:
    """What runs Programs of several ranks at a level. Their graphs are changed into that.

    cluster: as in `improve`. agree: whether all ranks of the mesh are given the same as these ones, a text for each;
    called by all of them. Communication is hidden where they agree on the order. carrier: for Programs that use tiers.
    ledgers: account for the memory of their calls, by what an allocator `on` a platform gives. Without a C++ compiler
    O1 and O2 become O0, with a warning. inspector: looks at all that is made.
    """
    level = available(level)
    for program in programs:
        divide(program)
        _change(program, LEVELS[level].before)
    if cluster:
        orders = [overlap.order(program, cluster, level) for program in programs]
        if agree([overlap.digest(order) for order in orders]):
            for program, order in zip(programs, orders, strict=True):
                overlap.apply(program.graph, order)
    for program in programs:
        _change(program, LEVELS[level].after)
    each: Sequence[Ledger | None] = ledgers or [None] * len(programs)
    return [_prepared(program, level, carrier, ledger, on, inspector.of(program) if inspector else None)
            for program, ledger in zip(programs, each, strict=True)]  # fmt: skip


def _prepared(program: Program, level: str, carrier: Carrier | None, ledger: Ledger | None, on: Platform,
              inspect: Inspect | None) -> Prepared:  # fmt: skip
    graph, meter, peaks, known = program.graph, None, [], {}
    if ledger:
        known = spans(fuse(replay(program), level), on)
        first = min((before for _, before, _ in known.values()), default=0)
        peaks = [(node.meta.get("label", ""), total - first) for node, (_, _, total) in known.items()]
    if level != "O0":
        attention.use(graph)
        if on is CPU:
            linear_cross_entropy.use_kernels(graph)
    compile_segments(graph, level)
    if ledger:
        meter = Meter(ledger, _needs(graph, known))
    graph.lint()
    make = partial(generate, graph, carrier, meter, inspect)
    return Prepared(_ahead(graph, make()), lambda stopwatch: make(stopwatch=stopwatch), peaks)


def _ahead(graph: fx.Graph, run: Run) -> Run:
    """What runs a graph, and compiles its functions together before it first does."""
    todo = [graph]

    def ahead(*inputs):
        if todo:
            compile_ahead(todo.pop(), inputs)
        return run(*inputs)

    return ahead


def _needs(graph: fx.Graph, known: Mapping[fx.Node, tuple[int, int, int]]) -> dict[fx.Node, int]:
    """Bytes that calls take, beyond what is alive before them; of compiled functions at their peak."""
    found = {}
    for node in graph.nodes:
        parts = sorted(known[n] for n in node.meta.get("inside", [node]) if n in known)
        if parts and (count := max(total for *_, total in parts) - parts[0][1]) > 0:
            found[node] = count
    return found
