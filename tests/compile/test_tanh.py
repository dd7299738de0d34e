"""The compiled hyperbolic tangent against float64."""

from __future__ import annotations

import pytest
import torch

from tutti import compat
from tutti.compile.tanh import DECOMPOSITIONS, tanh


def test_relative_error_is_that_of_float32():
    size = torch.logspace(-30, 4, 200_001, dtype=torch.float64)
    x = torch.cat([size, -size, torch.zeros(1, dtype=torch.float64), torch.linspace(-9, 9, 100_001).double()]).float()
    exact = torch.tanh(x.double())
    made = tanh(x)
    assert made.dtype == torch.float32
    assert (made.double() - exact).abs().le(3.5e-7 * exact.abs()).all()
    assert made.abs().max() < 1


def test_special_values():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    made = tanh(x)
    assert made[0].isnan() and made[3] == 0
    torch.testing.assert_close(made[1:3], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_keep_their_kernel(dtype):
    assert tanh(torch.ones(2, dtype=dtype)) is NotImplemented


@pytest.mark.starts
def test_compiled_graphs_use_it():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (x,)),))
    data = torch.randn(999)
    (made,) = compat.compile_graph(graph, [data], decompositions=DECOMPOSITIONS)(data)
    torch.testing.assert_close(made, tanh(data), rtol=2e-7, atol=0)
    torch.testing.assert_close(made, data.tanh(), rtol=1e-6, atol=0)
