"""Rotary embeddings whose frequencies depend on the length of a sequence: `longrope` and `dynamic` of transformers.

transformers takes the length from the largest position of a call. A step of the engine has tokens of many sequences, so
each token brings the length that it would have in the model's own `generate`, alone: its span.

- Models that drop their cache in `generate` when a sequence outgrows its first factors (Phi-3): all tokens of a
  sequence have its length. The engine computes such a sequence again when it grows beyond the limit.
- Others keep keys with the factors of the call that computed them: the span of a token is the length of the prompt, or
  the token's own position plus one if that is more.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tutti.serve.values import Model

if TYPE_CHECKING:
    from tutti.serve.engine.sequence import TokenSequence

LONG = b"long"


@dataclass(frozen=True)
class Scaling:
    """How frequencies depend on a sequence.

    limit: the longest sequence with the first frequencies. dynamic: whether each greater length has its own, otherwise
    all have the same. recomputed: whether all tokens of a sequence have the frequencies of its length.
    """

    limit: int
    dynamic: bool
    recomputed: bool

    def factors(self, prompt: int, tokens: int) -> bytes:
        """What distinguishes cached keys of a sequence with so many tokens from those of others with equal tokens."""
        if (tokens if self.recomputed else prompt) <= self.limit:
            return b""
        return b"%d" % prompt if self.dynamic else LONG

    def spans(self, sequence: TokenSequence, start: int, end: int) -> np.ndarray:
        """The spans (end - start,) of tokens of a sequence."""
        if self.recomputed:
            return np.full(end - start, self.limit + bool(sequence.factors))
        return np.maximum(sequence.prompt, np.arange(start + 1, end + 1))


def scaling_of(model: Model) -> Scaling | None:
    """How the frequencies of a model depend on the length of a sequence; None if they do not.

    Raises ValueError for a model whose frequencies do not follow a length by token.
    """
    scaled = [(module, kind) for module in _dependent(model) for kind in _kinds(module)]
    if not scaled:
        return None
    limits = {_limit(module, kind) for module, kind in scaled}
    dynamic = {"dynamic" in _name(module, kind) for module, kind in scaled}
    if len(limits) > 1 or len(dynamic) > 1:
        raise ValueError(
            f"{type(model).__name__} has rotary embeddings of several scalings that depend on the length of a "
            f"sequence, with the limits {sorted(limits)}; the engine serves one: use model.generate"
        )
    scaling = Scaling(limits.pop(), dynamic.pop(), _drops_cache(model, _limit(*scaled[0])))
    for module, kind in scaled:
        _check(module, kind, scaling.limit)
    return scaling


@contextmanager
def by_span(model: nn.Module, spans: Tensor | None) -> Iterator[None]:
    """Within the block, each token's frequencies are those of its span (tokens,)."""
    if spans is None:
        yield
        return
    modules = _dependent(model)
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module in modules:
            module.forward = partial(_rotated, module, spans)
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            del module.__dict__["forward"]
            if own is not None:
                module.forward = own


