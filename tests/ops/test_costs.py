"""FLOPs and bytes equal formulas."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tutti
import zoo
from tutti.ir.spec import Spec
from tutti.nn import MoE
from tutti.nn.experts.route import expected_rows
from tutti.ops.experts.experts_exchange import sends
from tutti.ops.products.grouped import GROUPED
from tutti.ops.registry import Cut

aten, ops = torch.ops.aten, torch.ops.tutti
TOKENS, HIDDEN, WIDE = 4 * 16, 64, 96


def cost(graph, target, key="flops", phase=None):
    return [n.meta[key] for n in graph.calls if n.target == target and phase in (None, n.meta["phase"])]


def test_matrix_products():
    graph = tutti.capture(
        nn.Sequential(nn.Linear(6, 10), nn.Flatten(0)), (torch.ones(8, 6),), loss=lambda m, b: m(*b).sum()
    )
    assert cost(graph, aten.addmm.default) == [2 * 8 * 6 * 10]
    assert cost(graph, aten.addmm.default, "bytes") == [4 * (10 + 8 * 6 + 6 * 10 + 8 * 10)]
    assert cost(graph, aten.mm.default) == [2 * 8 * 6 * 10]  # the weight's gradient; the batch needs none


def test_a_llama_step_costs_six_flops_a_weight_and_token():
    model = zoo.llama(2)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    graph = tutti.capture(model, zoo.tokens(4))
    targets = aten.mm.default, ops.linear_logsumexp.default, ops.linear_logsumexp_backward.default
    assert sum(sum(cost(graph, target)) for target in targets) == 6 * weights * TOKENS


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.scale, self.causal = nn.Parameter(torch.ones(())), causal

    def forward(self, x):
        return F.scaled_dot_product_attention(
            self.scale * x, x * self.scale, x * self.scale, is_causal=self.causal
        ).sum()


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    graph = tutti.capture(Attention(causal), (torch.ones(2, 4, 16, 8),))
    product = 2 * 2 * 4 * 16 * 16 * 8 // (2 if causal else 1)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert cost(graph, forward) == [2 * product]
    assert cost(graph, aten._scaled_dot_product_flash_attention_for_cpu_backward.default) == [5 * product]


def test_views_are_free_and_elementwise_operators_cost_one_flop_an_element():
    graph = tutti.capture(zoo.gpt2(1), zoo.tokens(4), patterns=())
    assert set(cost(graph, aten.reshape.default) + cost(graph, aten.reshape.default, "bytes")) == {0}
    assert set(cost(graph, aten.tanh.default)) == {TOKENS * 4 * HIDDEN}
    assert set(cost(graph, aten.tanh.default, "bytes")) == {2 * 4 * TOKENS * 4 * HIDDEN}


def test_the_graph_adds_up():
    graph = tutti.capture(zoo.llama(1), zoo.tokens(4))
    assert graph.flops == sum(n.meta["flops"] for n in graph.nodes) > 0


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_cost_what_torch_counts(transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4, 6, 3, stride=2, padding=1))
    images = torch.ones(2, 3, 8, 10)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    graph = tutti.capture(model, (images,), loss=lambda m, b: m(*b).sum())
    ours = sum(cost(graph, aten.convolution.default) + cost(graph, aten.convolution_backward.default))
    assert ours == counter.get_total_flops()


def test_an_lstm_costs_its_matrix_products():
    graph = tutti.capture(nn.LSTM(6, 8), (torch.ones(5, 4, 6),), loss=lambda m, b: m(*b)[0].sum())
    products = 2 * 5 * 4 * (6 + 8) * 4 * 8
    assert cost(graph, torch.ops.tutti.lstm_layer.default) == [products]
    assert cost(graph, torch.ops.tutti.lstm_layer_backward.default) == [2 * products]


def test_experts_cost_their_matrix_products_for_every_choice():
    graph = tutti.capture(MoE(6, 8, 4, 2), (torch.ones(3, 5, 6),), loss=lambda m, b: m(*b)[0].sum())
    products = 2 * 3 * 5 * 2 * (3 * 6 * 8)
    assert cost(graph, torch.ops.tutti.experts.default) == [products]
    assert cost(graph, torch.ops.tutti.experts_backward.default) == [2 * products]


@pytest.mark.parametrize("rows", [24, 1])
def test_grouped_products_cost_their_rows(rows):
    """Rows against a matrix of their group, or, in its backward pass, groups of rows against each other."""
    offs = torch.tensor([rows // 2, rows], dtype=torch.int32)

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 8, 16, dtype=torch.bfloat16))

        def forward(self, x):
            return F.grouped_mm(x, self.weight, offs=offs).float().sum()

    graph = tutti.capture(Grouped(), (torch.ones(rows, 8, dtype=torch.bfloat16),))
    assert cost(graph, GROUPED) == [2 * rows * 8 * 16] * 2, "forward, and the weight's gradient"


def test_bytes_that_experts_exchange():
    """In the backward pass: tokens, what they and their gradients become, choices, and the gradients of weights."""
    tokens, k, width, experts, parts = 6, 2, 8, 3, 2
    spec = [Spec((tokens, width), torch.bfloat16), Spec((tokens, width), torch.bfloat16),
            Spec((tokens, k), torch.int64), Spec((tokens, k), torch.bfloat16),
            Spec((experts, width, 16), torch.bfloat16)]  # fmt: skip
    plain, low = (SimpleNamespace(args=(*[None] * 10, matmul, matmul, -1), meta={}) for matmul in ("", "float8"))
    forward = Cut(plain, None, "t&e", parts, spec[1:], [])
    backward = Cut(plain, None, "t&e", parts, spec, [])
    moved = expected_rows(tokens, k, experts, parts) // 2
    choices = ("exchange", moved * 2 * k * 4)  # as float32, with their weights
    rows = ("exchange", moved * width * 2)
    assert sends(1)(forward) == [("exchange", 8), choices, rows, rows]
    assert sends(2)(backward) == [("exchange", 8), choices, rows, rows, rows, ("exchange", moved * k * 2)]
    assert sends(1)(replace(forward, factor="e")) == []
    packed = ("exchange", moved * (width + 1))  # bytes of FP8, and one for the scale
    assert sends(1)(replace(forward, node=low)) == [("exchange", 8), choices, packed, rows]
    assert sends(2)(replace(backward, node=low))[2:5] == [packed, packed, rows]
