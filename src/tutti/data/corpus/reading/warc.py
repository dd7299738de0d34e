"""WARC files of crawls: a document for each HTML response, and for each conversion to text (WET)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tutti.data.corpus.reading.records import Fault, Item, Record, dropped
from tutti.data.corpus.reading.splits import Source

_PAGES = ("text/html", "application/xhtml+xml")
_CODED = ("Content-Encoding", "Transfer-Encoding")  # the length of what they decode to is not known


def read_warc(path: str, source: Source, name: str, most: int) -> Iterator[Item]:
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    kinds = WarcRecordType.response | WarcRecordType.conversion
    place, records = 0, 0
    try:
        with open(path, "rb") as file:
            for record in ArchiveIterator(file, record_types=kinds, parse_http=True, auto_decode="all"):
                place = record.stream_pos
                item = _record(record, f"{name}@{place}", most)
                if item is None:
                    yield Fault(name, "truncated", f"after {records} records, at byte {place}")
                    return
                records += 1
                yield item
    except Exception as error:  # of the decompressor
        yield Fault(
            name, "truncated" if "end" in str(error).lower() else "corrupt", f"after {records} records: {error}"
        )
        return
    if not records:
        yield Fault(name, "no_records", "no response or conversion record; is it a WARC file?")


def _record(record: Any, place: str, most: int) -> Item | None:
    """A record; None if the file ends within it."""
    id = record.headers.get("WARC-Record-ID") or place
    url = record.headers.get("WARC-Target-URI")
    size = record.content_length
    content = record.reader.read(most + 1)
    coded = record.http_headers is not None and any(map(record.http_headers.get, _CODED))
    if not record.headers.get("Content-Length") or (not coded and len(content) < min(size, most + 1)):
        return None
    if len(content) > most:
        return dropped(id, "record_too_long", f"more than {most} bytes", content[:4096], len(content))
    if record.http_headers is None:  # WET
        try:
            return Record(id, content.decode("utf-8"), None, url)
        except UnicodeDecodeError as error:
            return dropped(id, "not_utf8", str(error), content)
    status, kind = record.http_headers.status_code, (record.http_content_type or "").lower()
    if status is not None and status != 200:
        return dropped(id, "http_status", f"{status} {url}", content)
    if kind and kind not in _PAGES:
        return dropped(id, "not_html", f"{kind} {url}", content)
    return Record(id, "", content, url)
