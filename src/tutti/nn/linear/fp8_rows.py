"""Rows in FP8 for messages: `fp8_rows(x)` packs x (T, H) into bytes, `rows_of_fp8` unpacks as many as `counts` sums to.

Blocks of 128 numbers of a row (all of it, if 128 does not divide H) have a scale that is a power of two, as in the
dispatch of DeepSeek-V3 (arXiv 2412.19437, section 3.3.3). So numbers are exact in bfloat16, and rounding them again
changes nothing. A row is H bytes of float8_e4m3fn and a byte for the exponent of each block's scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.nn.linear.scaled_mm import FP8, LARGEST, block_of
from tutti.nn.once import differentiable_once

SHIFT = 127  # of exponents: a byte holds -127 to 128
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("fp8_rows(Tensor x) -> Tensor")
_library.define("rows_of_fp8(Tensor bytes, Tensor counts, int width, str dtype, int filled) -> Tensor")


def width_of(hidden: int) -> int:
    """Bytes of a row of so many numbers."""
    return hidden + hidden // block_of(hidden, "float8")


def to_fp8(x: Tensor) -> Tensor:
    """x (T, H) -> uint8 (T, `width_of(H)`)."""
    size = block_of(x.shape[1], "float8")
    blocks = x.float().unflatten(1, (-1, size))
    largest = blocks.abs().amax(2)
    exponent = torch.ceil(torch.log2((largest / LARGEST).clamp(min=2.0**-126))).clamp(max=SHIFT)
    numbers = (blocks * torch.exp2(-exponent).unsqueeze(2)).clamp(-LARGEST, LARGEST).to(FP8).flatten(1)
    return torch.cat([numbers.view(torch.uint8), (exponent + SHIFT).to(torch.uint8)], 1)


def from_fp8(packed: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_fp8`, of shape (T, H)."""
    size = block_of(hidden, "float8")
    numbers = packed[:, :hidden].contiguous().view(FP8).float().unflatten(1, (-1, size))
    return (numbers * torch.exp2(packed[:, hidden:].float() - SHIFT).unsqueeze(2)).flatten(1).to(dtype)


def _rows_of_fp8(packed: Tensor, counts: Tensor, width: int, dtype: str, filled: int) -> Tensor:
    """Rows behind the last are undefined. filled: how many there are on average, for predictions."""
    rows = packed.new_empty((len(packed), width), dtype=DTYPES[dtype])
    count = int(counts.sum())
    rows[:count] = from_fp8(packed[:count], width, rows.dtype)
    return rows


for _device in ("CPU", "CUDA"):
    _library.impl("fp8_rows", to_fp8, _device)
    _library.impl("rows_of_fp8", _rows_of_fp8, _device)
torch.library.register_fake(
    "tutti::fp8_rows", lambda x: x.new_empty((x.shape[0], width_of(x.shape[1])), dtype=torch.uint8)
)
torch.library.register_fake(
    "tutti::rows_of_fp8",
    lambda packed, counts, width, dtype, filled: packed.new_empty((len(packed), width), dtype=DTYPES[dtype]),
)
differentiable_once("fp8_rows", "fp8_rows", "rows_of_fp8")
