"""Pause the garbage collector while graphs are built: they are millions of objects without garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MAX_NEW_BLOCKS = 8_000_000  # blocks of memory allocated since the last collection, about half a GiB
_blocks = 0  # allocated after the last collection


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the process's cyclic garbage collector. For building one graph, not for a loop that builds many.

    Afterwards the graph is in the oldest generation, which collections of young objects do not traverse. A full
    collection runs here after MAX_NEW_BLOCKS allocations.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _age()
        gc.enable()


def _age() -> None:
    global _blocks
    _blocks = min(_blocks or MAX_NEW_BLOCKS, sys.getallocatedblocks())
    if gc.get_freeze_count():  # by the user: unfreezing would undo it
        return
    if sys.getallocatedblocks() - _blocks > MAX_NEW_BLOCKS:
        gc.collect()
        _blocks = sys.getallocatedblocks()
    else:
        gc.freeze()
        gc.unfreeze()


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
