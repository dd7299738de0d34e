"""Rows that would fill the memory are bad rows; those beside them are read."""

from __future__ import annotations

import gzip

import pytest

from tutti.data import BadRow, Stream, open_source
from tutti.data.sources import jsonl, records

LINES = [b'{"x": 1}\n', b'{"x": "' + b"a" * 300 + b'"}\n', b"\n", b"b" * 150 + b"\n", b'{"x": 2}']


@pytest.fixture(autouse=True)
def _at_most_100_bytes(monkeypatch):
    for module in (jsonl, records):
        monkeypatch.setattr(module, "MOST", 100)


def test_a_stream_of_compressed_lines(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(LINES)))
    with Stream(path, 2, shuffle=None, epochs=1, on_bad="skip") as stream:
        assert [row["x"] for batch in stream for row in batch] == [1, 2]
        assert stream.bad_rows == 2
        assert f"{path}:2: more than 100 bytes" in stream.bad[0] and f"{path}:4:" in stream.bad[1]
    with pytest.raises(BadRow, match="the most of a row"), Stream(path, 3, shuffle=None) as stream:
        next(stream)


def test_lines_that_are_read_by_index(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(LINES))
    source = open_source(path)
    assert [source[i]["x"] for i in (0, 3)] == [1, 2]
    with pytest.raises(BadRow, match=rf"{path}:2: more than 100 bytes"):
        source[1]


def test_a_byte_order_mark_and_nesting(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + b"{}\n" + b"[" * 90 + b"\n" + b'{"x": 3}'))
    with Stream(path, 1, shuffle=None, epochs=1, on_bad="skip") as stream:
        assert [row.get("x") for batch in stream for row in batch] == [None, 3] and stream.bad_rows == 1


def test_a_line_just_too_long_takes_no_other_with_it(tmp_path):
    """One line has 101 bytes; another has as many blanks, and is no blank line."""
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"c" * 101 + b"\n" + b'{"x": 1}\n' + b" " * 150 + b"\n" + b'{"x": 2}'))
    with Stream(path, 1, shuffle=None, epochs=1, on_bad="skip") as stream:
        assert [row["x"] for batch in stream for row in batch] == [1, 2]
        assert [error.partition(": ")[0] for error in stream.bad] == [f"{path}:1", f"{path}:3"]
