"""Proportional prioritized replay (Schaul et al., 2016): a sum tree as operations on one tensor.

Node 1 of `tree` is the root, node i has the children 2 i and 2 i + 1, and leaves hold (|error| + eps)^alpha. Weights
of samples are (size P(i))^-beta, divided by the largest of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.rl.core import keys
from tutti.rl.replay.ring import Number, Ring, Shape

Tree = dict[str, Any]
EPS = 1e-6


class Prioritized(Ring):
    """alpha: how much priorities count. beta: how much weights correct for them."""

    def __init__(self, length: int, n: int, steps: int = 1, alpha: float = 0.6, beta: float = 0.4):
        super().__init__(length, n, steps)
        self.alpha, self.beta = alpha, beta
        self.depth = (length * n - 1).bit_length()
        self.leaves = 1 << self.depth

    def init(self, shapes: dict[str, Shape]) -> Tree:
        return super().init(shapes) | {"tree": torch.zeros(2 * self.leaves), "largest": torch.ones(())}

    def add(self, memory: Tree, chunk: Tree) -> Tree:
        """New rows get the largest priority so far; the last `steps - 1` have none, as their returns are not known."""
        count, late = chunk["reward"].shape[0], self.steps - 1
        rows = (memory["at"] + torch.arange(-late, count)) % self.length  # those that were late before are known now
        written = (memory["at"] + torch.arange(count)) % self.length
        old_enough = torch.cat([torch.ones(count, dtype=torch.bool), torch.zeros(late, dtype=torch.bool)])
        # A row of an earlier chunk exists only if the memory had as many rows.
        exists = torch.arange(-late, count) >= -memory["size"]
        value = torch.where(old_enough & exists, memory["largest"], 0.0)
        added = super().add(memory, chunk)
        tree = self._set(memory["tree"], self._flat(written), torch.zeros(count * self.n))
        each = value.repeat_interleave(self.n)
        if "valid" in memory["rows"]:
            valid = added["rows"]["valid"].flatten(0, 1)[self._flat(rows)]
            each = each * valid.reshape(len(each), -1).any(-1)
        tree = self._set(tree, self._flat(rows), each)
        return {**added, "tree": tree}

    def _flat(self, rows: Tensor) -> Tensor:
        return (rows.unsqueeze(-1) * self.n + torch.arange(self.n)).flatten()

    def _set(self, tree: Tensor, leaf: Tensor, value: Tensor) -> Tensor:
        """The tree with other values of leaves, and the sums above them."""
        node = leaf + self.leaves
        tree = tree.index_put((node,), value)
        for _ in range(self.depth):
            node = node // 2
            tree = tree.index_put((node,), tree[2 * node] + tree[2 * node + 1])
        return tree

    def sample(self, memory: Tree, key: Tensor, count: int, gamma: Number = 1.0) -> tuple[Tree, Tree]:
        tree = memory["tree"]
        part = (torch.arange(count) + keys.uniform(key, (count,))) / count  # one from each of `count` equal parts
        remaining, node = part * tree[1], torch.ones(count, dtype=torch.int64)
        for _ in range(self.depth):
            left = tree[2 * node]
            right = (remaining >= left) & (tree[2 * node + 1] > 0)
            remaining, node = torch.where(right, remaining - left, remaining), 2 * node + right
        leaf = node - self.leaves
        row, env = leaf // self.n, leaf % self.n
        start = (row - memory["at"] + memory["size"]) % self.length
        chance = tree[node] / tree[1]
        weight = (chance * memory["size"] * self.n + 1e-12) ** -self.beta
        return self.transitions(memory, start, env, gamma), {"index": leaf, "weight": weight / weight.max()}

    def learned(self, memory: Tree, where: Tree, error: Tensor) -> Tree:
        value = error.abs() + EPS
        tree = self._set(memory["tree"], where["index"], value**self.alpha)
        return {**memory, "tree": tree, "largest": torch.maximum(memory["largest"], (value**self.alpha).max())}
