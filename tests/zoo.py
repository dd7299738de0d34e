"""Tiny models of `transformers` with random weights, and batches for them."""

from __future__ import annotations

import torch
import transformers

transformers.logging.set_verbosity_error()

VOCABULARY = 96


def llama(layers: int = 2, seed: int = 0) -> torch.nn.Module:
    """Grouped-query attention, rotary embedding, SwiGLU."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=96,
        vocab_size=VOCABULARY,
    )
    return transformers.LlamaForCausalLM(config).train()


def gpt2(layers: int = 2, seed: int = 0, dropout: float = 0.1, attention: float | None = None) -> torch.nn.Module:
    """Fused qkv, learned positions, tied embeddings, dropout everywhere, in the attention another one."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=layers,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=dropout,
        attn_pdrop=dropout if attention is None else attention,
        resid_pdrop=dropout,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config).train()


CONFIG = {  # as a config.json says it
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCABULARY,
}  # fmt: skip


def tokens(batch: int = 12, length: int = 16, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch for a causal language model; some labels are ignored, more in some rows than in others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    labels = ids.clone()
    for row in range(batch):
        labels[row, : row % 5] = -100
    return {"input_ids": ids, "labels": labels}


@torch.library.custom_op("tutti_tests::ruleless", mutates_args=())
def ruleless(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody has said how to split: columns in descending order of their sums."""
    return x[:, x.sum(0).argsort(descending=True)]


ruleless.register_fake(torch.empty_like)
ruleless.register_autograd(
    lambda ctx, grad: torch.empty_like(grad).index_copy(1, ctx.saved_tensors[0], grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].sum(0).argsort(descending=True)),
)
