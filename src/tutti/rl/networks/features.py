"""Observations of any space as vectors of floats.

| space | features |
|---|---|
| `Box` | its numbers, flat |
| `Discrete`, `MultiDiscrete` | one-hot |
| `MultiBinary` | 0 and 1 |
| `Dict`, `Tuple` | those of its parts, one after another, in the order of the space |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from tutti.rl.networks.pixels import scaled


@dataclass(frozen=True)
class Features:
    """size: number of features of an observation. of: function that maps a batch of observations (..., *shape) to
    float32 (..., size).

    image: (channels, height, width) of a `Box` of pixels, whose features are in [0, 1]; None for others. parts: slice
    of the features that belong to each key of a `Dict`. dtype: dtype of features. picture: function that maps features
    of pixels (..., size) to (..., *shape) of the space.
    """

    size: int
    of: Callable[[Any], Tensor]
    image: tuple[int, int, int] | None = None
    parts: dict[str, slice] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    picture: Callable[[Tensor], Tensor] | None = None

    def __call__(self, obs: Any) -> Tensor:
        return self.of(obs)


def features_of(space: spaces.Space, pixels: bool = False) -> Features:
    """The features of an observation space. pixels: whether those of pictures stay uint8, from 0 to 255.

    Raises ValueError for spaces without a fixed size.
    """
    if isinstance(space, spaces.Box):
        dims, size = len(space.shape), int(np.prod(space.shape))
        if space.dtype == np.uint8 and dims == 3:
            channels_first = space.shape[0] < space.shape[2]
            a, b, c = space.shape
            image = (a, b, c) if channels_first else (c, a, b)
            move = (lambda x: x) if channels_first else (lambda x: x.movedim(-1, -3))
            back = (lambda x: x) if channels_first else (lambda x: x.movedim(-3, -1))
            flat = lambda x: move(x).flatten(-3)  # noqa: E731
            return Features(size, flat if pixels else lambda x: scaled(flat(x)), image, dtype=torch.uint8 if pixels else
                            torch.float32, picture=lambda x: back(x.unflatten(-1, image)))  # fmt: skip
        return Features(size, lambda x: (x.flatten(-dims) if dims else x.unsqueeze(-1)).float())
    if isinstance(space, spaces.Discrete):
        return Features(int(space.n), lambda x: F.one_hot((x - int(space.start)).long(), int(space.n)).float())
    if isinstance(space, spaces.MultiDiscrete):
        sizes, start = [int(n) for n in space.nvec.flatten()], torch.from_numpy(np.asarray(space.start, np.int64))

        def one_hots(x: Tensor) -> Tensor:
            columns = (x.long() - start).flatten(-space.nvec.ndim).unbind(-1)
            return torch.cat([F.one_hot(c, n) for c, n in zip(columns, sizes, strict=True)], -1).float()

        return Features(sum(sizes), one_hots)
    if isinstance(space, spaces.MultiBinary):
        dims = len(space.shape)
        return Features(int(np.prod(space.shape)), lambda x: x.flatten(-dims).float())
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        parts = {str(key): features_of(part) for key, part in items}
        ends = dict(zip(parts, accumulate(p.size for p in parts.values()), strict=True))
        return Features(sum(p.size for p in parts.values()),
                        lambda x: torch.cat([part(x[key]) for key, part in parts.items()], -1),
                        parts={key: slice(end - parts[key].size, end) for key, end in ends.items()})  # fmt: skip
    raise ValueError(f"observations of the space {space} have no fixed size; wrap the environment so that they are a "
                     "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")  # fmt: skip
