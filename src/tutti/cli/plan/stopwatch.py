"""The time that a search may take."""

from __future__ import annotations

import time


class Stopwatch:
    """Whether so many seconds have passed."""

    def __init__(self, seconds: float):
        self.begin, self.seconds = time.monotonic(), seconds

    def past(self) -> bool:
        return time.monotonic() - self.begin > self.seconds
