"""Pause the garbage collector while graphs are built: they are millions of objects without garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the process's cyclic garbage collector. For building one graph, not for a loop that builds many."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def unfrozen() -> Iterator[None]:
    """Undo `gc.freeze()` within the block, so that the collector sees all objects."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
