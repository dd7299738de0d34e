"""How GGUF stores the numbers of a tensor: plain, or in blocks of a row that share scales.

| type | block | a number is | bits a number |
|---|---|---|---|
| F32, F16, BF16 | 1 | itself | 32, 16, 16 |
| Q8_0 | 32 | d q, q of -127 to 127 | 8.5 |
| Q4_0 | 32 | d (q - 8), q of 0 to 15 | 4.5 |
| Q4_1 | 32 | d q + m, q of 0 to 15 | 5 |
| Q6_K | 256 | d s (q - 32), q of 0 to 63, s of 16 numbers: -128 to 127 | 6.5625 |
| Q5_K, Q4_K | 256 | d s q - e m, q of 0 to 31 or 15, s and m of 32 numbers: 0 to 63 | 5.5, 4.5 |
| Q3_K | 256 | d s (q - 4), q of 0 to 7, s of 16 numbers: -32 to 31 | 3.4375 |
| Q2_K | 256 | d s q - e m, q of 0 to 3, s and m of 16 numbers: 0 to 15 | 2.625 |

d, e and m of Q4_1 are float16. Encoding rounds to the nearest number under scales that just reach the extremes of a
group; llama.cpp's own quantizer also searches for scales of a smaller squared error. Source of the layouts:
ggml-quants.c of ggml-org/ggml.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class BlockType:
    """A type of tensors. number: its code in files. block: numbers that are stored together, in `size` bytes.

    encode: from float32 (n, k) to bytes (n, k / block * size); raises ValueError for numbers that do not fit.
    decode: from bytes to float32, up to the rounding of `encode` its inverse.
    """

    name: str
    number: int
    block: int
    size: int
    _encode: Callable[[Array], Array]
    _decode: Callable[[Array], Array]

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.block * self.size

    def encode(self, x: Array) -> Array:
        if x.shape[1] % self.block:
            raise ValueError(f"{self.name} needs rows of a multiple of {self.block} numbers, not {x.shape[1]}")
        if not np.isfinite(x).all():
            raise ValueError(f"{self.name}: the tensor has numbers that are not finite")
        blocks = np.ascontiguousarray(x, np.float32).reshape(-1, self.block)
        return self._encode(blocks).reshape(len(x), -1)

    def decode(self, data: Array) -> Array:
        blocks = np.ascontiguousarray(data).reshape(-1, self.size)
        return self._decode(blocks).reshape(len(data), -1)


def _plain(dtype: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    def encode(x: Array) -> Array:
        with np.errstate(over="ignore"):
            converted = x.astype(dtype)
        if not np.isfinite(converted).all():
            raise ValueError("a number is too large for float16: choose bf16 or f32")
        return converted.view(np.uint8)

    return encode, lambda data: data.view(dtype).astype(np.float32)


def _bf16(x: Array) -> Array:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)


def _from_bf16(data: Array) -> Array:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(x: Array) -> tuple[Array, Array]:
    """Float16 as bytes (n, 2), and the same numbers as float32 (n, 1)."""
    with np.errstate(over="ignore"):
        half = x.astype("<f2").reshape(-1, 1)
    if not np.isfinite(half).all():
        raise ValueError("a scale is too large for float16")
    return half.view(np.uint8), half.astype(np.float32)


def _float(data: Array) -> Array:
    return data.copy().view("<f2").astype(np.float32)


def _over(x: Array, scale: Array) -> Array:
    """x / scale, rounded; 0 where the scale is 0."""
    return np.rint(x / np.where(scale == 0, np.float32(np.inf), scale))


def _extreme(x: Array) -> Array:
    """The number of largest magnitude along the last dim."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]


def _join(*parts: Array) -> Array:
    return np.concatenate([x.astype(np.uint8) if x.dtype != np.int8 else x.view(np.uint8) for x in parts], 1)


# ---- blocks of 32 ---------------------------------------------------------------------------------------------------


def q8_0(q: Array, scales: Array) -> Array:
    """Blocks of int8 (n, 32) with scales (n)."""
    return _join(_half(scales)[0], q.astype(np.int8))


def q4_0(q: Array, scales: Array) -> Array:
    """Blocks of 0 to 15 (n, 32), of which 8 is zero, with scales (n)."""
    return _join(_half(scales)[0], _nibbles(q))


def q4_1(q: Array, scales: Array, least: Array) -> Array:
    """Blocks of 0 to 15 (n, 32) with scales (n) and what 0 stands for (n)."""
    return _join(_half(scales)[0], _half(least)[0], _nibbles(q))


