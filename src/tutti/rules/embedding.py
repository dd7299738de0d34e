"""Embeddings: a split vocabulary makes each rank look up its own rows, and the sum over ranks is the result."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from tutti.graph.step_graph import Call
from tutti.rules.registry import LOCAL, rules

aten = torch.ops.aten


def _positions(indices: Call) -> str:
    return " ".join(ascii_lowercase[: len(indices.meta["val"].shape)])


def _embedding(node: Call) -> str:
    at = _positions(node.args[1])
    return f"v* z, {at} -> {at} z | ~0"


def _embedding_backward(node: Call) -> str:
    at = _positions(node.args[1])
    if node.args[4]:  # scaled by how often an index occurs: all indices are needed
        whole = " ".join(f"{c}!" for c in at.split())
        return f"{whole} z, {whole} -> v! z | ~0"
    return f"{at} z, {at} -> v* z | ~0"


rules({aten.embedding.default: _embedding, aten.embedding_dense_backward.default: _embedding_backward})


def _own_rows(here, indices):
    """Indices counted from this rank's first row (0 where the row is another rank's), and which are its own."""
    first, rows = here.offset("v"), here.size("v")
    own = (indices >= first) & (indices < first + rows)
    return torch.where(own, indices - first, 0), own.unsqueeze(-1)


def _lookup(here, weight, indices, *rest):
    rows, own = _own_rows(here, indices)
    return aten.embedding(weight, rows) * own


def _lookup_backward(here, grad, indices, rows, padding, scale):
    own_rows, own = _own_rows(here, indices)
    if padding >= 0:
        own = own & (indices != padding).unsqueeze(-1)
    return aten.embedding_dense_backward(grad * own, own_rows, here.size("v"), -1, scale)


LOCAL |= {aten.embedding.default: _lookup, aten.embedding_dense_backward.default: _lookup_backward}
