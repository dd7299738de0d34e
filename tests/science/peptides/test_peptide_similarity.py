"""Identities, clusters and splits, against edit distances and components by plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.science.peptides.grammar import grammar
from tutti.science.peptides.similarity import clusters, diversity, nearest, split


def distance(a, b):
    """Levenshtein's, by the table of Wagner and Fischer."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def identity(a, b):
    return 1 - distance(a, b) / max(len(a), len(b))


PEPTIDES = [*grammar(30).sequences, "KWKLFKKI", "KWKLFKKV", "WKLFKKV", "KWKLFKKIE"]


def test_identities():
    table = np.array([[identity(a, b) for b in PEPTIDES] for a in PEPTIDES])
    assert nearest(PEPTIDES[:10], PEPTIDES[10:]) == pytest.approx(table[:10, 10:].max(1), abs=1e-6)
    pairs = ~np.eye(len(PEPTIDES), dtype=bool)
    assert diversity(PEPTIDES) == pytest.approx(1 - table[pairs].mean(), abs=1e-6)
    assert nearest(["A"], []).tolist() == [0] and nearest([], ["A"]).shape == (0,) and diversity(["A"]) == 0


@pytest.mark.parametrize("least", [0.3, 0.4, 0.6, 7 / 8, 1.0])
def test_clusters(least):
    labels = clusters(PEPTIDES, least)
    group = {i: {i} for i in range(len(PEPTIDES))}
    for i in range(len(PEPTIDES)):
        for j in range(i):
            if identity(PEPTIDES[i], PEPTIDES[j]) >= least - 1e-9 and group[i] is not group[j]:
                group[i] |= group[j]
                for k in group[i]:
                    group[k] = group[i]
    for i in range(len(PEPTIDES)):
        assert set(np.flatnonzero(labels == labels[i])) == group[i]
    assert clusters([], 0.5).shape == (0,)


def test_no_cluster_is_split():
    peptides = grammar(700).sequences
    labels = clusters(peptides, 0.5)
    parts = split(labels, (0.2, 0.1), seed=3)
    assert sorted(np.concatenate(parts)) == list(range(700)) and len(parts) == 3
    for i in range(3):
        for j in range(i):
            assert not set(labels[parts[i]]) & set(labels[parts[j]])
            assert nearest([peptides[k] for k in parts[i]], [peptides[k] for k in parts[j]]).max() < 0.5
    assert [len(x) for x in parts[1:]] == pytest.approx([140, 70], abs=14)
    assert all(np.array_equal(a, b) for a, b in zip(parts, split(labels, (0.2, 0.1), seed=3), strict=True))


def test_large_clusters_stay_in_the_first_part():
    """No cluster of more than a tenth of a part is in it, here of 2 of 20 peptides."""
    labels = np.concatenate([np.zeros(30), np.repeat(np.arange(1, 11), 3), np.arange(11, 51)]).astype(np.int64)
    for seed in range(5):
        first, second = split(labels, (0.2,), seed)
        assert set(range(11)) <= set(labels[first]) and len(second) == 20


def test_clusters_that_are_too_large():
    with pytest.raises(ValueError, match=r"too large to hold out 20% of 100 peptides; a higher data\.identity"):
        split(np.zeros(100, np.int64), (0.2,))
