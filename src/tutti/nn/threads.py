"""Threads of the compiled operators: see `threads.h`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tutti.nn.linear.linear_rows import kernels


@contextmanager
def own_threads() -> Iterator[None]:
    """Let the loops of compiled operators in this thread use threads of their own, as many as PyTorch has.

    They do not wait for a thread whose core another process uses. PyTorch's operators have one thread meanwhile: those
    of OpenMP spin for milliseconds after each loop, and would take the cores from ours.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    kernels().own_threads(threads)
    try:
        yield
    finally:
        kernels().own_threads(0)
        torch.set_num_threads(threads)
