"""Arrays in memory that several processes of one machine share."""

from __future__ import annotations

import contextlib
from multiprocessing.shared_memory import SharedMemory

import numpy as np

Path = tuple[str, ...]
Shapes = dict[Path, tuple[tuple[int, ...], str]]  # name -> shape and dtype
ALIGNED = 64  # bytes, a line of the cache


class Shared:
    """Arrays by name in one block of shared memory.

    shapes: shape and dtype of each array. name: name of a block that another process made, or None to make one, of
    zeros.
    """

    def __init__(self, shapes: Shapes, name: str | None = None):
        sizes = {path: int(np.prod(shape)) * np.dtype(dtype).itemsize for path, (shape, dtype) in shapes.items()}
        places, end = {}, 0
        for path, size in sizes.items():
            places[path] = end
            end += -(-size // ALIGNED) * ALIGNED
        self.shapes, self.owner = shapes, name is None
        self.memory = SharedMemory(name, create=self.owner, size=max(end, 1))
        self.arrays = {
            path: np.ndarray(shape, dtype, self.memory.buf, places[path]) for path, (shape, dtype) in shapes.items()
        }

    @property
    def name(self) -> str:
        return self.memory.name

    def group(self, first: str) -> dict[Path, np.ndarray]:
        """The arrays whose path begins with `first`, by the rest of their paths."""
        return {path[1:]: x for path, x in self.arrays.items() if path[0] == first}

    def close(self) -> None:
        self.arrays.clear()
        with contextlib.suppress(BufferError):
            self.memory.close()
        if self.owner:
            with contextlib.suppress(FileNotFoundError):
                self.memory.unlink()
