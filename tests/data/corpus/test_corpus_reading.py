"""Sources: what is no document is counted and named, and nothing else is lost with it."""

# ruff: noqa: E501

from __future__ import annotations

import gzip
import json
import os
import random
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tutti.data.corpus import Source
from tutti.data.corpus.reading import read
from tutti.data.corpus.reading.lines import chunks, lines
from tutti.data.corpus.reading.splits import format_of, splits_of


def everything(source: Source, split: int = 1 << 30, most: int = 1 << 20):
    """Texts by id, dropped (id, reason), faults (file, reason), in the order of the splits."""
    texts, lost, faults = {}, [], []
    for part in splits_of(source, split):
        for batch, dropped, wrong in read(part, most):
            texts |= dict(zip(batch.column("id").to_pylist(), batch.column("text").to_pylist(), strict=True))
            lost += [(d.id, d.reason) for d in dropped]
            faults += [(f.file, f.reason) for f in wrong]
    return texts, lost, faults


def test_a_malformed_record_costs_only_itself(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": "two"', b'\xff\xfe{"text": 1}', b'{"text": "caf\xc3\xa9", "n": 1e999}', b"[1, 2]",
             b'{"body": "x"}', b'{"text": 5}', b"", b"   ", b'{"text": "lone \\ud800 surrogate"}', b'{"id": 7, "text": "last"}']  # fmt: skip
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts, lost, faults = everything(Source(str(tmp_path)))
    assert [*texts.values()] == ["one", "café", "lone \ufffd surrogate", "last"] and "7" in texts and not faults
    assert [reason for _, reason in lost] == [
        "malformed_json",
        "not_utf8",
        "not_a_record",
        "no_text_field",
        "text_not_a_string",
    ]
    assert lost[0][0] == "a.jsonl@16"