def _nibbles(q: Array) -> Array:
    q = q.astype(np.uint8)
    return q[:, :16] | q[:, 16:] << 4


def _to_q8_0(x: Array) -> Array:
    d = _half(np.abs(x).max(1) / 127)[1]
    return q8_0(_over(x, d).clip(-127, 127), d)


def _to_q4_0(x: Array) -> Array:
    d = _half(_extreme(x) / -8)[1]
    return q4_0((_over(x, d) + 8).clip(0, 15), d)


def _to_q4_1(x: Array) -> Array:
    low = _half(x.min(1))[1]
    d = _half((x.max(1) - low[:, 0]) / 15)[1]
    return q4_1(_over(x - low, d).clip(0, 15), d, low)


def _numbers(data: Array) -> Array:
    return np.concatenate([data & 15, data >> 4], 1).astype(np.float32)


# ---- blocks of 256 --------------------------------------------------------------------------------------------------


def _shifted(data: Array, width: int, shifts: tuple[int, ...], bits: int) -> Array:
    """Unpack numbers of a few bits (n, 256): for each `width` bytes, those at the first shift, then at the next."""
    parts = data.reshape(len(data), -1, 1, width) >> np.array(shifts, np.uint8).reshape(-1, 1)
    return (parts & ((1 << bits) - 1)).reshape(len(data), -1)


def _gathered(q: Array, width: int, shifts: tuple[int, ...]) -> Array:
    """The inverse of `_shifted`."""
    parts = q.astype(np.uint8).reshape(len(q), -1, len(shifts), width)
    shifted = parts << np.array(shifts, np.uint8).reshape(-1, 1)
    return np.bitwise_or.reduce(shifted, 2).reshape(len(q), -1)


def _signed(x: Array, group: int, low: int, lowest_scale: int) -> tuple[Array, Array, Array]:
    """d as bytes, scales (n, 256 / group), and q - offset (n, 256), with q - offset from `low` to -low - 1."""
    parts = x.reshape(len(x), -1, group)
    scales = _extreme(parts) / low
    data, d = _half(_extreme(scales) / lowest_scale)
    s = _over(scales, d).clip(lowest_scale, -lowest_scale - 1)
    return data, s, _over(parts, (d * s)[..., None]).clip(low, -low - 1).reshape(x.shape)


def _with_minimum(x: Array, group: int, most: int, most_scale: int) -> tuple[Array, Array, Array, Array, Array]:
    """d and e as bytes, scales and minimums (n, 256 / group), and q (n, 256)."""
    parts = x.reshape(len(x), -1, group)
    low = parts.min(2).clip(max=0)
    scales = (parts.max(2) - low) / most
    d_data, d = _half(scales.max(1) / most_scale)
    e_data, e = _half((-low).max(1) / most_scale)
    s, m = _over(scales, d).clip(0, most_scale), _over(-low, e).clip(0, most_scale)
    q = _over(parts + (e * m)[..., None], (d * s)[..., None]).clip(0, most)
    return d_data, e_data, s, m, q.reshape(x.shape)


def _value(d: Array, s: Array, q: Array) -> Array:
    return ((d * s)[..., None] * q.reshape(len(q), s.shape[1], -1).astype(np.float32)).reshape(len(q), -1)


def _less(values: Array, e: Array, m: Array) -> Array:
    return (values.reshape(len(m), m.shape[1], -1) - (e * m)[..., None]).reshape(len(m), -1)


def _to_q6_k(x: Array) -> Array:
    data, s, q = _signed(x, 16, -32, -128)
    q = (q + 32).astype(np.uint8)
    return _join(_gathered(q & 15, 64, (0, 4)), _gathered(q >> 4, 32, (0, 2, 4, 6)), s.astype(np.int8), data)


def _from_q6_k(data: Array) -> Array:
    low, high = _shifted(data[:, :128], 64, (0, 4), 4), _shifted(data[:, 128:192], 32, (0, 2, 4, 6), 2)
    s = data[:, 192:208].view(np.int8).astype(np.float32)
    return _value(_float(data[:, 208:]), s, (low | high << 4).astype(np.int8) - 32)


def _packed_scales(s: Array, m: Array) -> Array:
    """Two times 8 numbers of 6 bits in 12 bytes."""
    s, m = s.astype(np.uint8), m.astype(np.uint8)
    first, last = slice(0, 4), slice(4, 8)
    return _join(
        s[:, first] | (s[:, last] >> 4) << 6,
        m[:, first] | (m[:, last] >> 4) << 6,
        (s[:, last] & 15) | (m[:, last] & 15) << 4,
    )


