"""MemoryBudget: counts the memory that Tutti holds on a device, and refuses to exceed a limit.

Memory counts from the call that returns it until the last reference is gone. Memory that tensors share counts once.
The memory that a call needs, including its workspace (`tutti.analysis.memory`), must be free before the call begins.
Tensors on other tiers and the user's own tensors (the model, the batch) do not count.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils import _pytree as pytree

from tutti.exec.stores.offload_store import OffloadStore
from tutti.plan.explain import size

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6,
         "GB": 10**9, "TB": 10**12}  # fmt: skip


def bytes_of(text: float | str) -> int:
    """A number of bytes, or one with a unit.

    >>> bytes_of("1.5GiB"), bytes_of("200 MB"), bytes_of(1024)
    (1610612736, 200000000, 1024)
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(text).strip())
    try:
        count = float(match[1]) * UNITS[match[2]] if match else -1.0
    except (KeyError, ValueError):
        count = -1.0
    if count < 1:
        raise ValueError(f"memory is {text!r}; write bytes, or a number with one of {', '.join(list(UNITS)[1:])}")
    return int(count)


class OverBudget(MemoryError):
    """A step needs more device memory than it was given."""


class MemoryBudget:
    """The memory of one rank.

    budget: limit in bytes; None counts without a limit. now, most: bytes held, and their peak. settle: waits for
    copies, after which their sources are free.
    """

    def __init__(self, offload_store: OffloadStore, budget: float | None = None):
        self.offload_store, self.budget = offload_store, budget
        self.settle: Callable[[], None] = lambda: None
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def hold(self, value: object) -> None:
        """Count the tensors of a value."""
        for x in pytree.tree_leaves(value):
            if isinstance(x, torch.Tensor) and not self.offload_store.holds(x):
                self.count(x)

    def count(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = id(storage)
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key).atexit = False

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def need(self, count: int, what: str) -> None:
        """Raise OverBudget if this many more bytes do not fit."""
        if self.budget is not None and self.now + count > self.budget:
            self.settle()
        self.most = max(self.most, self.now + count)
        if self.budget is not None and self.now + count > self.budget:
            raise OverBudget(
                f"{what} needs {size(count)} more on a device that holds {size(self.now)} of its limit of "
                f"{size(self.budget)}: offload more (plan 'offload', 'offload2', 'offload3'), recompute more "
                "('recompute'), use more microbatches (accumulate) or devices, or raise the limit"
            )

    def admit(self, peaks: Iterable[tuple[str, int]]) -> None:
        """Raise OverBudget before a Program begins if one of its calls will not fit.

        peaks: the label of each call, and the bytes that it will hold beyond those held now.
        """
        for label, count in peaks:
            if self.budget is not None and self.now + count > self.budget:
                self.need(count, label or "an operator")
