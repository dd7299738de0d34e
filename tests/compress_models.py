"""Small models, data and references for the tests of compression."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

SIZES: dict[str, Any] = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                             bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip


def _model_of(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.15)
            elif "norm" in name or "ln" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def model(kind: str = "llama", **options: Any) -> Any:
    """A small model with random weights. Norms have weights of their own."""
    sizes = {**SIZES, **options}
    experts = dict(num_experts=8, moe_intermediate_size=64, num_experts_per_tok=2, head_dim=16)
    if kind == "opt":
        config = OPTConfig(vocab_size=96, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                           max_position_embeddings=128, word_embed_proj_dim=64)  # fmt: skip
        return _model_of(OPTForCausalLM, config)
    if kind == "gpt2":
        return _model_of(GPT2LMHeadModel, GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128))
    if kind == "t5":
        config = T5Config(vocab_size=96, d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16)
        return _model_of(T5ForConditionalGeneration, config)
    if kind == "gpt-oss":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        kinds = (["sliding_attention", "full_attention"] * 2)[: sizes["num_hidden_layers"]]
        config = GptOssConfig(**sizes, num_local_experts=4, head_dim=16, num_experts_per_tok=2, rope_parameters=rope,
                              layer_types=kinds)  # fmt: skip
        return _model_of(GptOssForCausalLM, config)
    families = {
        "llama": (LlamaForCausalLM, lambda: LlamaConfig(**sizes)),
        "gemma": (GemmaForCausalLM, lambda: GemmaConfig(**sizes, head_dim=16)),
        "olmo2": (Olmo2ForCausalLM, lambda: Olmo2Config(**sizes)),
        "qwen2-moe": (
            Qwen2MoeForCausalLM,
            lambda: Qwen2MoeConfig(
                **sizes,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=64,
            ),
        ),
        "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**sizes, head_dim=16)),
        "mixtral": (MixtralForCausalLM, lambda: MixtralConfig(**sizes, num_local_experts=4)),
        "qwen3-moe": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**{**sizes, **experts})),
    }
    kind_of, config_of = families[kind]
    return _model_of(kind_of, config_of())


@cache
def llama() -> Any:
    """A small Llama that tests share and do not change."""
    return model()


def batches(count: int = 3, rows: int = 2, length: int = 24, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random tokens."""
    draw = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(2, 96, (rows, length), generator=draw)} for _ in range(count)]


def small(kind: str = "llama", layers: int = 3) -> Any:
    """A smaller one, to be changed."""
    return model(kind, hidden_size=32, intermediate_size=64, num_hidden_layers=layers)


def data() -> list[dict[str, torch.Tensor]]:
    """192 tokens."""
    return batches(rows=4, length=16)


@torch.no_grad()
def logits(model: Any, seed: int = 5) -> torch.Tensor:
    """The logits of a model for random tokens."""
    return model(**batches(1, seed=seed)[0], use_cache=False).logits
