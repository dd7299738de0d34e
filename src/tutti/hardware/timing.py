"""Measure seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Clock = Callable[[], float]


def times(
    run: Callable[[], object],
    device: torch.device,
    window: float,
    least: int = 1,
    clock: Clock = time.perf_counter,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Seconds of each run by the clock: as many runs as fit into the window (seconds), at least `least`.

    The first run, which loads libraries and starts threads, is dropped. before: called before each run, not measured.
    """
    once(run, device, clock, before)
    end, seconds = time.perf_counter() + window, []
    while len(seconds) < least or time.perf_counter() < end:
        seconds.append(once(run, device, clock, before))
    return seconds


def once(
    run: Callable[[], object],
    device: torch.device,
    clock: Clock = time.perf_counter,
    before: Callable[[], object] | None = None,
) -> float:
    if before:
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
