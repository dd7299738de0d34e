"""Gradients of linear layers with quantized weights with respect to their inputs: g W, of the dequantized weight.

A model with such layers is a base for adapters (QLoRA, Dettmers et al. 2023): only packed weights are kept for the
backward pass, which dequantizes one layer at a time. Rounded inputs pass gradients as if they were not rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.linear import linear_bits, linear_codes, linear_int4, linear_int8


def _save(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:-1])
    ctx.options = {name: x for name, x in keyword_only_inputs.items() if name != "rounded"}
    ctx.k = inputs[0].shape[1]
    ctx.count, ctx.biased = len(inputs), inputs[-1] is not None


def _gradients(dequantize: Any) -> Any:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        more = {"k": ctx.k} if dequantize is linear_codes.dequantize else {}
        weight = dequantize(*ctx.saved_tensors, **ctx.options, **more).to(g.dtype)
        of_bias = g.sum(0) if ctx.biased and ctx.needs_input_grad[-1] else None
        return (g @ weight, *[None] * (ctx.count - 2), of_bias)

    return backward


for _name, _dequantize in (
    ("linear_int8", linear_int8.dequantize_int8),
    ("linear_int4", linear_int4.dequantize_int4),
    ("linear_bits", linear_bits.dequantize),
    ("linear_codes", linear_codes.dequantize),
):
    torch.library.register_autograd(f"tutti::{_name}", _gradients(_dequantize), setup_context=_save)
