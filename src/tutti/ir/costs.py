"""Operators that cost nothing, and the tensors that an operator makes."""

from __future__ import annotations

import operator

import torch

from tutti.ir.spec import Spec

aten = torch.ops.aten


def flat(specs) -> list[Spec]:
    """The specs in a spec, a tuple of specs, or None."""
    if isinstance(specs, Spec):
        return [specs]
    return [s for part in specs or () for s in flat(part)]


# Views and renamings: no arithmetic, no bytes.
FREE = {
    operator.getitem,
    aten.reshape.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}
