"""Tables on a terminal, or in a file or a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tutti.analysis.memory import Memory
from tutti.plan.explain import size
from tutti.plan.plan import Plan

WIDTH = 120  # of a file or a pipe
SHOWN = 10  # operators, and tensors alive at the peak


def consoles() -> tuple[Console, Console]:
    """For results, and for progress."""
    width = None if sys.stdout.isatty() else WIDTH
    return Console(highlight=False, width=width), Console(stderr=True, highlight=False, width=width)


def table(first: str, *others: str, left: tuple[str, ...] = ()) -> Table:
    """With these columns, aligned to the right but for the first and those in `left`."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(first, overflow="fold")
    for title in others:
        made.add_column(title, justify="left" if title in left else "right")
    return made


def read(file: Path) -> Plan:
    try:
        return Plan.load(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def show_kinds(memory: Memory, console: Console) -> None:
    """What is held at the peak, by kind."""
    shown = table("memory at the peak", "bytes")
    for kind, count in memory.kinds.items():
        shown.add_row(kind, size(count))
    console.print(shown)


def show_alive(memory: Memory, console: Console) -> None:
    """... and the largest of it by label, where that is known: of no pipeline."""
    where = f" ({memory.at})" if memory.at else ""
    shown = table(f"alive at the peak{where}", "kind", "tensors", "bytes", left=("kind",))
    for alive in memory.alive[:SHOWN]:
        shown.add_row(alive.label, alive.kind, f"{alive.count:,}", size(alive.bytes))
    if memory.alive:
        console.print(shown)
