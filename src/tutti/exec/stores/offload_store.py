"""OffloadStore: memory outside of the device, for tensors that a plan keeps on outer tiers.

On tier `disk` a tensor is a memory-mapped file, whose pages the operating system writes and drops. The file is unlinked
once it is mapped, so nothing is left behind, however the process ends. On tier `host` it is ordinary memory.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path

import torch

from tutti import compat
from tutti.hardware import machine
from tutti.ir.spec import Spec
from tutti.plan.explain import size
from tutti.plan.tier import DISK

FOLDER = machine.FOLDER / "tiers"


class OffloadStore:
    """Tensors of one process that are not stored on the device.

    folder: for the files. pinned: whether host memory is page-locked, for copies by a GPU. bytes: allocated now,
    including memory that waits for reuse.
    """

    def __init__(self, folder: str | Path | None = None, pinned: bool = False):
        self.folder, self.pinned = Path(folder or FOLDER), pinned
        self.bytes = 0
        self.free: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self.storages: set[int] = set()  # storages, by id

    def holds(self, x: torch.Tensor) -> bool:
        """Whether a tensor is stored here."""
        return id(x.untyped_storage()) in self.storages

    def place(self, value: torch.Tensor, tier: str) -> torch.Tensor:
        """A copy of a tensor in this store. It lives as long as it is referenced."""
        stored = self.take(Spec.of(value), tier)
        return stored.copy_(value)

    def take(self, spec: Spec, tier: str, stride: tuple[int, ...] | None = None) -> torch.Tensor:
        """Memory for a tensor, contiguous or with these strides. It is reused once the tensor is not referenced.

        Raises OSError if the disk is full.
        """
        free = self.free[tier, spec.bytes]
        raw = free.pop() if free else self.make(spec.bytes, tier)
        tensor = raw.view(spec.dtype).view(spec.shape) if spec.bytes else torch.empty(spec.shape, dtype=spec.dtype)
        tensor = tensor.as_strided(spec.shape, stride) if stride else tensor
        weakref.finalize(tensor, free.append, raw).atexit = False
        return tensor

    def make(self, count: int, tier: str) -> torch.Tensor:
        """New memory, as bytes."""
        if tier == DISK and count:
            raw = torch.empty(0, dtype=torch.uint8).set_(self.file(count))
        else:
            raw = torch.empty(count, dtype=torch.uint8)
            if self.pinned and count:
                compat.pin(raw)
        self.bytes += count
        self.storages.add(id(raw.untyped_storage()))
        return raw

    def file(self, count: int) -> torch.UntypedStorage:
        """A mapped file of this many bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="tier-")
        try:
            try:
                os.posix_fallocate(handle, 0, count)  # otherwise a write to a full disk kills the process
            except OSError as error:
                raise OSError(
                    error.errno, f"{self.folder} has no room for {size(count)} more ({os.strerror(error.errno or 0)}; "
                    f"this process stores {size(self.bytes)} there): choose another folder, or keep less on tier disk"
                ) from None  # fmt: skip
            return torch.UntypedStorage.from_file(name, True, count)  # pyright: ignore[reportReturnType]
        finally:
            os.close(handle)
            os.unlink(name)
