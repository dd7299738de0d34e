"""The backward pass of attention over bfloat16 on a CPU: PyTorch's, but faster where a processor multiplies bfloat16.

`tutti::attention_backward` takes what `aten::_scaled_dot_product_flash_attention_for_cpu_backward` takes, and gives
what it gives: gradients of (batch, heads, tokens, width), which lie in memory as (batch, tokens, heads, width). Sums
are made in float32, in the same order for any number of threads. The kernel is `attention_backward.cpp`, compiled when
it is first used. PyTorch's is called for other dtypes than bfloat16, for widths that 32 does not divide, and on
processors that have no instructions for it (AMX, or AVX-512 BF16).
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import fx

from tutti import compat

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SOURCE = Path(__file__).with_suffix(".cpp")
WIDTH = 32  # divides the widths that the kernel knows

_library = torch.library.Library("tutti", "FRAGMENT")
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor, Tensor)"
)


@cache
def _kernel() -> ctypes.CDLL | None:
    """The compiled kernel, or None where the processor has no instructions for it."""
    if not compat.multiplies_bfloat16():
        return None
    library = compat.compile_cpp(SOURCE.read_text())
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.attention_backward.argtypes = [*[pointer] * 3, integer, pointer, pointer, ctypes.c_double, integer]
    library.attention_backward.restype = None
    return library


def use(graph: fx.Graph) -> None:
    """Let this be the backward pass of a graph's attention, in place, where it is faster; it is compiled meanwhile."""
    found = [n for n in graph.find_nodes(op="call_function", target=FLASH) if _knows(n.args[1].meta["val"])]
    if found and compat.multiplies_bfloat16():
        threading.Thread(target=_compile, name="tutti compiler", daemon=True).start()
        for node in found:
            node.target = torch.ops.tutti.attention_backward.default


def _compile() -> None:
    with suppress(Exception):  # told of where it is called
        _kernel()


def _knows(query) -> bool:
    return query.dtype == torch.bfloat16 and query.shape[-1] % WIDTH == 0


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """As the kernel reads it: rows of `width` numbers, apart by an even number of them (it moves two at a time). With
    other strides PyTorch's fails where there is no AMX."""
    apart, beside = x.stride()[-2:]
    fits = beside == 1 and apart >= x.shape[-1] and apart % 2 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def attention_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    given = [_in_rows(x) for x in (grad_out, query, key, value, out)]
    kernel = _kernel() if _knows(query) and not dropout_p else None
    if kernel is None:
        return FLASH(*given, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    (batch, heads, queries, width), (groups, keys) = query.shape, key.shape[1:3]
    made = [torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype) for x in (query, key, value)]
    strides = [n for x in (*given, *made, logsumexp) for n in x.stride()[:3]]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads, queries, keys)
    strides += (0,) * 4 if attn_mask is None else attn_mask.stride()
    sizes = batch, groups, heads // groups, queries, keys, width
    kernel.attention_backward(
        (ctypes.c_void_p * 8)(*[x.data_ptr() for x in (*given, *made)]),
        logsumexp.data_ptr(),
        None if attn_mask is None else attn_mask.data_ptr(),
        attn_mask is not None and attn_mask.dtype == torch.bfloat16,
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_int64 * len(strides))(*strides),
        width**-0.5 if scale is None else scale,
        is_causal,
    )
    return tuple(made)


_library.impl("attention_backward", attention_backward, "CPU")
torch.library.register_fake("tutti::attention_backward", lambda *args, **kwargs: FLASH(*args, **kwargs))
