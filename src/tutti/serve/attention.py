"""Attention over a paged KV cache, in the place of a model's own attention.

Models of `transformers` call an attention function by the name in their config. While the engine traces a step, that
name is `tutti_paged`: the function writes keys and values into the cache and attends to it. The model's code and its
config are as before afterwards, so a served model can be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import tutti.nn.paged_attention
import tutti.nn.paged_write  # noqa: F401  (registers the operators)

NAME = "tutti_paged"
KINDS = ("full_attention", "sliding_attention")  # layer types of transformers that are supported
ops = torch.ops.tutti


@dataclass(frozen=True)
class Layer:
    """The cache of an attention layer: key heads, the widths of keys and values, and how far it sees (0: all)."""

    heads: int
    width: int
    value_width: int
    window: int = 0


@dataclass
class Cache:
    """Keys and values of each layer: (slots, heads, width). A block is a run of slots."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class Step:
    """Where the tokens of a step are, as arguments of `tutti::paged_attention` and `tutti::paged_write`."""

    slots: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    block: int


class _Paged:
    """Attention of a step over a cache."""

    def __init__(self, cache: Cache, step: Step):
        self.cache, self.step = cache, step

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict) -> Tensor:
        """query (tokens, heads, width), key and value (tokens, key heads, width) -> (tokens, heads, value width)"""
        keys, values, step = self.cache.keys, self.cache.values, self.step
        keys[layer] = ops.paged_write(keys[layer], key, step.slots)
        values[layer] = ops.paged_write(values[layer], value, step.slots)
        return ops.paged_attention(
            query, keys[layer], values[layer], step.tables, step.starts, step.lengths,
            block=step.block, scale=scale, **options,
        )  # fmt: skip


@dataclass
class _Probe:
    """Notes what each layer caches."""

    layers: dict[int, Layer] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict) -> Tensor:
        self.layers[layer] = Layer(key.shape[1], key.shape[2], value.shape[2], options["window"])
        return query.new_zeros(*query.shape[:2], value.shape[2])


_current: ContextVar[Callable[[int, Tensor, Tensor, Tensor, float, dict[str, Any]], Tensor]] = ContextVar("attention")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What models call: query (1, heads, tokens, width), key and value (1, key heads, tokens, width)."""
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx, by which the engine finds its cache")
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} adds a mask of its own to attention, which the engine cannot page")
    options: dict[str, Any] = {"window": sliding_window or 0, "softcap": softcap or 0.0, "sinks": s_aux}
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    made = _current.get()(int(layer), query, key, value, scaling or query.shape[-1] ** -0.5, options)
    return made[None], None


@contextmanager
def _calling(model: nn.Module, attention: _Paged | _Probe) -> Iterator[None]:
    """Make a model call this attention, within the block."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    configs = {id(x): x for m in model.modules() if (x := getattr(m, "config", None)) is not None}
    before = [(x, x._attn_implementation) for x in configs.values() if hasattr(x, "_attn_implementation")]
    token = _current.set(attention)
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
        _current.reset(token)


def paging(model: nn.Module, cache: Cache, step: Step):
    """Within the block, a model's attention reads and writes the cache."""
    return _calling(model, _Paged(cache, step))


def layers_of(model: nn.Module) -> list[Layer]:
    """What each attention layer of a causal language model caches. Raises ValueError for models that cannot be paged.

    The model runs on one token.
    """
    probe, device = _Probe(), next(model.parameters()).device
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        with torch.no_grad(), _calling(model, probe):
            model(input_ids=token, position_ids=token, use_cache=False)
    except (TypeError, AttributeError, IndexError) as error:
        raise _unpaged(model, f"it computes a mask of its own ({error})") from error
    if sorted(probe.layers) != list(range(len(probe.layers))) or not probe.layers:
        raise _unpaged(model, f"layers {sorted(probe.layers)} call the attention interface of transformers, not all")
    config: Any = model.config
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    for i, kind in enumerate(kinds):
        if kind not in KINDS or (kind == "sliding_attention") > bool(probe.layers[i].window):
            raise _unpaged(model, f"layer {i} is {kind}")
    return [probe.layers[i] for i in range(len(probe.layers))]


def _unpaged(model: nn.Module, why: str) -> ValueError:
    return ValueError(f"the attention of {type(model).__name__} cannot be paged: {why}; use model.generate")


def empty_cache(layers: Sequence[Layer], slots: int, dtype: torch.dtype, device: torch.device | str) -> Cache:
    """A cache of so many slots."""

    def zeros(heads: int, width: int) -> Tensor:
        return torch.zeros(slots, heads, width, dtype=dtype, device=device)

    return Cache([zeros(x.heads, x.width) for x in layers], [zeros(x.heads, x.value_width) for x in layers])


def slot_bytes(layers: Sequence[Layer], dtype: torch.dtype) -> int:
    """Bytes of the cache for a token."""
    return sum(x.heads * (x.width + x.value_width) for x in layers) * dtype.itemsize
