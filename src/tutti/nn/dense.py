"""Operators with contiguous results, whatever the strides of their operands.

A compiler assumes this of an opaque operator. The strides of a formula in plain ATen depend on each of its operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def register(library: torch.library.Library, name: str, formula: Callable) -> None:
    """Register a formula in plain ATen as `tutti::name` on all devices, fake ones included.

    The formula returns a new tensor, or a tuple of tensors and None.
    """

    def dense(*args):
        results = formula(*args)
        if isinstance(results, tuple):
            return tuple(x if x is None else x.contiguous() for x in results)
        return results.contiguous()

    for device in ("CPU", "CUDA"):
        library.impl(name, dense, device)
    torch.library.register_fake(f"tutti::{name}", dense)
