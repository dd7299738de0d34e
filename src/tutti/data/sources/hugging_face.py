"""Datasets of Hugging Face, with random access or streaming."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tutti.data.rows import BadRow
from tutti.data.sources.source import Source, StreamingSource, needed


class HuggingFace(Source):
    """A `datasets.Dataset`."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    @property
    def columns(self) -> list[str]:
        return self.dataset.column_names

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, i: int) -> dict[str, Any]:
        return self.dataset[i]

    def cell(self, i: int, column: str) -> Any:
        return self.dataset.select_columns(column)[i][column]

    def cells(self, column: str, count: int) -> Iterator[Any]:
        return iter(self.dataset.select_columns(column)[:count][column])

    def name(self, i: int) -> str:
        return f"{self.dataset.info.builder_name or 'dataset'}, row {i}"


class HuggingFaceStream(StreamingSource):
    """A `datasets.IterableDataset`. Rows before the position of a resumed stream are read again, in their shard."""

    def __init__(self, dataset: Any):
        self.dataset, self.shards = dataset, dataset.num_shards

    def open(self, shard: int, start: int) -> Iterator[dict[str, Any] | BadRow]:
        rows = self.dataset.shard(self.shards, shard) if self.shards > 1 else self.dataset
        return islice(iter(rows), start, None)


def from_disk(folder: Path) -> HuggingFace:
    """A dataset that `save_to_disk` wrote. Raises ValueError if it has several splits."""
    datasets = needed("datasets", "datasets", "a saved dataset")
    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(f"{folder} has the splits {', '.join(loaded)}; open one of its folders")
    return HuggingFace(loaded)
