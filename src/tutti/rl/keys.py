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

_FOLD = 0x5EED


def make(seed: int) -> Tensor:
    """The key of a seed, a 0-d int64 tensor."""
    return torch.tensor(seed, dtype=torch.int64)


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """A new key from a key and a number, such as the index of a step."""
    k, l = random.keys(key, number if isinstance(number, Tensor) else torch.tensor(number), _FOLD)  # noqa: E741
    return (k << 31) ^ l


def split(key: Tensor, count: int = 2) -> tuple[Tensor, ...]:
    """Independent keys."""
    return tuple(fold(key, i) for i in range(count))


def uniform(key: Tensor, shape: Sequence[int], low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
    """Uniform numbers in [low, high), float32."""
    return low + (high - low) * random.uniform(key, torch.zeros_like(key), 0, shape)


def normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal numbers of mean 0 and variance 1, float32."""
    return random.standard_normal(random.uniform(key, torch.zeros_like(key), 0, shape))


def integers(key: Tensor, shape: Sequence[int], high: int | Tensor) -> Tensor:
    """Integers from 0 to high - 1, int64. high: at most 2^24."""
    drawn = random.uniform(key, torch.zeros_like(key), 0, shape) * high
    return torch.minimum(drawn.long(), torch.as_tensor(high) - 1)  # a float32 product may be rounded up to `high`


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Indices into the last dim of logits, drawn with probabilities softmax(logits), int64. The Gumbel-max trick."""
    u = random.uniform(key, torch.zeros_like(key), 0, logits.shape) + 2**-25
    return (logits - (-u.log()).log()).argmax(-1)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of 0, ..., n - 1, int64."""
    return random.uniform(key, torch.zeros_like(key), 0, (n,)).argsort(stable=True)
