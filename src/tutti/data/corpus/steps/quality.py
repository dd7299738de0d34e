"""Quality by a classifier: a logistic regression on hashed words and pairs of words, trained on examples of good and
bad text (as fastText's linear models: Joulin et al. 2016, https://arxiv.org/abs/1607.01759)."""

from __future__ import annotations

from collections.abc import Sequence
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

WORDS = 2000
"""Words of a document that the classifier looks at."""


@dataclass(frozen=True)
class Quality(Step):
    """Write the column `quality` in [0, 1], and drop documents below `min`.

    model: a folder that `train_quality` or `tutti corpus model` wrote.
    """

    kind: ClassVar[str] = "quality"
    model: str = ""
    min: float = 0.5

    def __post_init__(self):
        if not (Path(self.model).expanduser() / "quality.json").is_file():
            raise ValueError(
                f"quality: {self.model or 'no folder'} is not a model; train one with `tutti corpus model`"
            )

    def __call__(self, batch: pa.RecordBatch) -> Outcome:
        scores = load(self.model).scores(texts(batch))
        reasons = ["low_quality" if s < self.min else None for s in scores]
        details = [f"{s:.3f}" if r else None for s, r in zip(scores, reasons, strict=True)]
        return Outcome(replace(batch, "quality", pa.array(scores, pa.float32())), reasons, details)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "digest": read_json(Path(self.model).expanduser() / "quality.json")["digest"]}


class Classifier:
    """A loaded model: a weight for each bucket of words, and a bias."""

    def __init__(self, folder: Path):
        self.info = read_json(folder / "quality.json")
        self.weights, self.bias = np.load(folder / "weights.npy", mmap_mode="r"), self.info["bias"]

    def scores(self, documents: pa.StringArray) -> np.ndarray:
        """The probability that each document is good, (n,) float64. Without words: 0."""
        begins, indices = hashed(documents, len(self.weights))
        sums = np.concatenate([[0.0], np.cumsum(self.weights[indices], dtype=np.float64)])
        counts = np.diff(begins)
        mean = (sums[begins[1:]] - sums[begins[:-1]]) / np.maximum(counts, 1)
        return np.where(counts > 0, 1 / (1 + np.exp(-(mean + self.bias))), 0.0)


@cache
def load(folder: str) -> Classifier:
    return Classifier(Path(folder).expanduser())


def hashed(documents: pa.StringArray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `begins` and the buckets of words and pairs of words: document i has [begins[i], begins[i + 1])."""
    n, offsets, data = native.text_arguments(documents)
    begins, out = np.zeros(n + 1, np.int64), np.empty(2 * WORDS * n, np.int64)
    native.call("hashed_words", n, offsets, data, buckets, WORDS, begins, out)
    return begins, out[: begins[-1]]


def train_quality(
    good: Sequence[str], bad: Sequence[str], out: str | Path, buckets: int = 1 << 20, epochs: int = 5, seed: int = 0
) -> dict[str, float]:
    """Train a classifier on examples and write it into a folder.

    A tenth of the examples is held out. Returns `accuracy` and `auc` (the area under the ROC curve) on them.
    Raises ValueError if there are fewer than 20 examples of a kind.
    """
    import torch
    from torch.nn import functional

    for name, examples in (("good", good), ("bad", bad)):
        if len(examples) < 20:
            raise ValueError(f"there are {len(examples)} {name} examples; give at least 20")
    rng = np.random.default_rng(seed)
    documents = pa.array([*good, *bad], pa.string())
    labels = np.r_[np.ones(len(good)), np.zeros(len(bad))]
    order = rng.permutation(len(labels))
    held_out, train = order[: len(order) // 10], order[len(order) // 10 :]
    begins, indices = hashed(documents, buckets)
    share = torch.from_numpy(np.where(labels == 1, 0.5 / labels[train].mean(), 0.5 / (1 - labels[train].mean())))
    weights = torch.zeros(buckets, 1, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adagrad([weights, bias], lr=2.0)
    for _ in range(epochs):
        rng.shuffle(train)
        for rows in np.array_split(train, max(1, len(train) // 64)):
            pieces = [indices[begins[i] : begins[i + 1]] for i in rows]
            starts = np.cumsum([0, *(len(p) for p in pieces[:-1])])
            logits = functional.embedding_bag(
                torch.from_numpy(np.concatenate(pieces)), weights, torch.from_numpy(starts), mode="mean"
            )[:, 0]
            loss = functional.binary_cross_entropy_with_logits(
                logits + bias, torch.from_numpy(labels[rows]).float(), share[rows].float()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    folder = Path(out)
    with atomic(folder / "weights.npy") as file:
        np.save(file, weights.detach()[:, 0].numpy(), allow_pickle=False)
    write_json(folder / "quality.json", {"bias": float(bias.detach()), "digest": file.entry["blake2b"]})
    scores = Classifier(folder).scores(documents.take(pa.array(held_out)))
    return {
        "accuracy": float(((scores > 0.5) == (labels[held_out] == 1)).mean()),
        "auc": area(scores, labels[held_out]),
    }


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    """The area under the ROC curve: how often a good example scores higher than a bad one (Mann and Whitney 1947)."""
    from scipy.stats import rankdata

    ranks, good = rankdata(scores), labels == 1
    n, m = int(good.sum()), int((~good).sum())
    return float((ranks[good].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")
