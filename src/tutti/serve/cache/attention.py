"""Attention over a paged KV cache, in the place of a model's own attention.

Models of `transformers` call an attention function by the name in their config. While the engine traces a step, that
name is `tutti_paged`: the function writes keys and values into the cache and attends to it. The model's code and its
config are as before afterwards, so a served model can be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import tutti.nn.attention.paged_write
import tutti.nn.attention.sequence_attention  # noqa: F401  (registers the operators)
from tutti.nn.attention.paged_attention import row_size
from tutti.serve.cache.families import own_forwards
from tutti.serve.cache.rotary import by_span
from tutti.serve.values import Model

NAME = "tutti_paged"
CacheDtype = Literal["", "int8", "int4"]  # "": that of the model
ops = torch.ops.tutti
REFUSALS = {  # why a call of the attention interface cannot be paged
    "place": "has no layer_idx, by which the engine finds its cache",
    "mask": "adds a mask of its own to attention, which the engine cannot page",
    "later": "sees later tokens, which the engine cannot page",
    "bias": "adds a bias of its own to attention, which the engine cannot page",
}


@dataclass(frozen=True)
class Layer:
    """The cache of an attention call: key heads, the widths of keys and values, and how far it sees (0: all).

    calls: number of attention calls of the same layer of the model. Each has a cache of its own.
    """

    heads: int
    width: int
    value_width: int
    window: int = 0
    calls: int = 1


@dataclass
class Cache:
    """Keys and values of each attention call: (slots, heads, width). A block is a run of slots. calls: number of calls
    of a layer."""

    keys: list[Tensor]
    values: list[Tensor]
    calls: int = 1


@dataclass(frozen=True)
class PagedStep:
    """Where the tokens of a step are, as arguments of `tutti::paged_attention` and `tutti::paged_write`.

    source_tables, source_lengths: where the keys and values of sources are, which a decoder attends to, too.
    spans: span of each token (tokens,), for rotary embeddings that depend on the length of a sequence (`rotary`).
    """

    slots: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    block: int
    source_tables: Tensor | None = None
    source_lengths: Tensor | None = None
    spans: Tensor | None = None


Place = tuple[int, int]  # a layer, and which of its attention calls


class Attention:
    """What takes the place of attention: query (tokens, heads, width), key and value (tokens, key heads, width) ->
    (tokens, heads, value width).

    bias: bias by distance (heads, distances) of the last layer that has one; the layers after it share it. counts:
    number of calls of each layer so far. positions: positions of the tokens (tokens,). reach: upper bound of the
    length of the longest sequence.
    """

    bias: Tensor | None = None
    positions: Tensor | None = None
    reach = 1

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def place(self, layer: int) -> Place:
        """The place of the next call of a layer."""
        self.counts[layer] += 1
        return layer, self.counts[layer] - 1

    def __call__(self, place: Place, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict) -> Tensor:
        """Attention to the tokens of the same sequence."""
        raise NotImplementedError

    def cross(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attention to the source."""
        raise NotImplementedError


class _Paged(Attention):
    """Attention of a step over a cache."""

    def __init__(self, cache: Cache, step: PagedStep):
        super().__init__()
        self.cache, self.step, self.reach = cache, step, step.tables.shape[1] * step.block

    def __call__(self, place: Place, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict) -> Tensor:
        keys, values, step = self.cache.keys, self.cache.values, self.step
        layer = place[0] * self.cache.calls + place[1]
        keys[layer] = ops.paged_write(keys[layer], key, step.slots)
        values[layer] = ops.paged_write(values[layer], value, step.slots)
        return ops.paged_attention(
            query, keys[layer], values[layer], step.tables, step.starts, step.lengths,
            block=step.block, scale=scale, **options,
        )  # fmt: skip

    def cross(self, layer: int, query: Tensor, scale: float) -> Tensor:
        step = self.step
        return ops.paged_attention(
            query, self.cache.keys[layer], self.cache.values[layer], step.source_tables, step.starts,
            step.source_lengths, block=step.block, scale=scale, causal=False,
        )  # fmt: skip


