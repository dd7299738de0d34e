"""Text, HTML and source code: a document for each file."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.data.corpus.reading.lines import chunks
from tutti.data.corpus.reading.records import Fault, Item, Record, dropped
from tutti.data.corpus.reading.splits import Source


def read_file(path: str, kind: str, source: Source, name: str, most: int) -> Iterator[Item]:
    content, size = bytearray(), 0
    try:
        for data in chunks(path):
            if isinstance(data, Fault):
                yield data
                break
            size += len(data)
            content += data[: max(0, most - len(content))]
    except OSError as error:
        yield dropped(name, "not_readable", error.strerror or str(error), b"")
        return
    if size > len(content):
        yield dropped(name, "record_too_long", f"{size} bytes", bytes(content[:4096]), size)
    elif not size:
        yield dropped(name, "empty_file", "", b"")
    elif kind == "html":
        yield Record(name, "", bytes(content))
    elif is_binary(content):
        yield dropped(name, "binary_file", "it has zero bytes or is mostly control characters", bytes(content))
    else:
        try:
            yield Record(name, content.decode(source.encoding).removeprefix("\ufeff"))
        except UnicodeDecodeError as error:
            yield dropped(
                name, "not_utf8" if source.encoding == "utf-8" else "not_decodable", str(error), bytes(content)
            )


def is_binary(content: bytes | bytearray) -> bool:
    """Whether the first 8 kB have a zero byte, or a third of them are control characters."""
    head = bytes(content[:8192])
    controls = len(head) - len(head.translate(None, bytes([*range(7), 11, *range(14, 27), *range(28, 32), 127])))
    return b"\0" in head or controls > len(head) / 3
