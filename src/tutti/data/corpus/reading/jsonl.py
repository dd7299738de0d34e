"""JSON Lines: a record for each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from tutti.data.corpus.documents import Dropped
from tutti.data.corpus.reading.lines import Line, lines
from tutti.data.corpus.reading.records import Item, Record, dropped, encodable
from tutti.data.corpus.reading.splits import Source


def read_jsonl(path: str, begin: int, end: int, source: Source, name: str, most: int) -> Iterator[Item]:
    for line in lines(path, begin, end, most):
        if not isinstance(line, Line):
            yield line
        elif line.content.strip(b" \t\r\xef\xbb\xbf") or line.size > len(line.content):
            yield _record(line, source, name)


def _record(line: Line, source: Source, name: str) -> Record | Dropped:
    place = f"{name}@{line.begin}"
    if line.size > len(line.content):
        return dropped(place, "record_too_long", f"{line.size} bytes", line.content, line.size)
    content = line.content.removeprefix(b"\xef\xbb\xbf") if line.begin == 0 else line.content
    try:
        fields = orjson.loads(content)
    except ValueError as error:
        reason, detail = _why_not(content, error)
        if reason:
            return dropped(place, reason, detail, content)
        fields = json.loads(content)  # numbers beyond 64 bits, NaN, surrogates: Python reads them
    return record_of(fields, place, source, content)


def record_of(fields: Any, place: str, source: Source, content: bytes) -> Record | Dropped:
    """The record of a JSON value or of a row of a table."""
    if not isinstance(fields, dict):
        return dropped(place, "not_a_record", f"a JSON {type(fields).__name__}", content)
    text = fields.pop(source.text, None)
    if text is None:
        have = ", ".join(sorted(map(str, fields))[:8]) or "none"
        return dropped(place, "no_text_field", f"field {source.text}: there are {have}", content)
    if not isinstance(text, str):
        return dropped(place, "text_not_a_string", f"{source.text} is a {type(text).__name__}", content)
    own, url = fields.pop(source.id, None), fields.pop(source.url, None)
    try:
        meta = _dumped(fields) if fields else None
    except (ValueError, RecursionError, TypeError) as error:
        return dropped(place, "fields_not_writable", f"{type(error).__name__}: {error}", content)
    id = place if own is None else encodable(str(own))
    return Record(id, encodable(text), None, None if url is None else encodable(str(url)), meta)


def _dumped(fields: dict[str, Any]) -> str:
    """The fields as JSON; what orjson does not write (whole numbers of more than 64 bits, lone surrogates), Python
    does."""
    try:
        return orjson.dumps(fields, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return json.dumps(fields, default=str, ensure_ascii=True)


def _why_not(content: bytes, error: ValueError) -> tuple[str, str]:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return "not_utf8", str(wrong)
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return "malformed_json", str(error)
    return "", ""
