"""Log-probabilities with the bits that the engine reports.

The model runs as in a step of the engine: attention, linear layers, norms and rotary embeddings are those operators
whose bits do not depend on the other tokens of a batch (on a CPU). Under a plan that splits the same sums, a token has
one log-probability then, whether it was generated, one in a step, or is scored in a batch of padded sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.align.sequences import IGNORED, learned
from tutti.serve.cache.logits import sequence_logits
from tutti.serve.cache.rotary import scaling_of

OTHER_BITS = "quantize", "cache_dtype", "level"  # options of an engine whose numbers are others


def check_invariant(model: Any, engine: Mapping[str, Any]) -> None:
    """Raise ValueError for a model, or options of an engine, whose log-probabilities the trainer cannot reproduce."""
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ValueError(f"batch_invariant needs the kernels of a CPU, and the model is on {device}")
    if scaling_of(model) is not None:
        raise ValueError("batch_invariant with rotary embeddings that depend on the length of a sequence: a token of a "
                         "padded batch has other ones than in the engine")  # fmt: skip
    for name in OTHER_BITS:
        if engine.get(name) not in (None, "", "O0"):
            raise ValueError(f"batch_invariant with the engine's {name}={engine[name]!r}, which changes its bits")


def invariant_logprobs(model: Any, batch: Mapping[str, Tensor], temperature: float) -> Tensor:
    """As `sequences.model_logprobs`, at a temperature and without gradients, with the bits of the engine."""
    ahead = batch["labels"][:, 1:]
    logits = sequence_logits(model, batch["input_ids"])[:, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(2, ahead.clamp(min=0).unsqueeze(2)).squeeze(2)
    return logprobs * (ahead != IGNORED)


def check_bits(old: Tensor, sampled: Tensor, labels: Tensor, plans: Sequence[Any]) -> None:
    """Raise RuntimeError if log-probabilities (rows, t - 1) of the trainer and of the engine differ where there are
    labels. plans: plans of the two."""
    mask = learned(labels) > 0
    if torch.equal(old[mask], sampled[mask]):
        return
    different, largest = int((old[mask] != sampled[mask]).sum()), float((old[mask] - sampled[mask]).abs().max())
    raise RuntimeError(
        f"batch_invariant: {different} of {int(mask.sum())} log-probabilities of the engine differ from the trainer's, "
        f"by up to {largest:.1e}: plans {plans[0]!r} (trainer) and {plans[1]!r} (engine) divide sums otherwise; give "
        "engine= the trainer's plan and cluster"
    )