def _unpacked_scales(data: Array) -> tuple[Array, Array]:
    a, b, c = data[:, :4], data[:, 4:8], data[:, 8:]
    s = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], 1)
    m = np.concatenate([b & 63, c >> 4 | (b >> 6) << 4], 1)
    return s.astype(np.float32), m.astype(np.float32)


def _to_q4_k(x: Array) -> Array:
    d, e, s, m, q = _with_minimum(x, 32, 15, 63)
    return _join(d, e, _packed_scales(s, m), _gathered(q, 32, (0, 4)))


def _from_q4_k(data: Array) -> Array:
    s, m = _unpacked_scales(data[:, 4:16])
    q = _shifted(data[:, 16:], 32, (0, 4), 4)
    return _less(_value(_float(data[:, :2]), s, q), _float(data[:, 2:4]), m)


def _to_q5_k(x: Array) -> Array:
    d, e, s, m, q = _with_minimum(x, 32, 31, 63)
    q = q.astype(np.uint8)
    return _join(d, e, _packed_scales(s, m), _gathered(q >> 4, 32, tuple(range(8))), _gathered(q & 15, 32, (0, 4)))


def _from_q5_k(data: Array) -> Array:
    s, m = _unpacked_scales(data[:, 4:16])
    q = _shifted(data[:, 48:], 32, (0, 4), 4) | _shifted(data[:, 16:48], 32, tuple(range(8)), 1) << 4
    return _less(_value(_float(data[:, :2]), s, q), _float(data[:, 2:4]), m)


def _to_q3_k(x: Array) -> Array:
    data, s, q = _signed(x, 16, -4, -32)
    q, s = (q + 4).astype(np.uint8), (s + 32).astype(np.uint8)
    scales = _join(_gathered(s & 15, 8, (0, 4)), _gathered(s >> 4, 4, (0, 2, 4, 6)))
    return _join(_gathered(q >> 2, 32, tuple(range(8))), _gathered(q & 3, 32, (0, 2, 4, 6)), scales, data)


def _from_q3_k(data: Array) -> Array:
    q = _shifted(data[:, 32:96], 32, (0, 2, 4, 6), 2) | _shifted(data[:, :32], 32, tuple(range(8)), 1) << 2
    s = _shifted(data[:, 96:104], 8, (0, 4), 4) | _shifted(data[:, 104:108], 4, (0, 2, 4, 6), 2) << 4
    return _value(_float(data[:, 108:]), s.astype(np.float32) - 32, q.astype(np.int8) - 4)


def _to_q2_k(x: Array) -> Array:
    d, e, s, m, q = _with_minimum(x, 16, 3, 15)
    return _join(s.astype(np.uint8) | m.astype(np.uint8) << 4, _gathered(q, 32, (0, 2, 4, 6)), d, e)


def _from_q2_k(data: Array) -> Array:
    s, m = (data[:, :16] & 15).astype(np.float32), (data[:, :16] >> 4).astype(np.float32)
    q = _shifted(data[:, 16:80], 32, (0, 2, 4, 6), 2)
    return _less(_value(_float(data[:, 80:82]), s, q), _float(data[:, 82:]), m)


TYPES = {
    x.number: x
    for x in (
        BlockType("f32", 0, 1, 4, *_plain("<f4")),
        BlockType("f16", 1, 1, 2, *_plain("<f2")),
        BlockType("bf16", 30, 1, 2, _bf16, _from_bf16),
        BlockType("q8_0", 8, 32, 34, _to_q8_0, lambda x: _float(x[:, :2]) * x[:, 2:].view(np.int8)),
        BlockType("q4_0", 2, 32, 18, _to_q4_0, lambda x: _float(x[:, :2]) * (_numbers(x[:, 2:]) - 8)),
        BlockType("q4_1", 3, 32, 20, _to_q4_1, lambda x: _float(x[:, :2]) * _numbers(x[:, 4:]) + _float(x[:, 2:4])),
        BlockType("q2_k", 10, 256, 84, _to_q2_k, _from_q2_k),
        BlockType("q3_k", 11, 256, 110, _to_q3_k, _from_q3_k),
        BlockType("q4_k", 12, 256, 144, _to_q4_k, _from_q4_k),
        BlockType("q5_k", 13, 256, 176, _to_q5_k, _from_q5_k),
        BlockType("q6_k", 14, 256, 210, _to_q6_k, _from_q6_k),
    )
}
"""By number."""

BY_NAME = {x.name: x for x in TYPES.values()}
