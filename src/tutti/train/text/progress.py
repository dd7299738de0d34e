"""The progress of a run: live on a terminal, else a line at intervals."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from tutti.launch.progress import Show, Tell, Work, clock, live, told_by
from tutti.progress import Count

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
        start = time.perf_counter()
        with live(self.console, self.live) as show:
            stage = Stage(self, name, show)
            with told_by(stage.tell):
                yield stage
        seconds = time.perf_counter() - start
        self.say(f"{name:{_NAME}} {stage.text}{' ' if stage.text else ''}({seconds:.1f} s)")

    @contextmanager
    def training(self, steps: int, first: int, compiles: bool, dtype: str) -> Iterator["Training"]:
        """The training loop from step `first` of `steps`, in a dtype. compiles: whether the first step compiles."""
        with live(self.console, self.live, numbers=False, stays=True) as show:  # the text has them
            training = Training(self, show, steps, first, compiles, dtype)
            with told_by(training.tell):
                yield training


class Stage(Tell):
    """The progress and the result of a stage."""

    def __init__(self, display: Display, name: str, show: Show):
        super().__init__(show)
        self._display, self._name = display, name
        self._spoke = time.perf_counter()
        self.text = ""
        self.tell("")

    def update(self, done: int, total: int, what: str = "", /) -> None:
        self.count(done, total, what)
        if not self._display.live and time.perf_counter() - self._spoke > _PLAIN_SECONDS:
            self._spoke = time.perf_counter()
            self._display.say(f"{self._name:{_NAME}} {done / max(1, total):.0%}")

    def phase(self, name: str) -> Count:
        """Begin a phase of the preparation of a corpus: a function that shows its progress in tasks."""
        self.tell(name)
        return self.update

    def tell(self, what: str) -> None:
        """Show what is being done in the stage."""
        self(f"{self._name:{_NAME}} {what}")

    def result(self, text: str) -> None:
        self.text = text


class Training:
    """The progress line of the training loop. The first step is reported separately, as it includes compilation."""

    def __init__(self, display: Display, show: Show, steps: int, first: int, compiles: bool, dtype: str):
        self._display, self._show, self._steps, self._compiles = display, show, steps, compiles
        self._done, self._dtype = first, dtype
        self._text = _COMPILING if compiles else "first step"
        self._start: float | None = time.perf_counter()
        self._spoke = 0.0
        self.tell("")
        if not display.live:
            display.say(self._text)

    def tell(self, what: str) -> None:
        """Show what is being done between two steps."""
        self._show(Work(what or self._text, self._done, self._steps))

    def step(
        self, done: int, loss: float, seconds: float, tokens: int, peak_seconds: float, waiting: float = 0.0
    ) -> None:
        """Show that `done` steps are complete. A step has `tokens`, takes `seconds` (`peak_seconds` at peak FLOP/s),
        and waits the fraction `waiting` of its time for its batch."""
        self._done = done
        if self._start is not None:
            text = f"{'compile':{_NAME}} and first step" if self._compiles else f"{'first step':{_NAME}}"
            self._display.say(f"{text} ({time.perf_counter() - self._start:.1f} s)")
            self._start = None
            self._text = f"step {done} of {self._steps}  loss {loss:.4f}"
            self.tell("")
            return
        self._text = line(done, self._steps, loss, seconds, tokens, peak_seconds, self._dtype, waiting)
        self.tell("")
        if not self._display.live and (time.perf_counter() - self._spoke > _PLAIN_SECONDS or done == self._steps):
            self._spoke = time.perf_counter()
            self._display.say(self._text)


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
