"""Threads of the compiled operators: see `threads.h`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tutti.nn.linear.linear_rows import kernels


@contextmanager
def own_threads(threads: int) -> Iterator[None]:
    """Let the loops of compiled operators in this thread use so many threads of their own.

    They do not wait for a thread whose core another process uses. PyTorch's operators have one thread meanwhile: those
    of OpenMP and MKL spin for milliseconds after each loop, and would take the cores from ours. A thread that calls
    PyTorch for the first time meanwhile has one thread, too.
    """
    pool, openmp = kernels(), torch.get_num_threads()
    before = pool.own_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(openmp)
        pool.own_threads(before)
