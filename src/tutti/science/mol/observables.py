"""What is measured on configurations: radial distribution, mean squared displacement, error bars of correlated data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol.neighbors import NeighborList

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation

__all__ = ["MeanSquaredDisplacement", "RadialDistribution", "standard_error"]


class RadialDistribution:
    """g(r) between two kinds of atoms, averaged over replicas and calls: a callback, or call `add`.

    cutoff: largest distance. first, second: indices of atoms; by default all. blocks: number of blocks of consecutive
    configurations, from which the standard error is estimated. `configurations` is the number of calls, and `each` the
    means over `stride` of them; the stride doubles when there are 1024. A `Restart` that has this callback among its
    parts goes on with what was counted.
    """

    LONGEST = 1024  # of `each`; even

    def __init__(
        self, cutoff: float, bins: int = 100, every: int = 10, first: Tensor | None = None,
        second: Tensor | None = None, blocks: int = 8,
    ) -> None:  # fmt: skip
        if not (cutoff > 0 and bins > 0):
            raise ValueError(f"a distribution up to {cutoff} in {bins} bins cannot be")
        self.cutoff, self.bins, self.every, self.blocks = float(cutoff), bins, every, blocks
        self.first, self.second = first, second
        self.each: list[Tensor] = []
        self.configurations, self.stride = 0, 1
        self._sum = torch.zeros(bins, dtype=torch.float64)  # of configurations that are not in `each` yet

    @property
    def r(self) -> Tensor:
        """(bins): the middle of each bin."""
        return (torch.arange(self.bins, dtype=torch.float64) + 0.5) * self.cutoff / self.bins

    def __call__(self, simulation: Simulation) -> None:
        self.add(simulation.positions, simulation.cell, simulation.system.pbc)

    def add(self, positions: Tensor, cell: Tensor | None, pbc: cells.Periodic) -> None:
        """A configuration (R, N, 3) with cell (R, 3, 3)."""
        if cell is None or not all(pbc):
            raise ValueError("a radial distribution needs a cell that repeats in three directions")
        neighbors = NeighborList(self.cutoff, 0.0, True, pbc)
        neighbors.update(positions, cell)
        pairs, atoms = neighbors.pairs, positions.shape[1]
        weight = torch.ones(len(pairs), dtype=torch.float64) * 2
        sizes = (atoms, atoms)
        same = atoms
        if self.first is not None or self.second is not None:
            a, b = torch.zeros(2, atoms, dtype=torch.bool)
            a[slice(None) if self.first is None else self.first] = True
            b[slice(None) if self.second is None else self.second] = True
            weight = (a[pairs.i] & b[pairs.j]).double() + (b[pairs.i] & a[pairs.j]).double()
            sizes, same = (int(a.sum()), int(b.sum())), int((a & b).sum())
        r = pairs.vectors(positions, cell).norm(dim=-1)
        index = (r * (self.bins / self.cutoff)).long().clamp(max=self.bins - 1)
        counts = torch.zeros(len(positions), self.bins, dtype=torch.float64)
        counts.index_put_((pairs.replica, index), weight, accumulate=True)
        edges = torch.arange(self.bins + 1, dtype=torch.float64) * self.cutoff / self.bins
        shells = 4 / 3 * math.pi * (edges[1:] ** 3 - edges[:-1] ** 3)
        ideal = (sizes[0] * sizes[1] - same) / cells.volume(cell)[:, None] * shells
        self.configurations += 1
        self._sum += (counts / ideal).mean(0)
        if self.configurations % self.stride == 0:
            self.each.append(self._sum / self.stride)
            self._sum = torch.zeros_like(self._sum)
        if len(self.each) == self.LONGEST:
            self.each = [(a + b) / 2 for a, b in zip(self.each[::2], self.each[1::2], strict=True)]
            self.stride *= 2

    def state(self) -> dict[str, Tensor]:
        """What was counted, for restart files."""
        each = torch.stack(self.each) if self.each else torch.zeros(0, self.bins, dtype=torch.float64)
        return {"each": each, "sum": self._sum, "counts": torch.tensor([self.configurations, self.stride])}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Raises KeyError for a state that is not of such a distribution."""
        each, rest, counts = (state[name] for name in ("each", "sum", "counts"))
        if each.shape[1:] != (self.bins,) or rest.shape != (self.bins,) or counts.shape != (2,) or counts[1] < 1:
            raise KeyError(f"no counts in {self.bins} bins")
        self.each, self._sum = list(each), rest.clone()
        self.configurations, self.stride = counts.tolist()

    @property
    def g(self) -> Tensor:
        """(bins)"""
        if not self.configurations:
            raise ValueError("no configuration was added")
        total = self._sum
        if self.each:
            total = total + self.stride * torch.stack(self.each).sum(0)
        return total / self.configurations

    @property
    def error(self) -> Tensor:
        """(bins): standard errors of the mean, from blocks of consecutive configurations."""
        if len(self.each) < self.blocks:
            raise ValueError(f"{len(self.each)} configurations cannot make {self.blocks} blocks")
        means = torch.stack([block.mean(0) for block in torch.stack(self.each).tensor_split(self.blocks)])
        return means.std(0) / math.sqrt(self.blocks)


class MeanSquaredDisplacement:
    """A callback that follows how far atoms move. `coefficient()` is that of diffusion, length^2 per time.

    Positions are never folded, so nothing is to be unwrapped; the motion of the centre of mass is left out.
    """

    def __init__(self, every: int = 10, atoms: Tensor | None = None) -> None:
        self.every, self.atoms = every, atoms
        self.times: list[float] = []
        self.frames: list[Tensor] = []

    def __call__(self, simulation: Simulation) -> None:
        x, mass = simulation.positions, simulation.mass
        x = x - (x * mass).sum(1, keepdim=True) / mass.sum()
        self.times.append(simulation.time)
        self.frames.append((x if self.atoms is None else x[:, self.atoms]).clone())

    def curve(self, origins: int = 20) -> tuple[Tensor, Tensor]:
        """Times and mean squared displacements, averaged over atoms, replicas and origins, up to half the run."""
        if len(self.frames) < 4:
            raise ValueError(f"{len(self.frames)} frames are too few for a displacement")
        x, t = torch.stack(self.frames), torch.tensor(self.times, dtype=torch.float64)
        lags = len(x) // 2
        starts = torch.linspace(0, len(x) - lags - 1, min(origins, len(x) - lags)).long()
        squares = [(x[starts + k] - x[starts]).square().sum(-1).mean() for k in range(lags + 1)]
        return t[: lags + 1] - t[0], torch.stack(squares)

    def coefficient(self) -> float:
        """By Einstein's relation, from the slope over the second half of the curve."""
        t, square = self.curve()
        half = len(t) // 2
        u, s = t[half:] - t[half:].mean(), square[half:] - square[half:].mean()
        return float((u * s).sum() / u.square().sum() / 6)


def standard_error(samples: Tensor, least: int = 32) -> float:
    """The standard error of the mean of a correlated series (T): the largest over blockings (Flyvbjerg and Petersen
    1989) with at least `least` blocks."""
    x, largest = samples.double(), 0.0
    if len(x) < 2:
        raise ValueError("a standard error needs two samples or more")
    while len(x) >= min(least, len(samples)):
        largest = max(largest, float(x.std() / math.sqrt(len(x))))
        x = x[: len(x) // 2 * 2].view(-1, 2).mean(1)
        if len(x) < 2:
            break
    return largest
