"""Matrix products in low precision: operands are rounded to a format (`round_operand`, `round_both`) and multiplied
(`scaled_mm`).

The contracted dim is cut into blocks (the last may be smaller). Each row of the left operand and each column of the
right one has a scale for each block. Products of blocks are added in float32. So a split of the contracted dim between
whole blocks has the same rounding as the whole, and changes only the order of the sum.

| format | block | numbers | scale |
|---|---|---|---|
| `float8` | 128 | float8_e4m3fn | float32: the largest magnitude over 448 (DeepSeek-V3, section 3.3) |
| `mxfp8` | 32 | float8_e4m3fn | a power of two (OCP Microscaling Formats, 2023), as its exponent in a byte |
| `nvfp4` | 16 | E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; two in a byte | E4M3 times a power of two, in bfloat16 |

A rounded operand is a matrix of bytes, whose last dim is the contracted one, and a matrix of scales. `round_both` gives
a matrix rounded along its rows and along its columns in one read: a weight is contracted along one dim in the forward
pass and along the other in the backward pass, and so is the gradient of a result.

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
ROUNDED_AT_ONCE = 1 << 22  # numbers, to bound the memory of intermediate values
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Format:
    """Format of rounded numbers. block: how many numbers share a scale. bits: bits of a number. scales: dtype in which
    scales are kept."""

    block: int
    bits: int
    scales: torch.dtype

    def width(self, k: int) -> int:
        """Bytes of k numbers."""
        return -(-k * self.bits // 8)

    def blocks(self, k: int) -> int:
        """Scales of k numbers."""
        return -(-k // self.block)

    def bytes_of(self, rows: int, k: int) -> int:
        """Bytes of a rounded operand of (rows, k) with its scales."""
        return rows * (self.width(k) + self.blocks(k) * self.scales.itemsize)


FORMATS: Mapping[str, Format] = {
    "float8": Format(128, 8, torch.float32),
    "mxfp8": Format(32, 8, torch.uint8),
    "nvfp4": Format(16, 4, torch.bfloat16),
}

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("round_operand(Tensor x, int dim, str format) -> (Tensor, Tensor)")
_library.define("round_both(Tensor x, str format) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "scaled_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, str format, ScalarType dtype) -> Tensor"
)


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


def _in_blocks(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Numbers (rows, blocks, block) and float32 scales (rows, blocks, 1) of x (rows, k)."""
    block = format_of(name).block
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    if name == "float8":
        return rounded(blocks, 2)
    largest = blocks.abs().amax(2, keepdim=True)
    return _in_mxfp8(blocks, largest) if name == "mxfp8" else _in_nvfp4(blocks, largest)


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


