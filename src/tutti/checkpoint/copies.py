"""Copies of what a process writes of a checkpoint, in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutti.exec.stores.sharded_tensor import ShardedTensor
from tutti.ir.spec import Spec
from tutti.plan.layouts.boxes import Shape

Copies = dict[str, tuple[Spec, dict[Shape, torch.Tensor]]]  # by name: full Spec, owned blocks by offset


def copies(tensors: Mapping[str, ShardedTensor], buffers: Copies | None = None) -> Copies:
    """Copy the blocks that this process writes to host memory. Reuses `buffers` where shape and dtype match."""
    host_copies: Copies = {}
    for name, tensor in tensors.items():
        before = buffers[name][1] if buffers and name in buffers else {}
        blocks = {begin: tensor.blocks[begin][0] for begin in tensor.owned}
        host_copies[name] = tensor.spec, {begin: _like(x, before.get(begin)).copy_(x) for begin, x in blocks.items()}
    return host_copies


def _like(block: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is not None and buffer.shape == block.shape and buffer.dtype == block.dtype:
        return buffer
    return torch.empty(block.shape, dtype=block.dtype)
