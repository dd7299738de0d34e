"""Adapters of `peft` on a quantized model: QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

Only the adapters are trained. The quantized weights stay packed in the forward and the backward pass.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from tutti.compat.adapters import peft_model
from tutti.nn.quantized.quantized_linear import QuantizedLinear, quantized_layers


def with_adapters(model: nn.Module, config: Any) -> Any:
    """A quantized model with adapters, as `peft.get_peft_model` gives it.

        model = tutti.compress(model, "int4-gptq", data).model
        model = with_adapters(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        step = tutti.parallelize(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), batch)

    config: a `peft.LoraConfig`. Raises ValueError for a model without quantized layers, and for DoRA, which needs
    weights that are not packed.
    """
    from peft.tuners.lora import Linear

    class QuantizedLora(Linear):
        """A quantized layer and its adapters, which are never merged."""

        def _get_base_layer_device_and_dtype(self, base_layer: Any) -> Any:
            return base_layer.q.device, base_layer.dtype

        def merge(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("adapters cannot be merged into quantized weights: merge them into the model that was "
                             "quantized, and compress the result")  # fmt: skip

    if not quantized_layers(model):
        raise ValueError("the model has no quantized layers: use peft.get_peft_model")
    if getattr(config, "use_dora", False):
        raise ValueError("use_dora=True needs the norms of weights that are not packed: use LoRA")
    config._register_custom_module({QuantizedLinear: QuantizedLora})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        return peft_model(model, config)
