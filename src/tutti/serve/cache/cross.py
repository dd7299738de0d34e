"""Encoder-decoder models: the decoder reads keys and values of its source from the paged cache.

The encoder runs once for a request. Each layer of the decoder projects its output to keys and values, which lie in
blocks of that layer's cache, beside those of generated tokens. Only a sequence's tables tell them apart.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from tutti.serve.cache.attention import Cache, Probe, calling, ops
from tutti.serve.values import Model

Take = Callable[[int, Tensor, Tensor], None]


class _Source:
    """The keys and values of a source, as a decoder asks its cache for them: none, since attention reads the paged
    cache. take: receives them by layer when the decoder projects them."""

    def __init__(self, nothing: Tensor, take: Take | None):
        self.nothing, self.take = nothing, take
        self.keys = self.values = nothing
        self.layers: defaultdict[int, _Source] = defaultdict(lambda: self)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The projected keys and values (1, heads, positions, width) of a layer."""
        if self.take is not None:
            self.take(layer, keys, values)
        return self.nothing, self.nothing


class _Own(DynamicCache):
    """The keys and values of a decoder's own tokens. It tells positions, and keeps nothing."""

    def __init__(self, positions: Tensor):
        super().__init__()
        self.positions, self.asked = positions, False

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How far each token (tokens,) is from the position that it has in this call."""
        self.asked = True
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:  # pyright: ignore
        """The new keys and values of a layer, which attention writes into the paged cache."""
        return keys, values


class _Updated(dict[int, bool]):
    """Whether the source's keys and values of a layer are in the cache: the same for all layers."""

    def __init__(self, written: bool):
        super().__init__()
        self.written = written

    def get(self, layer: int, default: object = None) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.written


class _PagedCaches(EncoderDecoderCache):
    """The cache of a decoder whose attention is paged."""

    def __init__(self, positions: Tensor, take: Take | None):
        self.self_attention_cache: Any = _Own(positions)
        self.cross_attention_cache: Any = _Source(positions.new_zeros(1, 1, 0, 1, dtype=torch.float32), take)
        self.is_updated: Any = _Updated(take is None)


def decoded(
    model: Model, tokens: Tensor, positions: Tensor, hidden: Tensor | None = None, take: Take | None = None
) -> Any:
    """The decoder's result for tokens (tokens,) at these positions, within `calling`.

    hidden: the output (1, positions, width) of the encoder, whose keys and values go to `take`. Raises ValueError if
    the decoder does not ask for positions.
    """
    caches = _PagedCaches(positions, take)
    if hidden is None:
        hidden = positions.new_zeros(1, 1, 1, dtype=torch.float32)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(decoder_input_ids=tokens[None], decoder_attention_mask=torch.ones_like(tokens)[None],
                 encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                 use_cache=True, **{name: caches})  # pyright: ignore  # fmt: skip
    if not caches.self_attention_cache.asked:
        raise ValueError(f"the decoder of {type(model).__name__} does not take positions from its cache")
    return output


def write(model: Model, cache: Cache, slots: Tensor, hidden: Tensor) -> None:
    """Write the keys and values of an encoder's output (1, positions, width) into the cache.

    slots: the slot of each of its positions (positions,), or -1 for padding.
    """

    def take(layer: int, keys: Tensor, values: Tensor) -> None:
        cache.keys[layer] = ops.paged_write(cache.keys[layer], keys[0].transpose(0, 1), slots)
        cache.values[layer] = ops.paged_write(cache.values[layer], values[0].transpose(0, 1), slots)

    first = slots.new_zeros(1)
    with calling(model, Probe()):
        decoded(model, first, first, hidden, take)