@contextmanager
def pristine(model: nn.Module) -> Iterator[None]:
    """Within the block, rotary embeddings begin without the lengths of earlier calls; they are as before afterwards."""
    modules = _dependent(model)
    before = [({**x.__dict__}, {**x._buffers}, [b.clone() for b in x._buffers.values()]) for x in modules]
    for module in modules:
        for kind in _kinds(module):
            prefix = "" if kind is None else f"{kind}_"
            module._buffers[f"{prefix}inv_freq"] = getattr(module, f"{prefix}original_inv_freq").clone()
            if hasattr(module, f"{prefix}max_seq_len_cached"):
                setattr(module, f"{prefix}max_seq_len_cached", _limit(module, kind))
    try:
        yield
    finally:
        for module, (attributes, buffers, values) in zip(modules, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for buffer, value in zip(buffers.values(), values, strict=True):
                buffer.copy_(value)


def _dependent(model: nn.Module) -> list[Model]:
    """The rotary embeddings whose frequencies depend on a length."""
    return [x for x in model.modules() if hasattr(type(x).forward, "__wrapped__") and _kinds(x)]


def _kinds(module: Model) -> list[str | None]:
    """The layer types for which frequencies depend on a length; None stands for all layers."""
    name = getattr(module, "rope_type", None)
    names: dict[str | None, object] = dict(name) if isinstance(name, dict) else {None: name}
    return [kind for kind, x in names.items() if isinstance(x, str) and ("dynamic" in x or x == "longrope")]


def _name(module: Model, kind: str | None) -> str:
    return module.rope_type if kind is None else module.rope_type[kind]


def _limit(module: Model, kind: str | None) -> int:
    if "dynamic" in _name(module, kind):
        return int(module.config.max_position_embeddings)
    parameters = module.config.rope_parameters
    return int((parameters if kind is None else parameters[kind])["original_max_position_embeddings"])


def _rotated(module: Model, spans: Tensor, x: Tensor, position_ids: Any = None, layer_type: str | None = None) -> Any:
    """The module's result, by the span of each token."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    more = {} if layer_type is None else {"layer_type": layer_type}
    forward = type(module).forward
    if layer_type not in _kinds(module):
        return forward(module, x, position_ids, **more)
    name, limit = _name(module, layer_type), _limit(module, layer_type)
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = getattr(module, f"{prefix}original_inv_freq")
    init = partial(ROPE_INIT_FUNCTIONS[name], module.config, spans.device, **more)
    spans = spans[:, None]

    def run(frequencies: Tensor, positions: Tensor) -> Any:
        with _instead(module, f"{prefix}inv_freq", frequencies):
            return forward.__wrapped__(module, x, positions, **more)

    if "dynamic" in name:
        grown, _ = init(seq_len=spans)
        return run(torch.where(spans > limit, grown, original), position_ids)
    # Positions on one side of the limit only, for modules that look at the largest.
    short = run(original, position_ids.clamp(max=limit - 1))
    beyond = position_ids.new_full((*position_ids.shape[:-1], 1), limit)
    long = run(init(seq_len=limit + 1)[0], torch.cat([position_ids, beyond], -1))
    return pytree.tree_map(lambda a, b: torch.where(spans > limit, a[..., :-1, :], b), long, short)


@contextmanager
def _instead(module: Model, name: str, value: Tensor) -> Iterator[None]:
    """Within the block, a buffer has another value."""
    before = module._buffers[name]
    module._buffers[name] = value
    try:
        yield
    finally:
        module._buffers[name] = before


def _drops_cache(model: Model, limit: int) -> bool:
    """Whether `generate` computes all tokens again when a sequence grows beyond the limit."""
    from transformers import DynamicCache, GenerationMixin

    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is vars(GenerationMixin)["prepare_inputs_for_generation"]:
        return False
    cache, nothing = DynamicCache(), torch.zeros(1, 1, limit, 1)
    cache.update(nothing, nothing, 0)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.ones(1, limit + 1, dtype=torch.int64)
    return prepare(ids, attention_mask=torch.ones_like(ids), **{name: cache}).get(name) is None


def _check(module: Model, kind: str | None, limit: int) -> None:
    """Raise ValueError unless results by span are those of the module for a sequence of that length."""
    more = {} if kind is None else {"layer_type": kind}
    for length in (limit, limit + 1, 3 * limit + 1):
        device = getattr(module, "inv_freq" if kind is None else f"{kind}_inv_freq").device
        positions = torch.tensor([[0, length // 2, length - 1]], device=device)
        x, spans = torch.zeros(1, 3, 1, device=device), torch.full((3,), length, device=device)
        with torch.no_grad():
            want = copy.deepcopy(module)(x, positions, **more)
            try:
                got = _rotated(module, spans, x, positions, **more)
                same = _alike(pytree.tree_leaves(got), pytree.tree_leaves(want))
            except (RuntimeError, TypeError, AttributeError, KeyError):
                same = False
        if not same:
            raise ValueError(f"{type(module).__name__} does not follow the length of each sequence in a batch as its "
                             f"{_name(module, kind)} scaling should; use model.generate")  # fmt: skip


def _alike(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return len(got) == len(want) and all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True)
    )
