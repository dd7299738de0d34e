"""`as_strided` of tensors whose dims are permuted in memory.

Its strides refer to the storage, which a graph does not know: there an operand is contiguous, or has whatever strides
its operator gave it. So the operand is first permuted to its memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def in_order_of_memory(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Callable | None:
    """The function to trace for `as_strided` with these arguments, or None if the operand is contiguous."""
    return None if x.is_contiguous() and (offset is None or x.storage_offset() == 0) else _turned


def _turned(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    whole = x.permute(sorted(range(x.ndim), key=lambda dim: (-x.stride(dim), dim)))
    begin = 0 if offset is None else offset - x.storage_offset()
    end = begin + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not whole.is_contiguous() or begin < 0 or end > x.numel():
        raise ValueError(
            f"as_strided({tuple(size)}, {tuple(stride)}) of a tensor of shape {tuple(x.shape)} and strides {x.stride()}"
            " reads memory outside the tensor: call it on the base tensor, or on .contiguous()"
        )
    return aten.as_strided.default(whole.view(-1)[begin:end] if begin else whole, list(size), list(stride))
