"""Tables on a terminal, or in a file or a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tutti.plan.plan import Plan

WIDTH = 120  # of a file or a pipe


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
