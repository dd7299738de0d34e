"""The compiled hyperbolic tangent against float64."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tutti.compile.tanh import expand_tanh
from tutti.ir.spec import Spec

aten = torch.ops.aten


def expanded(dtype: torch.dtype) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.tanh.default, (x,))
    y.meta["val"] = Spec((1,), dtype)
    graph.output(y)
    expand_tanh(graph)
    return fx.GraphModule({}, graph)


def test_relative_error_is_that_of_float32():
    size = torch.logspace(-30, 4, 200_001, dtype=torch.float64)
    x = torch.cat([size, -size, torch.zeros(1, dtype=torch.float64), torch.linspace(-9, 9, 2_000_001).double()]).float()
    exact = torch.tanh(x.double())
    values = expanded(torch.float32)(x)
    assert values.dtype == torch.float32
    assert (values.double() - exact).abs().le(4e-7 * exact.abs()).all()
    assert values.abs().max() < 1


def test_special_values():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    values = expanded(torch.float32)(x)
    assert values[0].isnan() and values[3] == 0
    torch.testing.assert_close(values[1:3], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_keep_their_kernel(dtype):
    assert [n.target for n in expanded(dtype).graph.nodes if n.op == "call_function"] == [aten.tanh.default]
