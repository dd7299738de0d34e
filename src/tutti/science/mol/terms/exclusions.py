"""Which pairs of atoms are so few bonds apart that force fields treat them otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.science.mol.neighbors import unique_pairs


def neighbors_by_bonds(bonds: Any, most: int = 3) -> tuple[Tensor, ...]:
    """Pairs (X, 2) that are 1, 2, ... `most` bonds apart, by the shortest way: 1-2, 1-3 and 1-4 pairs.

    >>> [pairs.tolist() for pairs in neighbors_by_bonds([[0, 1], [1, 2], [2, 3]])]
    [[[0, 1], [1, 2], [2, 3]], [[0, 2], [1, 3]], [[0, 3]]]
    """
    graph: dict[int, set[int]] = {}
    for a, b in torch.as_tensor(bonds, dtype=torch.int64).reshape(-1, 2).tolist():
        graph.setdefault(a, set()).add(b)
        graph.setdefault(b, set()).add(a)
    pairs_by_distance: list[list[tuple[int, int]]] = [[] for _ in range(most)]
    for start in graph:
        seen, front = {start}, {start}
        for apart in range(most):
            front = {b for a in front for b in graph[a]} - seen
            seen |= front
            pairs_by_distance[apart] += [(start, b) for b in front if b > start]
    return tuple(unique_pairs(pairs or None) for pairs in pairs_by_distance)
