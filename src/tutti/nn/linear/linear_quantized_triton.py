"""Linear layers with quantized weights for few rows on a GPU, in Triton: `tutti.nn.linear.linear_int8`, `linear_int4`,
`linear_bits` and `linear_codes`.

The time is that of reading the weights, which stay packed in memory: a program widens N rows of one, K numbers at a
time, in registers. Weights but those of int8 are rounded to the dtype of x.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from tutti.nn.linear.weight_kinds import CODES, FLOAT8, INT3, INT4, INT8

INT8_KIND, FLOAT8_KIND = tl.constexpr(INT8), tl.constexpr(FLOAT8)
CODES_KIND, INT4_KIND, INT3_KIND = tl.constexpr(CODES), tl.constexpr(INT4), tl.constexpr(INT3)


@triton.jit
def _codes(w, row, k, size, inside, KIND: tl.constexpr, BITS: tl.constexpr):
    """Numbers k of rows of a weight, in float32, without zeros and scales. size: bytes of a row."""
    at = w + row.to(tl.int64)[:, None] * size
    if KIND == INT8_KIND:
        return tl.load(at + k[None, :], mask=inside, other=0).to(tl.float32)
    if KIND == FLOAT8_KIND:  # by the bits of a float, whose exponent is 120 larger
        q = tl.load(at + k[None, :], mask=inside, other=0).to(tl.int32)
        bits = ((q & 128) << 24) | ((q & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    if KIND == INT4_KIND:
        q = tl.load(at + (k // 64 * 32 + k % 32)[None, :], mask=inside, other=0).to(tl.int32)
        return ((q >> (k // 32 % 2 * 4)[None, :]) & 15).to(tl.float32)
    if KIND == CODES_KIND:  # a stream of bits
        first = (k * BITS // 8)[None, :]
        low = tl.load(at + first, mask=inside, other=0).to(tl.int32)
        high = tl.load(at + first + 1, mask=inside & (first + 1 < size), other=0).to(tl.int32)
        return (((low | (high << 8)) >> (k * BITS % 8)[None, :]) & ((1 << BITS) - 1)).to(tl.float32)
    block = k // 64 * (8 * BITS)
    q = tl.load(at + (block + k % 16)[None, :], mask=inside, other=0).to(tl.int32)
    q = (q >> (k // 16 % 4 * 2)[None, :]) & 3
    if KIND == INT3_KIND:
        high = tl.load(at + (block + 16 + k % 64 // 8)[None, :], mask=inside, other=0).to(tl.int32)
        q |= ((high >> (k % 8)[None, :]) & 1) << 2
    return q.to(tl.float32)


@triton.jit
def _linear(
    x, w, scales, zeros, bias, out, rows, n, width, size, x_row, group, groups,
    KIND: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """out (rows, n) = x (rows, width) W^T + bias."""
    row, column, of_x = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K), tl.arange(0, ROWS)
    result = tl.zeros([N, ROWS], tl.float32)
    for first in range(0, width, K):
        k = first + column
        inside = (row < n)[:, None] & (k < width)[None, :]
        values = _codes(w, row, k, size, inside, KIND, BITS)
        if KIND != INT8_KIND:
            at = row[:, None] * groups + (k // group)[None, :]
            if ZEROS:
                values -= tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
            elif KIND != FLOAT8_KIND:
                values -= 1 << (BITS - 1)
            values *= tl.load(scales + at, mask=inside, other=0.0)
        a = tl.load(x + of_x[None, :] * x_row + k[:, None], mask=(of_x < rows)[None, :] & (k < width)[:, None],
                    other=0.0)  # fmt: skip
        result = tl.dot(values.to(x.dtype.element_ty), a, result, input_precision="ieee")
    if KIND == INT8_KIND:
        result *= tl.load(scales + row, mask=row < n, other=0.0)[:, None]
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    tl.store(out + of_x[None, :] * n + row[:, None], result.to(out.dtype.element_ty),
             mask=(row < n)[:, None] & (of_x < rows)[None, :])  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, kind: int, bits: int
) -> Tensor:
    """x (rows, k) times the transpose of a weight of `kind` (`linear_rows`), plus bias (n): (rows, n)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, scales = weight.contiguous().view(torch.uint8 if kind != INT8 else torch.int8), scales.contiguous()
    (rows, k), n, groups = x.shape, len(weight), scales.shape[1] if scales.ndim > 1 else 1
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    padded = max(16, triton.next_power_of_2(rows))
    _linear[triton.cdiv(n, 32),](  # pyright: ignore[reportIndexIssue]
        x, weight, scales, scales if zeros is None else zeros.contiguous(), scales if bias is None else bias, out,
        rows, n, k, weight.shape[1], x.stride(0), k // groups, groups, KIND=kind % 8, BITS=bits,
        ZEROS=zeros is not None, BIAS=bias is not None, ROWS=padded, N=32, K=128, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
