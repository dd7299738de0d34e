"""Small models with an encoder for tests of the engine."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

SMALL = dict(vocab_size=256, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
             decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, pad_token_id=0, bos_token_id=1,
             eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None)  # fmt: skip
OF_T5 = dict(vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
             relative_attention_max_distance=12, pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
FAMILIES: dict[str, Any] = {
    "T5": lambda: t.T5ForConditionalGeneration(t.T5Config(**OF_T5)),
    "UMT5": lambda: t.UMT5ForConditionalGeneration(t.UMT5Config(**OF_T5)),
    "BART": lambda: t.BartForConditionalGeneration(t.BartConfig(**SMALL, max_position_embeddings=256)),
    "mBART": lambda: t.MBartForConditionalGeneration(t.MBartConfig(**SMALL, max_position_embeddings=256)),
    "Marian": lambda: t.MarianMTModel(t.MarianConfig(**SMALL, max_position_embeddings=256)),
    "Pegasus": lambda: t.PegasusForConditionalGeneration(t.PegasusConfig(**SMALL, max_position_embeddings=256)),
    "Whisper": lambda: t.WhisperForConditionalGeneration(
        t.WhisperConfig(**{**SMALL, "forced_eos_token_id": None}, num_mel_bins=16, max_source_positions=60,
                        max_target_positions=100)),
}  # fmt: skip


def model_of(family: str) -> Any:
    """A model with random weights, whose greedy output is not a constant."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.2)
    return model


def sources(family: str) -> list[dict[str, Any]]:
    """Prompts and inputs of some requests."""
    draw = torch.Generator().manual_seed(0)
    if family == "Whisper":
        features = [torch.randn(1, 16, 120, generator=draw) for _ in range(3)]
        begun = [], [1, 7, 9], [1]
        return [{"prompt": p, "inputs": {"input_features": x}} for x, p in zip(features, begun, strict=True)]
    return [{"prompt": torch.randint(3, 250, (n,), generator=draw).tolist()} for n in (5, 37, 21)]


def expected(model: Any, source: dict[str, Any], count: int) -> list[int]:
    """What `transformers` generates."""
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=count, eos_token_id=None)
    if "inputs" in source:
        begun = torch.tensor([source["prompt"] or [1]])
        generated = t.GenerationMixin.generate(model, **source["inputs"], decoder_input_ids=begun, **options)
        return generated[0, begun.shape[1] :].tolist()
    return model.generate(torch.tensor([source["prompt"]]), **options)[0, 1:].tolist()


def llava() -> Any:
    """A small model that sees images of 16 x 16 pixels as 4 tokens with number 9."""
    torch.manual_seed(0)
    vision = t.CLIPVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                                image_size=16, patch_size=8)  # fmt: skip
    text = t.LlamaConfig(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, eos_token_id=256,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip
    model = t.LlavaForConditionalGeneration(
        t.LlavaConfig(vision_config=vision, text_config=text, image_token_id=9)
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.15)
    return model
