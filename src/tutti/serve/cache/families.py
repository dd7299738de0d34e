"""Attention of families that do not call the attention interface of transformers: Bloom, Falcon and MPT.

Each function takes the place of a module's `forward` while a step is traced. It makes queries, keys and values by the
module's own parts, and calls the interface. ALiBi (Press et al., "Train short, test long", 2022) adds a multiple of the
position of a key to the logits, or equally of its distance, since a constant for all keys of a query changes nothing.

Bloom and Falcon round that number to the model's dtype, by position. It is a part of the keys here: the logits are
scale (q . k + q' . k') with k' = (b, b) and q' = (high, low), whose sum is the factor of b to more digits than the
dtype has. MPT adds float32 numbers by distance, as the bias of the kernel does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutti.serve.values import Model

Attend = Callable[..., tuple[Tensor, None]]


def own_forwards(
    model: nn.Module, attend: Attend, positions: Callable[[], Tensor], reach: int
) -> Iterator[tuple[nn.Module, Callable]]:
    """Modules with attention of their own, and what replaces their `forward`.

    attend: the attention interface. positions: function that returns the positions (tokens,) of the tokens of the call.
    reach: length of the longest sequence.
    """
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in FORWARDS and kind.__module__.startswith("transformers."):
                yield module, partial(FORWARDS[kind.__name__], module, attend, positions, reach)
                break


def _own(module: nn.Module) -> Model:
    """The Python module that defines a module of a family."""
    return sys.modules[type(module).__module__]


def _with_alibi(query: Tensor, key: Tensor, alibi: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, heads, tokens, width + 2) whose products contain factor times alibi (tokens, heads)."""
    high = torch.tensor(factor, dtype=torch.float64).to(query.dtype)
    low = torch.tensor(factor - float(high), dtype=torch.float64).to(query.dtype)
    factors = torch.stack([high, low]).to(query.device).expand(*query.shape[:-1], 2)
    numbers = alibi.to(key.dtype).T[None, :, :, None].expand(*query.shape[:-1], 2)
    return torch.cat([query, factors], -1), torch.cat([key.expand(*query.shape[:-1], -1), numbers], -1)


def _bloom(
    self: Model, attend: Attend, positions: Callable[[], Tensor], reach: int, hidden_states: Tensor, residual: Tensor,
    **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    slopes = _own(self)._get_alibi_slopes(self.num_heads, hidden_states.device)
    alibi = (slopes * positions()[:, None]).to(hidden_states.dtype)
    query, key = _with_alibi(query, key, alibi, 1 / self.inv_norm_factor)
    out, _none = attend(self, query, key, value, scaling=self.inv_norm_factor)
    return self.dense(out.flatten(2)) + residual, None


def _falcon(
    self: Model, attend: Attend, positions: Callable[[], Tensor], reach: int, hidden_states: Tensor,
    alibi: Tensor | None = None, position_embeddings: Any = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if alibi is None:
        query, key = _own(self).apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        two = torch.ones(1, 2, dtype=torch.int64, device=hidden_states.device)
        slopes = _own(self).build_alibi_tensor(two, self.num_heads, torch.bfloat16)[:, 0, 1]
        rounded = positions()[:, None].to(slopes.dtype)  # before the product, which for one token would not round them
        query, key = _with_alibi(query, key, slopes * rounded, 1.0)
        value = value.expand(*query.shape[:-1], -1)
    out, _none = attend(self, query, key, value, scaling=self.head_dim**-0.5)
    return self.dense(out.flatten(2)), None


def _mpt(
    self: Model, attend: Attend, positions: Callable[[], Tensor], reach: int, hidden_states: Tensor, **_: object
) -> tuple[Tensor, None]:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    heads = (x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    bias = _own(self).build_mpt_alibi_tensor(self.n_heads, reach, device=hidden_states.device)[:, 0].flip(-1)
    out, _none = attend(self, *heads, scaling=self.softmax_scale, by_distance=bias)
    return self.out_proj(out.flatten(2)), None


FORWARDS: dict[str, Callable] = {"BloomAttention": _bloom, "FalconAttention": _falcon, "MptAttention": _mpt}
