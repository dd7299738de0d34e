"""Attention in bfloat16 on a CPU, faster than PyTorch's on processors with bfloat16 matrix instructions.

`tutti::attention` and `tutti::attention_backward` have the arguments and results of
`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward pass: tensors of (batch, heads, tokens, width),
stored as (batch, tokens, heads, width), and the log-sum-exp of each query in float32. Sums are accumulated in float32,
in the same order for any number of threads. The kernels are in `fused.cpp`, compiled at first use. PyTorch's
kernels are called for dtypes other than bfloat16, for widths that are not a multiple of 32, with dropout, and on
processors without AMX or AVX-512 BF16.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, fx

from tutti import compat

aten, ops = torch.ops.aten, torch.ops.tutti
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SOURCE = Path(__file__).with_suffix(".cpp")
WIDTH = 32  # the kernels support multiples of this width

_library = torch.library.Library("tutti", "FRAGMENT")
_options = "*, Tensor? attn_mask=None, float? scale=None"
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, "
    f"{_options}) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"float dropout_p, bool is_causal, {_options}) -> (Tensor, Tensor, Tensor)"
)


@cache
def _kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None if the processor lacks the instructions."""
    if not compat.multiplies_bfloat16():
        return None
    library = compat.compile_cpp(SOURCE.read_text())
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for kernel in (library.attention, library.attention_backward):
        kernel.argtypes = [*[pointer] * 3, integer, pointer, pointer, ctypes.c_double, integer]
        kernel.restype = None
    return library


def use(graph: fx.Graph) -> None:
    """Use these kernels for the attention of a graph, in place, where they are faster. Starts their compilation."""
    replaced = [(node, ours)
             for theirs, ours, query in OURS
             for node in graph.find_nodes(op="call_function", target=theirs)
             if _knows(node.args[query].meta["val"])]  # fmt: skip
    if replaced and compat.multiplies_bfloat16():
        threading.Thread(target=_compile, name="tutti compiler", daemon=True).start()
        for node, ours in replaced:
            node.target = ours


def _compile() -> None:
    with suppress(Exception):  # raised again where they are called
        _kernels()


def _knows(query) -> bool:
    return query.dtype == torch.bfloat16 and query.shape[-1] % WIDTH == 0


def _kernels_for(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> ctypes.CDLL | None:
    """The kernels, if they support these operands. PyTorch's kernels report invalid ones."""
    alike = key.dtype == value.dtype == query.dtype and key.shape == value.shape and query.ndim == key.ndim == 4
    fits = alike and query.shape[::3] == key.shape[::3] and query.shape[1] % key.shape[1] == 0
    masked = mask is None or (mask.ndim in (2, 4) and mask.dtype in (torch.float32, torch.bfloat16))
    return _kernels() if _knows(query) and fits and masked and not dropout_p else None


def _in_rows(x: Tensor) -> Tensor:
    """The tensor as the kernels read it: contiguous rows of `width` elements at an even stride (two are moved at a
    time). PyTorch's kernels fail for other strides without AMX."""
    apart, beside = x.stride()[-2:]
    fits = beside == 1 and apart >= x.shape[-1] and apart % 2 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def attention(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    tensors = [_in_rows(x) for x in (query, key, value)]
    kernels = _kernels_for(query, key, value, attn_mask, dropout_p)
    out, logsumexp = _fake(query)
    if kernels is None:
        theirs, logsumexp = FLASH(*tensors, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        return theirs if theirs.stride() == out.stride() else out.copy_(theirs), logsumexp
    _call(kernels.attention, [*tensors, out], query, key, logsumexp, attn_mask, scale, is_causal)
    return out, logsumexp


def attention_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    tensors = [_in_rows(x) for x in (grad_out, query, key, value, out)]
    kernels = _kernels_for(query, key, value, attn_mask, dropout_p)
    if kernels is None:
        return FLASH_BACKWARD(*tensors, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    gradients = [_like(x) for x in (query, key, value)]
    _call(kernels.attention_backward, [*tensors, *gradients], query, key, logsumexp, attn_mask, scale, is_causal)
    return tuple(gradients)


def _fake(query: Tensor, *rest: object, **options: object) -> tuple[Tensor, Tensor]:
    """Empty results of the forward pass."""
    batch, heads, queries, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return _like(query), query.new_empty((batch, queries, heads), dtype=dtype).transpose(1, 2)


def _like(x: Tensor) -> Tensor:
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)


def _call(
    kernel, operands: Sequence[Tensor], query: Tensor, key: Tensor, logsumexp: Tensor, mask: Tensor | None,
    scale: float | None, causal: bool,
) -> None:  # fmt: skip
    (batch, heads, queries, width), (groups, keys) = query.shape, key.shape[1:3]
    strides = [n for x in (*operands, logsumexp) for n in x.stride()[:3]]
    if mask is not None:
        mask = mask.expand(batch, heads, queries, keys)
    strides += (0,) * 4 if mask is None else mask.stride()
    sizes = batch, groups, heads // groups, queries, keys, width
    kernel(
        (ctypes.c_void_p * len(operands))(*[x.data_ptr() for x in operands]),
        logsumexp.data_ptr(),
        None if mask is None else mask.data_ptr(),
        mask is not None and mask.dtype == torch.bfloat16,
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_int64 * len(strides))(*strides),
        width**-0.5 if scale is None else scale,
        causal,
    )


_library.impl("attention", attention, "CPU")
_library.impl("attention_backward", attention_backward, "CPU")
torch.library.register_fake("tutti::attention", _fake)
torch.library.register_fake("tutti::attention_backward", lambda *args, **kwargs: FLASH_BACKWARD(*args, **kwargs))

# (replaced operator, replacement, index of the query among its operands)
OURS = (
    (FLASH, ops.attention.default, 0),
    (FLASH_BACKWARD, ops.attention_backward.default, 1),
)
