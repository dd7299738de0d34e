"""The verb `tutti levels`: show the passes of each level, and their effect on a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from tutti.analysis.passes import LEVELS, improve
from tutti.analysis.segments import part_of, segments
from tutti.cli.plan.workload import Captured, Workload
from tutti.cli.tables import consoles, table
from tutti.launch.progress import progress
from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.progress import Say


def show_levels(model: str | None = None, batch: int = 8, seq: int = 128, dtype: str = "bfloat16") -> None:
    """Print the levels: the passes that each applies to a Program, in order, and what it compiles.

    Args:
        model: Also count the operators and kernels of a training step of this model at each level: a folder with a
            transformers config.json, such a file, or package.module:function that returns (model, batch).
            The module is imported and the function is called: name only code that you trust.
        batch: Sequences or images in the batch of a transformers model.
        seq: Tokens per sequence.
        dtype: Parameters of a transformers model: bfloat16 (with float32 master weights) or float32.
    """
    console = consoles()[0]
    counted = None
    if model is not None:
        with progress("reading the model") as tell:
            workload = Workload(model, batch, seq, dtype=dtype)
            counted = _counted(Captured(workload, tell), tell)
    _passes(console)
    if counted:
        console.print(counted)


def _passes(console: Console) -> None:
    shown = table("pass", "what it does", *LEVELS, left=("what it does",))
    by_level = [(*level.before, *level.after) for level in LEVELS.values()]
    for change in dict.fromkeys(change for passes in by_level for change in passes):
        done = ("x" if change in passes else "" for passes in by_level)
        shown.add_row(change.__name__, _first_sentence(change), *done)
    for name, level in LEVELS.items():
        console.print(f"[bold]{name}[/] {level.summary}")
    console.print(shown)


def _first_sentence(change: Callable) -> str:
    return " ".join((inspect.getdoc(change) or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _counted(captured: Captured, say: Say) -> Table:
    step = captured.captured(1).without_gradients()
    shown = table("level", "calls", "of compiled functions", "compiled functions")
    for name in LEVELS:
        say(f"applying the passes of {name}")
        program = improve(shard(step, Plan({"dp": 1}), 0), name)
        parts = segments(program.graph, name)
        calls = sum(n.op == "call_function" for n in program.graph.nodes) - sum(len(p) - 1 for p in parts)
        shown.add_row(name, str(calls), str(len(parts)), str(len({part_of(part).structure for part in parts})))
    return shown
