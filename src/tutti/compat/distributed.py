"""Collectives, rendezvous stores and pinned memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

# Renamed in 2.13, which warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def job_store(prefix: str) -> Any:
    """A separate connection to the store of this job, so that threads do not block each other."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())  # pyright: ignore


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory, for asynchronous GPU copies, as long as this tensor lives.

    torch's own pinned memory is allocated in powers of two, which wastes up to half. Raises RuntimeError if the system
    refuses.
    """
    cuda: Any = torch.cuda.cudart()
    place = memory.data_ptr()
    error = cuda.cudaHostRegister(place, memory.nbytes, 0)
    if int(error):
        raise RuntimeError(f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {int(error)}): "
                           "store less on tier host, or raise the limit of locked memory (ulimit -l)")  # fmt: skip
    weakref.finalize(memory, cuda.cudaHostUnregister, place).atexit = False
