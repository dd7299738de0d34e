"""The verb `tutti levels`: what each level does to a Program, and what it makes of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from tutti.lower.shard import shard
from tutti.plan.plan import Plan
from tutti.run.commands.workload import Captured, Workload
from tutti.run.levels import LEVELS, improve
from tutti.run.segments import part_of, segments


def show_levels(model: str | None = None, batch: int = 8, seq: int = 128) -> None:
    """Print the levels: the passes that each applies to a Program, in order, and what it compiles.

    Args:
        model: Count also what a training step of this model becomes: a folder with a config.json of transformers, such
            a file, or package.module:function that returns (model, batch).
        batch: Sequences or images in the batch of a model of transformers.
        seq: Tokens of each sequence.
    """
    console = Console()
    for name, level in LEVELS.items():
        console.print(f"[bold]{name}[/] {level.summary}", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for change in (*level.before, *level.after):
            table.add_row(change.__name__, _first_sentence(change))
        console.print(table, highlight=False)
    if model is not None:
        console.print(_counted(model, batch, seq))


def _first_sentence(change: Callable) -> str:
    return " ".join((inspect.getdoc(change) or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _counted(source: str, batch: int, seq: int) -> Table:
    step = Captured(Workload(source, batch, seq, clip_norm=1.0), lambda what: None).captured(1).without_gradients()
    table = Table("level", "calls", "of compiled functions", "compiled functions", title=f"a step of {source}")
    for name in LEVELS:
        program = improve(shard(step, Plan({"dp": 1}), 0), name)
        parts = segments(program.graph, name)
        calls = sum(n.op == "call_function" for n in program.graph.nodes) - sum(len(p) - 1 for p in parts)
        table.add_row(name, str(calls), str(len(parts)), str(len({part_of(part).structure for part in parts})))
    return table
