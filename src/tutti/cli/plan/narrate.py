"""Progress of a command that takes seconds: a line that changes, or lines where there is no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY = 1.0  # seconds between lines where there is no terminal
SILENT = 5.0  # seconds without a line after which the current activity is named again


class Stopwatch:
    """Whether so many seconds have passed."""

    def __init__(self, seconds: float):
        self.begin, self.seconds = time.monotonic(), seconds

    def past(self) -> bool:
        return time.monotonic() - self.begin > self.seconds


class Narrator:
    """Says what is being done, and keeps what was found on lines of their own, with the seconds since the begin."""

    def __init__(self, console: Console, show: Callable[[str], None] | None, text: str):
        self.console, self.show, self.text = console, show, text
        self.begin = self.last = time.monotonic()

    def __call__(self, text: str) -> None:
        self.text = text
        if self.show is not None:
            self.show(text)
        elif time.monotonic() - self.last > EVERY:
            self.result(text)

    def result(self, text: str) -> None:
        self.last = time.monotonic()
        self.console.print(f"{self.last - self.begin:5.1f} s  {text}", markup=False, soft_wrap=True)

    def repeat(self, ended: threading.Event) -> None:
        """Name the activity again after each silence, until the event is set."""
        while not ended.wait(EVERY):
            if time.monotonic() - self.last > SILENT:
                self.result(self.text)


@contextmanager
def narrated(console: Console, what: str) -> Iterator[Narrator]:
    if console.is_terminal:
        with console.status(what) as status:
            yield Narrator(console, status.update, what)
        return
    narrator, ended = Narrator(console, None, what), threading.Event()
    repeating = threading.Thread(target=narrator.repeat, args=(ended,), daemon=True)
    repeating.start()
    try:
        yield narrator
    finally:
        ended.set()
        repeating.join()  # no line comes after the answer
