"""A linear layer with a weight in any scheme that no other operator has: y = x W^T + bias, W = scale (q - zero).

| operand | shape | |
|---|---|---|
| x | (m, k) | floating |
| weight | (n, 4 ceil(k bits / 32)) uint8 | q, as a stream of bits for each row: `tutti.nn.quantized.scheme.pack_bits` |
| | or (n, k) float8_e4m3fn | q, with a zero of 0 |
| scales | (n, groups) float32 | of groups of k / groups numbers |
| zeros | (n, groups) uint8 or none | 2^(bits - 1) without |
| bias | (n) or none | of the dtype of x |

W is dequantized at each call, and rounded to the dtype of x. That is slower than `linear_int4`, `linear_bits` and
`linear_int8`, which have fewer schemes. On a CPU, float32 and bfloat16 are computed by `linear_rows.cpp`, some rows of
W at a time; a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.linear.linear_int4 import multiplied, of_codes
from tutti.nn.linear.linear_rows import DTYPES, kernels, quantized_on_gpu, tiles
from tutti.nn.linear.weight_kinds import CODES, FLOAT8
from tutti.nn.quantized.scheme import FLOAT8 as E4M3
from tutti.nn.quantized.scheme import unpack_bits

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "linear_codes(Tensor x, Tensor weight, Tensor scales, Tensor? zeros=None, Tensor? bias=None, *, int bits) -> Tensor"
)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, k: int, bits: int) -> Tensor:
    """The weight (n, k) in the dtype of the scales."""
    if weight.dtype == E4M3:
        return (scales.unsqueeze(2) * weight.to(scales.dtype).unflatten(1, (scales.shape[1], -1))).flatten(1)
    return of_codes(unpack_bits(weight, bits, k), scales, zeros, 2 ** (bits - 1))


def reference(x, weight, scales, zeros=None, bias=None, *, bits):
    """The operator in plain PyTorch."""
    _check(x, weight, scales, zeros, bits)
    return multiplied(x, dequantize(weight, scales, zeros, k=x.shape[1], bits=bits), bias, False)


def _check(x: Any, weight: Any, scales: Any, zeros: Any, bits: int) -> None:
    k = x.shape[-1]
    size, dtypes = (k, (E4M3,)) if weight.dtype == E4M3 else (4 * -(-k * bits // 32), (torch.uint8,))
    fits = len(x.shape) == len(weight.shape) == len(scales.shape) == 2 and bits in range(2, 9)
    fits = fits and weight.shape[1] == size and weight.dtype in dtypes
    fits = fits and weight.shape[0] == scales.shape[0] and scales.shape[1] and k % scales.shape[1] == 0
    if not fits or (zeros is not None and (zeros.shape, zeros.dtype) != (scales.shape, torch.uint8)):
        raise ValueError(
            f"linear_codes: x {tuple(x.shape)}, weight {tuple(weight.shape)} {weight.dtype} and scales "
            f"{tuple(scales.shape)}: expected (m, k), (n, {size}) of uint8 or float8 for {bits} bits and (n, groups), "
            "with zeros of uint8"
        )


def compiled(x: Any, weight: Any, scales: Any, zeros: Any = None, bias: Any = None, bits: int = 8) -> tuple | None:
    """The compiled operator and its arguments, as in `linear_rows`."""
    if x.dtype not in DTYPES:
        return None
    _check(x, weight, scales, zeros, bits)
    kind = FLOAT8 if weight.dtype == E4M3 else CODES + 8 * bits
    args = x, weight, scales, zeros, bias, kind, x.shape[1] // scales.shape[1], 0, tiles()
    return kernels().linear_rows.default, args


def cpu(x, weight, scales, zeros=None, bias=None, *, bits):
    """The operator on a CPU."""
    if call := compiled(x, weight, scales, zeros, bias, bits=bits):
        op, args = call
        return op(*args)
    return reference(x, weight, scales, zeros, bias, bits=bits)


def _on_gpu(x, weight, scales, zeros=None, bias=None, *, bits):
    _check(x, weight, scales, zeros, bits)
    kind, k = FLOAT8 if weight.dtype == E4M3 else CODES, x.shape[1]
    return quantized_on_gpu(x, weight, scales, zeros, bias, kind, bits,
                            lambda: dequantize(weight, scales, zeros, k=k, bits=bits))  # fmt: skip


_library.impl("linear_codes", cpu, "CPU")
_library.impl("linear_codes", _on_gpu, "CUDA")
torch.library.register_fake(
    "tutti::linear_codes",
    lambda x, weight, scales, zeros=None, bias=None, *, bits: x.new_empty(len(x), len(weight)),
)
