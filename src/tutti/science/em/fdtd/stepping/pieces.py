"""Long runs in pieces of about a second: between them a progress line is shown, and Ctrl-C is heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

from tutti.launch.progress import progress
from tutti.science.em.fdtd.problem import Problem

PIECE = 10**9  # updates of a cell
LONG = 3 * PIECE


def pieces(problem: Problem, start: int, steps: int) -> list[tuple[int, int]]:
    """(start, steps) of the pieces of a segment. problem: the whole, so that all processes have the same."""
    most = max(1, PIECE // (prod(problem.array) * problem.shots))
    return [(i, min(most, start + steps - i)) for i in range(start, start + steps, most)]


@contextmanager
def reports(problem: Problem, steps: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show how many steps are done, in runs that take seconds."""
    if steps * prod(problem.array) * problem.shots < LONG:
        yield lambda done: None
        return
    with progress(what) as tell:
        yield lambda done: tell.count(done, steps)
