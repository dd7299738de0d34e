"""Prefetch batches in a thread, so that a step only waits if batches take longer than steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree

AHEAD = 2  # one in use, one in progress


class Prefetch(Iterator[Any]):
    """An iterator over `make(step)` for each step, in order. A thread makes up to `ahead` batches in advance.

    An error in `make` is raised when the batch of that step is requested (StopIteration as RuntimeError). If there is a
    GPU, the tensors of a batch are in pinned memory, which allows asynchronous copies.

    waited: seconds that the last `next` took.
    late: how many batches were not ready when they were requested.

    >>> batches = Prefetch(lambda step: {"x": torch.full((2,), step)}, range(3))
    >>> [batch["x"].tolist() for batch in batches]
    [[0, 0], [1, 1], [2, 2]]
    """

    def __init__(self, make: Callable[[int], Any], steps: Iterable[int], ahead: int = AHEAD):
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}; it must be at least 1")
        self.make, self.steps = make, iter(steps)
        self.waited, self.late = 0.0, 0
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: deque[Future] = deque()
        self._begin(ahead)

    def __next__(self) -> Any:
        if not self._ahead:
            self.close()
            raise StopIteration
        future = self._ahead.popleft()
        self.late += not future.done()
        begin = perf_counter()
        try:
            batch = future.result()
        finally:
            self._begin(1)
        self.waited = perf_counter() - begin
        return batch

    def close(self) -> None:
        """Stop, and wait for the batch in progress."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _begin(self, count: int) -> None:
        self._ahead.extend(self._thread.submit(self._load, step) for step in islice(self.steps, count))

    def _load(self, step: int) -> Any:
        try:
            batch = self.make(step)
        except StopIteration as error:
            raise RuntimeError(f"no batch for step {step}: the source of batches is exhausted") from error
        return pinned(batch) if torch.cuda.is_available() else batch

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def pinned(batch: Any) -> Any:
    """The same tree, with CPU tensors in pinned memory."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # not a pytree for torch
        batch = dict(batch)
    return pytree.tree_map_only(torch.Tensor, lambda x: x.pin_memory() if x.device.type == "cpu" else x, batch)
