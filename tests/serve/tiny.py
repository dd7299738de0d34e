"""A small model and tokenizer for tests of the engine and the server."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if tools %}<|tools|>{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes, and `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return fast


def config(**options: Any) -> LlamaConfig:
    """The config of a small Llama whose vocabulary is that of the tokenizer."""
    sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, eos_token_id=256, bos_token_id=None,
                 pad_token_id=None)  # fmt: skip
    return LlamaConfig(**{**sizes, **options})


def model(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A small Llama with random weights, whose greedy output is not a constant."""
    torch.manual_seed(seed)
    llama = LlamaForCausalLM(config(**options)).eval()
    with torch.no_grad():
        for p in llama.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.15)
    return llama


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=draw).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """What `transformers` continues a prompt with."""
    generated = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, **options)
    return generated[0, len(prompt) :].tolist()
