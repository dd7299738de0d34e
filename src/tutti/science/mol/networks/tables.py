"""Networks for dynamics: filters of distance in tables, and energies and forces in one C++ kernel.

A filter W(d) fc(d) depends on the distance alone, so cubic Hermite splines replace its network: values and slopes at
equally spaced knots, built in float64. Their number is doubled until the tolerance is met.

    fast = compile_for_md(network)  # SchNet or PaiNN
    energy, forces = fast.energy_and_forces(batch)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tutti.science.mol.networks.batch import Batch
from tutti.science.mol.networks.network import Network
from tutti.science.mol.networks.painn import PaiNN
from tutti.science.mol.networks.schnet import SchNet

if TYPE_CHECKING:
    from tutti.science.mol.networks.ensemble import Ensemble

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
        found = Tables(torch.stack([values, slopes * h], 2), network.cutoff, 0.0)
        between = (torch.arange(intervals, dtype=torch.float64).unsqueeze(1) + torch.tensor([0.25, 0.5])).flatten() * h
        true = _with_slopes(exact.filters, between)
        splined = _with_slopes(lambda d, table=found: list(table(d)), between)
        error = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
                    for a, b in zip(true, splined, strict=True))  # fmt: skip
        if error <= tolerance:
            return Tables(found.data, network.cutoff, error)
        if intervals >= MOST:
            raise ValueError(f"tables of {MOST} intervals have an error of {error:.1e}, above the tolerance of "
                             f"{tolerance:.1e}: raise it, or use the network itself")  # fmt: skip
        intervals *= 2


def _with_slopes(filters: Callable[[Tensor], list[Tensor]], distance: Tensor) -> tuple[Tensor, Tensor]:
    values, slopes, *_ = torch.func.jvp(lambda d: torch.stack(filters(d)), (distance,), (torch.ones_like(distance),))
    return values.detach(), slopes.detach()


def compile_for_md(
    network: Network | Ensemble, tolerance: float = 1e-5, dtype: torch.dtype = torch.float32
) -> Compiled:
    """Energies and forces of a trained SchNet or PaiNN, or an ensemble, many times as fast, for dynamics on a CPU.

    tolerance: of filters and their slopes. dtype: of features; energies, forces and distances are float64. Weights
    are copied: compile again after training.
    """
    from tutti.science.mol.networks.ensemble import CompiledEnsemble, Ensemble
    from tutti.science.mol.networks.tabulated_painn import TabulatedPaiNN
    from tutti.science.mol.networks.tabulated_schnet import TabulatedSchNet

    if isinstance(network, Ensemble):
        members: Any = network.members
        return CompiledEnsemble(network, [compile_for_md(x, tolerance, dtype) for x in members])
    kinds: dict[type, Any] = {SchNet: TabulatedSchNet, PaiNN: TabulatedPaiNN}
    if type(network) not in kinds:
        raise ValueError(f"compile_for_md has no kernel for {type(network).__name__}, only for "
                         f"{', '.join(x.__name__ for x in kinds)}: use the network itself")  # fmt: skip
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of compile_for_md: torch.float32 or torch.float64, not {dtype}")
    return kinds[type(network)](network, tabulate(network, tolerance), dtype)  # pyright: ignore


class Compiled(Protocol):
    """What `compile_for_md` makes. A network in all that dynamics needs of one."""

    cutoff: float
    units: str
    network: Any  # a copy of what was compiled

    def energy_and_forces(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Energies (B) and forces (A, 3), float64."""
        ...

    def evaluate(self, batch: Batch, half: bool = False, virial: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Energies (B), forces (A, 3), virials -sum r (x) dE/dr (B, 3, 3) or None. half: edges lead one way only."""
        ...
