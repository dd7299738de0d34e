"""The language model against the formulas of Kneser-Ney, and the classifier on examples that differ."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest
from corpus_batches import batch_of

from tutti.data.corpus.steps import Perplexity, Quality
from tutti.data.corpus.steps.perplexity import train_perplexity
from tutti.data.corpus.steps.quality import area, train_quality


class Reference:
    """Interpolated modified Kneser-Ney, written from Chen and Goodman 1998 with dictionaries."""

    def __init__(self, sentences: list[list[str]], order: int):
        self.order = order
        raw = [Counter() for _ in range(order + 1)]
        for words in sentences:
            line = ["<s>", *words, "</s>"]
            for n in range(1, order + 1):
                raw[n].update(tuple(line[k : k + n]) for k in range(len(line) - n + 1) if n > 1 or k > 0)
        self.counts = [Counter() for _ in range(order + 1)]
        self.counts[order] = raw[order]
        for n in range(1, order):
            before = defaultdict(set)
            for gram in raw[n + 1]:
                before[gram[1:]].add(gram[0])
            self.counts[n] = Counter({g: len(before[g]) if g in before else c for g, c in raw[n].items()})
        self.discounts = [None, *(self._discounts(self.counts[n]) for n in range(1, order + 1))]
        self.vocabulary = {g[0] for g in raw[1]}

    @staticmethod
    def _discounts(counts):
        n = [sum(c == k for c in counts.values()) for k in range(5)]
        if all(n[1:]):
            y = n[1] / (n[1] + 2 * n[2])
            d = [0, 1 - 2 * y * n[2] / n[1], 2 - 3 * y * n[3] / n[2], 3 - 4 * y * n[4] / n[3]]
            if all(0 < x < k for k, x in enumerate(d) if k):
                return d
        return [0, 0.5, 1.0, 1.5]

    def p(self, word: str, context: tuple[str, ...]) -> float:
        n = len(context) + 1
        followers = {g: c for g, c in self.counts[n].items() if g[:-1] == context}
        if n == 1:
            total = sum(followers.values())
            lower = 1 / (len(self.vocabulary) + 1)
        else:
            lower = self.p(word, context[1:])
            if not followers:
                return lower
            total = sum(followers.values())
        d = self.discounts[n]
        gamma = sum(d[min(c, 3)] for c in followers.values()) / total
        count = followers.get((*context, word), 0)
        return max(count - d[min(count, 3)], 0) / total + gamma * lower


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_language_model_is_modified_kneser_ney(tmp_path, order):
    rng = random.Random(order)
    letters = [f"w{k}" for k in range(12)]
    weights = [1 / (k + 1) for k in range(12)]
    sentences = [rng.choices(letters, weights, k=rng.randrange(1, 9)) for _ in range(150)]
    documents = pa.array(["\n".join(" ".join(s) for s in sentences[k : k + 10]) for k in range(0, 150, 10)])
    model = train_perplexity([documents[:7], documents[7:]], tmp_path / "m", order)
    reference = Reference(sentences, order)
    for words in ([*rng.choices([*letters, "new"], k=6)] for _ in range(60)):
        line = ["<s>", *words, "</s>"]
        expected = sum(
            math.log2(reference.p(line[k], tuple(line[max(0, k - order + 1) : k]))) for k in range(1, len(line))
        )
        got, count = model.log2(pa.array([" ".join(words)]))
        assert count[0] == len(words) + 1 and got[0] == pytest.approx(expected, abs=1e-4), words
    for context in itertools.islice(itertools.product(["<s>", *letters[:3]], repeat=order - 1), 8):
        total = sum(reference.p(w, context) for w in [*reference.vocabulary, "new"])
        assert total == pytest.approx(1), "the reference itself sums to one"


def test_perplexity_tells_like_from_unlike(tmp_path):
    rng = random.Random(0)
    good = ["\n".join(" ".join(f"a{rng.randrange(30)}" for _ in range(8)) for _ in range(5)) for _ in range(60)]
    train_perplexity([pa.array(good[:50])], tmp_path / "m")
    step = Perplexity(str(tmp_path / "m"), max=200)
    outcome = step(batch_of([*good[50:], "zebra quagga", "..."]))
    assert outcome.reasons == [None] * 10 + ["perplexity_high"] * 2
    assert outcome.batch.column("perplexity")[11].as_py() == float("inf")
    assert train_perplexity([pa.array(["hello"])], tmp_path / "short", order=6).log2(pa.array(["hello"]))[1][0] == 2
    with pytest.raises(ValueError, match="no words"):
        train_perplexity([pa.array(["..."])], tmp_path / "n")
    with pytest.raises(ValueError, match="is not a model"):
        Perplexity(str(tmp_path / "none"))


def test_the_classifier_learns_and_is_the_same_again(tmp_path):
    rng = random.Random(0)

    def text(kind: int) -> str:
        return " ".join(
            f"{'common' if rng.random() < 0.8 else ('good', 'bad')[kind]}{rng.randrange(40)}" for _ in range(60)
        )

    good, bad = [text(0) for _ in range(300)], [text(1) for _ in range(200)]
    scores = train_quality(good, bad, tmp_path / "q", buckets=1 << 14)
    assert scores["accuracy"] > 0.95 and scores["auc"] > 0.98
    train_quality(good, bad, tmp_path / "r", buckets=1 << 14)
    assert (tmp_path / "q/weights.npy").read_bytes() == (tmp_path / "r/weights.npy").read_bytes()
    outcome = Quality(str(tmp_path / "q"))(batch_of([text(0), text(1), ""]))
    assert outcome.reasons == [None, "low_quality", "low_quality"]
    with pytest.raises(ValueError, match="3 bad examples; give at least 20"):
        train_quality(good, bad[:3], tmp_path / "s")


def test_the_area_under_the_curve():
    assert area(np.array([0.1, 0.9]), np.array([0, 1])) == 1.0
    assert area(np.array([0.5, 0.5, 0.5]), np.array([0, 1, 1])) == 0.5
