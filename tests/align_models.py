"""Small models, tokenizers and data for the tests of alignment."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
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
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                        additional_special_tokens=special[3:], model_max_length=256)  # fmt: skip
    tokenizer.chat_template = CHATML
    return tokenizer


def model(seed: int = 0, **options: Any) -> Any:
    """A small Llama for that tokenizer."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
                 eos_token_id=2, pad_token_id=0)  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).train()


def policy_options(path: Any, **more: Any) -> dict[str, Any]:
    """Options of a trainer that generates, for few and short completions."""
    return {"output_dir": str(path), "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 16,
            "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True, "seed": 0, "save_strategy": "no",
            "level": "O0", "plan": "single", "lr_scheduler_type": "constant", "max_completion_length": 8,
            **more}  # fmt: skip


def vowels(completions: list[str]) -> list[float]:
    """The share of characters that are vowels."""
    return [sum(c in "aeiou" for c in x) / max(1, len(x)) for x in completions]


def logs(trainer: Any, name: str = "loss") -> list[float]:
    """What a trainer has logged under a name."""
    return [x[name] for x in trainer.state.log_history if name in x]


def check_devices_and_parts(make: Callable[..., Any], path: Path) -> None:
    """Two virtual devices, and two microbatches, give the losses and the completions of one. make: a trainer for a
    folder and options, with 16 rows in a step."""
    whole = make(path / "a")
    whole.train()
    for name, options in {
        "dp": {"plan": "dp", "cluster": "cpu:2"},
        "parts": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    }.items():
        other = make(path / name, **options)
        other.train()
        assert logs(other) == pytest.approx(logs(whole), abs=1e-5), name
        assert logs(other, "reward") == pytest.approx(logs(whole, "reward"), abs=1e-6), "the engine wrote the same"
