"""Optimal assignment as an operator: `scipy.optimize.linear_sum_assignment`, which detection losses call.

    rows, columns = torch.ops.tutti.linear_sum_assignment(cost, maximize)

cost: (n, m) floating; rows, columns: (min(n, m),) int64, rows ascending. Not differentiable. It runs on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAME = "linear_sum_assignment"


@torch.library.custom_op(f"tutti::{NAME}", mutates_args=())
def assign(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost.detach().to("cpu", torch.float64).numpy(), maximize=maximize)
    return tuple(torch.as_tensor(x, dtype=torch.int64, device=cost.device) for x in (rows, columns))  # pyright: ignore


@assign.register_fake
def _(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    rows = cost.new_empty(min(cost.shape), dtype=torch.int64)
    return rows, torch.empty_like(rows)


@contextmanager
def assignments_of_tensors() -> Iterator[None]:
    """Make SciPy's function accept tensors without values, wherever a module has imported it, within the block."""
    optimize = sys.modules.get("scipy.optimize")
    if optimize is None:
        yield
        return
    theirs = vars(optimize)[NAME]
    ours = _accepting_tensors(theirs)
    holders = [names for m in list(sys.modules.values()) if (names := getattr(m, "__dict__", {})).get(NAME) is theirs]
    try:
        for names in holders:
            names[NAME] = ours
        yield
    finally:
        for names in holders:
            names[NAME] = theirs


def _accepting_tensors(theirs: Callable) -> Callable:
    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> Any:
        if isinstance(cost_matrix, Tensor):
            return torch.ops.tutti.linear_sum_assignment(cost_matrix.detach(), maximize)
        return theirs(cost_matrix, maximize)

    return linear_sum_assignment
