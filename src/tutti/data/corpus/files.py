"""Files that are complete or not there: written beside, flushed to disk, renamed; a manifest says what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from tutti.whole_files import whole_file


class Checked:
    """A file that is written once, from its beginning, with the checksum of its content."""

    def __init__(self, file: IO[bytes]):
        self._file, self._hash, self.size, self.closed = file, blake2b(digest_size=16), 0, False
        self.abandoned = False  # after an error, writers that are collected may still write their ends

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        if self.abandoned:
            return count
        self._hash.update(data)
        self.size += count
        self._file.write(data)
        return count

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self.size

    def close(self) -> None: ...

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    @property
    def entry(self) -> dict[str, Any]:
        """Its size in bytes and its checksum, blake2b of 16 bytes."""
        return {"size": self.size, "blake2b": self._hash.hexdigest()}


@contextmanager
def atomic(path: Path) -> Iterator[Checked]:
    """A file that gets its name when the block ends without an error. An error of the disk (full, say) is raised and
    leaves nothing."""
    with whole_file(path, durable=True) as draft, open(draft, "wb") as file:
        checked = Checked(file)
        try:
            yield checked
        except BaseException:
            checked.abandoned = True
            raise


def write_json(path: Path, value: Any) -> None:
    with atomic(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def digest(path: Path) -> str:
    """The checksum of a file, as in `Checked.entry`."""
    h = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            h.update(data)
    return h.hexdigest()


def fraction(text: str) -> float:
    """A number in [0, 1) by the hash of a text: equal texts are on the same side of any limit."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


def complete(folder: Path, manifest: Path) -> dict[str, Any] | None:
    """A task's manifest if all its files are there with their sizes; None if the task is to be done."""
    try:
        value = read_json(manifest)
        if all((folder / name).stat().st_size == entry["size"] for name, entry in value["files"].items()):
            return value
    except (FileNotFoundError, ValueError, KeyError):
        pass
    return None
