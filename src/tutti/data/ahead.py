"""Work ahead in a thread or in processes, as far as a budget of bytes allows."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tutti.data.prefetch import pinned

MOST = 64  # results that wait, however small


class Ahead(Iterator[Any]):
    """Results of `work(unit)` in the order of the units, computed before they are requested.

    units: what to compute. With `workers` they are read in this process, otherwise where the work is done.
    work: a function; with `workers` it and the units are pickled.
    budget: bytes of results that may wait. One result is computed ahead in any case; 0: none.
    workers: processes; 0: one thread.

    If there is a GPU, the tensors of a result are in pinned memory. Errors are raised when the result of their unit is
    requested. `unit` is the unit of the last result.
    """

    def __init__(self, units: Iterator[Any], work: Callable[[Any], Any], budget: int, workers: int = 0):
        self.units, self.work, self.budget, self.workers, self.unit = units, work, budget, workers, None
        self._most = 0  # bytes of the largest result so far
        self._futures: deque[tuple[Any, Future]] = deque()
        self._pool: Executor | None = None
        if workers > 0:
            context = multiprocessing.get_context("forkserver")
            self._pool = ProcessPoolExecutor(workers, context, _begin, (work,))
        elif budget > 0:
            self._pool = ThreadPoolExecutor(1, "ahead")

    def _both(self) -> tuple[Any, Any]:
        """The next unit and its result; `_END` after the last."""
        unit = next(self.units, _END)
        return unit, None if unit is _END else _pinned(self.work(unit))

    def _fill(self) -> None:
        while self._pool is not None and self._room():
            if self.workers == 0:
                self._futures.append((None, self._pool.submit(self._both)))
                continue
            try:
                unit = next(self.units, _END)
            except Exception as error:  # raised in its turn
                failed: Future = Future()
                failed.set_exception(error)
                self._futures.append((None, failed))
                self.units = iter(())
                return
            if unit is _END:
                return
            self._futures.append((unit, self._pool.submit(_go_on, unit)))

    def _room(self) -> bool:
        waiting = len(self._futures)
        if self._most == 0:
            return waiting <= self.workers
        return waiting < 1 or (waiting < MOST and (waiting + 1) * self._most <= self.budget)

    def __next__(self) -> Any:
        self._fill()
        if self._pool is None:
            self.unit, batch = self._both()
        elif not self._futures:
            self.unit, batch = _END, None
        else:
            self.unit, future = self._futures.popleft()
            batch = future.result()
            if self.workers == 0:
                self.unit, batch = batch
            else:
                batch = _pinned(pytree.tree_map_only(_Array, lambda x: torch.from_numpy(x.values), batch))
        if self.unit is _END:
            self.close()
            raise StopIteration
        self._most = max(self._most, size_of(batch), 1)
        self._fill()
        return batch

    def close(self) -> None:
        """Stop. Results that were not requested are lost."""
        self._futures.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self.units = iter(())


_END = object()


def _pinned(x: Any) -> Any:
    return pinned(x) if torch.cuda.is_available() else x


class _Array:
    """A tensor on its way between processes: its values, so that no file descriptors are shared."""

    def __init__(self, values: np.ndarray):
        self.values = values


_WORK: Callable[[Any], Any] | None = None  # of this worker process


def _begin(work: Callable[[Any], Any]) -> None:
    global _WORK
    torch.set_num_threads(1)
    _WORK = work


def _go_on(unit: Any) -> Any:
    assert _WORK is not None
    return pytree.tree_map_only(torch.Tensor, lambda x: _Array(x.numpy()), _WORK(unit))


def size_of(x: Any) -> int:
    """Bytes of the arrays, texts and images in a value, and 32 for any other object."""
    kind = type(x)  # the usual kinds first: a row of a stream passes here for each value
    if kind is str or kind is bytes:
        return len(x)
    if kind is int or kind is float:
        return 32
    if kind is dict:
        size = 0
        for value in x.values():  # without a call for texts
            size += len(value) if type(value) is str else size_of(value)
        return size
    if isinstance(x, torch.Tensor | np.ndarray):
        return x.nbytes
    if isinstance(x, Mapping):
        return sum(map(size_of, x.values()))
    if isinstance(x, list | tuple):
        if x and all(isinstance(i, int | float) for i in x):
            return 32 * len(x)
        return sum(map(size_of, x))
    if isinstance(x, str | bytes):
        return len(x)
    if hasattr(x, "size") and hasattr(x, "getbands"):  # an image of PIL
        return x.size[0] * x.size[1] * len(x.getbands())
    return 32
