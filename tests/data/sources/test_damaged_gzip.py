"""Damaged compressed files are named with the line, and the rows before the damage can be read."""

from __future__ import annotations

import gzip
import json

import pytest

from tutti.data import BadRow, Stream

WHOLE = gzip.compress("".join(json.dumps({"x": i}) + "\n" for i in range(5000)).encode())


def changed(place):
    return WHOLE[:place] + bytes([WHOLE[place] ^ 255]) + WHOLE[place + 1 :]


@pytest.mark.parametrize("content, line", [
    (WHOLE[: len(WHOLE) // 2], r"[1-9]\d+"),  # EOFError
    (changed(len(WHOLE) - 6), "5001"),  # the checksum: BadGzipFile
    (b"no gzip", "1"),
    (WHOLE[:10] + b"\xff" * 50, "1"),  # zlib.error
], ids=["cut", "checksum", "no gzip", "blocks"])  # fmt: skip
def test_the_error_names_the_file_and_the_line(tmp_path, content, line):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(BadRow, match=rf"{path}:{line}: cannot be decompressed .*copy or write the file again"):
        list(Stream(path, 8, epochs=1, shuffle=None))


def test_rows_before_the_damage_and_other_files_are_read(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(WHOLE[: len(WHOLE) // 2])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": -1}\n'))
    with Stream(str(tmp_path / "*.jsonl.gz"), 8, epochs=1, shuffle=None, on_bad="skip") as stream:
        numbers = [row["x"] for batch in stream for row in batch]
    assert len(numbers) > 1000 and numbers == [*range(len(numbers) - 1), -1]
    assert stream.bad_rows == 1 and f"a.jsonl.gz:{len(numbers)}: cannot be decompressed" in stream.bad[0]
