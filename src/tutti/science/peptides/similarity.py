"""Identity of peptides, clusters of similar ones, and splits that keep a cluster together.

The identity of two peptides is 1 - d / n: their edit distance (Levenshtein 1966) over the length of the longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tutti.extras import extra
from tutti.launch.progress import progress

with extra("peptides"):
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

__all__ = ["clusters", "diversity", "nearest", "split"]

ROWS = 512  # of the identity matrix at once


def _identities(queries: Sequence[str], references: Sequence[str], least: float) -> Iterator[tuple[int, np.ndarray]]:
    """(first query, (queries, references) float32) of blocks; identities below `least` are 0."""
    for first in range(0, len(queries), ROWS):
        block = queries[first : first + ROWS]
        yield first, cdist(block, references, scorer=Levenshtein.normalized_similarity, dtype=np.float32,
                           score_cutoff=least or None, workers=torch.get_num_threads())  # fmt: skip


def nearest(queries: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """(queries,) float64 identity with the most similar reference; 0 if there is none."""
    if not references:
        return np.zeros(len(queries))
    blocks = [block.max(1) for _, block in _identities(queries, references, 0.0)]
    return np.concatenate(blocks).astype(float) if blocks else np.zeros(0)


def diversity(peptides: Sequence[str]) -> float:
    """Mean of 1 - identity over all pairs; 0 for fewer than two peptides."""
    n = len(peptides)
    if n < 2:
        return 0.0
    total = sum(float(block.sum(dtype=float)) for _, block in _identities(peptides, peptides, 0.0))
    return 1 - (total - n) / (n * (n - 1))


def clusters(peptides: Sequence[str], identity: float) -> np.ndarray:
    """(peptides,) int64 numbers of clusters: peptides of at least that identity are in one, directly or through others.

    Time grows as the square of the number: 5,000 peptides take about a second.
    """
    rows, columns = [], []
    with progress("clusters of similar peptides") as tell:
        for first, block in _identities(peptides, peptides, identity - 1e-6):
            tell.count(first, len(peptides))
            i, j = np.nonzero(block)
            rows.append(i + first)
            columns.append(j)
    if not rows:
        return np.zeros(0, np.int64)
    i, j = np.concatenate(rows), np.concatenate(columns)
    graph = coo_array((np.ones(len(i), bool), (i, j)), shape=(len(peptides),) * 2)
    return connected_components(graph, directed=False)[1].astype(np.int64)


def split(labels: np.ndarray, fractions: Sequence[float], seed: int = 0) -> list[np.ndarray]:
    """Rows of the first part, which takes what is left, and of a part of each fraction, whole clusters each.

    Clusters of more than a tenth of a part stay in the first, so that no family makes up most of what is held out.
    Raises ValueError if what remains is too little for the fractions.
    """
    order = np.random.default_rng(seed).permutation(int(labels.max()) + 1 if len(labels) else 0)
    sizes = np.bincount(labels, minlength=len(order))
    part_of = np.zeros(len(order), np.int64)
    for part, fraction in enumerate(fractions, 1):
        wanted, count = fraction * len(labels), 0
        for cluster in order:
            if count >= wanted:
                break
            if part_of[cluster] == 0 and sizes[cluster] <= max(1, wanted / 10):
                part_of[cluster] = part
                count += sizes[cluster]
        if count < 0.8 * wanted:
            raise ValueError(f"clusters are too large to hold out {fraction:.0%} of {len(labels)} peptides; a higher "
                             "data.identity makes smaller clusters")  # fmt: skip
    parts = part_of[labels]
    return [np.flatnonzero(parts == part) for part in range(len(fractions) + 1)]
