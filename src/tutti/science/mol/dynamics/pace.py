"""How fast a run goes."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 0.5  # between two texts


class Pace:
    """Counts steps and now and then gives a text; looks at the clock seldom, as steps take microseconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.done, self.clock = 0, clock
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
        return f"{rate:,.0f} steps/s"
