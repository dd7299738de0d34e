"""Levels: how a Program becomes something that runs.

O0 runs it operator by operator. O2 compiles what lies between two collectives with `torch.compile`; parts with the
same operators on the same shapes (the layers of a model) share one compiled function.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tutti.lower.bucket import bucket
from tutti.lower.inplace import update_in_place
from tutti.lower.overwrite import write_over
from tutti.lower.program import Program
from tutti.lower.tiers import use_tiers
from tutti.lower.workspace import keep_workspaces
from tutti.run.carrier import Carrier
from tutti.run.code import Meter, Run, generate
from tutti.run.ledger import Ledger
from tutti.run.memory import CPU, Platform, spans
from tutti.run.segments import compile_segments, inline_random
from tutti.run.simulated.kernels import fuse
from tutti.run.simulated.replay import replay

LEVELS: dict[str, tuple[Callable[[fx.Graph], None], ...]] = {
    "O0": (keep_workspaces, bucket, use_tiers, update_in_place, write_over),
    "O2": (keep_workspaces, bucket, use_tiers, update_in_place, inline_random, compile_segments),
}


def check_level(level: str) -> None:
    """ValueError where there is no such level."""
    if level not in LEVELS:
        raise ValueError(f"no level {level!r}; there are {', '.join(LEVELS)}")


@dataclass(frozen=True)
class Prepared:
    """What runs a Program. peaks: of each call the label, and bytes that the device then holds beyond the inputs."""

    run: Run
    peaks: Sequence[tuple[str, int]] = ()


def improve(program: Program, level: str) -> Program:
    """Apply the passes of a level, all but compilation, in place: the form in which a Program is simulated."""
    for change in LEVELS[level]:
        if change is not compile_segments:
            change(program.graph)
    return program


def prepare(program: Program, level: str, carrier: Carrier | None = None, ledger: Ledger | None = None,
            on: Platform = CPU) -> Prepared:  # fmt: skip
    """What runs a Program at a level. Its graph is changed into that.

    carrier: for a Program that uses tiers. ledger: accounts for the memory of its calls, by what an allocator `on` a
    platform gives. Without a C++ compiler O2 becomes O0, with a warning.
    """
    if level == "O2" and not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn("level O2 needs a C++ compiler (g++ or clang++); running operator by operator", stacklevel=3)
        level = "O0"
    graph = improve(program, level).graph
    meter, peaks = None, []
    if ledger:
        played = replay(program)
        known = spans(fuse(played) if level == "O2" else played, on)
        first = min((before for _, before, _ in known.values()), default=0)
        peaks = [(node.meta.get("label", ""), total - first) for node, (_, _, total) in known.items()]
    if level == "O2":
        compile_segments(graph)
    if ledger:
        meter = Meter(ledger, _needs(graph, known))
    graph.lint()
    return Prepared(generate(graph, carrier, meter), peaks)


def _needs(graph: fx.Graph, known: Mapping[fx.Node, tuple[int, int, int]]) -> dict[fx.Node, int]:
    """Bytes that calls take, beyond what is alive before them; of compiled functions at their peak."""
    found = {}
    for node in graph.nodes:
        parts = sorted(known[n] for n in node.meta.get("inside", [node]) if n in known)
        if parts and (count := max(total for *_, total in parts) - parts[0][1]) > 0:
            found[node] = count
    return found
