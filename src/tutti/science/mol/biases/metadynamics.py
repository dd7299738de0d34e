"""Well-tempered metadynamics (Barducci, Bussi and Parrinello 2008): hills where a run has been fill its free energy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol.biases.variables import Variable
from tutti.science.mol.cell import Periodic
from tutti.science.mol.neighbors import Pairs
from tutti.science.mol.potential import Potential, check_part

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class Metadynamics(Potential):
    """A bias of one or two variables, and the callback that adds its hills. All replicas walk on one bias.

    widths: widths of hills, in units of the variables. height: height of the first hills, an energy. every: steps
    between hills. temperature: temperature of the run in kelvin. factor: the bias factor, above 1; infinity adds hills
    of one height. ranges: range (low, high) of each variable; a variable outside feels no bias. The range of a periodic
    variable is its period, from -period / 2. bins: number of intervals of the grid along each variable; on the grid the
    bias and its gradient lie as cubic Hermite splines.

        bias = Metadynamics([Torsion(4, 6, 8, 14)], [0.35], height=1.0, every=500, temperature=300.0)
        Simulation(system, Sum([field, bias]), Langevin(...)).run(1_000_000, [bias])
    """

    name = "metadynamics"
    half = None

    def __init__(
        self, variables: Sequence[Variable], widths: Sequence[float], height: float, every: int, temperature: float,
        factor: float = 10.0, ranges: Sequence[tuple[float, float] | None] = (), bins: int = 200,
    ) -> None:  # fmt: skip
        self.variables, self.widths = list(variables), torch.tensor(widths, dtype=torch.float64)
        if len(self.variables) not in (1, 2) or len(self.widths) != len(self.variables):
            raise ValueError(f"{len(self.variables)} variables and {len(self.widths)} widths: give one or two of each")
        if not (height > 0 and every > 0 and temperature > 0 and factor > 1 and bool((self.widths > 0).all())):
            raise ValueError("height, every, temperature and widths are above 0, the bias factor is above 1")
        self.height, self.every, self.temperature, self.factor = height, every, temperature, factor
        all_ranges = [*ranges, *[None] * (len(self.variables) - len(ranges))]
        self.ranges = [self._range(v, r) for v, r in zip(self.variables, all_ranges, strict=True)]
        self.bins = bins
        low = torch.tensor([r[0] for r in self.ranges], dtype=torch.float64)
        self.step = (torch.tensor([r[1] for r in self.ranges], dtype=torch.float64) - low) / bins
        self.low = low
        if bool((self.widths < 2 * self.step).any()):
            raise ValueError(
                f"hills of widths {widths} are finer than the grid's steps {self.step.tolist()}; more bins"
            )
        shape = [bins + 1] * len(self.variables)
        parts = 2 ** len(self.variables)  # value and derivatives, by powers of each variable
        self.grid = torch.zeros(parts, *shape, dtype=torch.float64)
        self.hills = torch.zeros(0, len(self.variables) + 1, dtype=torch.float64)

    @staticmethod
    def _range(variable: Variable, bounds: tuple[float, float] | None) -> tuple[float, float]:
        if variable.period is not None:
            return (-variable.period / 2, variable.period / 2)
        if bounds is None or not bounds[0] < bounds[1]:
            raise ValueError(f"the range {bounds} of {type(variable).__name__} cannot be: give (low, high)")
        return bounds

    def values(self, positions: Tensor, cell: Tensor | None, pbc: Periodic) -> Tensor:
        """(R, variables)"""
        return torch.stack([v(positions, cell, pbc) for v in self.variables], 1)

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        return self.bias(self.values(positions, cell, pairs.pbc))

    def bias(self, values: Tensor) -> Tensor:
        """The bias (n) at values (n, variables), by cubic Hermite splines; 0 outside of the ranges."""
        at = (values - self.low) / self.step
        inside = ((at >= 0) & (at <= self.bins)).all(1)
        cell = at.detach().floor().long().clamp(0, self.bins - 1)
        t = (at - cell).clamp(0, 1)
        weights = _hermite(t)  # (n, variables, 2 ends, 2: value and slope)
        total = values.new_zeros(len(values))
        dims = range(len(self.variables))
        for ends in itertools.product((0, 1), repeat=len(dims)):
            index = tuple(cell[:, d] + ends[d] for d in dims)
            for powers in itertools.product((0, 1), repeat=len(dims)):
                part = sum(p << d for d, p in enumerate(powers))
                weight = torch.stack([weights[:, d, ends[d], powers[d]] for d in dims]).prod(0)
                total = total + weight * self.grid[(part, *index)]
        return torch.where(inside, total, 0.0)

    def __call__(self, simulation: Simulation) -> None:
        """Add a hill for each replica, and the bias that the run feels now."""
        check_part(self, simulation.potential)
        values = self.values(simulation.positions, simulation.cell, simulation.system.pbc)
        kt = simulation.system.units.thermal_energy(self.temperature)
        lower = 0.0 if math.isinf(self.factor) else 1 / (kt * (self.factor - 1))
        for value in values:
            self.add(value, self.height * math.exp(-float(self.bias(value[None])) * lower))
        simulation.evaluate()

    def add(self, center: Tensor, height: float) -> None:
        """A hill at a value of the variables (variables)."""
        self.hills = torch.cat([self.hills, torch.cat([center, torch.tensor([height], dtype=torch.float64)])[None]])
        axes = []
        for d, variable in enumerate(self.variables):
            points = self.low[d] + self.step[d] * torch.arange(self.bins + 1, dtype=torch.float64)
            images = (-1, 0, 1) if variable.period is not None else (0,)
            value = slope = torch.zeros_like(points)
            for image in images:
                u = (points - center[d] - image * (variable.period or 0.0)) / self.widths[d]
                g = torch.exp(-u.square() / 2)
                value, slope = value + g, slope - u * g / self.widths[d] * self.step[d]
            axes.append((value, slope))
        for powers in itertools.product((0, 1), repeat=len(axes)):
            part = sum(p << d for d, p in enumerate(powers))
            hill = axes[0][powers[0]]
            if len(axes) == 2:
                hill = hill[:, None] * axes[1][powers[1]][None]
            self.grid[part] += height * hill

    def free_energy(self) -> tuple[list[Tensor], Tensor]:
        """The points of each variable, and the estimate of the free energy there, with its minimum at 0."""
        scale = 1.0 if math.isinf(self.factor) else self.factor / (self.factor - 1)
        surface = -scale * self.grid[0]
        points = [low + step * torch.arange(self.bins + 1, dtype=torch.float64)
                  for low, step in zip(self.low.tolist(), self.step.tolist(), strict=True)]  # fmt: skip
        return points, surface - surface.min()

    def state(self) -> dict[str, Tensor]:
        return {"grid": self.grid, "hills": self.hills}

    def restore(self, state: dict[str, Tensor]) -> None:
        grid, hills = state["grid"], state["hills"]
        if grid.shape != self.grid.shape or hills.shape[1:] != self.hills.shape[1:]:
            raise ValueError(f"the grid of metadynamics is {tuple(grid.shape)}, here {tuple(self.grid.shape)}")
        self.grid, self.hills = grid.clone(), hills.clone()


def _hermite(t: Tensor) -> Tensor:
    s = 1 - t
    low = torch.stack([(1 + 2 * t) * s * s, t * s * s], -1)
    high = torch.stack([t * t * (3 - 2 * t), -t * t * s], -1)
    return torch.stack([low, high], -2)
