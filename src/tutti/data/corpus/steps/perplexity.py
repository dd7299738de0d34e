"""Perplexity by a language model of n-grams of words: text unlike the examples that the model was trained on scores
high.

The model is interpolated modified Kneser-Ney (Chen and Goodman 1998, https://dash.harvard.edu/handle/1/25104739), as
in KenLM (Heafield et al. 2013). Sentences are lines. It is a folder of arrays, which worker processes share in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tutti.data.corpus import native
from tutti.data.corpus.documents import Outcome, replace, texts
from tutti.data.corpus.files import atomic, read_json, write_json
from tutti.data.corpus.steps.step import Step


@dataclass(frozen=True)
class Perplexity(Step):
    """Write the column `perplexity` (a word), and drop documents outside [min, max].

    model: a folder that `train_perplexity` or `tutti corpus model` wrote. Documents without words have perplexity
        infinity.
    """

    kind: ClassVar[str] = "perplexity"
    model: str = ""
    max: float = float("inf")
    min: float = 0.0

    def __post_init__(self):
        if not (Path(self.model).expanduser() / "model.json").is_file():
            raise ValueError(
                f"perplexity: {self.model or 'no folder'} is not a model; train one with `tutti corpus model`"
            )

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        values = load(self.model).perplexity(texts(batch))
        reasons = ["perplexity_high" if v > self.max else "perplexity_low" if v < self.min else None for v in values]
        details = [f"{v:.0f}" if r else None for v, r in zip(values, reasons, strict=True)]
        return Outcome(replace(batch, "perplexity", pa.array(values, pa.float32())), reasons, details)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "digest": read_json(Path(self.model).expanduser() / "model.json")["digest"]}


class NGrams:
    """A loaded model. tables[m], probabilities[m] (log2), backoffs[m] (log2): of (m + 1)-grams, by hash."""

    def __init__(self, folder: Path):
        self.info = read_json(folder / "model.json")
        self.order, self.unknown = self.info["order"], self.info["unknown"]
        self._arrays = [
            [np.load(folder / f"{m}.{name}.npy", mmap_mode="r") for name in ("keys", "probabilities", "backoffs")]
            for m in range(1, self.order + 1)
        ]

    def log2(self, documents: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """The sum of log2 probabilities of each document's words and ends of lines, and their number."""
        n, offsets, data = native.text_arguments(documents)
        sums, words = np.zeros(n), np.zeros(n, np.int64)
        pointers = [(ctypes.c_void_p * self.order)(*(a[k].ctypes.data for a in self._arrays)) for k in range(3)]
        sizes = np.array([len(a[0]) for a in self._arrays], np.int64)
        native.call("score_n_grams", n, offsets, data, self.order, pointers[0], sizes, pointers[1], pointers[2],
                    float(self.unknown), sums, words)  # fmt: skip
        return sums, words

    def perplexity(self, documents: pa.StringArray) -> np.ndarray:
        sums, words = self.log2(documents)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return np.where(words > 0, 2.0 ** (-sums / words), np.inf)


@cache
def load(folder: str) -> NGrams:
    return NGrams(Path(folder).expanduser())


def train_perplexity(batches: Iterable[pa.StringArray], out: str | Path, order: int = 3) -> NGrams:
    """Train a model on documents and write it into a folder.

    order: words of the longest n-gram, 1 to 6. The counts take about 60 bytes for each n-gram in memory.
    Raises ValueError if there are no words.
    """
    if not 1 <= order <= 6:
        raise ValueError(f"order is {order}; give 1 to 6")
    counts = _counts(batches, order)
    if not len(counts[0].grams):
        raise ValueError("the examples have no words")
    adjusted = [_adjusted(counts, m) for m in range(order)]
    folder = Path(out)
    lower, unknown = None, 0.0
    levels: list[list[np.ndarray]] = []
    gammas: list[tuple[np.ndarray, np.ndarray]] = []
    for m in range(order):
        level, values = counts[m], adjusted[m]
        discounts = _discounts(values)
        cut = discounts[np.minimum(values, 3)]
        contexts, inverse = np.unique(level.contexts, return_inverse=True)
        sums = np.bincount(inverse, values)
        gamma = np.bincount(inverse, cut) / sums
        if lower is None:
            base = np.full(len(values), 1.0 / (len(values) + 1))  # and one word that is not known
            unknown = float(gamma[0] / (len(values) + 1))
        else:
            base = lower[np.searchsorted(counts[m - 1].grams, level.suffixes)]
        lower = (values - cut) / sums[inverse] + gamma[inverse] * base
        levels.append([level.grams, lower])
        gammas.append((contexts, gamma))
    digest = ""
    for m, (grams, probabilities) in enumerate(levels):
        keys, backoffs = grams, np.zeros(len(grams))
        if m + 1 < order:
            contexts, gamma = gammas[m + 1]
            extra = contexts[~np.isin(contexts, grams)]  # beginnings of sentences
            keys = np.concatenate([grams, extra])
            probabilities = np.concatenate([probabilities, np.full(len(extra), 1e-30)])
            order_of = np.argsort(keys)
            keys, probabilities = keys[order_of], probabilities[order_of]
            backoffs = np.zeros(len(keys))
            backoffs[np.searchsorted(keys, contexts)] = np.log2(gamma)
        digest += _write(folder, m + 1, keys, np.log2(probabilities), backoffs)
    write_json(folder / "model.json", {"order": order, "unknown": float(np.log2(unknown)), "digest": digest,
                                       "n_grams": [len(x[0]) for x in levels]})  # fmt: skip
    return NGrams(folder)


