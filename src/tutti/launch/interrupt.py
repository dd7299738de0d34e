"""Ctrl-C in a command: a line at once, whatever the process is doing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

received = False  # a KeyboardInterrupt that is raised in a callback of C code is lost: a run that goes on looks here


@contextmanager
def report_interrupt(name: str) -> Iterator[None]:
    """Within the block, SIGINT writes a line to stderr and raises KeyboardInterrupt."""
    global received
    received = False
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        global received
        received = True
        os.write(2, f"\n{name}: interrupted\n".encode())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        received = False


@contextmanager
def noted(*numbers: int) -> Iterator[list[int]]:
    """Within the block, signals with these numbers are appended to a list and do nothing else. Does nothing outside the
    main thread."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
