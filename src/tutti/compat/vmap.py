"""Transforms of functions (`torch.func`): leaving `torch.vmap` for a while, and Hessians of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import eager_transforms, pyfunctorch


def in_vmap() -> bool:
    """Whether the innermost transform of functions is `torch.vmap`."""
    stack = _functorch.get_interpreter_stack()
    return bool(stack) and stack[-1].key() == _functorch.TransformType.Vmap


def outside_vmap(
    run: Callable[[list[Tensor]], list[Tensor]],
    tensors: list[Tensor],
    vmap_dims: list[int],
    returned: Callable[[int], int],
) -> list[Tensor]:
    """Call a function outside of the innermost `torch.vmap`, with tensors that have its dim.

    given: where the dim of vmap is, for each of `tensors`. returned: where it is in result i.
    """
    interpreter = pyfunctorch.retrieve_current_functorch_interpreter()
    level, size = interpreter.level(), interpreter.batch_size()  # pyright: ignore

    def whole(x: Tensor, dim: int) -> Tensor:
        inner, at = _functorch._unwrap_batched(x, level) if _functorch.is_batchedtensor(x) else (x, None)
        with interpreter.lower():
            return inner.movedim(at, dim) if at is not None else inner.unsqueeze(dim).expand(
                *inner.shape[:dim], size, *inner.shape[dim:])  # fmt: skip

    batched = [whole(x, dim) for x, dim in zip(tensors, vmap_dims, strict=True)]
    with interpreter.lower():
        results = run(batched)
    return [_functorch._add_batch_dim(x, returned(i), level) for i, x in enumerate(results)]


def vmapped(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """`torch.vmap` of a function of flat tensors, over dim 0 of all."""

    def run(*tensors: Any) -> list[Tensor]:
        return list(torch.vmap(function, randomness="error")(*tensors))

    return run


@contextmanager
def hessians_in_reverse() -> Iterator[None]:
    """Make `torch.func.hessian` take both derivatives in reverse mode, within the block.

    Forward mode over reverse mode under `vmap` leaves meta tensors among fake ones. The results are equal up to
    rounding.
    """
    before = eager_transforms.jacfwd
    eager_transforms.jacfwd = partial(_jacrev, eager_transforms.jacrev)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        eager_transforms.jacfwd = before


def _jacrev(jacrev: Callable, func: Callable, argnums: Any = 0, has_aux: bool = False, **_: Any) -> Callable:
    return jacrev(func, argnums, has_aux=has_aux)