@dataclass(frozen=True)
class _Level:
    """Different n-grams of one length, sorted by hash: counts, hashes of contexts and suffixes."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    suffixes: np.ndarray


def _counts(batches: Iterable[pa.StringArray], order: int) -> list[_Level]:
    empty = np.empty(0, np.uint64)
    levels = [_Level(empty, np.empty(0, np.int64), empty, empty) for _ in range(order)]
    for batch in batches:
        n, offsets, data = native.text_arguments(batch)
        for m in range(order):
            count = native.call("count_n_grams", n, offsets, data, m + 1, None, None, None)
            columns = [np.empty(count, np.uint64) for _ in range(3)]
            native.call("count_n_grams", n, offsets, data, m + 1, *columns)
            grams, first, counts = np.unique(columns[0], return_index=True, return_counts=True)
            levels[m] = _merged(levels[m], _Level(grams, counts, columns[1][first], columns[2][first]))
    return levels


def _merged(a: _Level, b: _Level) -> _Level:
    grams, first, inverse = np.unique(np.concatenate([a.grams, b.grams]), return_index=True, return_inverse=True)
    counts = np.bincount(inverse, np.concatenate([a.counts, b.counts])).astype(np.int64)
    contexts, suffixes = (
        np.concatenate([a.contexts, b.contexts])[first],
        np.concatenate([a.suffixes, b.suffixes])[first],
    )
    return _Level(grams, counts, contexts, suffixes)


def _adjusted(levels: list[_Level], m: int) -> np.ndarray:
    """Counts of the longest n-grams; of shorter ones, how many different words come before, or their counts where
    none can (they begin a sentence)."""
    level = levels[m]
    if m == len(levels) - 1 or not len(levels[m + 1].grams):
        return level.counts
    suffixes, before = np.unique(levels[m + 1].suffixes, return_counts=True)
    at = np.minimum(np.searchsorted(suffixes, level.grams), len(suffixes) - 1)
    return np.where(suffixes[at] == level.grams, before[at], level.counts)


def _discounts(values: np.ndarray) -> np.ndarray:
    """Discounts of counts 0, 1, 2, 3 and more: Chen and Goodman, equation 26; 0.5, 1, 1.5 where the counts of counts
    do not allow it (as in KenLM)."""
    n1, n2, n3, n4 = (int((values == k).sum()) for k in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) > 0:
        y = n1 / (n1 + 2 * n2)
        d = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (d[1:] > 0).all() and (d[1:] < [1, 2, 3]).all():
            return d
    return np.array([0, 0.5, 1.0, 1.5])


def _write(folder: Path, m: int, keys: np.ndarray, probabilities: np.ndarray, backoffs: np.ndarray) -> str:
    size = 1 << max(2, int(2 * len(keys) - 1).bit_length())
    table, slots = np.zeros(size, np.uint64), np.zeros(len(keys), np.int64)
    native.call("hash_table", len(keys), np.ascontiguousarray(keys), size, table, slots)
    digests = ""
    for name, values in (("keys", None), ("probabilities", probabilities), ("backoffs", backoffs)):
        array = table
        if values is not None:
            array = np.zeros(size, np.float32)
            array[slots] = values
        with atomic(folder / f"{m}.{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
        digests += file.entry["blake2b"][:8]
    return digests
