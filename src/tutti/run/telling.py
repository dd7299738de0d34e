"""What takes seconds is told on a terminal while it goes on; nothing is where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from tutti.run.position import HERE

Tell = Callable[[str], None]
_telling: list[Tell] = []


@contextmanager
def telling(what: str) -> Iterator[Tell]:
    """Say what is being done, on rank 0; what is given is told how far that is. Within another it says so there."""
    if _telling:
        _telling[-1](what)
        yield _telling[-1]
    else:
        with Console(stderr=True, quiet=HERE.rank > 0).status(what) as status, told_by(status.update):
            yield status.update


@contextmanager
def told_by(tell: Tell) -> Iterator[None]:
    """Who has a display of its own is told instead."""
    _telling.append(tell)
    try:
        yield
    finally:
        _telling.pop()
