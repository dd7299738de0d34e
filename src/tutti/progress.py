"""How work of seconds or more says what it does, and how much is done. `tutti.launch.progress` shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Say = Callable[[str], None]  # is called with what is being done


class Count(Protocol):
    """Is called with what is done, all of it, and what comes next or how fast it goes."""

    def __call__(self, done: int, total: int, what: str = "", /) -> None: ...


def silent(*work: object) -> None:
    """Shows nothing: as `Say` or as `Count`."""
