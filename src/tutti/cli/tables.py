"""Tables for a terminal, a file or a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tutti.analysis.memory import Memory
from tutti.plan.explain import size
from tutti.plan.plan import Plan

WIDTH = 120  # columns of a file or a pipe
WIDE = 1000  # columns, more than any table has
SHOWN = 10  # rows: operators, and tensors alive at the peak


def consoles() -> tuple[Console, Console]:
    """A console for results (stdout) and one for progress (stderr)."""
    width = None if sys.stdout.isatty() else WIDTH
    return Console(highlight=False, width=width), Console(stderr=True, highlight=False, width=width)


def table(first: str, *others: str, left: tuple[str, ...] = ()) -> Table:
    """A table with these columns, right-aligned except the first and those in `left`."""
    columns = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns.add_column(first, overflow="fold")
    for title in others:
        columns.add_column(title, justify="left" if title in left else "right")
    return columns


def unbroken(shown: Table) -> int:
    """Give a table the width that it has without breaking any line. Print it with crop=False."""
    for column in shown.columns:
        column.no_wrap, column.overflow = True, "crop"  # "ignore" would not align
    shown.width = Console(width=WIDE).measure(shown).maximum
    return shown.width


def read(file: Path) -> Plan:
    try:
        return Plan.load(file)
    except FileNotFoundError:
        raise ValueError(f"there is no file {file}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def show_kinds(memory: Memory, console: Console) -> None:
    """Print the memory at the peak by kind."""
    shown = table("memory at the peak", "bytes")
    for kind, count in memory.kinds.items():
        shown.add_row(kind, size(count))
    console.print(shown)


def show_alive(memory: Memory, console: Console) -> None:
    """Print the largest tensors alive at the peak. Pipelines do not record them."""
    where = f" ({memory.at})" if memory.at else ""
    shown = table(f"alive at the peak{where}", "kind", "tensors", "bytes", left=("kind",))
    for alive in memory.alive[:SHOWN]:
        shown.add_row(alive.label, alive.kind, f"{alive.count:,}", size(alive.bytes))
    if memory.alive:
        console.print(shown)
