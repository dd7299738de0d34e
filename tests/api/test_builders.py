"""Builders make the functions of a training step, a forward pass, prefill and decoding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tutti
import zoo


def test_a_training_step_and_a_forward_pass_share_a_store():
    model, batch = zoo.llama(2), zoo.tokens(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    twin = zoo.llama(2)
    optimizer_of_twin = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    reference = tutti.parallelize(twin, optimizer_of_twin, batch, clip_norm=0.5, cluster="cpu:1", level="O0")
    store = tutti.Store(model=model, optimizer=optimizer)
    where = {"store": store, "cluster": "cpu:2", "plan": "zero3"}
    step = tutti.train_step(model, optimizer, batch, clip_norm=0.5, **where)
    compute = tutti.forward(model, batch, **where)
    for _ in range(3):
        torch.testing.assert_close(step(batch), reference(batch), rtol=1e-5, atol=1e-6)
    output = compute(batch)
    torch.testing.assert_close(output.loss, reference.evaluate(batch), rtol=1e-5, atol=1e-6)
    assert output.logits.shape == (4, 16, 96) and not output.logits.requires_grad


def test_a_loss_of_ones_own():
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = tutti.Store(model=model, optimizer=optimizer)
    step = tutti.train_step(model, optimizer, (x,), loss=lambda m, b: m(*b).square().mean(), store=store,
                            cluster="cpu:2", plan="dp")  # fmt: skip
    assert step((x,)) > step((x,)) > step((x,))


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_decoding_gives_the_tokens_of_the_model_without_a_cache():
    transformers = pytest.importorskip("transformers")
    model = zoo.llama(2).eval()
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch_size=4, num_heads=heads, head_dim=width, dtype=torch.float32, device="cpu")
    prompt = zoo.tokens(4)["input_ids"][:, :5]
    where = {"store": tutti.Store(model=model, cache=cache), "cluster": "cpu:2", "plan": "tp"}
    prefill = tutti.prefill(model, cache, prompt, **where)
    decode = tutti.decode(model, cache, prompt[:, :1], **where)
    tokens = prompt
    logits = prefill(prompt, torch.arange(5))
    for position in range(5, 9):
        with torch.no_grad():
            expected = model(input_ids=tokens).logits[:, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
        logits = decode(new, torch.tensor([position]))
