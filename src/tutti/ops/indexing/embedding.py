"""Embeddings: with a split vocabulary, each rank looks up its own rows, and the sum over ranks is the result."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from tutti.ir.op_info import LOCAL, UNEVEN
from tutti.ir.step_graph import Call
from tutti.ops.indexing.rows import only, read_rows, write_rows
from tutti.ops.registry import rules

aten = torch.ops.aten


def _positions(indices: Call) -> str:
    return " ".join(ascii_lowercase[: len(indices.meta["val"].shape)])


def _embedding(node: Call) -> str:
    at = _positions(node.args[1])
    return f"v* z, {at} -> {at} z | ~0"


def _embedding_backward(node: Call) -> str:
    at = _positions(node.args[1])
    if node.args[4]:  # scale_grad_by_freq needs all indices
        at = " ".join(f"{c}!" for c in at.split())
    return f"{at} z, {at} -> v* z | ~0"


rules({aten.embedding.default: _embedding, aten.embedding_dense_backward.default: _embedding_backward})


def _lookup(here, weight, indices, *rest):
    rows, own = read_rows(here, "v", indices)
    return only(aten.embedding(weight, rows), own.unsqueeze(-1))


def _lookup_backward(here, grad, indices, rows, padding, scale):
    own, _ = write_rows(here, "v", indices)
    spare = here.size("v")
    if padding >= 0:
        own = torch.where(indices == padding, spare, own)
    return aten.embedding_dense_backward(grad, own, spare + 1, -1, scale).narrow(0, 0, spare)


LOCAL |= {aten.embedding.default: _lookup, aten.embedding_dense_backward.default: _lookup_backward}

UNEVEN |= dict.fromkeys((aten.embedding.default, aten.embedding_dense_backward.default), True)
