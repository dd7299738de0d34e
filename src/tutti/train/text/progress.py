"""The progress of a run: live on a terminal, else a line at intervals."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tutti.launch.progress import told_by

_NAME = 11  # width of the column of stage names
_COMPILING = "compiling the step: about a minute, seconds when it is cached; --parallel.level O0 does without"
WORTH_TELLING = 0.01  # minimum fraction of step time spent waiting for batches to report
_PLAIN_SECONDS = 10.0  # seconds between two lines about a stage without a terminal


class Display:
    """The stages of a run: a line for each finished one, and a progress line for the current one.

    `silent` prints nothing, for all ranks but the first.
    """

    def __init__(self, console: Console | None = None, silent: bool = False):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.console.quiet = silent
        self.live = self.console.is_terminal and not silent

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self.console.print(text, markup=False)

    @contextmanager
    def logs(self) -> Iterator[None]:
        """Print what the library logs, as lines."""
        handler = logging.Handler()
        handler.emit = lambda record: self.say(record.getMessage())
        logger = logging.getLogger("tutti")
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Print each warning once, as a line. Warnings for developers are dropped."""
        said: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *where: object) -> None:
            developers = issubclass(category, FutureWarning | DeprecationWarning | PendingDeprecationWarning)
            if not developers and str(message) not in said:
                said.add(str(message))
                self.say(f"note: {message}")

        with warnings.catch_warnings():
            warnings.showwarning = show
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator["Stage"]:
        """A piece of work before or after training: `with display.stage("read") as stage: ...`."""
        columns = (
            SpinnerColumn("line", style="default"),
            TextColumn("{task.description}", markup=False),
            BarColumn(40),
            TimeElapsedColumn(),
        )
        start = time.perf_counter()
        with Progress(*columns, console=self.console, transient=True, disable=not self.live) as bar:
            stage = Stage(self, name, bar)
            with told_by(stage.tell):
                yield stage
        seconds = time.perf_counter() - start
        self.say(f"{name:{_NAME}} {stage.text}{' ' if stage.text else ''}({seconds:.1f} s)")

    @contextmanager
    def training(self, steps: int, first: int, compiles: bool, dtype: str) -> Iterator["Training"]:
        """The training loop from step `first` of `steps`, in a dtype. compiles: whether the first step compiles."""
        columns = (BarColumn(24), TextColumn("{task.description}", markup=False))
        bar = Progress(*columns, console=self.console, disable=not self.live, refresh_per_second=4)
        with bar:
            training = Training(self, bar, steps, first, compiles, dtype)
            with told_by(training.tell):
                yield training


class Stage:
    """The progress and the result of a stage."""

    def __init__(self, display: Display, name: str, bar: Progress):
        self._display, self._bar, self._name = display, bar, name
        self._task = bar.add_task(f"{name:{_NAME}}", total=None)
        self._spoke = time.perf_counter()
        self.text = ""

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if not self._display.live and time.perf_counter() - self._spoke > _PLAIN_SECONDS:
            self._spoke = time.perf_counter()
            self._display.say(f"{self._name:{_NAME}} {done / max(1, total):.0%}")

    def phase(self, name: str) -> Callable[[int, int, int, int], None]:
        """Begin a phase of the preparation of a corpus: a function that shows its progress in tasks."""
        self.tell(name)
        return lambda done, total, documents, size: self.update(done, total)

    def tell(self, what: str) -> None:
        """Show what is being done in the stage."""
        self._bar.update(self._task, description=f"{self._name:{_NAME}} {what}")

    def result(self, text: str) -> None:
        self.text = text


class Training:
    """The progress line of the training loop. The first step is reported separately, as it includes compilation."""

    def __init__(self, display: Display, bar: Progress, steps: int, first: int, compiles: bool, dtype: str):
        self._display, self._bar, self._steps, self._compiles = display, bar, steps, compiles
        self._dtype = dtype
        self._text = _COMPILING if compiles else "first step"
        self._task = bar.add_task(self._text, total=steps, completed=first)
        self._start: float | None = time.perf_counter()
        self._spoke = 0.0
        if not display.live:
            display.say(self._text)

    def tell(self, what: str) -> None:
        """Show what is being done between two steps."""
        self._bar.update(self._task, description=what or self._text)

    def step(
        self, done: int, loss: float, seconds: float, tokens: int, peak_seconds: float, waiting: float = 0.0
    ) -> None:
        """Show that `done` steps are complete. A step has `tokens`, takes `seconds` (`peak_seconds` at peak FLOP/s),
        and waits the fraction `waiting` of its time for its batch."""
        if self._start is not None:
            text = f"{'compile':{_NAME}} and first step" if self._compiles else f"{'first step':{_NAME}}"
            self._display.say(f"{text} ({time.perf_counter() - self._start:.1f} s)")
            self._start = None
            self._text = f"step {done} of {self._steps}  loss {loss:.4f}"
            self._bar.update(self._task, completed=done, description=self._text)
            return
        self._text = text = line(done, self._steps, loss, seconds, tokens, peak_seconds, self._dtype, waiting)
        self._bar.update(self._task, completed=done, description=text)
        if not self._display.live and (time.perf_counter() - self._spoke > _PLAIN_SECONDS or done == self._steps):
            self._spoke = time.perf_counter()
            self._display.say(text)


def line(
    done: int,
    steps: int,
    loss: float,
    seconds: float,
    tokens: int,
    peak_seconds: float,
    dtype: str,
    waiting: float = 0.0,
) -> str:
    """`step 120 of 600  loss 3.2100  5,400 tokens/s  31 % of bfloat16 peak  3:12 left`, with `7 % waiting for data` if
    steps wait for their batches."""
    speed = f"{tokens / seconds:,.0f} tokens/s  {100 * peak_seconds / seconds:.0f} % of {dtype} peak"
    speed += f"  {100 * waiting:.0f} % waiting for data" if waiting >= WORTH_TELLING else ""
    return f"step {done} of {steps}  loss {loss:.4f}  {speed}  {clock((steps - done) * seconds)} left"


def clock(seconds: float) -> str:
    """`0:07`, `3:12`, `1:02:03`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
