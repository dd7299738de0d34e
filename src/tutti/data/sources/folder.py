"""Folders of images or audio: a class for each subfolder, or columns in metadata.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tutti.data.rows import BadRow
from tutti.data.sources.decode import AUDIO, IMAGES, decoded
from tutti.data.sources.jsonl import JsonLines
from tutti.data.sources.source import Source

METADATA = "metadata.jsonl"


class Folder(Source):
    """Files of some suffixes under a folder, in the order of their paths.

    A folder with `metadata.jsonl`, whose rows have `file_name` and other columns, gives these columns. Otherwise, if
    the files lie in subfolders, `label` is the index of the file's first subfolder among `classes`.

    classes: names of the subfolders, sorted.
    """

    column = "file"
    suffixes: tuple[str, ...] = ()

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.classes: list[str] = []
        self.metadata: list[dict[str, Any]] | None = None
        if (self.folder / METADATA).exists():
            rows = list(JsonLines(self.folder / METADATA))
            missing = next((i for i, row in enumerate(rows) if "file_name" not in row), None)
            if missing is not None:
                raise ValueError(f"{self.folder / METADATA}: row {missing} has no column 'file_name'")
            self.paths = [self.folder / row["file_name"] for row in rows]
            self.metadata = [{k: v for k, v in row.items() if k != "file_name"} for row in rows]
        else:
            every = (p for p in self.folder.rglob("*") if p.suffix[1:].lower() in self.suffixes)
            self.paths = sorted(p for p in every if not p.name.startswith("."))
            tops = [p.relative_to(self.folder).parts[0] for p in self.paths if p.parent != self.folder]
            self.classes = sorted(set(tops)) if len(tops) == len(self.paths) else []
        if not self.paths:
            raise ValueError(f"{folder} has no files that end in {', '.join(self.suffixes)}")

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, i: int) -> str:
        return str(self.paths[i])

    def row(self, i: int) -> dict[str, Any]:
        path = self.paths[i]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadRow(f"{path}: {error.strerror}; restore it, or read with on_bad='skip'") from None
        return {self.column: self.value(content, path), **self._about(i)}

    def cell(self, i: int, column: str) -> Any:
        if column == self.column:
            return self.row(i)[column]
        return self._about(i)[column]

    def _about(self, i: int) -> dict[str, Any]:
        """The columns of a row besides its content."""
        path = self.paths[i]
        about: dict[str, Any] = {"path": str(path)}
        if self.metadata is not None:
            return about | self.metadata[i]
        if self.classes:
            about["label"] = self.classes.index(path.relative_to(self.folder).parts[0])
        return about

    def value(self, content: bytes, path: Path) -> Any:
        """The decoded content of a file."""
        return decoded(content, path.suffix[1:].lower(), str(path))


class ImageFolder(Folder):
    """Images: rows `{"image": RGB image of PIL, "path": ..., "label": ...}`."""

    column, suffixes = "image", IMAGES


class AudioFolder(Folder):
    """Audio: rows `{"audio": {"array": float32, "sampling_rate": Hz}, "path": ..., "label": ...}`.

    An array is (samples,), several channels averaged.

    sampling_rate: resample to this rate, in Hz; None: as the file has it.
    """

    column, suffixes = "audio", AUDIO

    def __init__(self, folder: str | Path, sampling_rate: int | None = None):
        super().__init__(folder)
        self.sampling_rate = sampling_rate

    def value(self, content: bytes, path: Path) -> Any:
        audio = super().value(content, path)
        array, rate = audio["array"], audio["sampling_rate"]
        if array.ndim == 2:
            array = array.mean(1)
        if self.sampling_rate not in (None, rate):
            array, rate = resampled(array, rate, self.sampling_rate), self.sampling_rate  # pyright: ignore
        return {"array": array, "sampling_rate": rate}


def resampled(array: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Audio at another rate, by a polyphase filter (`scipy.signal.resample_poly`)."""
    from scipy.signal import resample_poly

    both = np.gcd(rate, wanted)
    return resample_poly(array, wanted // both, rate // both).astype(np.float32)
