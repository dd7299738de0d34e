"""Served tokens equal those of `transformers`, for any family, under any plan, on virtual devices and processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t

import encoder_models
from cases import crossed, some
from tutti.serve import Engine, Output, Request, Sampling

SMALL = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
             pad_token_id=None)  # fmt: skip
OF_GPT2 = dict(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=None, bos_token_id=None)
NO_ENDS = dict(eos_token_id=None, bos_token_id=None)
OF_FALCON = dict(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **NO_ENDS)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
FAMILIES: dict[str, Any] = {
    "Llama": lambda: t.LlamaConfig(**SMALL),
    "Mistral, sliding window": lambda: t.MistralConfig(**SMALL, sliding_window=8),
    "Qwen2": lambda: t.Qwen2Config(**SMALL),
    "Qwen3": lambda: t.Qwen3Config(**SMALL, head_dim=16),
    "Gemma 2, windows and caps": lambda: t.Gemma2Config(**SMALL, head_dim=16, sliding_window=8),
    "Gemma 3": lambda: t.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8),
    "GPT-2": lambda: t.GPT2Config(**OF_GPT2),
    "GPT-J": lambda: t.GPTJConfig(**OF_GPT2, rotary_dim=8),
    "GPT-NeoX": lambda: t.GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "OPT": lambda: t.OPTConfig(vocab_size=256, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
                               max_position_embeddings=256, word_embed_proj_dim=64, eos_token_id=None),
    "Phi": lambda: t.PhiConfig(**SMALL),
    "Phi 3": lambda: t.Phi3Config(**SMALL),
    "StableLM": lambda: t.StableLmConfig(**SMALL),
    "Cohere": lambda: t.CohereConfig(**SMALL),
    "Granite": lambda: t.GraniteConfig(**SMALL),
    "OLMo 2": lambda: t.Olmo2Config(**SMALL),
    "StarCoder 2": lambda: t.Starcoder2Config(**SMALL),
    "Mixtral": lambda: t.MixtralConfig(**SMALL, num_local_experts=4),
    "Qwen3, experts": lambda: t.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16, num_experts=4),
    "gpt-oss, sinks": lambda: t.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                             sliding_window=8),
    "DeepSeek-V3": lambda: t.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, **EXPERTS, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
    "Bloom, ALiBi": lambda: t.BloomConfig(vocab_size=256, hidden_size=96, n_layer=2, n_head=6, **NO_ENDS),
    "Falcon, multi-query": lambda: t.FalconConfig(**OF_FALCON, multi_query=True, parallel_attn=True),
    "Falcon, groups": lambda: t.FalconConfig(**OF_FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "Falcon, ALiBi": lambda: t.FalconConfig(**{**OF_FALCON, "num_attention_heads": 16}, multi_query=False,
                                            parallel_attn=False, alibi=True, bias=True),
    "MPT, ALiBi and clipping": lambda: t.MptConfig(vocab_size=256, d_model=96, n_heads=6, n_layers=2, max_seq_len=128,
                                                   attn_config={"clip_qkv": 0.8}, **NO_ENDS),
    "DiffLlama, two calls in a layer": lambda: t.DiffLlamaConfig(**SMALL),
}  # fmt: skip
APART = (
    "Llama",
    "Mistral, sliding window",
    "Gemma 2, windows and caps",
    "GPT-2",
    "GPT-J",
    "OPT",
    "Cohere",
    "Mixtral",
    "gpt-oss, sinks",
    "DeepSeek-V3",
    "Bloom, ALiBi",
    "Falcon, multi-query",
    "Falcon, ALiBi",
    "MPT, ALiBi and clipping",
    "DiffLlama, two calls in a layer",
)  # the others have the parts of these
PLANS = {"tp2": 2, "pp2": 2, "pp2xtp2": 4}
PLANNED = ("Llama", "GPT-2", "Gemma 2, windows and caps", "Mixtral", "DeepSeek-V3")
OTHERS = (
    "Bloom, ALiBi",
    "Falcon, multi-query",
    "Falcon, ALiBi",
    "MPT, ALiBi and clipping",
    "DiffLlama, two calls in a layer",
)
WITH_EXPERTS = ("Mixtral", "Qwen3, experts", "DeepSeek-V3")
LENGTHS = (5, 37, 21)
GREEDY = Sampling(max_tokens=10, temperature=0)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.12)
    return model


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 250, (n,), generator=draw).tolist() for n in LENGTHS]


def expected(model: Any) -> list[list[int]]:
    generated = [
        model.generate(torch.tensor([x]), do_sample=False, max_new_tokens=10, pad_token_id=0) for x in prompts()
    ]
    return [x[0, n:].tolist() for x, n in zip(generated, LENGTHS, strict=True)]


def served(model: Any, **options: Any) -> list[Output]:
    engine = Engine(model, blocks=32, budget=32, most=4, **options)
    return engine.generate(prompts(), GREEDY)


@pytest.mark.parametrize("family", some(FAMILIES, APART))
def test_families(family):
    model = model_of(family)
    wanted = expected(model)
    assert [x.tokens for x in served(model, plan="single", prefix_cache=False)] == wanted


@pytest.mark.parametrize("family, plan", crossed(PLANNED, PLANS))
def test_plans_on_virtual_devices(family, plan):
    model = model_of(family)
    assert [x.tokens for x in served(model, plan=plan, cluster=f"cpu:{PLANS[plan]}", speculate=2)] == expected(model)


@pytest.mark.parametrize("family", OTHERS)
def test_attention_of_their_own_is_split(family):
    """In chunks, with guesses and a prefix cache, after other requests, in blocks that are few."""
    model = model_of(family)
    engine = Engine(model, blocks=10, block=8, budget=16, most=4, plan="tp2", cluster="cpu:2", speculate=2)
    for _ in range(2):
        assert [x.tokens for x in engine.generate(prompts(), GREEDY)] == expected(model)
    assert engine.scheduler.preemptions


@pytest.mark.parametrize("family", ["Falcon, ALiBi", "Bloom, ALiBi"])
def test_alibi_is_rounded_as_in_the_model(family):
    """Beyond position 256, bfloat16 does not have all positions. The bound is that of the self-check."""
    model = model_of(family)
    prompt = torch.randint(3, 250, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, pad_token_id=0)[0, 400:].tolist()
    engine = Engine(model, blocks=64, budget=128, most=4, plan="single")
    assert engine.generate([prompt], GREEDY)[0].tokens[:8] == wanted
    assert Engine(model.bfloat16(), blocks=8, budget=32, most=4, plan="single").checked > 0


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_apart(family):
    """Each device has half of the heads and half of the experts."""
    model = model_of(family)
    assert [x.tokens for x in served(model, plan="tp2xexperts2", cluster="cpu:2")] == expected(model)


def _rank(family: str, plan: str) -> list[list[int]]:
    return [x.tokens for x in served(model_of(family), plan=plan)]


@pytest.mark.parametrize(
    "family, plan", [("Llama", "tp4"), ("Mixtral", "tp4xexperts4"), ("GPT-2", "pp4"), ("Mixtral", "pp2xtp2")]
)
def test_plans_on_processes(pool, family, plan):
    results = pool.run(_rank, family, plan)
    wanted = expected(model_of(family))
    assert all(x == wanted for x in results)


def _rank_with_encoder(family: str, plan: str) -> list[list[int]]:
    model, sampling = encoder_models.model_of(family), Sampling(max_tokens=10, temperature=0, ignore_end=True)
    engine = Engine(model, plan=plan, blocks=64, budget=32, most=4)
    requests = [Request(sampling=sampling, **x) for x in encoder_models.sources(family)]
    return [x.tokens for x in engine.generate(requests)]


@pytest.mark.parametrize("family, plan", [("T5", "pp2xtp2"), ("Whisper", "tp4")])
def test_encoders_on_processes(pool, family, plan):
    model, sources = encoder_models.model_of(family), encoder_models.sources(family)
    wanted = [encoder_models.expected(model, x, 10) for x in sources]
    assert all(x == wanted for x in pool.run(_rank_with_encoder, family, plan))


REFUSED: dict[str, tuple[Any, str]] = {  # a part of the reason
    "Llama 4, attention in chunks": (
        lambda: t.Llama4TextConfig(**SMALL, head_dim=16, num_local_experts=2, intermediate_size_mlp=64), "chunked"),
    "CPM-Ant, attention of its own": (
        lambda: t.CpmAntConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, dim_head=16,
                               dim_ff=64), "attention interface"),
    "Qwen3-Next, linear attention": (
        lambda: t.Qwen3NextConfig(
            **SMALL, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, linear_num_value_heads=2, linear_num_key_heads=2,
            linear_key_head_dim=16, linear_value_head_dim=16), "linear_attention, which keeps"),
    "BART without an encoder, positions of its cache": (
        lambda: t.BartConfig(vocab_size=256, d_model=64, decoder_layers=2, decoder_attention_heads=4,
                             decoder_ffn_dim=64, max_position_embeddings=64, is_decoder=True,
                             is_encoder_decoder=False), "served wrongly"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_paged_are_refused(name):
    config, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        Engine(t.AutoModelForCausalLM.from_config(config()), plan="single", blocks=8)
