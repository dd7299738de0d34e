"""Matrix products in low precision: `tutti::scaled_mm(a, b, format)` is a @ b with operands rounded to a format.

The contracted dim is cut into blocks (the last may be smaller). Each row of a and each column of b has a scale for each
block. Products of blocks are added in float32. So a split of the contracted dim between whole blocks has the same
rounding as the whole, and changes only the order of the sum.

| format | block | numbers | scale |
|---|---|---|---|
| `float8` | 128 | float8_e4m3fn | float32: the largest magnitude over 448 (DeepSeek-V3, section 3.3) |
| `mxfp8` | 32 | float8_e4m3fn | a power of two (OCP Microscaling Formats, 2023) |
| `nvfp4` | 16 | E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 | E4M3 times a power of two |

NVFP4 on hardware has a scale for the whole tensor instead of that power of two, so that blocks 2^17 times smaller than
the tensor's largest have scale 0. Numbers are rounded to the nearest, without Hadamard transforms. Devices that lack a
format compute the same numbers from operands that are rounded and scaled back.

Error of `float8`: a number x of a block with scale s is rounded by at most max(2^-4 |x|, 2^-10 s), so each result
differs from the exact one by at most (2^-3 + 2^-8) sum |a| |b|, if no operand is below 2^-6 s, and by a term of 2^-10 s
for those that are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti import compat
from tutti.nn.once import differentiable_once

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
FP4_LARGEST = 6.0
ALIGNED = 16  # kernels take contracted dims and columns of a multiple of it


@dataclass(frozen=True)
class Format:
    """block: numbers that share a scale. bits: of a number. scale_bytes: of a scale."""

    block: int
    bits: int
    scale_bytes: int

    def bytes_of(self, rows: int, k: int) -> int:
        """Bytes of a rounded operand of (rows, k) with its scales."""
        return rows * (k * self.bits // 8 + -(-k // self.block) * self.scale_bytes)


FORMATS: Mapping[str, Format] = {"float8": Format(128, 8, 4), "mxfp8": Format(32, 8, 1), "nvfp4": Format(16, 4, 1)}

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("scaled_mm(Tensor a, Tensor b, str format) -> Tensor")


def format_of(name: str) -> Format:
    """The format of a name. Raises ValueError for an unknown one."""
    if name not in FORMATS:
        raise ValueError(f"no format {name!r} of matrix products; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def block_of(k: int, name: str) -> int:
    """The size of the blocks at which a contracted dim can be split: that of the format, or all of the dim."""
    block = format_of(name).block
    return block if k and k % block == 0 else max(1, k)


def rounded(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """x in FP8, and the float32 scale of each row (dim 1) or column (dim 0)."""
    scale = (x.abs().amax(dim, keepdim=True).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def rounded_to(x: Tensor, name: str) -> Tensor:
    """x (rows, k) rounded to a format along dim 1 and scaled back, in float32."""
    block, k = format_of(name).block, x.shape[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -k % block)).unflatten(1, (-1, block))
    if name == "float8":
        numbers, scale = rounded(blocks, 2)
    else:
        largest = blocks.abs().amax(2, keepdim=True)
        numbers, scale = _in_mxfp8(blocks, largest) if name == "mxfp8" else _in_nvfp4(blocks, largest)
    return (numbers.float() * scale).flatten(1)[:, :k]


def _in_mxfp8(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.exp2(torch.ceil(torch.log2((largest / LARGEST).clamp(min=2.0**-127))))
    return (x / scale).to(FP8), scale


def _in_nvfp4(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    mantissa, exponent = torch.frexp((largest / FP4_LARGEST).clamp(min=2.0**-127))
    scale = torch.ldexp(mantissa.to(FP8).float(), exponent)  # in [0.5, 1]: 3 bits of the mantissa, as in E4M3
    scale = torch.where(largest.isfinite(), scale, torch.nan)  # as a number that is not finite makes its block
    x = (x / scale).clamp(-FP4_LARGEST, FP4_LARGEST)
    spacing = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=1.0))) - 1)  # 0.5 below 2, 1 below 4, then 2
    return torch.round(x / spacing) * spacing, scale


def product(a: Tensor, b: Tensor, name: str) -> Tensor:
    """a (m, k) @ b (k, n) in a format, in the dtype of a."""
    if name != "float8":
        x, y = rounded_to(a, name), rounded_to(b.t(), name)
        dtype = torch.bfloat16 if a.device.type == "cuda" else torch.float32  # which has all bits of the numbers
        return (x.to(dtype) @ y.to(dtype).t()).to(a.dtype)
    pad, columns = torch.nn.functional.pad, b.shape[1]
    a, b = pad(a, (0, -a.shape[1] % ALIGNED)), pad(b, (0, -columns % ALIGNED, 0, -b.shape[0] % ALIGNED))
    total, size = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device), FORMATS[name].block
    for start in range(0, a.shape[1], size):
        x, x_scale = rounded(a[:, start : start + size], 1)
        y, y_scale = rounded(b[start : start + size], 0)
        total += compat.scaled_mm(x, y, x_scale, y_scale, torch.float32)
    return total[:, :columns].to(a.dtype)


for _device in ("CPU", "CUDA"):
    _library.impl("scaled_mm", product, _device)
torch.library.register_fake("tutti::scaled_mm", lambda a, b, format: a.new_empty((a.shape[0], b.shape[1])))
differentiable_once("scaled_mm", "scaled_mm")
