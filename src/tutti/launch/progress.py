"""A progress line for what takes seconds. Silent without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from tutti.launch.launch import rank


class Tell:
    """Shows a text in place of the last one."""

    def __init__(self, show: Callable[[str], None]):
        self.show, self.text = show, ""

    def __call__(self, text: str) -> None:
        self.text = text
        self.show(text)


_telling: list[Tell] = []


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Show what is being done, on rank 0. Call the yielded object with texts that say how far it is. Nested uses share
    one line."""
    if not _telling:
        with _spinner() as show, told_by(show), progress(what) as tell:
            yield tell
        return
    tell = _telling[-1]
    before = tell.text
    tell(what)
    try:
        yield tell
    finally:
        tell(before)


@contextmanager
def told_by(show: Callable[[str], None]) -> Iterator[None]:
    """Send progress texts to another display. An empty text clears it."""
    _telling.append(Tell(show))
    try:
        yield
    finally:
        _telling.pop()


@contextmanager
def _spinner() -> Iterator[Callable[[str], None]]:
    console, spinner = Console(stderr=True), Spinner("dots")
    if rank() or not console.is_terminal:
        yield lambda text: None
    else:  # leave the output of the model alone
        with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield lambda text: spinner.update(text=text)
