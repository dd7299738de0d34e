"""Deduplication, exact and near. These steps need all documents: shards meet before their results are applied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus import native
from tutti.data.corpus.documents import Outcome, pc, replace, texts
from tutti.data.corpus.duplicates import Verdict
from tutti.data.corpus.files import digest
from tutti.data.corpus.native.tables import version
from tutti.data.corpus.sketches import Hashes
from tutti.data.corpus.steps.step import Step


@dataclass(frozen=True)
class Meeting(Step):
    """A step that looks at the hashes of all documents of a corpus before it decides on any.

    `sketch` gives the hashes of a batch whose first document has row `first` of its shard. `apply` decides, with what
    repeats an earlier document. connects: whether repeats are pairs of a graph, of which one document in each component
    stays.

    against: folders of indexes that earlier runs wrote; their documents come first, so what repeats them is dropped.
    index: whether to write an index of the documents that are kept, for later runs.
    """

    connects: ClassVar[bool] = False
    against: tuple[str, ...] = ()
    index: bool = False

    def sketch(self, batch: pa.RecordBatch, first: int) -> Hashes:
        raise NotImplementedError

    def apply(self, batch: pa.RecordBatch, first: int, verdict: Verdict) -> Outcome:
        reasons: list[str | None] = [None] * len(batch)
        details: list[str | None] = [None] * len(batch)
        rows, repeats = verdict.between(first, first + len(batch))
        for i, repeat in zip(rows, repeats, strict=True):
            reasons[i], details[i] = self.reason, f"of {verdict.id_of(repeat['twin'])}"
        return Outcome(batch, reasons, details)

    reason: ClassVar[str] = ""

    def key(self) -> dict[str, Any]:
        return {**super().key(), "indexes": [digest(p) for p in self.indexes()]}

    def sketch_key(self) -> dict[str, Any]:
        """What an index must share with this step to be compared with."""
        return {
            **{k: v for k, v in super().key().items() if k not in ("against", "index", "class")},
            "python": version(),
        }

    def indexes(self) -> list[Path]:
        """The files that describe the indexes of older corpora. Raises ValueError for a folder without one."""
        indexes = []
        for folder in map(Path, self.against):
            paths = [p for p in (folder / "index.json", folder / "index" / self.name / "index.json") if p.exists()]
            if not paths:
                raise ValueError(f"{self.name}: {folder} has no index; run that corpus with index = true in this step")
            indexes.append(paths[0])
        return indexes


@dataclass(frozen=True)
class Duplicates(Meeting):
    """Remove documents, or parts of documents, that occurred before.

    unit: "document"; "paragraph" and "line", of at least `least` bytes; "span": runs of `words` words or more, wherever
        they begin (what Lee et al. 2022 find with suffix arrays, https://arxiv.org/abs/2107.06499, by hashes of
        windows).
    equal: "text" compares bytes; "words" compares words in lower case without punctuation and spaces. Spans are
        compared by words.
    empty: a document of which fewer bytes are left is dropped.
    """

    kind: ClassVar[str] = "duplicates"
    reason: ClassVar[str] = "duplicate"
    unit: str = "document"
    equal: str = "text"
    least: int = 40
    words: int = 50
    empty: int = 1

    def __post_init__(self):
        if self.unit not in ("document", "paragraph", "line", "span"):
            raise ValueError(f"duplicates: unit is {self.unit!r}; give document, paragraph, line or span")
        if self.equal not in ("text", "words"):
            raise ValueError(f"duplicates: equal is {self.equal!r}; give text or words")
        if self.words < 2:
            raise ValueError(f"duplicates: words is {self.words}; spans have at least 2")

    @property
    def name(self) -> str:
        return f"duplicate_{self.unit}s"

    def sketch(self, batch: pa.RecordBatch, first: int) -> Hashes:
        n, offsets, data = native.text_arguments(texts(batch))
        by_words = self.equal == "words"
        if self.unit == "document":
            hashes = np.empty(n, np.uint64)
            native.call("hash_documents", n, offsets, data, by_words, hashes)
            return Hashes.of_documents(hashes, np.arange(first, first + n))
        function, options = (
            ("hash_windows", (self.words,)) if self.unit == "span"
            else ("hash_units", (int(self.unit == "line") + 1, by_words, self.least))
        )  # fmt: skip
        count = native.call(function, n, offsets, data, *options, None, None, None, None)
        rows, begins, ends = (np.empty(count, np.uint32) for _ in range(3))
        hashes = np.empty(count, np.uint64)
        native.call(function, n, offsets, data, *options, rows, begins, ends, hashes)
        return Hashes(hashes, rows + np.uint32(first), begins, ends)

    def apply(self, batch: pa.RecordBatch, first: int, verdict: Verdict) -> Outcome:
        if self.unit == "document":
            return super().apply(batch, first, verdict)
        rows, repeats = verdict.between(first, first + len(batch))
        documents = texts(batch)
        n, offsets, data = native.text_arguments(documents)
        out, out_offsets = np.empty(int(offsets[-1] - offsets[0]) + 1, np.uint8), np.empty(n + 1, np.int32)
        ranges = [np.ascontiguousarray(x, np.uint32) for x in (rows, repeats["begin"], repeats["end"])]
        native.call("remove_ranges", n, offsets, data, len(rows), *ranges, out, out_offsets)
        shorter = native.text_array(out_offsets, out)
        cut = np.diff(offsets).astype(np.int64) - np.diff(out_offsets)
        counts = np.bincount(rows, minlength=n).astype(np.int64)
        left = pc.binary_length(pc.utf8_trim_whitespace(shorter)).to_numpy(zero_copy_only=False)
        gone = np.flatnonzero((cut > 0) & (left < self.empty))
        reasons: list[str | None] = [None] * n
        details: list[str | None] = [None] * n
        for i in gone:
            twin = repeats["twin"][np.searchsorted(rows, i)]
            reasons[i], details[i] = f"all_{self.unit}s_duplicate", f"the first one of {verdict.id_of(twin)}"
        return Outcome(replace(batch, "text", shorter), reasons, details, {f"duplicate_{self.unit}": (counts, cut)})


@dataclass(frozen=True)
class NearDuplicates(Meeting):
    """Remove documents that are similar to an earlier one, found by MinHash and locality-sensitive hashing.

    Documents are sets of `ngram` words that follow each other. Two with Jaccard similarity s become a pair with
    probability
    1 - (1 - s^rows)^bands (Broder 1997; Indyk and Motwani 1998). The defaults are FineWeb's: 0.92 at s = 0.8, 0.56 at
    0.7.
    """

    kind: ClassVar[str] = "near_duplicates"
    reason: ClassVar[str] = "near_duplicate"
    connects: ClassVar[bool] = True
    ngram: int = 5
    bands: int = 14
    rows: int = 8
    seed: int = 1

    def __post_init__(self):
        for name in ("ngram", "bands", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"near_duplicates: {name} is {getattr(self, name)}; give 1 or more")

    def sketch(self, batch: pa.RecordBatch, first: int) -> Hashes:
        n, offsets, data = native.text_arguments(texts(batch))
        a, b = multipliers(self.bands * self.rows, self.seed)
        keys, shingles = np.empty((n, self.bands), np.uint64), np.empty(n, np.uint32)
        native.call("minhash", n, offsets, data, self.ngram, self.bands, self.rows, a, b, keys, shingles)
        some = shingles > 0  # documents without words are not similar to each other
        return Hashes.of_documents(keys[some].ravel(), np.repeat(np.arange(first, first + n)[some], self.bands))


@cache
def multipliers(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Odd factors and summands of `count` hash functions modulo 2^64, (count,) uint64 each."""
    state = np.random.SeedSequence([seed, 0x5EED]).generate_state(2 * count, np.uint64)
    return state[:count] | np.uint64(1), state[count:]