def round_operand(x: Tensor, dim: int, name: str) -> tuple[Tensor, Tensor]:
    """A matrix rounded to a format along a dim: bytes of numbers (rows, `width(k)`) and scales (rows, `blocks(k)`),
    where k is the size of the dim and `rows` that of the other one."""
    x = x if dim == 1 else x.t()
    (rows, k), form = x.shape, format_of(name)
    numbers = x.new_empty((rows, form.width(k)), dtype=torch.uint8)
    scales = x.new_empty((rows, form.blocks(k)), dtype=form.scales)
    size = max(1, ROUNDED_AT_ONCE // max(1, k))
    for start in range(0, rows, size):
        part = slice(start, start + size)
        blocks, scale = _in_blocks(x[part], name)
        flat = blocks.flatten(1)[:, :k]
        numbers[part] = _packed(flat) if name == "nvfp4" else flat.contiguous().view(torch.uint8)
        scale = scale.squeeze(2)
        scales[part] = scale.to(torch.float8_e8m0fnu).view(torch.uint8) if name == "mxfp8" else scale
    return numbers, scales


def _packed(x: Tensor) -> Tensor:
    """Numbers of E2M1 (rows, k), two in a byte. The first has the lower bits; its highest is the sign."""
    magnitudes = torch.tensor(E2M1, device=x.device)
    codes = torch.bucketize(x.abs().contiguous(), magnitudes, out_int32=True).clamp(max=7) + 8 * x.signbit()
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, x.shape[1] % 2))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Tensor) -> Tensor:
    """The inverse of `_packed`, in float32."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=packed.device)
    return values[torch.stack([packed & 15, packed >> 4], 2).flatten(1).int()]


def scaled_back(numbers: Tensor, scales: Tensor, name: str) -> Tensor:
    """The numbers of a rounded operand times their scales, in float32. Of an odd number in NVFP4, one zero follows."""
    block = FORMATS[name].block
    x = _unpacked(numbers) if name == "nvfp4" else numbers.view(FP8).float()
    scale = (scales.view(torch.float8_e8m0fnu) if name == "mxfp8" else scales).float()
    blocks = torch.nn.functional.pad(x, (0, scale.shape[1] * block - x.shape[1])).unflatten(1, (-1, block))
    return (blocks * scale.unsqueeze(2)).flatten(1)[:, : x.shape[1]]


def scaled_mm(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """The product (m, n) of rounded operands a (m, k) and b (n, k)."""
    if name != "float8":
        x, y = scaled_back(a, a_scales, name), scaled_back(b, b_scales, name)
        wide = torch.bfloat16 if a.device.type == "cuda" else torch.float32  # which has all bits of the numbers
        return (x.to(wide) @ y.to(wide).t()).to(dtype)
    pad, columns = torch.nn.functional.pad, b.shape[0]
    a = pad(a, (0, -a.shape[1] % ALIGNED)).view(FP8)
    b = pad(b, (0, -b.shape[1] % ALIGNED, 0, -columns % ALIGNED)).view(FP8)
    b_scales = pad(b_scales, (0, 0, 0, -columns % ALIGNED), value=1.0)
    total, size = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.float32, device=a.device), FORMATS[name].block
    for i, start in enumerate(range(0, a.shape[1], size)):
        x, y = a[:, start : start + size], b[:, start : start + size].t()
        x_scale, y_scale = a_scales[:, i].contiguous().unsqueeze(1), b_scales[:, i].contiguous().unsqueeze(0)
        total += compat.scaled_mm(x, y, x_scale, y_scale, torch.float32)
    return total[:, :columns].to(dtype)


def product(a: Tensor, b: Tensor, name: str) -> Tensor:
    """a (m, k) @ b (k, n) in a format, in the dtype of a."""
    return scaled_mm(*round_operand(a, 1, name), *round_operand(b, 0, name), name, a.dtype)


def _round_both(x: Tensor, name: str) -> tuple[Tensor, ...]:
    """Along dim 1, as a left operand, and along dim 0."""
    return *round_operand(x, 1, name), *round_operand(x, 0, name)


def _empty(x: Tensor, dim: int, name: str) -> tuple[Tensor, Tensor]:
    (rows, k), form = (x.shape if dim == 1 else x.shape[::-1]), format_of(name)
    numbers = x.new_empty((rows, form.width(k)), dtype=torch.uint8)
    return numbers, x.new_empty((rows, form.blocks(k)), dtype=form.scales)


for _device in ("CPU", "CUDA"):
    _library.impl("round_operand", round_operand, _device)
    _library.impl("round_both", _round_both, _device)
    _library.impl("scaled_mm", scaled_mm, _device)
torch.library.register_fake("tutti::round_operand", lambda x, dim, format: _empty(x, dim, format))
torch.library.register_fake("tutti::round_both", lambda x, format: (*_empty(x, 1, format), *_empty(x, 0, format)))
torch.library.register_fake(
    "tutti::scaled_mm",
    lambda a, a_scales, b, b_scales, format, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
)
differentiable_once("scaled_mm", "round_operand", "round_both", "scaled_mm")
