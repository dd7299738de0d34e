"""What learning reports: a progress line, callbacks, and files that TensorBoard reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tutti.launch.progress import progress

if TYPE_CHECKING:
    from tutti.rl.agent import Agent, Callback


@contextmanager
def reporting(agent: Agent, callback: Callback | Iterable[Callback] | None, bar: bool) -> Iterator[Callable[[], bool]]:
    """Yields a function that is called before each iteration, and returns whether learning goes on."""
    given = [] if callback is None else [callback] if callable(callback) else list(callback)
    for each in given:
        if hasattr(each, "begin"):
            each.begin(agent)  # pyright: ignore[reportFunctionMemberAccess]
    begun, first, started, stopped = time.perf_counter(), agent.num_timesteps, False, False
    with progress("learning") as tell:

        def goes_on() -> bool:
            nonlocal started, stopped
            if not started:
                started = True
                return True
            if bar:
                tell(line(agent, agent.num_timesteps - first, time.perf_counter() - begun))
            stopped = not all([each(agent) is not False for each in given])
            return not stopped

        yield goes_on
        if started and not stopped:
            goes_on()


def line(agent: Agent, steps: int, seconds: float) -> str:
    """One line about where learning is."""
    mean = f"  return {statistics.fmean(r for r, _ in agent.episodes):.1f}" if agent.episodes else ""
    share = agent.num_timesteps / agent.total
    done = f"{agent.num_timesteps:,} of {agent.total:,} steps ({share:.0%})"
    return f"learning: {done}{mean}  {steps / seconds:,.0f} steps/s"
