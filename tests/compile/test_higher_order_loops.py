"""Loops as torch's higher-order operators compute what they compute themselves."""

from __future__ import annotations

import pytest
import torch

import tutti
from tutti import compat
from tutti.compile.loops import with_higher_order
from tutti.tracing.trace.trace import trace


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan(reverse):
    def function(h, xs):
        def step(h, x):
            h = torch.sin(h + x)
            return h, (h * 2, h.sum() + x)

        h, (doubled, sums) = tutti.scan(step, h, xs, reverse=reverse)
        return h, doubled, sums

    h, xs = torch.randn(3), torch.randn(5, 3)
    with compat.fake_mode():
        graph = trace(function, torch.empty(3), torch.empty(5, 3)).graph
    copy, modules = with_higher_order(graph)
    for ours, expected in zip(torch.fx.GraphModule(modules, copy)(h, xs), function(h, xs), strict=True):
        torch.testing.assert_close(ours, expected)
