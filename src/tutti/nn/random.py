"""Random numbers as a function of (seed, step, salt, position of the element in the whole tensor).

Nothing is carried from draw to draw, so any part of a tensor can be drawn anywhere, in any order, on any
number of devices, and is the same. ``seed`` names the run, ``step`` the training step, ``salt`` the operator.
Where only a part of a tensor is wanted, ``sizes``, ``strides`` and ``offset`` say which: the flat index of a
local element, written in the mixed radix ``sizes`` (most significant digit first), stands for position
``offset + sum(digit * stride)`` of the whole tensor.

The 24 upper bits of a keyed permutation of 32-bit words give the number:

    k, l = hash_a(seed, step, salt), hash_b(seed, step, salt)
    h = mix(hi(position)),  g = mix(h + (h << 16))
    u = mix(mix(lo(position) ^ k ^ h) ^ l ^ g) >> 8,  times 2^-24

``mix`` is the multiply-xorshift permutation of C. Wellons' "hash-prospector" search (exact bias 0.107);
counters in place of state follow Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). Not for
cryptography.

    >>> seed, step = torch.tensor(0), torch.tensor(1)
    >>> whole = uniform(seed, step, 0, (2, 6))
    >>> right_half = uniform(seed, step, 0, (2, 3), sizes=(2, 3), strides=(6, 1), offset=3)
    >>> torch.equal(right_half, whole[:, 3:])
    True
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)  # 32 bits, unsigned, in a Python int or an int64 tensor

_MULTIPLIERS = 0x21F0AAAD, 0x735A2D97  # both below 2^31: products with a 32-bit word fit into int64
_STARTS = 0x243F6A88, 0x85A308D3  # digits of pi: two hashes that have nothing in common
_MASK = 0xFFFFFFFF
_BLOCK = 1 << 16  # elements for each thread: their words and scratch stay in the cache of a core


def uniform(
    seed: Tensor,
    step: Tensor,
    salt: int,
    shape: Sequence[int],
    sizes: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24, float32, of the local ``shape``.

    ``seed`` and ``step`` are 0-d int64 tensors. Without ``sizes`` and ``strides`` the tensor is whole;
    without ``device`` it is made on that of ``seed``. The formula in ATen operators, for a compiler to fuse
    with what uses the numbers; run as it is, each operator makes a pass through memory.
    ``torch.ops.tutti.uniform`` gives the same bits quickly without a compiler.
    """
    return uniform_of(keys(seed, step, salt), shape, sizes, strides, offset, device or seed.device)


def uniform_of(
    words: Sequence[Tensor] | Tensor,
    shape: Sequence[int],
    sizes: Sequence[int] | None,
    strides: Sequence[int] | None,
    offset: int,
    device: torch.device,
) -> Tensor:
    """``uniform`` of what ``keys`` has made of seed, step and salt."""
    sizes, strides = _digits(shape, sizes, strides)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    index = torch.int32 if last < 1 << 31 else torch.int64
    position = torch.full((), offset, dtype=index, device=device)
    for size, stride in zip(sizes, strides, strict=True):
        position = position.unsqueeze(-1) + torch.arange(size, dtype=index, device=device) * stride
    return _draw(position, words[0], words[1], high=last > _MASK).reshape(shape)


def bernoulli(u: Tensor, p: float | Tensor) -> Tensor:
    """A ``uniform`` draw as a bool mask, true with probability ``p`` (rounded up to a multiple of 2^-24)."""
    return u < p


def between(u: Tensor, low: float, high: float) -> Tensor:
    """A ``uniform`` draw as uniform numbers from ``low`` to ``high``."""
    return low + (high - low) * u


def standard_normal(u: Tensor) -> Tensor:
    """A ``uniform`` draw as normal numbers of mean 0 and variance 1, none further out than 5.42.

    sqrt(2) erfinv(2 u + 2^-24 - 1): the inverse distribution function at the middle of each step of ``u``.
    """
    return torch.erfinv(2 * u + (2**-24 - 1)) * 2**0.5


def _draw(position: Tensor, k: Word, l: Word, high: bool) -> Tensor:  # noqa: E741
    """The numbers at ``position`` (int32 or int64); ``high`` tells whether any is 2^32 or more."""
    first, second = _signed(k), _signed(l)
    if high:
        h = _mix(position >> 32)
        first, second = first ^ _signed(h), second ^ _signed(_mix(_spread(h)))
    words = _mix32(_mix32(_signed(position) ^ first) ^ second)
    return ((words >> 8) & 0xFFFFFF).to(torch.float32) * 2**-24


