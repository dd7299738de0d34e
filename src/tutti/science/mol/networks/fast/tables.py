"""Filters of distance in tables, for kernels of dynamics (`science.mol.networks.fast.for_md`).

A filter W(d) fc(d) depends on the distance alone, so cubic Hermite splines replace its network: values and slopes at
equally spaced knots, built in float64. Their number is doubled until the tolerance is met.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

LEAST, MOST = 512, 16384  # intervals of a table


@dataclass(frozen=True)
class Tables:
    """Filters by distance. data: (interactions, knots, 2, F): values, and slopes times the interval, at each knot.

    error: the largest of a filter, and of its slope, between knots, relative to the largest value or slope.
    """

    data: Tensor
    cutoff: float
    error: float

    def __call__(self, distance: Tensor) -> Tensor:
        """Filters (interactions, n, F) at distances (n). The definition that kernels follow."""
        intervals = self.data.shape[1] - 1
        x = (distance / self.cutoff * intervals).clamp(0, intervals)
        k = x.detach().long().clamp(max=intervals - 1)
        t = (x - k).unsqueeze(-1)
        s = 1 - t
        low, high = self.data[:, k], self.data[:, k + 1]
        ends = (1 + 2 * t) * s * s * low[:, :, 0] + t * t * (3 - 2 * t) * high[:, :, 0]
        return ends + t * s * s * low[:, :, 1] - t * t * s * high[:, :, 1]


class HasFilters(Protocol):
    cutoff: float

    def filters(self, distance: Tensor) -> list[Tensor]: ...


def tabulate(network: HasFilters, tolerance: float = 1e-5) -> Tables:
    """Tables of a network's filters, in float64. Raises ValueError for a tolerance that tables cannot meet."""
    exact: Any = deepcopy(network).double()  # pyright: ignore
    intervals = LEAST
    while True:
        h = network.cutoff / intervals
        values, slopes = _with_slopes(exact.filters, torch.arange(intervals + 1, dtype=torch.float64) * h)
        values[:, -1], slopes[:, -1] = 0, 0  # rounding
        tables = Tables(torch.stack([values, slopes * h], 2), network.cutoff, 0.0)
        between = (torch.arange(intervals, dtype=torch.float64).unsqueeze(1) + torch.tensor([0.25, 0.5])).flatten() * h
        true = _with_slopes(exact.filters, between)
        splined = _with_slopes(lambda d, table=tables: list(table(d)), between)
        error = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
                    for a, b in zip(true, splined, strict=True))  # fmt: skip
        if error <= tolerance:
            return Tables(tables.data, network.cutoff, error)
        if intervals >= MOST:
            raise ValueError(f"tables of {MOST} intervals have an error of {error:.1e}, above the tolerance of "
                             f"{tolerance:.1e}: raise it, or use the network itself")  # fmt: skip
        intervals *= 2


def _with_slopes(filters: Callable[[Tensor], list[Tensor]], distance: Tensor) -> tuple[Tensor, Tensor]:
    values, slopes, *_ = torch.func.jvp(lambda d: torch.stack(filters(d)), (distance,), (torch.ones_like(distance),))
    return values.detach(), slopes.detach()
