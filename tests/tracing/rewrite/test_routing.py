"""Limits of routers, as models of transformers state them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

import tutti

ops = torch.ops.tutti
SMALL = dict(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
    num_hidden_layers=2, vocab_size=64, num_experts_per_tok=2,
)  # fmt: skip
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, head_dim=8)


@pytest.mark.parametrize("config, limits", [
    (DeepseekV3Config(**SMALL, **LATENT, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1), (4, 2)),
    (DeepseekV3Config(**SMALL, **LATENT, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1), None),
    (Qwen3MoeConfig(**SMALL, num_experts=8), None),
], ids=["groups", "one-group", "none"])  # fmt: skip
def test_limits_of_groups_are_read(config, limits):
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(64, (2, 8))
    step = tutti.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.SGD(model.parameters(), lr=0.1))
    experts = [n for n in step.calls if n.target in (ops.experts.default, ops.experts_backward.default)]
    assert experts and {n.meta.get("routing") for n in experts} == {limits}
