"""Levels: how a Program becomes something that runs.

O0 runs it operator by operator. O2 compiles what lies between two collectives with `torch.compile`; parts with the
same operators on the same shapes (the layers of a model) share one compiled function.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable

from torch import fx

from tutti.lower.bucket import bucket
from tutti.lower.inplace import update_in_place
from tutti.lower.overwrite import write_over
from tutti.lower.program import Program
from tutti.lower.workspace import keep_workspaces
from tutti.run.code import Run, generate
from tutti.run.segments import compile_segments, inline_random

LEVELS: dict[str, tuple[Callable[[fx.Graph], None], ...]] = {
    "O0": (keep_workspaces, bucket, update_in_place, write_over),
    "O2": (keep_workspaces, bucket, update_in_place, inline_random, compile_segments),
}


def check_level(level: str) -> None:
    """ValueError where there is no such level."""
    if level not in LEVELS:
        raise ValueError(f"no level {level!r}; there are {', '.join(LEVELS)}")


def prepare(program: Program, level: str) -> Run:
    """The generator function of a Program at a level. Its graph is changed into what runs.

    Without a C++ compiler O2 becomes O0, with a warning.
    """
    if level == "O2" and not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn("level O2 needs a C++ compiler (g++ or clang++); running operator by operator", stacklevel=3)
        level = "O0"
    for improve in LEVELS[level]:
        improve(program.graph)
    program.graph.lint()
    return generate(program.graph)
