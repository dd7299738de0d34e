"""The experts of transformers models as one fused operator, under the name "tutti".

`tutti.capture`, and so `parallelize` and `tutti train`, uses them during capture for models with transformers' default
("grouped_mm"). In plain PyTorch:

    import tutti.models.experts
    model.set_experts_implementation("tutti")

They support the experts of Mixtral, Qwen3-MoE, DeepSeek-V3 and most others: gate and up projection side by side, or up
alone, without biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.activations as theirs
from torch import Tensor, nn
from transformers.integrations import moe

from tutti.nn.experts import experts

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
    up = self.gate_up_proj if self.has_gate else self.up_proj
    return experts(hidden_states, top_k_index, top_k_weights, up, self.down_proj, ACTIVATIONS[type(self.act_fn)])  # pyright: ignore


def unsupported(module: nn.Module) -> str:
    """The feature of a module of experts that the operator lacks, or ""."""
    default_gate = getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
    found = {
        "biases": module.has_bias,
        "transposed weights": module.is_transposed,
        "gate and up interleaved": not module.is_concatenated,
        "a norm behind each expert": module.has_post_expert_norm,
        "a custom gate": module.has_gate and not default_gate,
        f"the activation {type(getattr(module, 'act_fn', None)).__name__}": type(getattr(module, "act_fn", None))
        not in ACTIVATIONS,
        "its experts spread over devices already": module._is_expert_parallel,
    }
    return ", ".join(what for what, there in found.items() if there)


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
