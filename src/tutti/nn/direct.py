"""Operators that a Program calls without PyTorch's dispatcher, which takes longer than a small one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.nn import linear_int4, linear_int8, linear_rows, paged_attention, paged_write

ops = torch.ops.tutti


def _directly(op: Any, cpu: Callable) -> Callable:
    """The operator, or its function for a CPU where the first operand is an ordinary tensor there."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return cpu(x, *args, **kwargs) if type(x) is Tensor and x.is_cpu else op(x, *args, **kwargs)

    return call


DIRECT: dict[Any, Callable] = {
    op: _directly(op, module.cpu)
    for op, module in (
        (ops.linear_rows.default, linear_rows),
        (ops.linear_int8.default, linear_int8),
        (ops.linear_int4.default, linear_int4),
        (ops.paged_attention.default, paged_attention),
        (ops.paged_write_.default, paged_write),
    )
}
