"""What trainers of alignment share: dropout."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import BloomConfig, GPTBigCodeConfig, OPTConfig

from tutti.align.arguments import without_dropout

CONFIGS = {
    "opt": OPTConfig(vocab_size=32, hidden_size=16, num_hidden_layers=4, ffn_dim=16, num_attention_heads=2,
                     max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.5, layerdrop=0.5),
    "bloom": BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.5, attention_dropout=0.5),
    "gpt_bigcode": GPTBigCodeConfig(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, attn_pdrop=0.5,
                                    resid_pdrop=0.5, embd_pdrop=0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_models_give_one_result_without_dropout(name):
    torch.manual_seed(0)
    model, ids = Auto.from_config(CONFIGS[name]).train(), torch.arange(3, 11).unsqueeze(0)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    without_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
