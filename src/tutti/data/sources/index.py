"""Indexes of files, made once and kept beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tutti.whole_files import whole_file

SMALL = 1 << 20  # bytes; indexes of smaller files are not kept
CHUNK = 1 << 24


def indexed(
    path: Path, kind: str, make: Callable[[Path], dict[str, np.ndarray]], cache: str | Path | None
) -> dict[str, np.ndarray]:
    """The index that `make` makes of a file, from its cache if the file has the size and time of then.

    cache: folder for indexes. None: beside the file; if that cannot be written, the index is made each time. Indexes
        of files under 1 MB are kept only in a folder that is given.
    """
    status = path.stat()
    if cache is None:
        saved = path.with_name(f".{path.name}.{kind}-index.npz")
        if status.st_size < SMALL:
            return make(path)
    else:
        name = blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
        saved = Path(cache) / f"{path.name}-{name}.{kind}-index.npz"
    stamp = np.array([status.st_size, status.st_mtime_ns], np.int64)
    try:
        with np.load(saved, allow_pickle=False) as file:
            if np.array_equal(file["stamp"], stamp):
                return {name: file[name] for name in file.files if name != "stamp"}
    except (OSError, ValueError, KeyError):
        pass  # none yet, or half written by another program
    index = make(path)
    with suppress(OSError), whole_file(saved) as draft, open(draft, "wb") as file:
        np.savez(file, **{"stamp": stamp, **index})  # pyright: ignore[reportArgumentType]
    return index


def records(path: Path, quote: bytes | None = None) -> dict[str, np.ndarray]:
    """Where the lines of a file begin and end, without blank ones, and their line numbers from 1.

    quote: a newline between two of these characters does not end a record (CSV).
    """
    ends, quoted, at = [], 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            data = np.frombuffer(chunk, np.uint8)
            line_ends = np.flatnonzero(data == 10)
            if quote is not None:
                marks = np.flatnonzero(data == quote[0])
                before = np.searchsorted(marks, line_ends)
                real = (before + quoted) % 2 == 0
                quoted = (quoted + len(marks)) % 2
            else:
                real = np.ones(len(line_ends), bool)
            ends.append(np.stack([line_ends + at, real]))
            at += len(chunk)
    newlines = np.concatenate(ends, axis=1) if ends else np.zeros((2, 0), np.int64)
    lines = np.arange(1, newlines.shape[1] + 1)
    stops, numbers = newlines[0][newlines[1] == 1], lines[newlines[1] == 1]
    if not len(stops) or stops[-1] != at - 1:  # the last line has no newline
        stops, numbers = np.append(stops, at), np.append(numbers, len(lines) + 1)
    starts = np.concatenate([[0], stops[:-1] + 1])
    first = np.concatenate([[1], numbers[:-1] + 1])
    full = stops - starts > _carriage(path, starts, stops)
    return {"start": starts[full], "stop": stops[full], "line": first[full]}


def _carriage(path: Path, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """1 for lines that are at most a carriage return, else 0."""
    ends_in_return = np.zeros(len(starts), np.int64)
    short = np.flatnonzero(stops - starts == 1)
    with open(path, "rb") as file:
        for i in short:
            file.seek(starts[i])
            ends_in_return[i] = file.read(1) == b"\r"
    return ends_in_return
