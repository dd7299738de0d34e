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
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tutti.nn.paged_write
import tutti.nn.sequence_attention  # noqa: F401  (registers the operators)
from tutti.nn.paged_attention import row_size
from tutti.serve.families import own_forwards
from tutti.serve.rotary import by_span

NAME = "tutti_paged"
CacheDtype = Literal["", "int8", "int4"]  # "": that of the model
KINDS = ("full_attention", "sliding_attention")  # layer types of transformers that are supported
STATES = ("mamba", "linear", "hybrid", "conv", "recurrent", "delta")  # parts of the names of others
ops = torch.ops.tutti
REFUSALS = {  # why the attention of a model cannot be paged
    "mask": "it computes a mask of its own ({})",
    "state": "layer {} is {}, which keeps a state of each sequence besides keys and values",
    "none": "no layer calls the attention interface of transformers",
    "some": "layers {} call the attention interface of transformers, not all",
    "calls": "layers call attention {} times, not all equally often",
    "kind": "layer {} is {}",
}
CALLS = {  # the same of a call of the attention interface
    "place": "has no layer_idx, by which the engine finds its cache",
    "mask": "adds a mask of its own to attention, which the engine cannot page",
    "later": "sees later tokens, which the engine cannot page",
    "bias": "adds a bias of its own to attention, which the engine cannot page",
}


@dataclass(frozen=True)
class Layer:
    """The cache of an attention call: key heads, the widths of keys and values, and how far it sees (0: all).

    calls: of the same layer of the model. Each has a cache of its own.
    """

    heads: int
    width: int
    value_width: int
    window: int = 0
    calls: int = 1


@dataclass
class Cache:
    """Keys and values of each attention call: (slots, heads, width). A block is a run of slots. calls: of a layer."""

    keys: list[Tensor]
    values: list[Tensor]
    calls: int = 1


@dataclass(frozen=True)
class Step:
    """Where the tokens of a step are, as arguments of `tutti::paged_attention` and `tutti::paged_write`.

    source_tables, source_lengths: where the keys and values of sources are, which a decoder attends to, too.
    spans: of tokens, for rotary embeddings that depend on the length of a sequence (`rotary`).
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

    bias: by distance, of the last layer that has one; the layers after it share it. counts: calls of each layer so far.
    positions: of the tokens (tokens,). reach: the longest sequence.
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

    def __init__(self, cache: Cache, step: Step):
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


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, by_distance: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What models call: query (1, heads, tokens, width), key and value (1, key heads, tokens, width)."""
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{type(module).__name__} {CALLS['place']}")
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} {CALLS['mask']}")
    current, scale = _current.get(), scaling or query.shape[-1] ** -0.5
    query = query[0].transpose(0, 1)
    if key.shape[2] == 0:
        return current.cross(int(layer), query, scale)[None], None
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} {CALLS['later']}")
    bias = by_distance if position_bias is None else _by_distance(module, current)
    options = {"window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux, "bias": bias}
    return current(current.place(int(layer)), query, key[0].transpose(0, 1), value[0].transpose(0, 1), scale, options)[
        None
    ], None


def _by_distance(module: Any, current: Attention) -> Tensor:
    """The relative position bias of a layer (heads, distances): its own, or that of a layer before."""
    if getattr(module, "has_relative_attention_bias", False):
        n = module.relative_attention_max_distance + 1
        current.bias = module.compute_bias(1, n, past_seen_tokens=n - 1)[0, :, 0].flip(-1)
    if current.bias is None:
        raise ValueError(f"{type(module).__name__} {CALLS['bias']}")
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
def paging(model: nn.Module, cache: Cache, step: Step) -> Iterator[None]:
    """Within the block, a model's attention reads and writes the cache."""
    with by_span(model, step.spans), calling(model, _Paged(cache, step)):
        yield


def logits(model: Any, tokens: Tensor, positions: Tensor, rows: Tensor | None = None, **inputs: Any) -> Tensor:
    """The logits (rows, vocabulary) after tokens (tokens,) at these positions. inputs: others of the model.

    rows: the tokens whose logits are returned; by default all.
    """
    if model.config.is_encoder_decoder:
        from tutti.serve.cross import decoded

        made = decoded(model, tokens, positions).logits[0]
        return made if rows is None else made[rows]
    given = inputs or {"input_ids": tokens[None]}
    kept = {} if rows is None else {"logits_to_keep": rows}
    if (attention := _current.get(None)) is not None:
        attention.positions = positions
    return model(**given, position_ids=positions[None], use_cache=False, **kept).logits[0]


def sequence_logits(model: Any, ids: Tensor) -> Tensor:
    """The logits (rows, t, vocabulary) after each token of sequences ids (rows, t), padded at the end, without
    gradients. A Function of level O0 on a CPU gives them the bits of the engine's steps, if its plan splits the same
    sums; not for rotary embeddings that depend on the length of a sequence.

    Raises ValueError for attention that cannot be paged.
    """
    rows, t = ids.shape
    positions = torch.arange(t, device=ids.device).repeat(rows)
    with calling(model, Sequences(t)):
        return logits(model, ids.flatten(), positions).unflatten(0, (rows, t))


def layers_of(model: nn.Module) -> list[Layer]:
    """What each attention call of a model that generates caches. Raises ValueError for models that cannot be paged.

    The model runs on one token.
    """
    probe, device = Probe(), next(model.parameters()).device
    token = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        with torch.no_grad(), calling(model, probe):
            logits(model, token, token)
    except (TypeError, AttributeError, IndexError) as error:
        raise _unpaged(model, "mask", error) from error
    config: Any = model.config
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    for i, kind in enumerate(kinds):
        if any(x in kind for x in STATES):
            raise _unpaged(model, "state", i, kind)
    if not probe.layers:
        raise _unpaged(model, "none")
    calls = probe.counts[0]
    if sorted(probe.counts) != list(range(len(probe.counts))):
        raise _unpaged(model, "some", sorted(probe.counts))
    if set(probe.counts.values()) != {calls}:
        raise _unpaged(model, "calls", sorted(set(probe.counts.values())))
    for i, kind in enumerate(kinds):
        if kind not in KINDS or (kind == "sliding_attention") > bool(probe.layers[i, 0].window):
            raise _unpaged(model, "kind", i, kind)
    return [replace(probe.layers[place], calls=calls) for place in sorted(probe.layers)]


def _unpaged(model: nn.Module, why: str, *values: Any) -> ValueError:
    """why: a key of `REFUSALS`, whose text has a place for each of the values."""
    reason = REFUSALS[why].format(*values)
    return ValueError(f"the attention of {type(model).__name__} cannot be paged: {reason}; use model.generate")


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
