"""A linear layer with a weight of 2 or 3 bits in groups along k: y = x W^T + bias, W = scale (q - zero) of its group.

| operand | shape | |
|---|---|---|
| x | (m, k) | floating |
| weight | (n, k bits / 8) uint8 | q, packed: `pack` |
| scales | (n, k / group) float32 | the groups are of 32, 64 or 128 |
| zeros | (n, k / group) uint8 or none | 2^(bits - 1) without |
| bias | (n) or none | of the dtype of x |

k is a multiple of 64 and of the group. Of each 64 numbers, 16 bytes have the two low bits: byte b those of the numbers
b, b + 16, b + 32 and b + 48, from its lowest bits on. With 3 bits, 8 bytes with the high bits follow, that of number i
in bit i % 8 of byte i / 8. `rounded` and the kernels are those of `linear_int4`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.linear.linear_int4 import BLOCK, check_group, multiplied, of_codes
from tutti.nn.linear.linear_rows import DTYPES, digits, kernels, quantized_on_gpu, rounds, tiles
from tutti.nn.linear.weight_kinds import INT2, INT3

KINDS = {2: INT2, 3: INT3}

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "linear_bits(Tensor x, Tensor weight, Tensor scales, Tensor? zeros=None, Tensor? bias=None, *, int bits, "
    "bool rounded=False) -> Tensor"
)


def pack(q: Tensor, bits: int) -> Tensor:
    """Numbers 0 to 2^bits - 1 of (n, k) as (n, k bits / 8) uint8. Raises ValueError for other bits than 2 and 3."""
    _check_sizes(bits, q.shape[1])
    blocks = q.to(torch.uint8).unflatten(1, (-1, 4, BLOCK // 4))
    a, b, c, d = (blocks & 3).unbind(2)
    parts = [a | b << 2 | c << 4 | d << 6]
    if bits == 3:
        high = (blocks >> 2).flatten(2).unflatten(2, (8, 8))
        parts.append((high << torch.arange(8, dtype=torch.uint8, device=q.device)).sum(3, dtype=torch.uint8))
    return torch.cat(parts, 2).flatten(1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    blocks = packed.unflatten(1, (-1, BLOCK // 8 * bits))
    low = blocks[..., : BLOCK // 4]
    q = torch.stack([low >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(2)
    if bits == 3:
        high = blocks[..., BLOCK // 4 :].unsqueeze(3) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
        q = q | (high & 1).flatten(2) << 2
    return q.flatten(1)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int) -> Tensor:
    """The weight (n, k) in the dtype of the scales."""
    return of_codes(unpack(weight, bits), scales, zeros, 2 ** (bits - 1))


def reference(x, weight, scales, zeros=None, bias=None, *, bits, rounded=False):
    """The operator in plain PyTorch."""
    _check(x, weight, scales, zeros, bits)
    return multiplied(x, dequantize(weight, scales, zeros, bits=bits), bias, rounded)


def _check_sizes(bits: int, k: int, group: int = BLOCK) -> None:
    if bits not in KINDS:
        raise ValueError(f"linear_bits: {bits} bits; expected 2 or 3 (linear_int4 and linear_int8 have 4 and 8)")
    check_group("linear_bits", k, group)


def _check(x: Any, weight: Any, scales: Any, zeros: Any, bits: int) -> None:
    _check_sizes(bits, x.shape[-1], x.shape[-1] // max(1, scales.shape[-1]))
    fits = len(x.shape) == len(weight.shape) == len(scales.shape) == 2 and x.shape[1] * bits == 8 * weight.shape[1]
    fits = fits and scales.shape[0] == weight.shape[0] and weight.dtype == torch.uint8
    if not fits or (zeros is not None and (zeros.shape, zeros.dtype) != (scales.shape, torch.uint8)):
        raise ValueError(
            f"linear_bits: x {tuple(x.shape)}, weight {tuple(weight.shape)} {weight.dtype} and scales "
            f"{tuple(scales.shape)}: expected (m, k), (n, k {bits} / 8) uint8 and (n, k / group), with zeros of uint8"
        )


def compiled(
    x: Any, weight: Any, scales: Any, zeros: Any = None, bias: Any = None, bits: int = 2, rounded: bool = False
) -> tuple | None:
    """The compiled operator and its arguments, as in `linear_rows`."""
    if x.dtype not in DTYPES or (rounded and not rounds()):
        return None
    _check(x, weight, scales, zeros, bits)
    args = x, weight, scales, zeros, bias, KINDS[bits], x.shape[1] // scales.shape[1], digits(x, rounded), tiles()
    return kernels().linear_rows.default, args


def cpu(x, weight, scales, zeros=None, bias=None, *, bits, rounded=False):
    """The operator on a CPU."""
    if call := compiled(x, weight, scales, zeros, bias, bits=bits, rounded=rounded):
        op, args = call
        return op(*args)
    return reference(x, weight, scales, zeros, bias, bits=bits, rounded=rounded)


def _on_gpu(x, weight, scales, zeros=None, bias=None, *, bits, rounded=False):
    if rounded:
        return reference(x, weight, scales, zeros, bias, bits=bits, rounded=True)
    _check(x, weight, scales, zeros, bits)
    return quantized_on_gpu(x, weight, scales, zeros, bias, KINDS[bits], bits,
                            lambda: dequantize(weight, scales, zeros, bits=bits))  # fmt: skip


_library.impl("linear_bits", cpu, "CPU")
_library.impl("linear_bits", _on_gpu, "CUDA")
torch.library.register_fake(
    "tutti::linear_bits",
    lambda x, weight, scales, zeros=None, bias=None, *, bits, rounded=False: x.new_empty(len(x), len(weight)),
)
