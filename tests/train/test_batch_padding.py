"""Padding of batches against plain indexing."""

from __future__ import annotations

import pytest
import torch

from tutti.train.trainer.batches import padded


@pytest.mark.parametrize(("shape", "sizes"), [
    ((2, 3), [5]), ((2, 3), [3]), ((2, 3, 4), [5]), ((2, 3, 4), [5, 4]), ((2, 3, 4), [3, 6]), ((2, 3, 4, 5), [4, 6]),
])  # fmt: skip
def test_only_the_dims_that_have_a_size_are_padded_at_their_ends(shape, sizes):
    x = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    wanted = torch.full((shape[0], *sizes, *shape[1 + len(sizes) :]), -100)
    wanted[tuple(slice(n) for n in shape)] = x
    assert torch.equal(padded(x, sizes, -100), wanted)
