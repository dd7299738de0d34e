"""A linear layer with a weight of int8 and one scale for each row: y = x (scales q)^T + bias.

| operand | shape | |
|---|---|---|
| x | (m, k) | floating |
| weight | (n, k) int8 | q |
| scales | (n) float32 | |
| bias | (n) or none | of the dtype of x |

With `rounded`, each row of x is rounded to int8 with a scale of its own, and products are summed in integers: on
processors with VNNI instructions about twice as fast for many rows. Otherwise the result is exact in the weight. On a
CPU, float32 and bfloat16 are computed by `linear_rows.cpp`; a row's bits do not depend on the other rows. With VNNI
instructions, rows of bfloat16 that are not `rounded` are rounded to 16 bits of their largest magnitude. On a GPU
with Triton, `linear_quantized_triton.py` computes up to 64 rows (16 of float32) that are not rounded; for more, the
weight is dequantized in the dtype of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.linear.linear_rows import DTYPES, digits, kernels, quantized_on_gpu, rounds, tiles
from tutti.nn.linear.weight_kinds import INT8

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "linear_int8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, *, bool rounded=False) -> Tensor"
)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest int8 weight (n, k) and its scales (n): of each row, the largest magnitude is 127 scales."""
    scales = weight.float().abs().amax(1) / 127
    return _rounded(weight, scales), scales


def dequantize_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """The weight in the dtype of the scales."""
    return weight * scales.unsqueeze(1)


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() / torch.where(scales == 0, 1, scales).unsqueeze(1)).round().to(torch.int8)


def reference(x, weight, scales, bias=None, *, rounded=False):
    """The operator in plain PyTorch."""
    _check(x, weight, scales)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    if rounded:
        of_rows = rows.abs().amax(1) / 127
        rows, scales = _rounded(x, of_rows).to(wide), of_rows.unsqueeze(1) * scales
    product = (rows @ weight.to(wide).T) * scales
    return (product if bias is None else product + bias).to(x.dtype)


def _check(x: Any, weight: Any, scales: Any) -> None:
    if (
        len(x.shape) != 2
        or weight.dtype != torch.int8
        or x.shape[1] != weight.shape[1]
        or scales.shape != weight.shape[:1]
    ):
        raise ValueError(
            f"linear_int8: x {tuple(x.shape)}, weight {tuple(weight.shape)} {weight.dtype} and scales "
            f"{tuple(scales.shape)}: expected (m, k), (n, k) int8 and (n)"
        )


def compiled(x: Any, weight: Any, scales: Any, bias: Any = None, rounded: bool = False) -> tuple | None:
    """The compiled operator and its arguments, as in `linear_rows`."""
    if x.dtype not in DTYPES or (rounded and not rounds()):
        return None
    _check(x, weight, scales)
    args = x, weight, scales, None, bias, INT8, 0, digits(x, rounded), tiles()
    return kernels().linear_rows.default, args


def cpu(x, weight, scales, bias=None, *, rounded=False):
    """The operator on a CPU."""
    if call := compiled(x, weight, scales, bias, rounded):
        op, args = call
        return op(*args)
    return reference(x, weight, scales, bias, rounded=rounded)


def _on_gpu(x, weight, scales, bias=None, *, rounded=False):
    if rounded:
        return reference(x, weight, scales, bias, rounded=True)
    _check(x, weight, scales)
    return quantized_on_gpu(x, weight, scales, None, bias, INT8, 8, lambda: dequantize_int8(weight, scales))


_library.impl("linear_int8", cpu, "CPU")
_library.impl("linear_int8", _on_gpu, "CUDA")
torch.library.register_fake(
    "tutti::linear_int8", lambda x, weight, scales, bias=None, *, rounded=False: x.new_empty(len(x), len(weight))
)
