"""Biases of products in bodies of loops."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tutti.compile.bias import take_biases_out
from tutti.ir.spec import Spec

aten = torch.ops.aten


def layer(dtype: torch.dtype, **kwargs: float) -> fx.GraphModule:
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("bias", "x", "weight")]
    y = graph.call_function(aten.addmm.default, tuple(operands), kwargs)
    y.meta["val"] = Spec((1,), dtype)
    graph.output(y)
    take_biases_out(graph)
    return fx.GraphModule({}, graph)


def targets(module: fx.GraphModule) -> list:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_layer_has_the_same_values():
    bias, x, weight = torch.randn(3), torch.randn(5, 4), torch.randn(4, 3)
    module = layer(torch.float32)
    assert targets(module) == [aten.mm.default, aten.neg.default, aten.sub.Tensor]
    torch.testing.assert_close(module(bias, x, weight), torch.addmm(bias, x, weight))


@pytest.mark.parametrize("dtype, kwargs", [(torch.bfloat16, {}), (torch.float32, {"beta": 0.5})])
def test_others_stay(dtype, kwargs):
    assert targets(layer(dtype, **kwargs)) == [aten.addmm.default]
