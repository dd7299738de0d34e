"""Agents with unlike spaces: their observations and actions padded to one space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tutti.rl.adapt import layout


def widest(parts: Sequence[Any], name: str) -> spaces.Space:
    """The smallest plain space that values of unlike plain spaces can be padded to, with zeros at the end of each dim.

    name: what has these spaces, for errors. Raises ValueError for spaces of unlike kinds.
    """
    first = parts[0]
    if all(part == first for part in parts):
        return first
    kinds = {type(part) for part in parts}
    ranks = {len(part.shape or ()) for part in parts}
    if len(kinds) == 1 and len(ranks) == 1:
        match first:
            case spaces.Dict() if all(part.keys() == first.keys() for part in parts):
                return spaces.Dict({key: widest([part[key] for part in parts], f"{name}[{key!r}]") for key in first})
            case spaces.Discrete():
                return spaces.Discrete(max(int(part.n) for part in parts))
            case spaces.Box():
                shape = tuple(max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
                low = np.min([pad(part.low, shape) for part in parts], axis=0)
                high = np.max([pad(part.high, shape) for part in parts], axis=0)
                return spaces.Box(low, high, dtype=np.result_type(*(part.dtype for part in parts)).type)
    raise ValueError(
        f"{name} cannot be padded to one space: {', '.join(map(str, dict.fromkeys(map(str, parts))))}. Only Box of the "
        "same number of dims, Discrete and Dict of these can differ in size; wrap the environment"
    )


def pad(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pad the last dims of an array with zeros at their ends, to this shape."""
    leading = array.ndim - len(shape)
    return np.pad(array, [(0, 0)] * leading + [(0, a - b) for a, b in zip(shape, array.shape[leading:], strict=True)])


def fit(batch: layout.Batch, space: spaces.Space) -> layout.Batch:
    """A batch padded to a space of `widest`."""
    if isinstance(space, spaces.Dict):
        return {key: fit(batch[key], part) for key, part in space.spaces.items()}
    return batch if batch.shape[1:] == space.shape else pad(batch, space.shape or ())


def cut(batch: layout.Batch, space: spaces.Space) -> layout.Batch:
    """The part of a padded batch that belongs to a smaller space. Inverse of `fit`."""
    if isinstance(space, spaces.Dict):
        return {key: cut(batch[key], part) for key, part in space.spaces.items()}
    return batch[(slice(None), *(slice(size) for size in space.shape or ()))]


def stack(batches: Sequence[layout.Batch], axis: int) -> layout.Batch:
    """Batches of one space next to one another in a new dim."""
    if isinstance(batches[0], dict):
        return {key: stack([batch[key] for batch in batches], axis) for key in batches[0]}
    return np.stack(batches, axis)
