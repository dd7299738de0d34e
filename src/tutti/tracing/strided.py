"""`as_strided` of tensors whose memory is in another order than their dims.

Strides are those of the memory under a tensor. A graph knows no memory: what an operand is there is contiguous, or has
whatever strides its operator gave it. So the operand is first turned into the order of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def in_order_of_memory(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Callable | None:
    """What is recorded for `as_strided` of these arguments: a call on a contiguous tensor; None if it is one."""
    return None if x.is_contiguous() and (offset is None or x.storage_offset() == 0) else _turned


def _turned(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    whole = x.permute(sorted(range(x.ndim), key=lambda dim: (-x.stride(dim), dim)))
    begin = 0 if offset is None else offset - x.storage_offset()
    end = begin + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not whole.is_contiguous() or begin < 0 or end > x.numel():
        raise ValueError(
            f"as_strided({tuple(size)}, {tuple(stride)}) of a tensor of shape {tuple(x.shape)} and strides {x.stride()}"
            " reads memory that is no part of the tensor: call it on what this is a view of, or on .contiguous()"
        )
    return aten.as_strided.default(whole.view(-1)[begin:end] if begin else whole, list(size), list(stride))
