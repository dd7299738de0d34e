"""Levels: how a Program becomes something that runs.

O0 runs it operator by operator. O2 compiles what lies between two collectives with `torch.compile`; parts with the
same operators on the same shapes (the layers of a model) share one compiled function. Where devices compute on while
collectives are under way, the order of the Program is one that hides them (`run.overlap`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence

from torch import fx

from tutti.cluster import Cluster
from tutti.lower.bucket import bucket
from tutti.lower.inplace import update_in_place
from tutti.lower.overwrite import write_over
from tutti.lower.program import Program
from tutti.lower.workspace import keep_workspaces
from tutti.run import overlap
from tutti.run.code import Run, generate
from tutti.run.segments import compile_segments, inline_random

Passes = tuple[Callable[[fx.Graph], None], ...]

# What is done to a Program's graph before an order is looked for, and after.
LEVELS: dict[str, tuple[Passes, Passes]] = {
    "O0": ((keep_workspaces, bucket, update_in_place), (write_over,)),
    "O2": ((keep_workspaces, bucket, update_in_place, inline_random), ()),
}


def check_level(level: str) -> None:
    """ValueError where there is no such level."""
    if level not in LEVELS:
        raise ValueError(f"no level {level!r}; there are {', '.join(LEVELS)}")


def improve(program: Program, level: str, cluster: Cluster | None = None) -> Program:
    """Apply the passes of a level, all but compilation, in place: the form in which a Program is simulated.

    cluster: on whose devices communication is to be hidden.
    """
    before, after = LEVELS[level]
    _change(program, before)
    if cluster:
        overlap.apply(program.graph, overlap.order(program, cluster, level))
    _change(program, after)
    return program


def _change(program: Program, passes: Passes) -> None:
    for change in passes:
        change(program.graph)


def prepare(programs: Sequence[Program], level: str, cluster: Cluster | None, agree: Callable[[list[str]], bool]
            ) -> list[Run]:  # fmt: skip
    """The generator functions of Programs of several ranks at a level. Their graphs are changed into what runs.

    cluster: as in `improve`. agree: whether all ranks of the mesh are given the same as these ones, a text for each;
    called by all of them. Communication is hidden where they agree on the order. Without a C++ compiler O2 becomes O0,
    with a warning.
    """
    if level == "O2" and not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn("level O2 needs a C++ compiler (g++ or clang++); running operator by operator", stacklevel=3)
        level = "O0"
    before, after = LEVELS[level]
    for program in programs:
        _change(program, before)
    if cluster:
        orders = [overlap.order(program, cluster, level) for program in programs]
        if agree([overlap.digest(order) for order in orders]):
            for program, order in zip(programs, orders, strict=True):
                overlap.apply(program.graph, order)
    runs = []
    for program in programs:
        _change(program, after)
        if level == "O2":
            compile_segments(program.graph)
        program.graph.lint()
        runs.append(generate(program.graph))
    return runs
