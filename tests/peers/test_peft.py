"""The adapter methods of `peft`: training by `tutti.parallelize` equals plain PyTorch's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import tutti

VOCABULARY = 64
TARGETS = ["q_proj", "v_proj"]
# What a method needs beside the names of the modules that it adapts, so that it fits a model of width 32.
OPTIONS = {
    "ADALORA": {"target_modules": TARGETS, "total_step": 10, "tinit": 1, "tfinal": 1},
    "ADAMSS": {"target_modules": TARGETS, "r": 8, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"target_modules": "self_attn", "adapter_len": 4, "adapter_layers": 1},
    "BOFT": {"target_modules": TARGETS, "boft_block_size": 4},
    "C3A": {"target_modules": TARGETS, "block_size": 8},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FOURIERFT": {"target_modules": TARGETS, "n_frequency": 8},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"target_modules": TARGETS, "r": 8},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "OFT": {"target_modules": TARGETS, "oft_block_size": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "POLY": {"target_modules": TARGETS, "r": 2, "n_tasks": 2},
    "ROAD": {"target_modules": TARGETS, "group_size": 8},
    "SHADOW": {"shadow_dropout": 0.0},
    "SHIRA": {"target_modules": TARGETS, "r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
    "VBLORA": {"target_modules": TARGETS, "num_vectors": 8, "vector_length": 8, "r": 2},
    "WAVEFT": {"target_modules": TARGETS, "n_frequency": 8},
}
SAMPLED = ("POLY", "PVERA")  # they draw random numbers in training; compared in evaluation mode, where they do not
REFUSED = {
    "CPT": "x[mask]",  # it selects the tokens of each batch by a mask
    "FROD": "taken out to Python",  # it reads the size of a sparse matrix from a buffer
    "SHIRA": "sparse tensor",
}
APART = "XLORA"  # it combines trained adapters, which it reads from files
NAMES = [kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING if kind.value != APART]


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))
    options = OPTIONS.get(name, {"target_modules": TARGETS})
    config = next(config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if kind == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(base, config(task_type="CAUSAL_LM", **options))


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (4, 8), generator=generator) for _ in range(4)]
    more = {"task_ids": torch.tensor([0, 1, 0, 1])} if name in ("POLY", "MULTITASK_PROMPT_TUNING") else {}
    if name == "CPT":
        more = {"input_type_mask": torch.full((4, 8), 4)}
    return [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), **more} for ids in rows]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    # A large eps: Adam would scale the rounding noise of gradients that are zero up to whole updates.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def plain(model: torch.nn.Module, rows: list) -> list[float]:
    optimizer = optimizer_of(model)
    losses = []
    for batch in rows:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_tutti(model: torch.nn.Module, rows: list) -> list[float]:
    step = tutti.parallelize(model, optimizer_of(model), rows[0])
    losses = [step(batch).item() for batch in rows]
    model.load_state_dict(step.state_dict())
    return losses


def train(name: str, way: Callable[[torch.nn.Module, list], list[float]]) -> tuple[list[float], dict]:
    model = build(name).train(name not in SAMPLED)
    torch.manual_seed(2)
    losses = way(model, batches(name))
    return losses, {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_an_adapter_trains_as_in_plain_pytorch(name):
    losses, weights = train(name, plain)
    ours, trained = train(name, by_tutti)
    assert ours == pytest.approx(losses, rel=1e-5)
    assert trained.keys() == weights.keys()
    for key in weights:
        torch.testing.assert_close(trained[key], weights[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_cannot_be_captured_is_refused_with_a_remedy(name):
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        train(name, by_tutti)
