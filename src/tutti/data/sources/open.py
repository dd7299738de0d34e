"""`open_source`: the source of a path or a dataset."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.data.rows import Rows
from tutti.data.sources.csv import Csv
from tutti.data.sources.folder import AUDIO, IMAGES, METADATA, AudioFolder, ImageFolder
from tutti.data.sources.hugging_face import HuggingFace, HuggingFaceStream, from_disk
from tutti.data.sources.jsonl import CompressedJsonLines, JsonLines
from tutti.data.sources.parquet import Parquet
from tutti.data.sources.source import Joined, Source, StreamingSource
from tutti.data.sources.text import TextFiles, TextLines
from tutti.data.sources.webdataset import WebDataset

FORMATS: dict[str, type[Source]] = {
    ".jsonl": JsonLines, ".ndjson": JsonLines, ".parquet": Parquet, ".csv": Csv, ".tsv": Csv, ".txt": TextLines,
    ".tar": WebDataset,
}  # fmt: skip
"""Source by suffix of a file."""

STREAMED = (".jsonl.gz", ".ndjson.gz")


class RowList(Source):
    """Rows of a list or another sequence of dicts."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        return self.rows[i]


def open_source(spec: Any, **options: Any) -> Any:
    """The source of a dataset, a list of rows, a file, several files or a folder.

    spec: a `datasets.Dataset` or `IterableDataset`; a source; a sequence of dicts; or a path, a pattern ("*.jsonl"),
        a folder, or a list of paths of one format. The suffix says the format: .jsonl, .ndjson, .parquet, .csv, .tsv,
        .txt (a row for each line), .tar (WebDataset); .jsonl.gz is streamed. A folder is a dataset of `save_to_disk`,
        a folder of images or audio (`ImageFolder`, `AudioFolder`), or files of one format.
    options: options of the format's class, such as `cache`, `columns`, `types`, `decode`, `sampling_rate`. With
        `rows="files"` a row is a whole .txt file.

    Raises ValueError if nothing is there, or the format is not known.
    """
    if isinstance(spec, str | Path):
        return _of_path(str(spec), options)
    if isinstance(spec, list | tuple) and spec and isinstance(spec[0], str | Path):
        return _of_files([Path(p) for p in spec], options)
    if options:
        raise ValueError(f"the options {', '.join(options)} are of files; {type(spec).__name__} takes none")
    if isinstance(spec, Rows | StreamingSource):
        return spec
    kind = type(spec).__name__
    if hasattr(spec, "features") and hasattr(spec, "column_names"):  # of datasets, which need not be imported for it
        return HuggingFace(spec) if hasattr(spec, "__len__") else HuggingFaceStream(spec)
    if hasattr(spec, "__len__") and hasattr(spec, "__getitem__"):
        return RowList(spec)
    raise ValueError(f"a {kind} has no rows by index; give a dataset, a path, a list of dicts, or a StreamingSource")


def _of_path(spec: str, options: dict[str, Any]) -> Any:
    path = Path(spec).expanduser()
    if path.is_dir():
        return _of_folder(path, options)
    if path.is_file():
        return _of_files([path], options)
    matches = sorted(glob.glob(str(path), recursive=True))
    if not matches:
        raise ValueError(f"there is no file, folder or pattern with files {spec!r}")
    return _of_files([Path(p) for p in matches], options)


def _of_folder(folder: Path, options: dict[str, Any]) -> Any:
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        return from_disk(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    counts = Counter(_suffix(p) for p in files if p.name != METADATA)
    if not counts:
        raise ValueError(f"the folder {folder} is empty")
    kinds = set(counts)
    if kinds & {f".{s}" for s in IMAGES}:
        return ImageFolder(folder, **options)
    if kinds & {f".{s}" for s in AUDIO}:
        return AudioFolder(folder, **options)
    readable = [kind for kind in counts if kind in FORMATS or kind in STREAMED]
    if len(readable) != 1:
        has = ", ".join(f"{n} {kind or 'without suffix'}" for kind, n in counts.most_common(4))
        raise ValueError(f"the folder {folder} has {has}; give a pattern of files of one format ({_formats()})")
    return _of_files([p for p in files if _suffix(p) == readable[0]], options)


def _of_files(paths: list[Path], options: dict[str, Any]) -> Any:
    kinds = {_suffix(p) for p in paths}
    if len(kinds) > 1:
        raise ValueError(f"files of several formats ({', '.join(sorted(kinds))}); open each, and mix or join them")
    kind = kinds.pop()
    if kind in STREAMED:
        return CompressedJsonLines(paths, **options)
    if kind == ".txt" and (unit := options.pop("rows", "lines")) != "lines":
        if unit != "files":
            raise ValueError(f"rows is {unit!r}; a row of text is one of its 'lines' or one of the 'files'")
        return TextFiles(paths, **options)
    if kind not in FORMATS:
        raise ValueError(f"{paths[0]}: the format {kind or 'without suffix'} is not known; known are {_formats()}")
    opened = [FORMATS[kind](path, **options) for path in paths]  # pyright: ignore[reportCallIssue]
    return opened[0] if len(opened) == 1 else Joined(opened)


def _suffix(path: Path) -> str:
    return next((kind for kind in STREAMED if path.name.endswith(kind)), path.suffix.lower())


def _formats() -> str:
    return ", ".join([*FORMATS, *STREAMED])
