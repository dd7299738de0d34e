"""Functions that most projects need: a training step, a forward pass, prefill and decoding with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tutti.api.function import Function, function
from tutti.api.store import Store
from tutti.tracing.batch import Batch


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    store: Store,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> Function:
    """`step(batch)` trains a model of a store, which other functions share. It returns the loss, a 0-d tensor.

    Without a store of your own, `tutti.parallelize` does more: microbatches, which also fill pipelines.

    loss: `loss(model, batch)`. By default the `.loss` of the model's output.
    clip_norm: maximum norm of the gradients.
    options: those of `tutti.function`.
    """

    def update(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        value = _call(model, batch).loss if loss is None else loss(model, batch)
        value.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return value

    return function(update, batch, store=store, **options)


def forward(model: nn.Module, batch: Batch, *, store: Store, **options: Any) -> Function:
    """`fn(batch)` is the output of a model of a store, as a pytree of full tensors, without gradients.

    The model runs in the mode that it is in: call `model.eval()` first for inference. options: those of
    `tutti.function`.
    """

    @torch.no_grad()
    def compute(batch: Batch) -> Any:
        return _call(model, batch)

    return function(compute, batch, store=store, **options)


def prefill(model: nn.Module, cache: Any, tokens: Tensor, *, store: Store, **options: Any) -> Function:
    """`fn(tokens, positions)` reads a prompt into a KV cache and returns the logits of its last token.

    model: a causal language model of `transformers`. cache: a `StaticCache`; model and cache are in the store.
    tokens: an example prompt, int64 of shape (rows, length). positions: int64 of shape (length,). Logits have shape
    (rows, vocabulary). options: those of `tutti.function`.
    """
    return function(_next(model, cache), tokens, torch.arange(tokens.shape[1]), store=store, **options)


def decode(model: nn.Module, cache: Any, tokens: Tensor, *, store: Store, **options: Any) -> Function:
    """`fn(tokens, positions)` adds a token for each row to a KV cache and returns the logits of the next.

    tokens: an example, int64 of shape (rows, 1). positions: int64 of shape (1,). The rest is as for `prefill`.
    """
    return function(_next(model, cache), tokens, torch.zeros(1, dtype=torch.int64), store=store, **options)


def _next(model: nn.Module, cache: Any) -> Callable[[Tensor, Tensor], Tensor]:
    @torch.no_grad()
    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        output = model(input_ids=tokens, past_key_values=cache, cache_position=positions,
                     position_ids=positions[None], use_cache=True)  # fmt: skip
        return output.logits[:, -1]

    return logits


def _call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)
