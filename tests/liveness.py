"""Bytes of memory that tensors hold while a function runs, counted as they come and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts each memory once, from when an operator returns it until nothing refers to it any more.

    now, most: bytes. What operators allocate for themselves is not seen.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.storages: dict[int, int] = {}
        self.now = self.most = 0
        for x in tensors:
            self.see(x)

    def see(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = id(storage)
        if key not in self.storages:
            self.storages[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key).atexit = False

    def forget(self, key: int) -> None:
        self.now -= self.storages.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.see(x)
        return out


def most_of_step(step: Any, batch: Any) -> int:
    """The most bytes that one more run of a step holds at once, on all ranks of this process; what it looks at of the
    user's batch counts as memory of its own."""
    run, peaks = step.runtime.run, []

    def measured(runs, inputs):
        own = [[x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in row] for row in inputs]
        result, most = most_alive(run, runs, own)
        peaks.append(most)
        return result

    step.runtime.run = measured
    step(batch)
    return peaks[0]


def most_alive(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What the function returns, and the most bytes that its arguments and what it makes hold at once."""
    live = Live(x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
    with live:
        result = function(*args)
    return result, live.most
