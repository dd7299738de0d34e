"""Adapters on quantized models: gradients, training under plans, and what stays packed."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

import tutti
from compress_models import data, model, small
from tutti.compress.adapters import with_adapters
from tutti.nn.quantized.quantized_linear import QuantizedLinear
from tutti.nn.quantized.scheme import Scheme

SCHEMES = Scheme(8, None), Scheme(4, 32), Scheme(3, 32), Scheme(2, 64, symmetric=False), Scheme(5, 16)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_dequantized_weight(scheme, dtype):
    layer = QuantizedLinear.like(torch.nn.Linear(64, 24, dtype=dtype), scheme)
    layer.load(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)))
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(2, 3, n, generator=generator, dtype=dtype) for n in (64, 24))
    inputs = x.clone().requires_grad_()
    layer(inputs).backward(g)
    torch.testing.assert_close(inputs.grad, (g.flatten(0, 1) @ layer.dequantize()).view_as(x))
    torch.testing.assert_close(layer.bias.grad, g.flatten(0, 1).sum(0))


def config(**options) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize(("plan", "cluster"), [("single", "cpu:1"), ("dp", "cpu:2"), ("tp", "cpu:2")])
def test_adapters_learn_as_in_plain_pytorch(plan, cluster):
    torch.manual_seed(0)
    adapted = with_adapters(tutti.compress(model(), "int4-g32").model, config()).train()
    plain, batch = copy.deepcopy(adapted), data()[0]
    batch = {**batch, "labels": batch["input_ids"]}
    own, other = (torch.optim.AdamW([p for p in x.parameters() if p.requires_grad], lr=1e-2) for x in (adapted, plain))
    codes = adapted.base_model.model.model.layers[0].mlp.up_proj.q.clone()
    step = tutti.parallelize(adapted, own, batch, plan=plan, cluster=cluster, level="O0")
    for _ in range(3):
        other.zero_grad()
        expected = plain(**batch).loss
        expected.backward()
        other.step()
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-4, atol=0)
    assert torch.equal(adapted.base_model.model.model.layers[0].mlp.up_proj.q, codes)
    for name, x in plain.named_parameters():
        if x.requires_grad:
            torch.testing.assert_close(
                dict(adapted.named_parameters())[name].detach(), x.detach(), rtol=1e-3, atol=1e-5
            )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has no quantized layers"):
        with_adapters(small(), config())
    compressed = tutti.compress(model(), "int4-g32").model
    with pytest.raises(ValueError, match="use_dora=True"):
        with_adapters(compressed, config(use_dora=True))
    with pytest.raises(ValueError, match="cannot be merged"):
        with_adapters(compressed, config()).merge_and_unload()
