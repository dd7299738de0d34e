"""A digest of some rows of a source, by which a resumed stream notices other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from tutti.data.rows import BadRow, Mapped, Numbered, Rows
from tutti.data.sources.source import MappedStream, Regrouped, StreamingSource

ROWS = 16  # of a source, evenly spaced, or the first of its first shards
SHARDS = 4


def digest(source: Any) -> str:
    """16 hex digits that differ if the rows looked at do, as they are before any function of them; of an object that is
    not a source, which may give other rows each time, "".

    A row that cannot be read counts as such, whatever its error says: that names the path of the file.
    """
    while isinstance(source, Mapped | Numbered | MappedStream | Regrouped):
        source = source.rows if isinstance(source, Mapped | Numbered) else source.source
    if not isinstance(source, Rows | StreamingSource | Sequence):
        return ""
    code = blake2b(digest_size=8)
    for row in _some(source):
        for piece in _pieces(row):
            code.update(piece)
    return code.hexdigest()


def _some(source: Any) -> Iterator[Any]:
    if isinstance(source, StreamingSource):
        for shard in range(min(SHARDS, source.shards)):
            yield from islice(source.open(shard, 0), ROWS // SHARDS)
        return
    count = len(source)
    for i in sorted({k * (count - 1) // max(1, ROWS - 1) for k in range(ROWS)} if count else ()):
        try:
            yield source[i]
        except BadRow as error:
            yield error


def _pieces(value: Any) -> Iterator[bytes]:
    """The content of a value, equal in all processes; of an object of another kind, the name of its type."""
    if isinstance(value, Mapping):
        for key in value:
            yield f"{key}=".encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, np.ndarray | np.generic | Tensor) or hasattr(value, "__array_interface__"):
        array: Any = np.ascontiguousarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
    elif isinstance(value, str | bytes | bool | int | float | type(None)):
        yield value if isinstance(value, bytes) else repr(value).encode()
    else:
        yield type(value).__name__.encode()
