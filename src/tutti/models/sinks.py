"""Attention with sinks as fused attention: a learned logit for each head that takes its share of the softmax.

GPT-OSS and its like run eagerly in transformers, with scores of (queries x keys) in memory. With s the sink and L the
log-sum-exp of a query's scores, the output is that of attention without a sink times exp(L - M), with
M = log(exp L + exp s). The backward pass of fused attention gives the gradients of query, key and value if it is given
that output and M, from which it computes the probabilities again.

`tutti.capture`, and so `parallelize` and `tutti train`, uses it during capture for models with transformers' default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tutti.nn.attention.fused import FLASH, FLASH_BACKWARD

NAME, DEFAULT = "tutti_sinks", "eager"
MODELS = ("gpt_oss",)  # model types whose `eager` is attention with sinks


class _Attention(torch.autograd.Function):
    """(query, key, value, sinks (heads), additive mask or None, is_causal, scale) -> (batch, heads, tokens, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        out, lse = FLASH(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
        out = out * (lse - total).exp().unsqueeze(-1).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, mask, out, total)
        ctx.options = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, out, total = ctx.saved_tensors
        is_causal, scale = ctx.options
        (grad,) = grads
        gradients = FLASH_BACKWARD(grad, query, key, value, out, total, 0.0, is_causal, attn_mask=mask, scale=scale)
        share = (sinks.to(total.dtype).view(1, -1, 1) - total).exp()
        lost = (grad * out).to(total.dtype).sum(-1)
        return *gradients, -(share * lost).sum((0, 2)).to(sinks.dtype), None, None, None


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces the attention function of transformers. Shapes: (batch, heads, tokens, width)."""
    if dropout:
        raise NotImplementedError("attention with sinks has no dropout here: use attn_implementation='eager'")
    mask = attention_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    causal = mask is None and query.shape[2] > 1
    output: Any = _Attention.apply(query, key, value, module.sinks, mask, causal, scaling)
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def fused_by_default(model: nn.Module) -> Iterator[None]:
    """Use this attention in a model with transformers' default, where it has sinks, within the block."""
    all_configs: list[Any] = [getattr(m, "config", None) for m in model.modules()]
    configs = {id(config): config for config in all_configs if _suits(config)}
    for config in configs.values():
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation = DEFAULT


def _suits(config: Any) -> bool:
    return (
        getattr(config, "model_type", "") in MODELS
        and getattr(config, "_attn_implementation", "") == DEFAULT
        and not getattr(config, "attention_dropout", 0.0)
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
