"""Views that share the memory of a model's tensor, written as operators that can be split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tutti.tracing.trace.slots import same_view

WHOLE = torch.arange(24.0).view(2, 3, 4)
VIEWS = {
    "all": WHOLE,
    "transposed": WHOLE.permute(2, 0, 1),
    "flat": WHOLE.view(-1),
    "with a dim of size one": WHOLE.unsqueeze(1).transpose(0, 1),
    "the second half": WHOLE[1],
    "the second half, transposed": WHOLE[1].t(),
    "one number": WHOLE[1, 2, 3:],
    "every second column": WHOLE[..., ::2],
    "a column": WHOLE[..., 1:2],
    "a column without its dim": WHOLE[..., 1],
    "some rows": WHOLE[:, 1:],
    "rows that are repeated": WHOLE[0, :1].expand(3, 4),
    "windows that overlap": WHOLE.view(-1).unfold(0, 4, 2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_a_view_of_a_tensor_is_read_from_the_whole(view: Tensor):
    restored = same_view(WHOLE, view.shape, view.stride(), int(view.storage_offset()))
    assert torch.equal(restored, view)


@pytest.mark.parametrize("name", ["all", "transposed", "flat", "with a dim of size one", "the second half"])
def test_a_dense_view_can_be_split(name):
    """It is made of slices, reshapes and permutations."""
    view = VIEWS[name]
    graph = make_fx(lambda x: same_view(x, view.shape, view.stride(), int(view.storage_offset())))(WHOLE)
    assert not [node for node in graph.graph.nodes if "as_strided" in str(node.target)]
