"""How an input is cut into shards: by its files and their sizes alone, so that every run cuts it the same way."""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.data.text_folder import STDLIB

FORMATS = {
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".jsonl.zst", ".ndjson.zst"),
    "parquet": (".parquet",),
    "warc": (".warc", ".warc.gz", ".warc.zst", ".wet", ".wet.gz", ".warc.wet", ".warc.wet.gz"),
    "html": (".html", ".htm", ".xhtml"),
    "text": (".txt", ".md", ".rst", ".text", ".txt.gz"),
}
"""Formats by the ends of file names. The format "code" takes any file."""

UNREADABLE = "unreadable"
"""The format of a broken link, a pipe or a device: its reader says so."""


@dataclass(frozen=True)
class Source:
    """A part of the input: files, and how to read them.

    path: a file, a folder, or a pattern ("raw/*.jsonl.gz", "**" for all folders below); "stdlib" is the folder of the
        source code of Python's own library, of which the files that end in .py are read.
    domain: what reports and mixtures call it; "": the name of the file or folder.
    format: one of FORMATS or "code"; "": by the ends of names.
    text, id, url: names of the fields of records.
    encoding: encoding of text files.
    """

    path: str
    domain: str = ""
    format: str = ""
    text: str = "text"
    id: str = "id"
    url: str = "url"
    encoding: str = "utf-8"

    def __post_init__(self):
        if self.format not in ("", "code", *FORMATS):
            raise ValueError(f"source {self.path}: no format {self.format!r}; give {', '.join([*FORMATS, 'code'])}")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ValueError(
                f"source {self.path}: no encoding {self.encoding!r}; give one of Python's, such as utf-8 or latin-1"
            ) from None

    @property
    def _path(self) -> Path:
        return Path(sysconfig.get_path("stdlib")) if self.path == STDLIB else Path(self.path).expanduser()

    @property
    def name(self) -> str:
        """The domain of its documents."""
        return self.domain or os.path.basename(os.path.normpath(self.root))

    @property
    def root(self) -> Path:
        """The folder that names of files are relative to."""
        path = self._path
        parts = path.parts
        fixed = next((k for k, part in enumerate(parts) if glob.has_magic(part)), None)
        if fixed is not None:
            return Path(*parts[:fixed])
        return path if path.is_dir() else path.parent

    def files(self) -> list[tuple[Path, str]]:
        """The files and their formats, in the order of their names. Raises ValueError if there are none, or one's
        format is not known."""
        path = self._path
        if path.is_dir():
            paths = [p for p in _below(path) if self.path != STDLIB or p.suffix == ".py"]
        elif path.is_file():
            paths = [path]
        else:
            matches = sorted(p for p in glob.glob(str(path), recursive=True) if not os.path.isdir(p))
            paths = [Path(p) for p in {os.path.realpath(p): p for p in reversed(matches)}.values()]  # links make loops
        if not paths:
            raise ValueError(f"source {self.path}: there is no such file, folder, or pattern with files")
        formats = [(p, self.format or format_of(p.name)) for p in sorted(paths)]
        unknown = [p for p, kind in formats if not kind]
        if unknown:
            raise ValueError(
                f"source {self.path}: the format of {unknown[0].name} ({len(unknown)} files) is not known; give a "
                f"pattern, or format = {', '.join([*FORMATS, 'code'])}"
            )
        return formats


@dataclass(frozen=True)
class Split:
    """The input of one shard: byte or row-group ranges [begin, end) of files of one source."""

    source: Source
    parts: tuple[tuple[str, str, int, int], ...]  # path, format, begin, end; the whole file: 0, -1

    def key(self) -> dict[str, Any]:
        """What it reads: names, sizes and times of change of its files."""
        stats = [_stat(path) for path, *_ in self.parts]
        return {
            "source": asdict(self.source),
            "parts": [
                [os.path.relpath(path, self.source.root), kind, begin, end, *s]
                for (path, kind, begin, end), s in zip(self.parts, stats, strict=True)
            ],
        }

    @property
    def label(self) -> str:
        """A short name for messages."""
        path, kind, begin, end = self.parts[0]
        name = os.path.relpath(path, self.source.root)
        if len(self.parts) > 1:
            return f"{name} and {len(self.parts) - 1} more"
        unit = "row groups" if kind == "parquet" else "bytes"
        return name if end < 0 else f"{name}, {unit} {begin} to {end}"


def splits_of(source: Source, size: int) -> list[Split]:
    """The splits of a source, of about `size` bytes each.

    Files of lines are cut at bytes: a split has the lines that begin in it. Parquet files are cut at row groups. A
    compressed file and a WARC file are one split. Small files share one.
    """
    splits: list[Split] = []
    together: list[tuple[str, str, int, int]] = []
    total = 0

    def close() -> None:
        nonlocal together, total
        if together:
            splits.append(Split(source, tuple(together)))
        together, total = [], 0

    for path, kind in source.files():
        for part, length in _parts(path, kind, size):
            if total and total + length > size:
                close()
            together.append(part)
            total += length
    close()
    return splits


def _parts(path: Path, kind: str, size: int) -> Iterator[tuple[tuple[str, str, int, int], int]]:
    length, _ = _stat(path)
    if not path.is_file():
        yield (str(path), UNREADABLE, 0, -1), 0
    elif kind == "parquet" and length > size and (meta := _metadata(path)) is not None:
        begin = total = 0
        for group in range(meta.num_row_groups):
            total += meta.row_group(group).total_byte_size
            if total >= size or group == meta.num_row_groups - 1:
                yield (str(path), kind, begin, group + 1), total
                begin, total = group + 1, 0
    elif kind == "jsonl" and path.suffix not in (".gz", ".zst") and length > size:
        for begin in range(0, length, size):
            yield (str(path), kind, begin, min(begin + size, length)), min(size, length - begin)
    else:
        yield (str(path), kind, 0, -1), length


def _stat(path: str | Path) -> tuple[int, int]:
    """The size of a file and the time of its last change; zeros if it cannot be told."""
    try:
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return 0, 0


def _metadata(path: Path) -> Any:
    """The metadata of a Parquet file; None if it has none: the reader will say so."""
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).metadata
    except Exception:
        return None


def format_of(name: str) -> str:
    """The format of a file by the end of its name, or ""."""
    ends = [(len(end), kind) for kind, those in FORMATS.items() for end in those if name.lower().endswith(end)]
    return max(ends)[1] if ends else ""


_SKIPPED = {".git", "__pycache__", "node_modules", "site-packages", ".svn", ".hg"}


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"the folder {error.filename} cannot be read: {error.strerror}")

    for at, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(set(folders) - _SKIPPED)
        yield from (Path(at, name) for name in sorted(names) if not name.startswith("."))
