"""Lines of plain and compressed files, in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tutti.data.corpus.reading.records import Fault

CHUNK = 1 << 20
# Bytes of a compressed file at a time. Hostile ones become 1,000 (gzip) or 33,000 (Zstandard) times as many.
COMPRESSED = {".gz": 1 << 16, ".zst": 1 << 10}


@dataclass(frozen=True)
class Line:
    """`content` without its end, from byte `begin` (of the decompressed stream). A line that is longer than allowed has
    its first bytes and its true `size`."""

    begin: int
    content: bytes
    size: int


def chunks(path: str, begin: int = 0) -> Iterator[bytes | Fault]:
    """The bytes of a file from `begin`, decompressed by its suffix. Compressed files may have several members or
    frames.

    Where a file cannot be decompressed further, a Fault follows what could be.
    """
    if path.endswith((".gz", ".zst")):
        yield from _decompressed(path)
        return
    with open(path, "rb") as file:
        file.seek(begin)
        while data := file.read(CHUNK):
            yield data


def _decompressed(path: str) -> Iterator[bytes | Fault]:
    if path.endswith(".gz"):
        start, wrong = (lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)), zlib.error
    else:
        import zstandard

        start, wrong = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, zstandard.ZstdError
    name, member, begun = Path(path).name, start(), False
    with open(path, "rb") as file:
        while data := file.read(COMPRESSED[Path(path).suffix]):
            data = data if begun else data.lstrip(b"\0")  # padding of zeros may stand between members
            while data:
                try:
                    plain = member.decompress(data)
                except wrong as error:
                    yield Fault(name, "corrupt", str(error))
                    return
                begun = True
                if plain:
                    yield plain
                data = b""
                if member.eof:
                    data, member, begun = member.unused_data.lstrip(b"\0"), start(), False
    if begun:
        yield Fault(name, "truncated", "the compressed data end before their end mark")


def lines(path: str, begin: int = 0, end: int = -1, most: int = 1 << 26) -> Iterator[Line | Fault]:
    """The lines that begin in bytes [begin, end), -1: the end of the file. `most`: bytes of a line that are kept."""
    position = begin
    rest = b""  # of a line that is not complete
    size = 0  # bytes of that line
    skip = begin > 0  # the line before this one ends here
    start = position
    if skip:
        position = start = begin - 1  # a line that begins at `begin` follows a newline
    for data in chunks(path, position):
        if isinstance(data, Fault):
            if size and not skip:
                yield Line(start, rest, size)
            yield data
            return
        at = 0
        while True:
            stop = data.find(b"\n", at)
            piece = data[at:] if stop < 0 else data[at:stop]
            size += len(piece)
            if not skip and len(rest) < most:
                rest += piece[: most - len(rest)]
            if stop < 0:
                if skip and 0 <= end <= start + size:  # a line goes on that began in an earlier split
                    return
                break
            if not skip:
                yield Line(start, rest, size)
            at = stop + 1
            start += size + 1
            skip, rest, size = False, b"", 0
            if 0 <= end <= start:
                return
    if size and not skip:
        yield Line(start, rest, size)
