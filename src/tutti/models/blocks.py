"""Transformer blocks with layer norms in front of attention and MLP, for the language models of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What this version of transformers calls the cache of keys and values, in inputs and outputs of a model."""


class Attention(nn.Module):
    """Multi-head attention. Queries may come from another sequence than keys and values.

    layer: its number among the layers that share a cache.
    cross: whether keys and values come from an encoder, so that a cache keeps those of the first call.
    """

    def __init__(self, width: int, heads: int, layer: int = 0, cross: bool = False):
        super().__init__()
        if width % heads:
            raise ValueError(f"the width {width} is not a multiple of the number of heads {heads}")
        self.heads, self.layer, self.cross = heads, layer, cross
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None, causal: bool = False,
                cache: Any = None) -> Tensor:  # fmt: skip
        """x: (batch, queries, width). source: (batch, keys, width). mask: true where a query may look, of a shape that
        broadcasts to (batch, heads, queries, keys). Returns (batch, queries, width)."""
        query = self._split(self.query(x))
        if self.cross and cache is not None and cache.is_updated.get(self.layer):
            source_cache = cache.cross_attention_cache.layers[self.layer]
            key, value = source_cache.keys, source_cache.values
        else:
            key, value = self._split(self.key(source)), self._split(self.value(source))
            if cache is not None:
                layer_cache = (
                    cache.cross_attention_cache if self.cross else getattr(cache, "self_attention_cache", cache)
                )
                key, value = layer_cache.update(key, value, self.layer)
                if self.cross:
                    cache.is_updated[self.layer] = True
        output = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        return self.out(output.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return self.down(nn.functional.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if `cross`, and an MLP, each with a layer norm in front and a residual."""

    def __init__(self, config: Any, layer: int = 0, cross: bool = False):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = nn.LayerNorm(width, eps)
        self.attention = Attention(width, config.num_attention_heads, layer)
        if cross:
            self.cross_norm = nn.LayerNorm(width, eps)
            self.cross_attention = Attention(width, config.num_attention_heads, layer, cross=True)
        self.mlp_norm = nn.LayerNorm(width, eps)
        self.mlp = MLP(width, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False, cache: Any = None,
                query: Tensor | None = None, encoded: Tensor | None = None,
                encoded_mask: Tensor | None = None) -> Tensor:  # fmt: skip
        """(batch, tokens, width) -> the same shape.

        query: queries of the self-attention, (batch, tokens, width), in place of the tokens themselves.
        encoded: hidden states of an encoder, (batch, source, width), with their mask.
        """
        norm = self.attention_norm(x)
        x = x + self.dropout(self.attention(norm if query is None else query, norm, mask, causal, cache))
        if encoded is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), encoded, encoded_mask, cache=cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def look_back(mask: Tensor | None, queries: int, keys: int, device: Any) -> tuple[Tensor | None, bool]:
    """(mask, causal) of queries that may look at keys up to their own position, for `Attention`.

    given: None, an attention mask (batch, keys) that is 0 at padding, or a bool mask (batch, 1, queries, keys), which
        is returned as it is. Padding may look at itself, so that no query looks at nothing.
    """
    if mask is not None and mask.dim() == 4:
        return mask, False
    if mask is None and (queries == keys or queries == 1):
        return None, queries > 1
    at = torch.arange(keys - queries, keys, device=device)[:, None]
    place = torch.arange(keys, device=device)
    seen = place <= at
    if mask is None:
        return seen[None, None], False
    return seen & (mask[:, None, None, :].bool() | (place == at)), False


def look_around(mask: Tensor | None) -> Tensor | None:
    """The mask of queries that may look at all keys that are not padding. given: None, or (batch, keys), or 4-d."""
    return mask if mask is None or mask.dim() == 4 else mask[:, None, None, :].bool()


def place_of(tokens: Tensor, cache: Any, positions: Tensor | None = None) -> Tensor:
    """Positions of tokens (batch, new): `given`, or those after what the cache holds, (1, new) int64."""
    if positions is not None:
        return positions
    begin = 0 if cache is None else cache.get_seq_length()
    return torch.arange(begin, begin + tokens.shape[1], device=tokens.device)[None]


class ForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model with the output layer tied to the embedding `model.tokens`. A subclass sets `model`."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.tokens.weight"}  # noqa: RUF012
    model: Any

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = self.make(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make(self, config: Any) -> nn.Module:
        """The model below the output layer."""
        raise NotImplementedError(type(self).__name__)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                labels: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int = 0,
                **kwargs: Any) -> CausalLMOutputWithPast:  # fmt: skip
        """input_ids, labels: (batch, tokens) int64; a label is compared with the logits of the position before.

        attention_mask: (batch, tokens), 0 at padding, or a bool mask (batch, 1, queries, keys).
        logits_to_keep: number of last positions whose logits are computed; 0: all.
        """
        from transformers import DynamicCache

        cache = kwargs.pop(CACHE, None)
        if use_cache and cache is None and labels is None:
            cache = DynamicCache()
        hidden = self.model(input_ids, attention_mask, position_ids, cache)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        cache_output: Any = {CACHE: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **cache_output)
