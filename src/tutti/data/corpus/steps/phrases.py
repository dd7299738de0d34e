"""Lists of words and phrases: texts that evaluations use, and words that a corpus should not have."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus import native
from tutti.data.corpus.documents import Outcome, texts
from tutti.data.corpus.files import digest
from tutti.data.corpus.steps.step import Step


@dataclass(frozen=True)
class Decontaminate(Step):
    """Drop documents that share a run of `ngram` words with an evaluation set (Brown et al. 2020, appendix C: 13
    words).

    Words are compared in lower case without punctuation. An evaluation text with fewer words counts as a whole if it
    has at least `least` of them.

    against: files or patterns: text (a text for each line), or JSON Lines and Parquet, of which all string fields
        count.
    """

    kind: ClassVar[str] = "decontaminate"
    against: tuple[str, ...] = ()
    ngram: int = 13
    least: int = 8

    def __post_init__(self):
        if not self.against:
            raise ValueError("decontaminate: give the files of the evaluation sets as `against`")
        files_of(self.kind, self.against)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        sizes, hashes = phrases(files_of(self.kind, self.against), self.ngram, self.least)
        places, passages = find(texts(batch), sizes, hashes)
        reasons = ["contaminated" if count else None for count in places]
        details = [
            f"{count} places: {passage}" if count else None for count, passage in zip(places, passages, strict=True)
        ]
        return Outcome(batch, reasons, details)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "digests": [digest(Path(p)) for p in files_of(self.kind, self.against)]}


@dataclass(frozen=True)
class Words(Step):
    """Drop documents with words or phrases of a list: toxicity lists, names.

    files: files or patterns; a word or phrase for each line; "#" begins a comment. most: how many a document may
        have. reason: name of the reason for which they are dropped.
    """

    kind: ClassVar[str] = "words"
    files: tuple[str, ...] = ()
    most: int = 0
    reason: str = "listed_words"

    def __post_init__(self):
        if not self.files:
            raise ValueError("words: give the files of the lists as `files`")
        files_of(self.kind, self.files)

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        sizes, hashes = word_list(files_of(self.kind, self.files))
        places, passages = find(texts(batch), sizes, hashes)
        reasons = [self.reason if count > self.most else None for count in places]
        details = [f"{c} places: {p}" if c > self.most else None for c, p in zip(places, passages, strict=True)]
        return Outcome(batch, reasons, details)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "digests": [digest(Path(p)) for p in files_of(self.kind, self.files)]}


def find(documents: pa.StringArray, sizes: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """How many places of each document have one of the phrases, and the text of the first."""
    n, offsets, data = native.text_arguments(documents)
    places, begins, ends = (np.zeros(n, np.uint32) for _ in range(3))
    native.call("find_phrases", n, offsets, data, sizes, len(sizes), hashes, len(hashes), places, begins, ends)
    passages = [
        bytes(data[offsets[i] + begins[i] : offsets[i] + ends[i]]).decode()[:200] if places[i] else "" for i in range(n)
    ]
    return places, passages


def hashes_of(documents: pa.StringArray, size: int) -> np.ndarray:
    """The hashes of all runs of `size` words, sorted, without repeats."""
    n, offsets, data = native.text_arguments(documents)
    out = np.empty(native.call("phrase_hashes", n, offsets, data, size, None), np.uint64)
    native.call("phrase_hashes", n, offsets, data, size, out)
    return np.unique(out)


@cache
def phrases(files: tuple[str, ...], ngram: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The sizes and the sorted hashes of the runs of words of evaluation texts."""
    every = [text for path in files for text in _texts(Path(path))]
    return _grouped(every, ngram, least)


@cache
def word_list(files: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    lines = [line.partition("#")[0] for path in files for line in Path(path).read_text("utf-8").splitlines()]
    return _grouped([line for line in lines if line.strip()], 64, 1)


def _grouped(every: list[str], most: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts of fewer than `most` words as a whole, of others all runs of `most`."""
    documents = pa.array(every, pa.string())
    n, offsets, data = native.text_arguments(documents)
    counts = np.zeros(n, np.int64)
    native.call("count_words", n, offsets, data, counts)
    sizes = np.unique(np.minimum(counts, most))
    sizes = sizes[sizes >= least]
    groups = [hashes_of(documents.filter(pa.array(np.minimum(counts, most) == size)), int(size)) for size in sizes]
    return sizes.astype(np.int64), np.unique(np.concatenate(groups)) if groups else np.empty(0, np.uint64)


def _texts(path: Path) -> Iterator[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield from _strings(row)
        return
    from tutti.data.corpus.reading.lines import Line, lines

    name = path.name.removesuffix(".gz").removesuffix(".zst")
    for line in lines(str(path)):
        if not isinstance(line, Line):
            raise ValueError(f"{path} is {line.reason}: {line.detail}")
        text = line.content.decode("utf-8", "replace")
        if not name.endswith((".jsonl", ".ndjson", ".json")):
            yield text
        elif text.strip():
            yield from _strings(json.loads(text))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def files_of(kind: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The files that patterns match, in the order of their names. Raises ValueError for a pattern without any."""
    files: list[str] = []
    for pattern in patterns:
        paths = sorted(p for p in glob.glob(str(Path(pattern).expanduser()), recursive=True) if Path(p).is_file())
        if not paths:
            raise ValueError(f"{kind}: there is no file {pattern}")
        files += paths
    return tuple(files)
