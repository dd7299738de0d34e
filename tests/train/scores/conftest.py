"""Saved models so small that a score takes a second."""

from __future__ import annotations

import pytest
import torch
import transformers

from tutti.data.tokenizer import train_tokenizer, train_wordpiece

TEXTS = [f"the {a} {b} sat on the {c}" for a in ("big", "small") for b in ("cat", "dog") for c in ("mat", "bed")]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="session")
def causal(tmp_path_factory):
    """The folder of a Llama with 32 positions."""
    folder = tmp_path_factory.mktemp("causal")
    tokenizer = train_tokenizer(TEXTS, 280)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=32, num_key_value_heads=2,
                                      initializer_range=0.3, pad_token_id=0, eos_token_id=0, bos_token_id=0,
                                      **SIZES)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """The folder of a BERT classifier."""
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = train_wordpiece(TEXTS, 80)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.5, **SIZES
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def writer(tmp_path_factory):
    """The folder of a PanGu-beta encoder-decoder that has learned to copy two words."""
    from tutti.models.pangu_beta import PanGuBetaConfig, PanGuBetaForConditionalGeneration

    folder = tmp_path_factory.mktemp("writer")
    tokenizer = train_wordpiece(TEXTS, 80)
    tokenizer.eos_token = "[SEP]"
    torch.manual_seed(0)
    config = PanGuBetaConfig(vocab_size=len(tokenizer), num_decoder_layers=1, max_position_embeddings=32,
                             pad_token_id=0, eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=2,
                             **SIZES)  # fmt: skip
    model = PanGuBetaForConditionalGeneration(config)
    batch = tokenizer(["cat", "dog"], return_tensors="pt")
    labels = torch.tensor([tokenizer(f"the {x}", add_special_tokens=False)["input_ids"] + [3] for x in ("cat", "dog")])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(batch["input_ids"], batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
