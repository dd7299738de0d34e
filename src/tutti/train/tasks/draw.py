"""Random numbers of a sample: a function of the seed and the sample, so that resumed runs draw the same."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike

from tutti.data.rows import SAMPLE
from tutti.train.values import Row


def generator(seed: int, feature: Row, content: ArrayLike) -> np.random.Generator:
    """Return the generator of a sample, seeded with its `sample_index` if it has one, otherwise with `content`."""
    index = feature.get(SAMPLE)
    if index is not None:
        return np.random.default_rng([seed, int(index)])
    text = content if isinstance(content, str) else np.asarray(content).tobytes().hex()
    return np.random.default_rng([seed, int(blake2b(text.encode(), digest_size=8).hexdigest(), 16), 1])


def composition(draw: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """`parts` positive integers that sum to `total`, uniform among all such."""
    cuts = np.sort(draw.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff([0, *cuts, total])


def rounded(draw: np.random.Generator, x: float) -> int:
    """An integer with mean x: the fraction decides at random."""
    return int(np.floor(x + draw.random()))


def first_of(names: Iterable[str], vocabulary: dict[str, int]) -> int | None:
    """The id of the first name in the vocabulary."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)
