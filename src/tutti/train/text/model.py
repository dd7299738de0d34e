"""Build the model and the optimizer of a config, as for one device."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging

from tutti.hardware import local
from tutti.train.text import config as settings
from tutti.train.trainer.optimizers import OPTIMIZERS, parameter_groups

KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, **OPTIMIZERS}


def model_config(model: settings.Model, vocab_size: int, seq: int) -> PreTrainedConfig:
    """The transformers config of a model with this vocabulary, and position embeddings for at least `seq` tokens.

    Raises ValueError for a model type that transformers lacks, and for an option that the type lacks.
    """
    chosen = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "vocab_size": vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    blank = _blank(model.type)
    options = {f.name for f in fields(blank)} | set(blank.attribute_map)  # pyright: ignore
    for key in model.options:
        if key not in options:
            near = get_close_matches(key, options, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{type(blank).__name__} has no option {key} (model.options){hint}")
    reach = max(seq, getattr(blank, "max_position_embeddings", seq))
    chosen |= {"max_position_embeddings": reach} | model.options
    try:
        return AutoConfig.for_model(model.type, **chosen)
    except (TypeError, ValueError, StrictDataclassError) as e:
        raise ValueError(f"the model's config is not valid: {' '.join(str(e).split())}") from None


def check_model(model: settings.Model, vocab_size: int, seq: int) -> None:
    """Raise ValueError if transformers cannot build this model. Tried on the meta device."""
    config = model_config(model, vocab_size, seq)
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as e:
        why = f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"
        raise ValueError(f"transformers cannot build this {model.type} model ([model] of the config): {why}") from None


def precision(wanted: str, processes: int) -> torch.dtype:
    """The dtype of "float32" or "bfloat16"; "auto" is the one with faster matrix products on this machine."""
    if wanted != "auto":
        return getattr(torch, wanted)
    device = local(processes).device
    return max((torch.float32, torch.bfloat16), key=device.rate)


def build_model(
    config: PreTrainedConfig, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """A causal language model with random weights, which depend only on the seed, not on dtype or device.

    Tensors have the dtypes that transformers gives them in a model of `dtype`: rotary frequencies stay in float32.
    """
    transformers_logging.disable_progress_bar()  # progress bars of saving this model
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.device("meta"):
        typed: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for ours, theirs in zip(_tensors(model), _tensors(typed), strict=True):
        ours.data = ours.data.to(theirs.dtype)
    return model.to(device).train()


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def build_optimizer(model: torch.nn.Module, optimizer: settings.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a config, with weight decay for matrices only."""
    kind = KINDS[optimizer.name]
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    groups = parameter_groups(
        model, matrices, optimizer.weight_decay, optimizer.lr, optimizer.layer_decay, muon=optimizer.name == "muon"
    )
    options = {"momentum": optimizer.momentum} if optimizer.name == "sgd" else {"betas": optimizer.betas}
    return kind(groups, lr=optimizer.lr, **options)


def _blank(kind: str) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(kind)
    except ValueError:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

        near = get_close_matches(kind, known, 1)
        hint = f"did you mean {near[0]}?" if near else "llama, gpt2 and qwen3 are some that it has"
        raise ValueError(f"transformers has no model type {kind!r} (model.type); {hint}") from None
