"""Norms, rotary embedding and gated units of rows against their formulas."""

import operator

import pytest
import torch
from torch import fx
from torch.library import opcheck

from tutti.ir.spec import Spec
from tutti.nn import rows
from tutti.nn.activation import ACTIVATIONS

aten, ops = torch.ops.aten, torch.ops.tutti
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def close(actual, wanted):
    """Equal up to a rounding of sums: in bfloat16, all but a few numbers are the same."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    if actual.dtype == torch.bfloat16:
        assert actual.ne(wanted).sum() <= 0.02 * actual.numel() + 1
        torch.testing.assert_close(actual, wanted, rtol=1 / 64, atol=1e-3)
    else:
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def drawn(*shape, dtype):
    return (torch.randn(shape) + 0.5).to(dtype)


@BOTH
@pytest.mark.parametrize("shape", [(3, 5, 768), (7, 33), (1, 1), (2, 0, 8)])
@pytest.mark.parametrize("options", [(0.0, False, False), (1.0, True, False), (0.0, True, False), (0.0, True, True)])
@pytest.mark.starts
def test_norms(shape, options, dtype):
    torch.manual_seed(0)
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    for w, b in ((weight, None), (None, None), *([(weight, weight / 3)] if options[2] else [])):
        close(ops.norm_rows(x, w, b, 1e-5, *options), rows.norm_reference(x, w, b, 1e-5, *options))


@BOTH
@pytest.mark.parametrize("width", [64, 20])
def test_rotary(width, dtype):
    torch.manual_seed(0)
    x = drawn(2, 7, 3, width, dtype=dtype).transpose(1, 2)  # as models have it: tokens beside each other in memory
    cos, sin = (drawn(1, 1, 7, width, dtype=dtype) for _ in range(2))
    y = ops.rotary_rows(x, cos, sin)
    assert torch.equal(y, ops.rotary(x, cos, sin)) and y.stride() == x.stride()


@BOTH
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_gated_units(activation, dtype):
    torch.manual_seed(0)
    gate, up = drawn(3, 2, 2 * 1300, dtype=dtype).chunk(2, -1)
    close(ops.glu_rows(gate, up, activation), ops.glu(gate, up, activation))
    close(ops.activation_rows(gate, activation), ACTIVATIONS[activation].forward(gate))
    for x in (gate[:0], gate[..., :0], gate[0, 0, 0]):
        close(ops.activation_rows(x, activation), ACTIVATIONS[activation].forward(x))
    close(ops.glu_rows(gate[..., :0], up[..., :0], activation), gate[..., :0])


@BOTH
@pytest.mark.parametrize("width", [1, 16, 50])
def test_activations_of_numbers_that_are_not_finite(width, dtype):
    x = torch.tensor([torch.inf, torch.nan, -0.0, 30.0, -30.0], dtype=dtype)[:, None].expand(5, width)
    y = ops.activation_rows(x, "gelu")
    assert torch.equal(y[0], x[0]) and y[1].isnan().all()
    assert torch.equal(y[2:], torch.tensor([0.0, 30.0, 0.0], dtype=dtype)[:, None].expand(3, width))


@BOTH
def test_bits_do_not_depend_on_other_rows(dtype):
    x, weight = drawn(50, 768, dtype=dtype), drawn(768, dtype=dtype)
    for centered in (False, True):
        whole = ops.norm_rows(x, weight, None, 1e-5, 0.0, True, centered)
        assert torch.equal(ops.norm_rows(x[7:8], weight, None, 1e-5, 0.0, True, centered), whole[7:8])


def test_registration():
    x, weight = drawn(3, 8, dtype=torch.float32), drawn(8, dtype=torch.float32)
    opcheck(ops.norm_rows.default, (x, weight, None, 1e-5, 0.0, False, False))
    opcheck(ops.glu_rows.default, (x.double(), x.double(), "silu"))
    opcheck(ops.activation_rows.default, (x, "gelu"))
    four = drawn(1, 3, 2, 8, dtype=torch.float32).transpose(1, 2)
    opcheck(ops.rotary_rows.default, (four, four[:, :1], four[:, :1]))


@pytest.mark.parametrize("dtype, results", [(torch.float32, 1), (torch.float32, 2), (torch.float64, 1)], ids=str)
def test_which_norms_of_a_graph_are_replaced(dtype, results):
    """Those whose other results nothing reads."""
    graph = fx.Graph()
    x, weight = (graph.placeholder(name) for name in "xw")
    for node, shape in ((x, (3, 8)), (weight, (8,))):
        node.meta["val"] = Spec(shape, dtype)
    calls = (
        graph.call_function(ops.rms_norm.default, (x, weight, 1e-5, 1.0, True)),
        graph.call_function(aten.native_layer_norm.default, (x, [8], weight, None, 1e-6)),
    )
    parts = [graph.call_function(operator.getitem, (call, i)) for call in calls for i in range(results)]
    for part in parts:
        part.meta["val"] = Spec((3, 8), dtype)
    graph.output(tuple(parts))
    rows.use(graph)
    graph.lint()
    replaced = [node.args for node in graph.find_nodes(op="call_function", target=ops.norm_rows.default)]
    expected = [(x, weight, None, 1e-5, 1.0, True, False), (x, weight, None, 1e-6, 0.0, True, True)]
    assert replaced == (expected if dtype == torch.float32 and results == 1 else [])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_activations_of_a_graph_are_replaced_on_a_cpu(on_cpu):
    graph = fx.Graph()
    x = graph.placeholder("x")
    wide = graph.placeholder("wide")
    x.meta["val"], wide.meta["val"] = Spec((3, 8), torch.float32), Spec((3, 8), torch.float64)
    calls = [
        graph.call_function(aten.gelu.default, (x,)),
        graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"}),
        graph.call_function(aten.relu.default, (x,)),
        graph.call_function(aten.silu.default, (wide,)),
    ]
    for call in calls:
        call.meta["val"] = call.args[0].meta["val"]
    graph.output(tuple(calls))
    rows.use(graph, on_cpu)
    replaced = [node.args[1] for node in graph.find_nodes(op="call_function", target=ops.activation_rows.default)]
    assert replaced == (["gelu", "gelu_tanh", "relu"] if on_cpu else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 33, 32000])
def test_greatest(dtype, width):
    torch.manual_seed(0)
    x = torch.randn(9, width).to(dtype)
    x[1] = -torch.inf
    x[2, -1] = torch.nan
    x[3] = 2.0  # the first of equals
    x[4, width // 2] = torch.inf
    wanted = x.max(1).indices
    wanted[1] = wanted[2] = -1
    wanted[3] = 0
    assert torch.equal(rows.greatest(x), wanted)
    assert torch.equal(rows.greatest(x.t().contiguous().t()), wanted)
    assert torch.equal(rows.greatest(x.double()), wanted)
    assert rows.greatest(x[:0]).shape == (0,)
