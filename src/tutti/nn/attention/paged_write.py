"""Write keys or values of new tokens into a paged cache.

    cache[slots[i]] = values[i],    where slots[i] >= 0

| operand | shape |
|---|---|
| cache | (slots, heads, width) |
| values | (tokens, heads, width) |
| slots | (tokens) int64; no two are equal, except negative ones, which are padding |

A cache of int8 for floating values, (slots, heads, width + 4), has the nearest int8 numbers of each row, and behind
them their scale as the bytes of a float32: the largest magnitude of the row is 127 scales.

A cache of int4 is of uint8, (slots, heads, width / 2 + 4 ceil(width / 64)). Numbers of a row are in groups of 64, or
fewer in the last, and each is least + scale q with q of 0 to 15. The first half of a group is the low halves of its
bytes. Behind all numbers are scale and least of each group as the bytes of two float16.

`tutti::paged_write` returns the new cache. Graphs contain it; where the cache is an input that the result replaces,
`tutti.lower.memory.inplace` makes it `tutti::paged_write_`, which writes in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.attention.paged_attention import DTYPES, GROUP, ROUNDED, kernels, row_size
from tutti.nn.rows import triton_kernels

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define("paged_write(Tensor cache, Tensor values, Tensor slots) -> Tensor")
_library.define("paged_write_(Tensor(a!) cache, Tensor values, Tensor slots) -> ()")


def rounded(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Rows (..., width) in int8, or with uint8 in int4, with their scales (..., `row_size(width)`)."""
    x = x.float()
    if dtype == torch.uint8:
        return _int4(x)
    most = x.abs().amax(-1, keepdim=True)
    q = (x * torch.where(most > 0, 127 / most, 0)).round().clamp(-127, 127).nan_to_num().to(torch.int8)
    return torch.cat([q, (most / 127).view(torch.int8)], -1)


def _int4(x: Tensor) -> Tensor:
    most, codes, of_groups = torch.finfo(torch.float16).max, [], []
    for part in x.split(GROUP, -1):
        low = part.amin(-1, keepdim=True).clamp(-most, most).half()
        scale = ((part.amax(-1, keepdim=True) - low.float()) / 15).clamp(0, most).half()
        inverse = torch.where(scale > 0, 1 / scale.float(), 0)
        q = ((part - low.float()) * inverse).nan_to_num().round().clamp(0, 15).to(torch.uint8)
        first, second = q.chunk(2, -1)
        codes.append(first | second << 4)
        of_groups += [scale, low]
    return torch.cat([*codes, torch.cat(of_groups, -1).view(torch.uint8)], -1)


def reference(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """The operator in place, in plain PyTorch, without waiting for a GPU. Padding repeats another row."""
    if not len(slots):
        return
    if _rounds(cache, values):
        values = rounded(values, cache.dtype)
    valid = slots >= 0
    other = valid.int().argmax()
    row = torch.where(valid[other], values[other].to(cache.dtype), cache[0])
    rows = torch.where(valid.view(-1, 1, 1), values.to(cache.dtype), row)
    cache.index_copy_(0, torch.where(valid, slots, slots[other].clamp(min=0)), rows)


def _rounds(cache: Any, values: Any) -> bool:
    """Whether floating numbers are written into a cache of int8 or int4."""
    return cache.dtype in ROUNDED and values.dtype.is_floating_point


def _check(cache: Any, values: Any, slots: Any) -> None:
    size = row_size(values.shape[2], cache.dtype) if _rounds(cache, values) else values.shape[2]
    fits = tuple(cache.shape[1:]) == (values.shape[1], size)
    if not fits or slots.shape != values.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(
            f"paged_write: values {tuple(values.shape)} at slots {tuple(slots.shape)} {slots.dtype} into a cache of "
            f"{tuple(cache.shape)} {cache.dtype}: expected (tokens, heads, width), (tokens) int64 and (slots, heads, "
            "width), or of int8 or int4 (slots, heads, row_size(width))"
        )


def compiled(cache: Any, values: Any, slots: Any) -> tuple | None:
    """The compiled operator and its arguments for tensors, or Specs; None if they do not fit. A slot of the cache must
    be contiguous."""
    _check(cache, values, slots)
    fits = cache.dtype == values.dtype or (_rounds(cache, values) and values.dtype in DTYPES)
    return (kernels().paged_write.default, (cache, values, slots)) if fits else None


def cpu(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """The operator in place on a CPU."""
    call = compiled(cache, values, slots)
    if call and cache.stride()[1:] == (cache.shape[2], 1):
        op, args = call
        op(*args)
    else:
        reference(cache, values, slots)


def _cuda(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    _check(cache, values, slots)
    kernels = triton_kernels(cache, values) if cache.stride(2) == 1 and not _rounds(cache, values) else None
    (kernels.write if kernels else reference)(cache, values, slots)


def _functional(write):
    def functional(cache: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        new = cache.clone()
        write(new, values, slots)
        return new

    return functional


for _device, _run in (("CPU", cpu), ("CUDA", _cuda)):
    _library.impl("paged_write_", _run, _device)
    _library.impl("paged_write", _functional(_run), _device)
torch.library.register_fake("tutti::paged_write", lambda cache, values, slots: torch.empty_like(cache))
torch.library.register_fake("tutti::paged_write_", lambda cache, values, slots: None)

# functional operator -> the operator that writes into its first operand
IN_PLACE = {torch.ops.tutti.paged_write.default: torch.ops.tutti.paged_write_.default}
