"""Draw a token from each row of logits.

    p = softmax(logits / temperature)

p is reduced to the top_k most probable tokens, then to the fewest of these, at least one, whose share of the
probability is at least top_p, then to those of at least min_p times the greatest probability. The token is the first,
in the order of the vocabulary, at which the running sum of p exceeds `uniform` times the sum of all that is left. Of
equally probable tokens, the first in the vocabulary is kept first.

| operand | shape | |
|---|---|---|
| logits | (rows, vocabulary) | floating; minus infinity is never drawn, and infinity always |
| temperature | (rows) | 0: the most probable token |
| top_k | (rows) int64 | 0: all |
| top_p, min_p | (rows) | 1 and 0: all |
| uniform | (rows) | numbers from 0 to below 1 |
| result | (rows) int64 | -1 for a row with a NaN, or without a logit above minus infinity |

On a CPU by `sample.cpp`, which is compiled at first use and does not sort the vocabulary.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tutti import compat
from tutti.nn.compiled import with_headers

SOURCE = Path(__file__).with_suffix(".cpp")

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor"
)


def reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """The operator in plain PyTorch, in float64."""
    _check(logits, temperature, top_k, top_p, min_p, uniform)
    temperature, top_p, min_p, uniform = (x.double().unsqueeze(1) for x in (temperature, top_p, min_p, uniform))
    greedy = temperature == 0
    logits = logits.double()
    greatest, first = logits.max(1)
    greedy |= greatest.isposinf().unsqueeze(1)
    p = (logits / torch.where(greedy, 1, temperature)).softmax(1)
    ordered, order = p.sort(stable=True, dim=1, descending=True)
    rank = torch.arange(p.shape[1], device=p.device)
    most = torch.where(top_k > 0, top_k, p.shape[1]).unsqueeze(1)
    ordered = ordered * (rank < most)
    before = ordered.cumsum(1) - ordered
    in_nucleus = (top_p >= 1) | (rank == 0) | (before < top_p * ordered.sum(1, keepdim=True))
    ordered = ordered * in_nucleus * (ordered >= min_p * ordered[:, :1])
    p = torch.zeros_like(p).scatter(1, order, ordered)
    running = p.cumsum(1)
    drawn = (running > uniform * running[:, -1:]) & (p > 0)
    chosen = torch.where(greedy.squeeze(1), first, drawn.int().argmax(1))
    return torch.where(greatest > -torch.inf, chosen, -1)


def _check(logits: Tensor, *each: Tensor) -> None:
    if logits.ndim != 2 or not logits.shape[1] or any(x.shape != logits.shape[:1] for x in each):
        raise ValueError(
            f"sample: logits {tuple(logits.shape)} with {', '.join(str(tuple(x.shape)) for x in each)}: expected "
            "(rows, vocabulary) with (rows) of temperature, top_k, top_p, min_p and uniform"
        )


@cache
def _kernel():
    library = compat.compile_cpp(with_headers(SOURCE))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.sample.argtypes = [pointer, *[integer] * 3, *[pointer] * 6]
    library.sample.restype = None
    return library.sample


def _cpu(logits, temperature, top_k, top_p, min_p, uniform):
    _check(logits, temperature, top_k, top_p, min_p, uniform)
    logits = logits.float()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    each = [x.to(dtype).contiguous() for x, dtype in (
        (temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float32), (min_p, torch.float32),
        (uniform, torch.float32))]  # fmt: skip
    out = top_k.new_empty(len(logits), dtype=torch.int64)
    pointers = [x.data_ptr() for x in (*each, out)]
    _kernel()(logits.data_ptr(), *logits.shape, logits.stride(0), *pointers)
    return out


_library.impl("sample", _cpu, "CPU")
_library.impl("sample", reference, "CUDA")
torch.library.register_fake(
    "tutti::sample", lambda logits, *each: logits.new_empty(logits.shape[:1], dtype=torch.int64)
)
