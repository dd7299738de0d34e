"""A linear layer with a weight of int4 in groups along k: y = x W^T + bias, W = scale (q - zero) of a weight's group.

| operand | shape | |
|---|---|---|
| x | (m, k) | floating |
| weight | (n, k / 2) uint8 | q, two to a byte: `pack` |
| scales | (n, k / group) float32 | the groups are of 32, 64 or 128 |
| zeros | (n, k / group) uint8 or none | 8 without |
| bias | (n) or none | of the dtype of x |

k is a multiple of 64 and of the group. With `rounded`, each row of x is rounded to int8 with a scale of its own, and
the products of a group are summed in integers. Otherwise, on processors with VNNI instructions, rows of bfloat16 are
rounded to 16 bits of their largest magnitude; on those with bfloat16 instructions alone, W is rounded to bfloat16. On a
CPU, float32 and bfloat16 are computed by `linear_rows.cpp`; a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.linear.linear_rows import DTYPES, digits, kernels, quantized_on_gpu, rounds, tiles
from tutti.nn.linear.weight_kinds import INT4

GROUPS = 32, 64, 128
BLOCK = 64  # numbers that are packed together

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "linear_int4(Tensor x, Tensor weight, Tensor scales, Tensor? zeros=None, Tensor? bias=None, *, "
    "bool rounded=False) -> Tensor"
)


def quantize_int4(weight: Tensor, group: int = 64, zeros: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """The nearest int4 weight of (n, k), packed, its scales, and its zeros or None.

    Without zeros, the number of largest magnitude in a group is -8 scale; with zeros, the smallest number, or 0, is
    -zero scale, and the largest, or 0, is (15 - zero) scale. Raises ValueError for an unsupported group or k.
    """
    check_group("linear_int4", weight.shape[1], group)
    parts = weight.float().unflatten(1, (-1, group))
    if zeros:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = (high - low) / 15
        offset = (-low / _nonzero(scales)).round()
    else:
        extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True)).squeeze(2)
        scales, offset = -extreme / 8, torch.full_like(extreme, 8)
    q = (parts / _nonzero(scales).unsqueeze(2)).round() + offset.unsqueeze(2)
    packed = pack(q.clamp(0, 15).to(torch.uint8).flatten(1))
    return packed, scales, offset.to(torch.uint8) if zeros else None


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1, scales)


def pack(q: Tensor) -> Tensor:
    """Pack numbers 0 to 15 (n, k), two to a byte: the first 32 of each 64 are the low halves of 32 bytes."""
    low, high = q.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    parts = packed.unflatten(1, (-1, BLOCK // 2))
    return torch.stack([parts & 15, parts >> 4], 2).flatten(1)


def dequantize_int4(weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """The weight (n, k) in the dtype of the scales."""
    return of_codes(unpack(weight), scales, zeros, 8)


def of_codes(q: Tensor, scales: Tensor, zeros: Tensor | None, middle: int) -> Tensor:
    """The weight (n, k) of codes, in the dtype of the scales. middle: the zero of all groups where there are none."""
    offset = middle if zeros is None else zeros.to(scales.dtype).unsqueeze(2)
    return (scales.unsqueeze(2) * (q.to(scales.dtype).unflatten(1, (scales.shape[1], -1)) - offset)).flatten(1)


def reference(x, weight, scales, zeros=None, bias=None, *, rounded=False):
    """The operator in plain PyTorch."""
    _check(x, weight, scales, zeros)
    return multiplied(x, dequantize_int4(weight, scales, zeros), bias, rounded)


def multiplied(x: Tensor, w: Tensor, bias: Tensor | None, rounded: bool) -> Tensor:
    """x w^T + bias for a dequantized weight. rounded: each row of x is rounded to int8, else w to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    if rounded:
        of_rows = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(wide).tiny)
        rows = (rows / of_rows).round() * of_rows
    else:
        w = w.to(x.dtype)
    y = rows @ w.to(wide).T
    return (y if bias is None else y + bias).to(x.dtype)


def _check(x: Any, weight: Any, scales: Any, zeros: Any) -> None:
    fits = len(x.shape) == len(weight.shape) == len(scales.shape) == 2 and x.shape[1] == 2 * weight.shape[1]
    fits = (
        fits
        and scales.shape[0] == weight.shape[0]
        and x.shape[1] % scales.shape[1] == 0
        and weight.dtype == torch.uint8
    )
    if not fits or (zeros is not None and (zeros.shape, zeros.dtype) != (scales.shape, torch.uint8)):
        raise ValueError(
            f"linear_int4: x {tuple(x.shape)}, weight {tuple(weight.shape)} {weight.dtype} and scales "
            f"{tuple(scales.shape)}: expected (m, k), (n, k / 2) uint8 and (n, k / group), and zeros of uint8, too"
        )
    check_group("linear_int4", x.shape[1], x.shape[1] // scales.shape[1])


def check_group(operator: str, k: int, group: int) -> None:
    """Raise ValueError for groups that the kernels do not have."""
    if group not in GROUPS or k % group or k % BLOCK:
        raise ValueError(
            f"{operator}: groups of {group} along {k} numbers; expected groups of {', '.join(map(str, GROUPS))}, and "
            f"a multiple of {BLOCK} and of the group"
        )


def compiled(
    x: Any, weight: Any, scales: Any, zeros: Any = None, bias: Any = None, rounded: bool = False
) -> tuple | None:
    """The compiled operator and its arguments, as in `linear_rows`."""
    if x.dtype not in DTYPES or (rounded and not rounds()):
        return None
    _check(x, weight, scales, zeros)
    group = x.shape[1] // scales.shape[1]
    args = x, weight, scales, zeros, bias, INT4, group, digits(x, rounded), tiles()
    return kernels().linear_rows.default, args


def cpu(x, weight, scales, zeros=None, bias=None, *, rounded=False):
    """The operator on a CPU."""
    if call := compiled(x, weight, scales, zeros, bias, rounded):
        op, args = call
        return op(*args)
    return reference(x, weight, scales, zeros, bias, rounded=rounded)


def _on_gpu(x, weight, scales, zeros=None, bias=None, *, rounded=False):
    if rounded:
        return reference(x, weight, scales, zeros, bias, rounded=True)
    _check(x, weight, scales, zeros)
    return quantized_on_gpu(x, weight, scales, zeros, bias, INT4, 4, lambda: dequantize_int4(weight, scales, zeros))


_library.impl("linear_int4", cpu, "CPU")
_library.impl("linear_int4", _on_gpu, "CUDA")
torch.library.register_fake(
    "tutti::linear_int4",
    lambda x, weight, scales, zeros=None, bias=None, *, rounded=False: x.new_empty(len(x), len(weight)),
)
