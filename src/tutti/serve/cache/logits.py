"""The logits of a model whose attention is replaced, and what its attention caches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tutti.serve.cache.attention import Layer, Probe, Sequences, calling, current
from tutti.serve.cache.cross import decoded
from tutti.serve.values import Model

KINDS = ("full_attention", "sliding_attention")  # layer types of transformers that are supported
STATES = ("mamba", "linear", "hybrid", "conv", "recurrent", "delta")  # parts of the names of others
REFUSALS = {  # why the attention of a model cannot be paged
    "mask": "it computes a mask of its own ({})",
    "state": "layer {} is {}, which keeps a state of each sequence besides keys and values",
    "none": "no layer calls the attention interface of transformers",
    "some": "layers {} call the attention interface of transformers, not all",
    "calls": "layers call attention {} times, not all equally often",
    "kind": "layer {} is {}",
}


def logits(model: Model, tokens: Tensor, positions: Tensor, rows: Tensor | None = None, **inputs: object) -> Tensor:
    """The logits (rows, vocabulary) after tokens (tokens,) at these positions. inputs: others of the model.

    rows: the tokens whose logits are returned; by default all.
    """
    if model.config.is_encoder_decoder:
        all_logits = decoded(model, tokens, positions).logits[0]
        return all_logits if rows is None else all_logits[rows]
    arguments = inputs or {"input_ids": tokens[None]}
    if rows is not None:
        arguments = {**arguments, "logits_to_keep": rows}
    if (attention := current()) is not None:
        attention.positions = positions
    return model(**arguments, position_ids=positions[None], use_cache=False).logits[0]


def sequence_logits(model: Model, ids: Tensor) -> Tensor:
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
    config: Model = model.config
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


def _unpaged(model: nn.Module, why: str, *values: object) -> ValueError:
    """why: a key of `REFUSALS`, whose text has a place for each of the values."""
    reason = REFUSALS[why].format(*values)
    return ValueError(f"the attention of {type(model).__name__} cannot be paged: {reason}; use model.generate")
