"""Packed rows train as the texts alone do, or are refused: ten architectures, losses and gradients."""

from __future__ import annotations

import pytest
import torch
import transformers as t

from tutti.data.packs import packed_batch
from tutti.train.tasks.language.causal_lm import check_packing

TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
SLIDING = {"sliding_window": 4}
SEQUENCES = [[5, 9, 3, 8, 7, 2, 11, 13], [4, 6, 10], [12, 15, 14, 18, 21, 22, 25]]
LENGTH = 20
MODELS = {
    "llama": (t.LlamaConfig, {}),
    "mistral": (t.MistralConfig, SLIDING),
    "gemma2": (t.Gemma2Config, {**SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": (t.Gemma3TextConfig, {**SLIDING, "query_pre_attn_scalar": 8}),
    "qwen2": (t.Qwen2Config, {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": (t.Qwen3Config, {}),
    "phi3": (t.Phi3Config, {"bos_token_id": 1, "eos_token_id": 2}),
    "olmo2": (t.Olmo2Config, {}),
    "gpt2": (t.GPT2Config, {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
                            "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "starcoder2": (t.Starcoder2Config, {**SLIDING, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
}  # fmt: skip


def model_of(name, attention="sdpa"):
    kind, more = MODELS[name]
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(kind(**{**TINY, **more}), attn_implementation=attention).train()


def loss_and_gradients(model, batches):
    """The mean over all tokens that are predicted."""
    model.zero_grad()
    total = torch.zeros(())
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
        total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (total / count).backward()
    return total.item() / count, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_equals_separate_or_is_refused(name, implementation):
    if name == "gemma2" and implementation == "sdpa":
        pytest.skip("transformers has no SDPA for Gemma 2")
    model = model_of(name, implementation)
    alone = [{"input_ids": torch.tensor([x]), "labels": torch.tensor([x])} for x in SEQUENCES]
    loss, gradients = loss_and_gradients(model, alone)
    for attention in ("mask", "positions"):
        try:
            check_packing(model, LENGTH, attention)
        except ValueError as error:
            why = "adds its mask" if implementation == "eager" else "attends to windows of 4 tokens"
            assert attention == "mask" and why in str(error)
            assert implementation == "eager" or MODELS[name][1].items() >= SLIDING.items()
            continue
        packed = packed_batch([{"sequences": SEQUENCES}], LENGTH, attention=attention)
        packed_loss, grad = loss_and_gradients(model, [packed])
        assert packed_loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(grad, gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (t.MambaConfig, {"state_size": 4}, "carries a state from token to token"),
        (t.BloomConfig, {"n_head": 2}, "takes no position_ids"),
        (t.Llama4TextConfig, {"attention_chunk_size": 4, "num_local_experts": 2}, "within chunks of 4 tokens"),
    ],
)
def test_models_that_see_other_texts_are_refused(kind, more, message):
    with torch.device("meta"):
        model = t.AutoModelForCausalLM.from_config(kind(**{**TINY, **more}))
    with pytest.raises(ValueError, match=message):
        check_packing(model, LENGTH, "positions")


def test_windows_as_long_as_a_row_may_be_masked():
    with torch.device("meta"):
        model = model_of("mistral")
    check_packing(model, 4, "mask")
