"""The experts of transformers models as one fused operator, under the name "tutti".

`tutti.capture`, and so `parallelize` and `tutti train`, uses them during capture for models with transformers' default
("grouped_mm"). In plain PyTorch:

    import tutti.models.experts
    model.set_experts_implementation("tutti")

They support the experts of Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and most others: gate and up projection side by
side, or up alone, with or without biases, and the gate of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.activations as theirs
from torch import Tensor, nn
from transformers.integrations import moe

from tutti.nn.experts.experts import experts
from tutti.nn.experts.gate import CLAMPED

NAME, DEFAULT = "tutti", "grouped_mm"
ACTIVATIONS: dict[type, str] = {
    nn.SiLU: "silu",
    theirs.SiLUActivation: "silu",
    theirs.GELUActivation: "gelu",
    theirs.GELUTanh: "gelu_tanh",
    theirs.NewGELUActivation: "gelu_tanh",
    nn.ReLU: "relu",
    theirs.ReLUSquaredActivation: "relu2",
}
MARK = "has_post_expert_norm"  # an attribute that transformers sets on every module of experts


def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Replaces the `forward` of transformers' experts. Shapes: (tokens, hidden), (tokens, k) twice."""
    if missing := unsupported(self):
        raise NotImplementedError(
            f"{type(self).__name__} has {missing}, which tutti's experts do not support; use those of transformers: "
            "model.set_experts_implementation('batched_mm')"
        )
    names = "gate_up_proj" if self.has_gate else "up_proj", "down_proj"
    up, down = (getattr(self, name).mT if self.is_transposed else getattr(self, name) for name in names)
    biases = [getattr(self, f"{name}_bias") for name in names] if self.has_bias else (None, None)
    return experts(hidden_states, top_k_index, top_k_weights, up, down, gate_name(self), *biases)


def gate_name(module: nn.Module) -> str:
    """The name of the gate of a module of experts, or "" if the operator lacks it."""
    gate = getattr(type(module), "_apply_gate", None)
    if not module.has_gate or (gate is moe._default_apply_gate and module.is_concatenated):
        return ACTIVATIONS.get(type(getattr(module, "act_fn", None)), "")
    if getattr(gate, "__qualname__", "") == "GptOssExperts._apply_gate" and not module.is_concatenated:
        return f"{CLAMPED}:{module.alpha}:{module.limit}"
    return ""


def unsupported(module: nn.Module) -> str:
    """The feature of a module of experts that the operator lacks, or ""."""
    gate = getattr(type(module), "_apply_gate", None)
    act = f"the activation {type(getattr(module, 'act_fn', None)).__name__}"
    plain = not module.has_gate or (gate is moe._default_apply_gate and module.is_concatenated)
    features = {
        act if plain else "a custom gate": not gate_name(module),
        "a norm behind each expert": module.has_post_expert_norm,
        "its experts spread over devices already": module._is_expert_parallel,
    }
    return ", ".join(what for what, there in features.items() if there)


@contextmanager
def taken_by_default(model: nn.Module) -> Iterator[None]:
    """Use these experts in a model with transformers' default, where supported, within the block."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, MARK)]
    refused = {id(m.config) for m in layers if unsupported(m)}
    configs = {id(m.config): m.config for m in layers if m.config._experts_implementation == DEFAULT}
    chosen = [config for key, config in configs.items() if key not in refused]
    for config in chosen:
        config._experts_implementation = NAME
    try:
        yield
    finally:
        for config in chosen:
            config._experts_implementation = DEFAULT


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
