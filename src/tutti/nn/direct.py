"""Operators that a Program calls without PyTorch's dispatcher, which takes longer than a small one computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tutti.nn import rows
from tutti.nn.attention import paged_attention, paged_write
from tutti.nn.linear import linear_bits, linear_codes, linear_int4, linear_int8, linear_rows

ops = torch.ops.tutti


def _directly(op: Any, cpu: Callable) -> Callable:
    """The operator, or its function for a CPU where the first operand is an ordinary tensor there."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return cpu(x, *args, **kwargs) if type(x) is Tensor and x.is_cpu else op(x, *args, **kwargs)

    return call


# operator: its function for a CPU, and the function that returns the compiled operator and its arguments, or None
OPERATORS: dict[Any, tuple[Callable, Callable[..., tuple | None]]] = {
    ops.linear_rows.default: (linear_rows.cpu, linear_rows.compiled),
    ops.linear_int8.default: (linear_int8.cpu, linear_int8.compiled),
    ops.linear_int4.default: (linear_int4.cpu, linear_int4.compiled),
    ops.linear_bits.default: (linear_bits.cpu, linear_bits.compiled),
    ops.linear_codes.default: (linear_codes.cpu, linear_codes.compiled),
    ops.paged_attention.default: (paged_attention.cpu, paged_attention.compiled),
    ops.paged_write_.default: (paged_write.cpu, paged_write.compiled),
    **{getattr(ops, name).default: (cpu, partial(rows.compiled, name)) for name, cpu in rows.CPU.items()},
}
DIRECT: dict[Any, Callable] = {op: _directly(op, cpu) for op, (cpu, _) in OPERATORS.items()}
COMPILED: dict[Any, Callable[..., tuple | None]] = {op: compiled for op, (_, compiled) in OPERATORS.items()}
