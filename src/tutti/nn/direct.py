"""Operators that a Program calls without PyTorch's dispatcher, which takes longer than a small one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.nn import linear_int4, linear_int8, linear_rows, paged_attention, paged_write, rows

ops = torch.ops.tutti


def _directly(op: Any, cpu: Callable) -> Callable:
    """The operator, or its function for a CPU where the first operand is an ordinary tensor there."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return cpu(x, *args, **kwargs) if type(x) is Tensor and x.is_cpu else op(x, *args, **kwargs)

    return call


DIRECT: dict[Any, Callable] = {
    op: _directly(op, cpu)
    for op, cpu in (
        (ops.linear_rows.default, linear_rows.cpu),
        (ops.linear_int8.default, linear_int8.cpu),
        (ops.linear_int4.default, linear_int4.cpu),
        (ops.paged_attention.default, paged_attention.cpu),
        (ops.paged_write_.default, paged_write.cpu),
        (ops.norm_rows.default, rows.norm_cpu),
        (ops.rotary_rows.default, rows.rotary_cpu),
        (ops.glu_rows.default, rows.glu_cpu),
    )
}
