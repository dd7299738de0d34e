"""The pass list: how a Program is changed before it runs, and before it is simulated.

O0 runs a Program operator by operator. O1 compiles what fuses into one kernel, O2 whole layers (`analysis.segments`).
Where devices compute while collectives are in flight, the passes choose an order that hides these (`analysis.overlap`).
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from tutti.analysis import overlap
from tutti.analysis.segments import gather_kernels, gather_layers, gather_parts
from tutti.hardware import Cluster
from tutti.lower.memory.inplace import update_in_place
from tutti.lower.memory.reuse_operands import write_over
from tutti.lower.memory.tiers import use_tiers
from tutti.lower.memory.workspace import keep_workspaces
from tutti.lower.overlap.bucket import bucket
from tutti.lower.overlap.regions import divide
from tutti.lower.program import Program
from tutti.lower.variants.decompose import write_out
from tutti.lower.variants.one_pass import make_losses_in_one_pass
from tutti.lower.variants.round_once import round_once

Pass = Callable[[fx.Graph], None]


@dataclass(frozen=True)
class Level:
    """The passes over a Program's graph before and after the order that hides communication is chosen. Afterwards its
    segments are compiled, if the level has any."""

    summary: str
    before: tuple[Pass, ...]
    after: tuple[Pass, ...]


ALL = make_losses_in_one_pass, keep_workspaces, round_once, bucket, use_tiers, update_in_place

LEVELS = {
    "O0": Level("operator by operator", ALL, (write_over,)),
    "O1": Level("what fuses into one kernel is compiled", (*ALL, write_out), (gather_parts, gather_kernels)),
    "O2": Level("whole layers are compiled", (*ALL, write_out), (gather_parts, gather_layers)),
}


def check_level(level: str, *others: str) -> None:
    """Raise ValueError for an unknown level. others: what it may be besides."""
    if level not in (*LEVELS, *others):
        raise ValueError(f"unknown level {level!r}; expected one of {', '.join((*others, *LEVELS))}")


def available(level: str) -> str:
    """The level, or O0 with a warning if it compiles and there is no C++ compiler."""
    if level != "O0" and not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn(f"level {level} needs a C++ compiler (g++, clang++); running operator by operator", stacklevel=4)
        return "O0"
    return level


def improve(program: Program, level: str, cluster: Cluster | None = None) -> Program:
    """Apply the passes of a level, except compilation, in place. This is the Program that is simulated.

    cluster: the cluster to hide communication for, or None.
    """
    divide(program)
    change(program, LEVELS[level].before)
    if cluster:
        overlap.apply(program.graph, overlap.order(program, cluster, level))
    change(program, LEVELS[level].after)
    return program


def change(program: Program, passes: tuple[Pass, ...]) -> None:
    for change in passes:
        change(program.graph)
