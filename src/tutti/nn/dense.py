"""Operators whose results lie in memory in the order of their dims, however their operands lie.

That is what a compiler takes an operator to do that it does not look into; what a formula's results are otherwise like
in memory is left to each of its elementwise operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def register(library: torch.library.Library, name: str, formula: Callable) -> None:
    """Make a formula in plain ATen the implementation of `tutti::name` on all devices, fake ones included.

    The formula returns a new tensor, or a tuple of them and of None.
    """

    def dense(*args):
        made = formula(*args)
        if isinstance(made, tuple):
            return tuple(x if x is None else x.contiguous() for x in made)
        return made.contiguous()

    for device in ("CPU", "CUDA"):
        library.impl(name, dense, device)
    torch.library.register_fake(f"tutti::{name}", dense)
