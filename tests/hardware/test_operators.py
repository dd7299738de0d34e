from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tutti.nn.adam  # noqa: F401  (registers the operators)
from tutti.hardware import Cluster, Device
from tutti.hardware.curve import Curve
from tutti.hardware.device import FAMILIES
from tutti.hardware.operators import FAMILY, KINDS, PRODUCTS, TRANSPOSING, family_of, lies_transposed, seconds

aten = torch.ops.aten
DEVICE = Device("toy", {"float32": 10e12}, 16e9, 1e12)


@pytest.mark.parametrize(
    ("target", "shapes", "product"),
    [
        (aten.mm.default, [(8, 16), (16, 32)], (1, 8, 16, 32)),
        (aten.addmm.default, [(32,), (8, 16), (16, 32)], (1, 8, 16, 32)),
        (aten.bmm.default, [(4, 8, 16), (4, 16, 32)], (4, 8, 16, 32)),
        (aten.baddbmm.default, [(4, 8, 32), (4, 8, 16), (4, 16, 32)], (4, 8, 16, 32)),
    ],
)
def test_products_go_by_their_shapes(target, shapes, product):
    assert PRODUCTS[target](*shapes) == product
    h100 = Cluster.parse("h100").device
    assert seconds(h100, target, shapes, torch.bfloat16, 0, 0) == h100.matmul_seconds(*product, "bfloat16")


def test_a_transposed_first_matrix_takes_longer():
    device = replace(DEVICE, transposed={"float32": 2.5})
    times = [seconds(device, aten.mm.default, [(64, 64)] * 2, torch.float32, 0, 0, way) for way in (False, True)]
    assert times[1] == 2.5 * times[0]

    def graph(x, w):
        return torch.mm(x.t(), w), torch.mm(x, w.t()), torch.addmm(x, x.t(), x), x.t() + x

    nodes = [n for n in make_fx(graph)(torch.ones(4, 4), torch.ones(4, 4)).graph.nodes if n.op == "call_function"]
    assert [lies_transposed(n) for n in nodes if n.target not in TRANSPOSING] == [True, False, True, False]


def test_attention_goes_by_its_own_rate():
    device = replace(DEVICE, efficiency={"attention float32": 0.5, "attention_backward float32": 0.1})
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    assert seconds(device, flash.default, [], torch.float32, 5e12, 2e12) == 2.0
    assert seconds(device, flash.default, [], torch.float32, 5e12, 1.0) == 1.0
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert seconds(device, back, [], torch.float32, 4e12, 1.0) == 4.0
    assert seconds(DEVICE, back, [], torch.float32, 5e12, 1.0) == 0.5
    assert seconds(DEVICE, aten.convolution.default, [], torch.float32, 5e12, 1.0) == 0.5


def test_the_rest_goes_by_bytes():
    device = replace(DEVICE, streams={"silu float32": Curve(((0, 0.0), (100.0, 3.0)))})
    assert seconds(device, aten.silu.default, [], torch.float32, 10, 50) == 1.5
    assert seconds(device, aten.silu_backward.default, [], torch.bool, 10, 50) == 1.5
    assert seconds(device, aten.relu.default, [], torch.float32, 10, 1e12) == 1.0
    assert seconds(device, aten.fft_fft.default, [], torch.complex64, 10e12, 1.0) == 1.0


@pytest.mark.parametrize(
    ("target", "family"),
    [
        (aten.exp.default, "exp"),
        (aten.gelu_backward.default, "gelu"),
        (aten._softmax_backward_data.default, "softmax"),
        (aten._log_softmax.default, "softmax"),
        (aten.native_layer_norm_backward.default, "norm"),
        (aten.embedding.default, "index"),
        (aten.embedding_dense_backward.default, "table"),
        (aten._embedding_bag_backward.default, "table"),
        (aten._embedding_bag.default, "add"),
        (torch.ops.tutti.adam_.default, "update"),
        (aten.lt.Scalar, "compare"),
        (aten._safe_softmax.default, "where"),
        (aten.index_put.default, "scatter"),
        (aten.clone.default, "transpose"),
        (aten.mul.Tensor, "add"),
        (max, "add"),
    ],
)
def test_families(target, family):
    assert family_of(target) == family


def test_every_name_is_an_operator_and_every_family_is_known():
    assert set(FAMILY) | {"add"} == set(FAMILIES)
    for name in (name for names in (*FAMILY.values(), *KINDS.values()) for name in names if "::" not in name):
        assert hasattr(aten, name) or hasattr(aten, f"{name}_backward"), name
