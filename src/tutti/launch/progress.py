"""The progress display: what is being done, how much of it is done, and the time that is left.

There is one at a time, a line on a terminal, and all uses of `progress` nest in it. Without a terminal, it is silent by
default; commands that take long print lines then (`narrated`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tutti.launch.launch import rank
from tutti.progress import Count, Say

EVERY = 1.0  # seconds between lines where there is no terminal
LINE_EVERY = 10.0  # the same, of commands that may take hours
FIRST = 8  # so many counted pieces of work get a line when they begin; later ones every `every` seconds
SILENT = 5.0  # so many times `every` without a line, the current activity is named again


@dataclass(frozen=True)
class Work:
    """What is being done. total: 0 if it is not counted. what: the next item, or the speed. first: how much was done
    at `begin`."""

    text: str = ""
    done: int = 0
    total: int = 0
    what: str = ""
    first: int = 0
    begin: float = field(default_factory=lambda: time.monotonic())

    def __str__(self) -> str:
        count = f"{self.done:,} of {self.total:,}" if self.total else ""
        return ": ".join(filter(None, (self.text, count))) + (f", {self.what}" if self.what else "")

    @property
    def left(self) -> str:
        """The time until all is done, at the pace so far, or nothing."""
        if not self.first < self.done <= self.total:
            return ""
        seconds = (time.monotonic() - self.begin) * (self.total - self.done) / (self.done - self.first)
        return f", about {clock(seconds)} left"


Show = Callable[[Work], None]


class Tell:
    """Shows what is being done in place of what was."""

    def __init__(self, show: Show):
        self.show, self.work = show, Work()

    def __call__(self, text: str) -> None:
        self.put(Work(text))

    def count(self, done: int, total: int, what: str = "", /) -> None:
        """Show how much is done of what was told last."""
        if self.work.total != total or done < self.work.done:
            self.work = Work(self.work.text, total=total, first=done)
        self.put(replace(self.work, done=done, what=what))

    def put(self, work: Work) -> None:
        self.work = work
        self.show(work)


_telling: list[Tell] = []


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Show what is being done, on rank 0. Call the yielded object with texts, or its `count` with numbers, that say how
    far it is. Nested uses share one line."""
    if not _telling:
        console = Console(stderr=True)
        with live(console, console.is_terminal and not rank()) as show, _shown_by(show), progress(what) as tell:
            yield tell
        return
    tell = _telling[-1]
    before = tell.work
    tell(what)
    try:
        yield tell
    finally:
        tell.put(before)


@contextmanager
def told_by(show: Say) -> Iterator[None]:
    """Send texts of progress to another display. An empty text clears it."""
    with _shown_by(lambda work: show(str(work))):
        yield


@contextmanager
def _shown_by(show: Show) -> Iterator[Tell]:
    _telling.append(Tell(show))
    try:
        yield _telling[-1]
    finally:
        _telling.pop()


class _Counted(ProgressColumn):
    """A bar, numbers and times of counted work."""

    def __init__(self, numbers: bool):
        super().__init__()
        self.numbers = numbers

    def render(self, task: Task) -> Table | Text:
        work: Work = task.fields["work"]
        if not work.total:
            return Text()
        row = Table.grid(padding=(0, 1))
        passed = clock(time.monotonic() - work.begin)
        numbers = [f"{work.done:,} of {work.total:,}", f"{passed}{work.left}"] if self.numbers else []
        row.add_row(ProgressBar(work.total, work.done, 30), *numbers)
        return row


@contextmanager
def live(
    console: Console, shown: bool, numbers: bool = True, drawn: bool = True, stays: bool = False
) -> Iterator[Show]:
    """A line of a terminal. numbers: whether counts and times stand beside the bar. drawn: whether the line is drawn
    between two calls, too. stays: whether the line stays when the work ends."""
    if not shown:
        yield lambda work: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), _Counted(numbers)
    redirect = not console.stderr  # leave the output of the model alone
    with Progress(*columns, console=console, transient=not stays, auto_refresh=drawn, redirect_stdout=redirect,
                  redirect_stderr=redirect) as bar:  # fmt: skip
        task = bar.add_task("", total=None, work=Work())

        def show(work: Work) -> None:
            text = ", ".join(filter(None, (work.text, work.what)))
            bar.update(task, description=text, work=work, refresh=not drawn)

        yield show


@contextmanager
def drawn_when_counted() -> Iterator[Count]:
    """Counts on a terminal, by a line that is drawn at each count and never between them, as that would take time from
    what is measured."""
    console = Console(stderr=True)
    with live(console, console.is_terminal, drawn=False) as show, _shown_by(show) as tell:
        yield tell.count


class Narrator(Tell):
    """Says what is being done, and keeps what was found on lines of their own, with the seconds since the begin."""

    def __init__(self, console: Console, show: Show | None, every: float):
        super().__init__(show or self.narrate)
        self.console, self.every = console, every
        self.begin = self.last = time.monotonic()
        self.counted: set[float] = set()  # begins of the counted work of which there is a line

    def narrate(self, work: Work) -> None:
        first = work.total > 0 and work.begin not in self.counted and len(self.counted) < FIRST
        if work.text and (first or time.monotonic() - self.last > self.every):
            self.counted |= {work.begin} if work.total else set()
            self.result(f"{work}{work.left}")

    def result(self, text: str) -> None:
        self.last = time.monotonic()
        self.console.print(f"{self.last - self.begin:5.1f} s  {text}", markup=False, soft_wrap=True)

    def repeat(self, ended: threading.Event) -> None:
        """Name the activity again after each silence, until the event is set."""
        while not ended.wait(EVERY):
            if time.monotonic() - self.last > SILENT * self.every:
                self.result(f"{self.work}{self.work.left}")


@contextmanager
def narrated(console: Console, what: str, every: float | None = None) -> Iterator[Narrator]:
    """Show what is being done, by a line that changes, or by lines where there is no terminal.

    every: seconds between lines where there is no terminal, by default `EVERY`.
    """
    terminal = console.is_terminal and not console.quiet
    with live(console, terminal) as show:
        narrator = Narrator(console, show if terminal else None, EVERY if every is None else every)
        ended = threading.Event()
        narrator.work = Work(what)
        repeating = threading.Thread(target=narrator.repeat, args=(ended,), daemon=True)
        if terminal:
            narrator(what)
        else:
            repeating.start()
        _telling.append(narrator)
        try:
            yield narrator
        finally:
            _telling.pop()
            ended.set()
            if not terminal:
                repeating.join()  # no line comes after the answer


def clock(seconds: float) -> str:
    """`0:07`, `3:12`, `1:02:03`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
