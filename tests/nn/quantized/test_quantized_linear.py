"""Quantized layers, against layers with the dequantized weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tutti.nn.experts.quantized_experts import StackedLinear
from tutti.nn.quantized.quantized_embedding import QuantizedEmbedding
from tutti.nn.quantized.quantized_linear import QuantizedLinear, dtype_of, layout
from tutti.nn.quantized.scheme import Scheme

SCHEMES = {
    "int8": Scheme(8, None),
    "int4": Scheme(4, 64),
    "int4-zeros": Scheme(4, 32, False),
    "int4-small-groups": Scheme(4, 16),
    "int3": Scheme(3, 32),
    "int2-zeros": Scheme(2, 16, False),
    "int2": Scheme(2, 128, False),
    "int8-groups": Scheme(8, 32),
    "float8": Scheme(8, None, kind="float8"),
}


def layer_of(scheme, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(128, 48, bias, dtype=dtype)
    quantized = QuantizedLinear.like(layer, scheme)
    quantized.load(layer.weight)
    return layer, quantized


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dims", [(3,), (2, 3), (2, 2, 3), (1, 2, 3, 2)], ids=len)
def test_of_inputs_of_any_dims(name, dims):
    layer, quantized = layer_of(SCHEMES[name])
    x = torch.randn(*dims, 128)
    expected = F.linear(x, quantized.scheme.rounded(layer.weight), layer.bias)
    torch.testing.assert_close(quantized(x), expected, rtol=2e-2, atol=1e-2)
    assert quantized(x).shape == (*dims, 48)
    assert torch.equal(quantized.dequantize(), quantized.scheme.rounded(layer.weight.detach()))


@pytest.mark.parametrize("name", SCHEMES)
def test_parts_come_back(name):
    layer, quantized = layer_of(SCHEMES[name], bias=False)
    parts = quantized.scheme.quantize(layer.weight.detach())
    for got, want in zip(quantized.parts(), parts, strict=True):
        assert (got is None and want is None) or torch.equal(got.float(), want.float())
    again = QuantizedLinear.from_parts(parts, quantized.scheme, dtype=torch.float32)
    assert all(
        torch.equal(a.float(), b.float()) for a, b in zip(again.parameters(), quantized.parameters(), strict=True)
    )


def test_layouts_have_the_bytes_of_their_bits():
    for name, size in {"int8": 128, "int4": 64, "int3": 48, "int2-zeros": 32, "float8": 128}.items():
        assert layer_of(SCHEMES[name])[1].q.nbytes == 48 * size
    assert [layout(x, 128) for x in SCHEMES.values()] == [
        "int8",
        "int4",
        "int4",
        "bits",
        "low",
        "bits",
        "low",
        "bits",
        "float8",
    ]
    assert layout(Scheme(4, 32), 96) == "bits", "no kernel takes rows of 96"


def test_dynamic_activations_are_rounded_by_rows():
    layer, quantized = layer_of(Scheme(8, None, activations="int8"))
    x = torch.randn(5, 128) * torch.tensor([1, 10, 100, 0.1, 0]).unsqueeze(1)
    scales = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / scales.clamp(min=1e-9)).round() * scales
    torch.testing.assert_close(
        quantized(x), F.linear(rounded, quantized.dequantize(), layer.bias), rtol=1e-4, atol=1e-4
    )


def test_static_activations_are_rounded_by_one_scale():
    scheme = Scheme(8, None, activations="int8-static")
    layer, _ = layer_of(Scheme(8, None))
    weight = layer.weight.detach()
    quantized = QuantizedLinear.from_parts(scheme.quantize(weight), scheme, layer.bias, input_scale=torch.tensor(0.02))
    x = torch.randn(5, 128)
    rounded = (x / 0.02).round().clamp(-128, 127) * 0.02
    torch.testing.assert_close(
        quantized(x), F.linear(rounded, quantized.dequantize(), layer.bias), rtol=1e-4, atol=1e-4
    )


def test_bfloat16():
    layer, quantized = layer_of(Scheme(4, 64), torch.bfloat16)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert quantized(x).dtype == torch.bfloat16 and quantized.weight.dtype == torch.bfloat16
    torch.testing.assert_close(quantized(x), F.linear(x, quantized.dequantize(), layer.bias), rtol=2e-2, atol=2e-2)
    assert dtype_of(nn.Sequential(quantized)) == torch.bfloat16


@pytest.mark.parametrize("name", ["int8", "int4", "int4-zeros", "int3"])
def test_rows_of_an_embedding(name):
    table = layer_of(SCHEMES[name], bias=False)[1]
    embedding = QuantizedEmbedding(table)
    ids = torch.tensor([[0, 47, 3], [3, 3, 1]])
    assert torch.equal(embedding(ids), F.embedding(ids, table.dequantize()))
    assert torch.equal(QuantizedEmbedding(table, 2.0)(ids), 2 * embedding(ids))
    assert embedding.q is table.q, "an output layer can share it"


@pytest.mark.parametrize("name", ["int8", "int4", "float8"])
def test_another_dtype(name):
    """What is stored stays, also where an embedding shares it; the layer computes in the dtype."""
    _, layer = layer_of(SCHEMES[name])
    model = nn.ModuleList([QuantizedEmbedding(layer), layer])
    before = {key: x.clone() for key, x in model.state_dict().items()}
    model.to(torch.bfloat16)
    assert dtype_of(model) == layer.dtype == torch.bfloat16
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items() if "bias" not in key)
    assert layer.bias.dtype == torch.bfloat16  # pyright: ignore
    assert model[0].q is layer.q and model[0].scales is layer.scales
    stacked = StackedLinear([layer_of(SCHEMES[name])[1]] * 2, True)
    codes = stacked.q.clone()
    stacked.to(torch.bfloat16)
    assert torch.equal(stacked.q, codes) and stacked.scales.dtype == torch.float32
    x = torch.randn(3, 128)
    close = layer(x.bfloat16()).float() - layer.float()(x)
    assert close.norm() < 0.02 * layer(x).norm()
