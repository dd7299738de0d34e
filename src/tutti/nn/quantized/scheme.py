"""How a weight is quantized: a few bits for each number, and a scale, or a scale and a zero, for a group of numbers.

A weight (n, k) becomes codes (n, k) of 0 to 2^bits - 1, and the number of a code is scale (code - zero). A group is
`group` numbers along k, or a whole row. Without zeros, the zero of all groups is 2^(bits - 1).

Ternary weights are -s, 0 or s, with the codes 1, 2 and 3 of two bits; binary ones -s or s, with the codes 1 and 3. So
they are multiplied as other weights of two bits are. Files hold five ternary weights in a byte, or eight binary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MOST = torch.finfo(FLOAT8).max
BITS = {"float8": 8, "ternary": 2, "binary": 2}  # of the codes of a kind in memory
TRITS = 5  # ternary weights in a byte: 3^5 < 256
SCALES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
SHARED = 256  # scales that share a scale of their own


class Parts(NamedTuple):
    """A quantized weight. codes: (n, k) uint8, or float8. scales: (n, groups) float32. zeros: (n, groups) uint8."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized.

    bits: bits of a code, 2 to 8. group: numbers along k that share a scale; None: all of an output.
    symmetric: whether there are no zeros. kind: codes are integers, numbers in float8 (e4m3) with a scale, or those of
        ternary or binary weights, which are of 2 bits in memory.
    activations: inputs are rounded to int8 with a scale for each token ("int8"), or with one that was calibrated
        ("int8-static"). It needs a scale for each output.
    scales: the dtype that scales are rounded to; by default that of the weight. "int8": they are codes of -127 to 127,
        and each 256 of them have a scale in float32 (the double quantization of Dettmers et al. 2023). In memory scales
        are float32.

    Raises ValueError for what does not fit together.
    """

    bits: int = 4
    group: int | None = 64
    symmetric: bool = True
    activations: Literal["int8", "int8-static"] | None = None
    kind: Literal["int", "float8", "ternary", "binary"] = "int"
    scales: Literal["", "float16", "bfloat16", "int8"] = ""

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9) or self.bits != BITS.get(self.kind, self.bits):
            raise ValueError(f"{self.bits} bits of kind {self.kind!r}; expected 2 to 8 bits of integers, 8 of float8, "
                             "or 2 of ternary or binary")  # fmt: skip
        if self.group is not None and self.group < 1:
            raise ValueError(f"groups of {self.group}; expected a positive number, or None for a scale for each output")
        if self.kind != "int" and not self.symmetric:
            raise ValueError(f"{self.kind} has no zeros: symmetric=True")
        if self.activations and (self.bits, self.group, self.kind, self.symmetric) != (8, None, "int", True):
            raise ValueError(f"activations={self.activations!r} needs bits=8, group=None and symmetric=True")
        if self.scales not in ("", *SCALES):
            raise ValueError(f"scales={self.scales!r}; expected one of {', '.join(SCALES)}")

    def __str__(self) -> str:
        name = f"int{self.bits}" if self.kind == "int" else self.kind
        parts = [name, f"g{self.group}" if self.group else "", "" if self.symmetric else "zeros"]
        if self.activations:
            parts.append({"int8": "a8", "int8-static": "a8static"}[self.activations])
        return "-".join(x for x in parts if x)

    def check(self, path: str, k: int) -> None:
        """Raise ValueError if a weight with rows of k numbers does not divide into groups."""
        if self.group and k % self.group:
            fitting = [g for g in (128, 64, 32, 16) if k % g == 0]
            remedy = f"use groups of {fitting[0]}" if fitting else "use a scale for each output (group=None)"
            raise ValueError(
                f"{path} has {k} inputs, which groups of {self.group} do not divide: {remedy}, or ignore it"
            )

    def groups(self, k: int) -> int:
        """The number of groups of a row."""
        return k // self.group if self.group else 1

    def bytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a quantized weight of shape (n, k). dtype: dtype of the weight, which scales have by default."""
        n, k = shape
        groups = n * self.groups(k)
        of_scales = groups * SCALES.get(self.scales, dtype).itemsize
        of_scales += 4 * -(-groups // SHARED) if self.scales == "int8" else 0
        of_row = -(-k // TRITS) if self.kind == "ternary" else -(-k * (1 if self.kind == "binary" else self.bits) // 8)
        return n * of_row + of_scales + (0 if self.symmetric else -(-groups * self.bits // 8))

    def grid(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scales and zeros (n, groups) with which the range of each group is just covered.

        Without zeros, the number of largest magnitude is -2^(bits-1) scale, in int8 127 scale or -127 scale; with
        zeros, the smallest number, or 0, is -zero scale, and the largest, or 0, is (2^bits - 1 - zero) scale.

        Scales of ternary and binary weights are those of least squared error: the mean magnitude of the m numbers that
        are not 0, of largest magnitude, with the m of the largest (their sum)^2 / m; of binary weights, of all.
        """
        parts = weight.float().unflatten(1, (self.groups(weight.shape[1]), -1))
        if self.kind == "float8":
            return self.stored(parts.abs().amax(2) / FLOAT8_MOST, weight.dtype), None
        if self.kind == "binary":
            return self.stored(parts.abs().mean(2), weight.dtype), None
        if self.kind == "ternary":
            sums = parts.abs().sort(2, descending=True).values.cumsum(2)
            count = torch.arange(1, parts.shape[2] + 1, device=weight.device)
            best = (sums.square() / count).argmax(2, keepdim=True)
            return self.stored((sums.gather(2, best) / (best + 1)).squeeze(2), weight.dtype), None
        if not self.symmetric:
            low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
            return self.grid_of(low, high, weight.dtype)
        if self.bits == 8:
            return self.stored(parts.abs().amax(2) / 127, weight.dtype), None
        extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True)).squeeze(2)
        return self.stored(extreme / -(2 ** (self.bits - 1)), weight.dtype), None

    def grid_of(self, low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The scales and zeros that cover low <= 0 to high >= 0."""
        scales = self.stored((high - low) / (2**self.bits - 1), dtype)
        return scales, (-low / nonzero(scales)).round().clamp(0, 2**self.bits - 1).to(torch.uint8)

    def stored(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales (n, groups) in float32, rounded to the dtype in which they are saved. dtype: dtype of the weight."""
        if self.scales == "int8":
            return of_scale_codes(*scale_codes(scales))
        return scales.to(SCALES.get(self.scales, dtype)).float()

    def codes(self, weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        """The nearest codes (n, k) of a weight for scales and zeros (n, groups)."""
        parts = weight.float().unflatten(1, (scales.shape[1], -1)) / nonzero(scales).unsqueeze(2)
        if self.kind == "float8":
            return parts.clamp(-FLOAT8_MOST, FLOAT8_MOST).flatten(1).to(FLOAT8)
        return self.nearest(parts + self._zeros(zeros)).to(torch.uint8).flatten(1)

    @property
    def least(self) -> int:
        """The smallest code."""
        return 1 if self.kind in ("ternary", "binary") else 0

    @property
    def most(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def nearest(self, x: Tensor) -> Tensor:
        """The codes that are nearest to numbers, in their dtype."""
        if self.kind == "binary":
            return torch.where(x >= 2, 3.0, 1.0).to(x.dtype)
        return x.round().clamp(self.least, self.most)

    def quantize(self, weight: Tensor) -> Parts:
        """The nearest quantized weight: round to nearest."""
        scales, zeros = self.grid(weight)
        return Parts(self.codes(weight, scales, zeros), scales, zeros)

    def dequantize(self, parts: Parts) -> Tensor:
        """The weight (n, k) in float32."""
        codes = parts.codes.float().unflatten(1, (parts.scales.shape[1], -1))
        offset = 0 if self.kind == "float8" else self._zeros(parts.zeros)
        return (parts.scales.unsqueeze(2) * (codes - offset)).flatten(1)

    def rounded(self, weight: Tensor) -> Tensor:
        """The nearest quantized weight in float32."""
        return self.dequantize(self.quantize(weight))

    def _zeros(self, zeros: Tensor | None) -> Tensor | int:
        return 2 ** (self.bits - 1) if zeros is None else zeros.float().unsqueeze(2)


def nonzero(scales: Tensor) -> Tensor:
    """Scales to divide by: 1 for those of groups of zeros."""
    return torch.where(scales == 0, 1, scales)


def scale_codes(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (n, groups) as codes (n, groups) int8 and units (ceil(n groups / 256)) float32: scale = code unit.

    The largest of 256 scales has the code 127, and no scale but 0 the code 0. Units have 16 bits of precision, so that
    products are exact in float32, and scales that were rounded once are not changed again.
    """
    blocks = _blocks(scales.float())
    units = ((blocks.abs().amax(1) / 127).contiguous().view(torch.int32) & -256).view(torch.float32)
    codes = (blocks / nonzero(units).unsqueeze(1)).round().clamp(-127, 127)
    codes = torch.where(codes == 0, blocks.sign(), codes).to(torch.int8)
    return codes.flatten()[: scales.numel()].view(scales.shape), units


def of_scale_codes(codes: Tensor, units: Tensor) -> Tensor:
    """The inverse of `scale_codes`: scales (n, groups) float32."""
    return (_blocks(codes.float()) * units.unsqueeze(1)).flatten()[: codes.numel()].view(codes.shape)


def _blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % SHARED)).view(-1, SHARED)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., k) as a stream of bits (..., 4 ceil(k bits / 32)) uint8, whole words of 32 bits.

    The first code is the lowest bits of the first byte, as `compressed-tensors` packs them.
    """
    k = codes.shape[-1]
    eights = torch.nn.functional.pad(codes, (0, -k % 8)).to(torch.int64).unflatten(-1, (-1, 8))
    joined = (eights << (bits * torch.arange(8, device=codes.device))).sum(-1)
    packed = joined.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    size = 4 * -(-k * bits // 32)
    return torch.nn.functional.pad(packed, (0, max(0, size - packed.shape[-1])))[..., :size].contiguous()


def unpack_bits(packed: Tensor, bits: int, k: int) -> Tensor:
    """The inverse of `pack_bits`: codes (..., k) uint8."""
    count = -(-k // 8)
    packed = torch.nn.functional.pad(packed, (0, max(0, count * bits - packed.shape[-1])))[..., : count * bits]
    joined = torch.nn.functional.pad(packed.unflatten(-1, (count, bits)), (0, 8 - bits)).contiguous().view(torch.int64)
    codes = (joined >> (bits * torch.arange(8, device=packed.device))) & (2**bits - 1)
    return codes.flatten(-2)[..., :k].to(torch.uint8)


def pack_ternary(codes: Tensor) -> Tensor:
    """Codes 1, 2 and 3 (..., k) as (..., ceil(k / 5)) uint8: digits of base 3, the first the lowest."""
    fives = torch.nn.functional.pad(codes - 1, (0, -codes.shape[-1] % TRITS)).unflatten(-1, (-1, TRITS))
    return (fives * 3 ** torch.arange(TRITS, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_ternary(packed: Tensor, k: int) -> Tensor:
    """The inverse of `pack_ternary`: codes (..., k) uint8."""
    digits = packed.unsqueeze(-1) // 3 ** torch.arange(TRITS, dtype=torch.uint8, device=packed.device) % 3
    return digits.flatten(-2)[..., :k] + 1