@pytest.mark.parametrize("seed", range(5))
def test_a_file_cut_at_any_bytes_has_the_same_records(tmp_path, seed):
    rng = random.Random(seed)
    rows = [{"text": "x" * rng.randrange(60) + "é", "k": i} for i in range(200)]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n" * rng.randrange(2)
    )
    source = Source(str(tmp_path / "a.jsonl"))
    whole = everything(source)
    assert len(whole[0]) == 200
    for size in (1, 7, 50, 64, 1000):
        assert everything(source, size) == whole


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_of_several_members(tmp_path, suffix):
    parts = [b'{"text": "one"}\n{"text": "two"}\n', b'{"text": "three"}\n']
    if suffix == ".gz":
        content = b"".join(map(gzip.compress, parts))
    else:
        zstandard = pytest.importorskip("zstandard")
        content = b"".join(map(zstandard.ZstdCompressor().compress, parts))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
    assert [*everything(Source(str(tmp_path)))[0].values()] == ["one", "two", "three"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_file_gives_what_it_has_and_says_so(tmp_path, suffix):
    rng = random.Random(0)
    data = "".join(json.dumps({"text": f"{i} {rng.random()}"}) + "\n" for i in range(5000)).encode()
    if suffix == ".gz":
        content = gzip.compress(data)
    else:
        content = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    name = f"a.jsonl{suffix}"
    (tmp_path / name).write_bytes(content[: len(content) * 3 // 4])
    (tmp_path / "b.jsonl").write_text('{"text": "of another file"}\n')
    texts, lost, faults = everything(Source(str(tmp_path)))
    assert faults == [(name, "truncated")]
    assert 1000 < len(texts) < 5000 and "of another file" in texts.values()
    assert {reason for _, reason in lost} <= {"malformed_json"}
    (tmp_path / name).write_bytes(b"garbage" + content[7:])
    assert everything(Source(str(tmp_path)))[2] == [(name, "corrupt")]


def test_a_line_that_is_too_long_is_named_and_not_kept_in_memory(tmp_path):
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"text": "before"}\n{"text": "' + b"x" * 5_000_000 + b'"}\n{"text": "after"}\n')
    texts, lost, _ = everything(Source(str(tmp_path / "a.jsonl")), most=100_000)
    assert [*texts.values()] == ["before", "after"] and lost == [("a.jsonl@19", "record_too_long")]


def test_files_of_text_and_code(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in {"a.py": b"x = 1\n", "sub/b.py": "é".encode(), "c.bin": b"\0\1\2", "d.py": b"\xff\xfe", "e.py": b"",
                          ".hidden": b"no"}.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    texts, lost, _ = everything(Source(str(tmp_path), format="code"))
    assert texts == {"a.py": "x = 1\n", "sub/b.py": "é"}
    assert sorted(lost) == [("c.bin", "binary_file"), ("d.py", "not_utf8"), ("e.py", "empty_file")]
    assert list(everything(Source(str(tmp_path / "d.py"), format="text", encoding="latin-1"))[0].values()) == ["ÿþ"]


def test_parquet_by_row_groups(tmp_path):
    table = pa.table({"text": [f"t{i}" for i in range(100)], "id": [str(i) for i in range(100)], "n": range(100)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    source = Source(str(tmp_path))
    assert everything(source) == everything(source, 100) and len(splits_of(source, 100)) > 3
    assert list(everything(source)[0].values()) == [f"t{i}" for i in range(100)]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense PAR1")
    texts, _, faults = everything(source)
    assert len(texts) == 100 and faults == [("b.parquet", "corrupt")]
    with pytest.raises(ValueError, match="no column body; there are text, id, n"):
        everything(Source(str(tmp_path / "a.parquet"), text="body"))


def warc(path, responses):
    """A WARC file (ISO 28500) of responses, each a gzip member."""
    with open(path, "wb") as file:
        for url, head, body in responses:
            content = head + body
            header = (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
                f"WARC-Record-ID: <urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, url)}>\r\n"
                f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            file.write(gzip.compress(header.encode() + content + b"\r\n\r\n"))


def test_warc_files(tmp_path):
    pytest.importorskip("fastwarc")
    ok = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    pages = [
        ("http://a/1", ok, b"<p>one</p>"),
        ("http://a/2", ok.replace(b"200 OK", b"404 Not Found"), b"gone"),
        ("http://a/3", ok.replace(b"text/html", b"image/png"), b"\x89PNG"),
        ("http://a/4", ok, b"<p>four</p>"),
    ]
    warc(tmp_path / "a.warc.gz", pages)
    raws, urls, lost, faults = [], [], [], []
    for part in splits_of(Source(str(tmp_path)), 1 << 30):
        for batch, dropped, wrong in read(part, 1 << 20):
            raws += batch.column("raw").to_pylist()
            urls += batch.column("url").to_pylist()
            lost += [d.reason for d in dropped]
            faults += wrong
    assert raws == [b"<p>one</p>", b"<p>four</p>"] and urls == ["http://a/1", "http://a/4"] and not faults
    assert lost == ["http_status", "not_html"]
    content = (tmp_path / "a.warc.gz").read_bytes()
    (tmp_path / "a.warc.gz").write_bytes(content[:-40])
    texts, _, faults = everything(Source(str(tmp_path)))
    assert len(texts) == 1 and [f for f, _ in faults] == ["a.warc.gz"]


def test_small_files_share_a_shard_and_large_ones_are_cut(tmp_path):
    for k in range(20):
        (tmp_path / f"{k:02}.txt").write_text("x" * 100)
    assert [len(s.parts) for s in splits_of(Source(str(tmp_path)), 500)] == [5, 5, 5, 5]
    (tmp_path / "z.jsonl").write_text("x" * 2000)
    assert len(splits_of(Source(str(tmp_path)), 500)) == 8


def test_sources_that_are_wrong(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        Source(str(tmp_path / "none*")).files()
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(ValueError, match=r"format of a\.xyz .* is not known; give a pattern, or format = jsonl"):
        Source(str(tmp_path)).files()
    with pytest.raises(ValueError, match="no format 'pdf'"):
        Source(str(tmp_path), format="pdf")
    assert format_of("x.jsonl.gz") == "jsonl" and format_of("x.WARC.GZ") == "warc" and format_of("README") == ""


def test_records_that_json_can_spell_and_others_cannot_write(tmp_path):
    deep = "[" * 300 + "]" * 300
    lines = ['{"text": "a", "x": "\\ud800"}', '{"text": "b", "id": "\\ud800"}', '{"\\ud800": 1}', f'{{"text": "c", "x": {deep}}}',
             '{"text": "d", "x": 123456789012345678901234567890, "y": NaN}', '{"text": "e", "id": 12345678901234567890123}']  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    texts, lost, _ = everything(Source(str(tmp_path)))
    assert {"a", "b", "d", "e"} <= set(texts.values()) and len(texts) + len(lost) == 6


def test_compressed_bombs_and_padding(tmp_path):
    """A small file that becomes gigabytes is read in bounded memory; zeros behind a member are padding."""
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor(19).compress(b"x" * (1 << 28)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n') + b"\0" * 70_000)
    largest = max(len(c) for c in chunks(str(tmp_path / "a.jsonl.zst")) if isinstance(c, bytes))
    assert largest < 100 << 20
    texts, lost, faults = everything(Source(str(tmp_path)))
    assert list(texts.values()) == ["one"] and [r for _, r in lost] == ["record_too_long"] and not faults


def test_links_pipes_and_names(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "me").symlink_to(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with open(os.fsencode(tmp_path) + b"/b\xff.txt", "w") as file:
        file.write("b")
    texts, _, faults = everything(Source(str(tmp_path)))
    assert sorted(texts.values()) == ["a", "b"] and "b\\xff.txt" in texts
    assert sorted(faults) == [("gone.txt", "not_readable"), ("pipe.txt", "not_readable")]
    assert len(Source(f"{tmp_path}/**/*.txt").files()) == 4


def test_a_long_line_is_not_read_by_every_split(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + b"x" * 100_000 + b'\n{"text": "b"}\n')
    source = Source(str(tmp_path / "a.jsonl"))
    assert everything(source, 1000, most=5000) == everything(source, most=5000)
    assert len([*lines(str(tmp_path / "a.jsonl"), 50_000, 51_000)]) == 0
