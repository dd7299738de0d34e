"""Functional graphs go through JSON unchanged."""

from __future__ import annotations

import pytest
import torch

from tutti import compat
from tutti.ir.portable import NotPortable, packed, unpacked
from tutti.tracing.trace.trace import trace


def function(x, y):
    z = torch.nn.functional.gelu(x @ y, approximate="tanh").to(torch.bfloat16)
    low, high = z.float().clamp(-1e30, float("inf"))[:, 1:].split([2, 2], 1)
    return (torch.cat([low, high], 1).sum(dim=(0,), dtype=torch.float64), x.new_zeros(3, dtype=torch.int64))


def test_graphs_go_through_json_unchanged():
    x, y = torch.randn(4, 3), torch.randn(3, 5)
    with compat.fake_mode():
        graph = trace(function, *(torch.empty(z.shape) for z in (x, y))).graph
    copy = unpacked(packed(graph))
    assert [(n.op, n.name, n.target) for n in copy.nodes] == [(n.op, n.name, n.target) for n in graph.nodes]
    for ours, theirs in zip(torch.fx.GraphModule({}, copy)(x, y), function(x, y), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


@pytest.mark.parametrize("target", ["function os.system", "function subprocess.run", "call os.system", "op aten"])
def test_rows_that_name_other_functions_are_refused(target):
    with pytest.raises((NotPortable, ValueError)):
        unpacked([["call_function", "x", target, ["tuple", "true"], ["dict"]]])
