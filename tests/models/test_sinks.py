"""Attention with sinks: fused, it gives the loss and gradients of the eager model of transformers."""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

import tutti
from tutti.models.sinks import DEFAULT, fused_by_default


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=64, sliding_window=8,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = GptOssForCausalLM(config).float()
    for name, x in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(x)
    return model


BATCH = torch.arange(64).view(2, 32) * 7 % 64


def gradients(model):
    loss = model(input_ids=BATCH, labels=BATCH).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_loss_and_gradients_are_those_of_the_eager_model(model):
    eager = gradients(model)
    with fused_by_default(model):
        fused = gradients(model)
    assert model.config._attn_implementation == DEFAULT
    for ours, theirs in zip(fused, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_captured_step_has_no_scores(model):
    graph = tutti.capture(model, {"input_ids": BATCH, "labels": BATCH}, torch.optim.AdamW(model.parameters()))
    assert not any("softmax" in str(node.target) and "self_attn" in node.meta["label"] for node in graph.calls)
