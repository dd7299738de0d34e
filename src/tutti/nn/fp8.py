"""Matrix products in FP8: `tutti::fp8_mm(a, b)` is a @ b with operands rounded to float8_e4m3fn.

The contracted dim is cut into blocks of 128 (one block, if 128 does not divide it). Each row of a and each column of b
has a scale for each block, its largest magnitude over 448, the largest number of the format (DeepSeek-V3, section 3.3).
Products of blocks are added in float32. With scales of blocks, a part of the blocks has the same rounding as the whole,
so a split of k changes only the order of the sum.

Error: a number x of a block with scale s is rounded by at most max(2^-4 |x|, 2^-10 s), so each result differs from the
exact one by at most (2^-3 + 2^-8) sum |a| |b|, if no operand is below 2^-6 s, and by a term of 2^-10 s for those that
are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti import compat
from tutti.nn.once import differentiable_once

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("fp8_mm(Tensor a, Tensor b) -> Tensor")


def block_of(k: int) -> int:
    """The size of the blocks of a contracted dim."""
    return BLOCK if k and k % BLOCK == 0 else max(1, k)


def rounded(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """x in FP8, and the float32 scale of each row (dim 1) or column (dim 0)."""
    scale = (x.abs().amax(dim, keepdim=True).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def _fp8_mm(a: Tensor, b: Tensor) -> Tensor:
    size = block_of(a.shape[1])
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], size):
        x, x_scale = rounded(a[:, start : start + size], 1)
        y, y_scale = rounded(b[start : start + size], 0)
        total += compat.scaled_mm(x, y, x_scale, y_scale, torch.float32)
    return total.to(a.dtype)


for _device in ("CPU", "CUDA"):
    _library.impl("fp8_mm", _fp8_mm, _device)
torch.library.register_fake("tutti::fp8_mm", lambda a, b: a.new_empty((a.shape[0], b.shape[1])))
differentiable_once("fp8_mm", "fp8_mm")