def _draw_in_blocks(seed, step, salt, shape, sizes, strides, offset) -> Tensor:
    """``uniform`` in pieces that stay in the cache, each overwritten in place."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    flat = out.view(-1)
    sizes, strides = _digits(shape, sizes, strides)
    k, l = keys(int(seed), int(step), salt)  # noqa: E741
    table, blocks = _blocks(sizes, strides, offset, _BLOCK * torch.get_num_threads())
    low = table.to(torch.int32)
    words, scratch = torch.empty_like(low), torch.empty_like(low)
    start = 0
    for base, count in blocks:
        part = flat[start : start + count]
        start += count
        if base >> 32 != (base + int(table[count - 1])) >> 32:
            part.copy_(_draw(table[:count] + base, k, l, high=True))
            continue
        w, s, h = words[:count], scratch[:count], _mix(base >> 32)
        torch.add(low[:count], _signed(base & _MASK), out=w)
        _mix32_(w.bitwise_xor_(_signed(k ^ h)), s)
        _mix32_(w.bitwise_xor_(_signed(l ^ _mix(_spread(h)))), s)
        part.copy_(w.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)).mul_(2**-24)
    return out


def _uniform(seed, step, salt, shape, sizes, strides, offset, *, device) -> Tensor:
    if device.type == "cpu":
        return _draw_in_blocks(seed, step, salt, shape, sizes, strides, offset)
    return uniform(seed, step, salt, shape, sizes, strides, offset, device)


def _fake_keys(seed, step, salt, *, device) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


def _fake_uniform(seed, step, salt, shape, sizes, strides, offset, *, device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def keys(seed: Word, step: Word, salt: int) -> tuple[Word, Word]:
    """The two words that make the numbers of a draw what they are. ``torch.ops.tutti.keys`` is the same of tensors, for
    a compiler that is to see no salt in what it compiles: int64, (2,)."""
    words = []
    for word in _STARTS:
        salted = _mix(_mix(word) ^ salt & _MASK)
        for part in (seed & _MASK, seed >> 32 & _MASK, step & _MASK, step >> 32 & _MASK):
            word = _mix(part ^ word)
        words.append(_mix(word ^ salted))
    return words[0], words[1]


def _keys(seed: Tensor, step: Tensor, salt: int, *, device: torch.device) -> Tensor:
    return torch.tensor(keys(int(seed), int(step), salt), device=device)


def _mix(x: Word) -> Word:
    """Permutes 32-bit words. 0 stays 0."""
    x = (x ^ x >> 16) * _MULTIPLIERS[0] & _MASK
    x = (x ^ x >> 15) * _MULTIPLIERS[1] & _MASK
    return x ^ x >> 15


def _mix32(x: Tensor) -> Tensor:
    """``_mix`` on int32, whose shifts keep the sign and whose products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _MULTIPLIERS[1]
    return x ^ ((x >> 15) & 0x1FFFF)


def _mix32_(x: Tensor, scratch: Tensor) -> None:
    """``_mix32`` in place."""
    for shift, mask, multiplier in ((16, 0xFFFF, 0), (15, 0x1FFFF, 1), (15, 0x1FFFF, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(mask))
        if multiplier is not None:
            x.mul_(_MULTIPLIERS[multiplier])


def _spread(x: Word) -> Word:
    return x + (x << 16) & _MASK


def _signed(word):
    """A 32-bit word as the int32 of the same bits."""
    return word.to(torch.int32) if isinstance(word, Tensor) else (word ^ 1 << 31) - (1 << 31)


def _digits(
    shape: Sequence[int], sizes: Sequence[int] | None, strides: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """The radix in its shortest form: no digit of size 1, neighbours merged where they count through."""
    count = prod(shape)
    sizes, strides = ([count], [1]) if sizes is None or strides is None else (sizes, strides)
    if prod(sizes) != count or len(sizes) != len(strides):
        raise ValueError(
            f"digits of sizes {list(sizes)} and strides {list(strides)} do not number the {count} elements "
            f"of shape {list(shape)}; the product of the sizes must be {count}, with one stride each"
        )
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return [size for size, _ in merged], [stride for _, stride in merged]


def _blocks(sizes: list[int], strides: list[int], offset: int, most: int) -> tuple[Tensor, Iterator[tuple[int, int]]]:
    """How to walk all positions in order: a table, and (base, count <= most) for each block.

    The positions of a block are ``table[:count] + base``.
    """
    inside, count = len(sizes), 1  # sizes[inside:] lie in one block
    while inside and count * sizes[inside - 1] <= most:
        inside -= 1
        count *= sizes[inside]
    table = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes[inside:], strides[inside:], strict=True):
        table = (table.unsqueeze(-1) + torch.arange(size) * stride).flatten()
    if not inside:
        return table, iter([(offset, count)] if count else [])
    cut, cut_stride = sizes[inside - 1], strides[inside - 1]
    rows = -(-cut // -(-cut // max(1, most // count)))
    table = (torch.arange(rows).unsqueeze(-1) * cut_stride + table).flatten()

    def walk() -> Iterator[tuple[int, int]]:
        for digits in product(*(range(size) for size in sizes[: inside - 1])):
            base = offset + sum(d * stride for d, stride in zip(digits, strides, strict=False))
            for row in range(0, cut, rows):
                yield base + row * cut_stride, min(rows, cut - row) * count

    return table, walk()


_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "uniform(Tensor seed, Tensor step, int salt, SymInt[] shape, SymInt[] sizes, SymInt[] strides, "
    "SymInt offset, *, Device device) -> Tensor"
)
_library.define("keys(Tensor seed, Tensor step, int salt, *, Device device) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("uniform", _uniform, _device)
    _library.impl("keys", _keys, _device)
torch.library.register_fake("tutti::uniform", _fake_uniform)
torch.library.register_fake("tutti::keys", _fake_keys)
