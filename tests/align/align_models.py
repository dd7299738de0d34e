"""Small models, tokenizers and data for the tests of alignment."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@cache
def tokenizer() -> Any:
    """Bytes as tokens, with a beginning of text that the tokenizer adds, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    vocabulary = {x: i for i, x in enumerate([*special, *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    from tokenizers.processors import TemplateProcessing

    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                    additional_special_tokens=special[3:], model_max_length=256)  # fmt: skip
    found.chat_template = CHATML
    return found


def model(seed: int = 0, **options: Any) -> Any:
    """A small Llama for that tokenizer."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
                 eos_token_id=2, pad_token_id=0)  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).train()
