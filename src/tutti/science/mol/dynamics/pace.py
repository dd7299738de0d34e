"""How far a run is, how fast it goes, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 0.5  # between two texts


class Pace:
    """Counts steps and now and then gives a text; looks at the clock seldom, as steps take microseconds."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps, self.done, self.clock = steps, 0, clock
        self.begin = self.last = clock()
        self.stride, self.next = 1, 1

    def step(self) -> str | None:
        self.done += 1
        if self.done < self.next:
            return None
        now = self.clock()
        if now - self.last < SECONDS / 4:
            self.stride = min(2 * self.stride, 1 << 16)
        elif now - self.last > SECONDS:
            self.stride = max(1, self.stride // 2)
        self.next, self.last = self.done + self.stride, now
        rate = self.done / max(now - self.begin, 1e-9)
        left = (self.steps - self.done) / rate
        return f"step {self.done:,} of {self.steps:,}, {rate:,.0f} steps/s, {_span(left)} left"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
