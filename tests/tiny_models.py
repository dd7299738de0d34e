"""Tiny models of the size of a tokenizer, for the tests of tasks."""

import torch
import transformers


def bert(kind, tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {**sizes, "intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": tokenizer.pad_token_id}
    return kind(transformers.BertConfig(**(given | options)))


def llama(tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    given = {**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "pad_token_id": None}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(given | tokens | options)))


def t5(tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": len(tokenizer)}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
              "decoder_start_token_id": tokenizer.pad_token_id}  # fmt: skip
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**(sizes | tokens | options)))