class Sequences(Attention):
    """Attention of whole sequences, t tokens each, one behind the other, with the bits of a step of the engine."""

    def __init__(self, t: int):
        super().__init__()
        self.reach = t

    def __call__(self, place: Place, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict) -> Tensor:
        rows = (x.unflatten(0, (-1, self.reach)) for x in (query, key, value))
        return ops.sequence_attention(*rows, scale=scale, **options).flatten(0, 1)


class Probe(Attention):
    """Notes what each call caches. Its results are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[Place, Layer] = {}

    def __call__(self, place: Place, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict) -> Tensor:
        self.layers[place] = Layer(key.shape[1], key.shape[2], value.shape[2], options["window"])
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def cross(self, layer: int, query: Tensor, scale: float) -> Tensor:
        return query.new_zeros(*query.shape[:2], self.layers[layer, 0].value_width)


_current: ContextVar[Attention] = ContextVar("attention")


def current() -> Attention | None:
    """The attention that a model calls here, within `calling`."""
    return _current.get(None)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, by_distance: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What models call: query (1, heads, tokens, width), key and value (1, key heads, tokens, width)."""
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{type(module).__name__} {REFUSALS['place']}")
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} {REFUSALS['mask']}")
    current, scale = _current.get(), scaling or query.shape[-1] ** -0.5
    query = query[0].transpose(0, 1)
    if key.shape[2] == 0:
        return current.cross(int(layer), query, scale)[None], None
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} {REFUSALS['later']}")
    bias = by_distance if position_bias is None else _by_distance(module, current)
    options = {"window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux, "bias": bias}
    return current(current.place(int(layer)), query, key[0].transpose(0, 1), value[0].transpose(0, 1), scale, options)[
        None
    ], None


def _by_distance(module: Model, current: Attention) -> Tensor:
    """The relative position bias of a layer (heads, distances): its own, or that of a layer before."""
    if getattr(module, "has_relative_attention_bias", False):
        n = module.relative_attention_max_distance + 1
        current.bias = module.compute_bias(1, n, past_seen_tokens=n - 1)[0, :, 0].flip(-1)
    if current.bias is None:
        raise ValueError(f"{type(module).__name__} {REFUSALS['bias']}")
    return current.bias


@contextmanager
def calling(model: nn.Module, attention: Attention) -> Iterator[None]:
    """Make a model call this attention, within the block."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    configs = {id(x): x for m in model.modules() if (x := getattr(m, "config", None)) is not None}
    before = [(x, x._attn_implementation) for x in configs.values() if hasattr(x, "_attn_implementation")]
    own = [(x, x.__dict__.get("forward"), f) for x, f in
           own_forwards(model, _attention, lambda: _positions(attention), attention.reach)]  # fmt: skip
    token = _current.set(attention)
    try:
        for config, _ in before:
            config._attn_implementation = "eager" if own else NAME  # what else reads it makes a mask, which is not used
        for module, _, forward in own:
            module.forward = forward
        yield
    finally:
        for module, forward, _ in own:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward
        for config, name in before:
            config._attn_implementation = name
        _current.reset(token)


def _positions(attention: Attention) -> Tensor:
    assert attention.positions is not None
    return attention.positions


@contextmanager
def paging(model: nn.Module, cache: Cache, step: PagedStep) -> Iterator[None]:
    """Within the block, a model's attention reads and writes the cache."""
    with by_span(model, step.spans), calling(model, _Paged(cache, step)):
        yield


def empty_cache(layers: Sequence[Layer], slots: int, dtype: torch.dtype, device: torch.device | str) -> Cache:
    """A cache of so many slots. With int8, or uint8 for int4, rows are rounded as `tutti::paged_write` does."""

    def zeros(heads: int, width: int) -> Tensor:
        return torch.zeros(slots, heads, row_size(width, dtype), dtype=dtype, device=device)

    keys, values = [zeros(x.heads, x.width) for x in layers], [zeros(x.heads, x.value_width) for x in layers]
    return Cache(keys, values, layers[0].calls)


def slot_bytes(layers: Sequence[Layer], dtype: torch.dtype) -> int:
    """Bytes of the cache for a token."""
    each = [x.heads * (row_size(x.width, dtype) + row_size(x.value_width, dtype)) for x in layers]
    return sum(each) * dtype.itemsize
