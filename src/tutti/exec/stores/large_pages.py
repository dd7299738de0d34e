"""Large pages for stored tensors on Linux.

A decoding step reads all weights once. With pages of 4 KiB it waits for page tables as well as for memory.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from tutti.exec.stores.tensor_store import TensorStore

LARGE, LINE = 2 << 20, 64  # bytes of a large page, and of a line of a cache


def pack(store: TensorStore, blank: str = "") -> None:
    """Move the stored tensors of each local rank into one block of memory with large pages.

    Tensors must be replaced in place from then on, or the block outlives them. blank: how the names of tensors begin
    that are zero; their memory is not touched. Shared tensors stay where they are. Nothing changes for stores on other
    devices, stores with a budget of memory, and systems without such pages.
    """
    if store.device.type != "cpu" or store.budgets or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    for tensors in store.parts:
        sizes = {name: -(-x.nbytes // LINE) * LINE for name, x in tensors.items()
                 if x.nbytes and name not in store.shared}  # fmt: skip
        memory = mmap.mmap(-1, sum(sizes.values()) + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the system has them disabled
            memory.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        at = -block.data_ptr() % LARGE
        for name, size in sizes.items():
            old = tensors[name]
            new = block[at : at + old.nbytes].view(old.dtype).view(old.shape)
            tensors[name] = new if blank and name.startswith(blank) else new.copy_(old)
            at += size
