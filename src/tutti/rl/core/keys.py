"""Random numbers for pure functions: each draw is a function of a key and of the position of an element.

A key is a 0-d int64 tensor. Nothing is carried from draw to draw: code that needs several draws splits its key.

    key, k = split(key, 2)
    x = normal(k, (4, 3))

The numbers are those of `tutti.nn.random`, written in ATen operators. They are the same in eager code, in compiled code
and under `torch.vmap` over keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.nn import random
from tutti.nn.quantized.stored import stored

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as a signed 64-bit word
_MULTIPLIERS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def make(seed: int) -> Tensor:
    """The key of a seed, a 0-d int64 tensor."""
    return fold(torch.tensor(seed, dtype=torch.int64), 0)


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """A new key from a key and a number, such as the index of a step: output `number` of the generator SplitMix64 in
    the state `key` (Steele, Lea and Flood, 2014)."""
    z = key + (number + 1) * _STEP if isinstance(number, Tensor) else key + _wrapped((number + 1) * _STEP)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MULTIPLIERS[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MULTIPLIERS[1]
    return stored(z ^ ((z >> 31) & ((1 << 33) - 1)))


def seed(key: Tensor) -> int:
    """A seed for what draws random numbers of its own, from 2^30 to 2^31 - 2^20: apart from small seeds, and with room
    for those of further instances."""
    return (1 << 30) + int(key) % ((1 << 30) - (1 << 20))


def _wrapped(word: int) -> int:
    """A signed 64-bit word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def _uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24."""
    words = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    return random.uniform_of(words, shape, None, None, 0, key.device)


def split(key: Tensor, count: int = 2) -> tuple[Tensor, ...]:
    """Independent keys."""
    return tuple(fold(key, i) for i in range(count))


def uniform(key: Tensor, shape: Sequence[int], low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
    """Uniform numbers in [low, high), float32."""
    return low + (high - low) * _uniform(key, shape)


def normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal numbers of mean 0 and variance 1, float32."""
    return random.standard_normal(_uniform(key, shape))


def integers(key: Tensor, shape: Sequence[int], high: int | Tensor) -> Tensor:
    """Integers from 0 to high - 1, int64. high: at most 2^24."""
    drawn = _uniform(key, shape) * high
    return torch.minimum(drawn.long(), torch.as_tensor(high) - 1)  # a float32 product may be rounded up to `high`


def gumbel(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers of the standard Gumbel distribution, float32. They are finite, from -2.9 to 16.7."""
    u = (_uniform(key, shape) + 2**-25).clamp(max=1 - 2**-24)  # the sum may be rounded up to 1
    return -(-u.log()).log()


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Indices into the last dim of logits, drawn with probabilities softmax(logits), int64. The Gumbel-max trick."""
    return (logits + gumbel(key, logits.shape)).argmax(-1)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of 0, ..., n - 1, int64."""
    return _uniform(key, (n,)).argsort(stable=True)
