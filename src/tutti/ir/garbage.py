"""The garbage collector stands by while graphs are made: they are millions of objects, none of which is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's search for cycles, of all threads; for what makes one graph, not for a loop that makes many."""
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
    """With all objects in sight of the collector, also those that `gc.freeze()` has hidden."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
