"""Collective variables: numbers of a configuration that slow motions are followed by.

Each is a function of positions (R, N, 3) with values (R), differentiable. Molecules must be whole, as simulations keep
them; distances between molecules are those of nearest images if `nearest` is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol import cell as cells

ALL = (True, True, True)


class Variable:
    """A collective variable. period: period of values that repeat, None for others."""

    period: float | None = None

    def __call__(self, positions: Tensor, cell: Tensor | None = None, pbc: cells.Periodic = ALL) -> Tensor:
        raise NotImplementedError

    def difference(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a - b, the shortest way round."""
        d = a - b
        return d if self.period is None else d - self.period * torch.round(d.detach() / self.period)


class Distance(Variable):
    """The distance between two atoms, or the centres of two groups. nearest: whether it is that of nearest images, for
    atoms of different molecules."""

    def __init__(self, first: int | Sequence[int], second: int | Sequence[int], nearest: bool = False) -> None:
        self.first, self.second, self.nearest = _group(first), _group(second), nearest

    def __call__(self, positions: Tensor, cell: Tensor | None = None, pbc: cells.Periodic = ALL) -> Tensor:
        d = _of(positions, self.second).mean(1) - _of(positions, self.first).mean(1)
        if self.nearest and cell is not None:
            d = cells.minimum_image(d[:, None], cell, pbc)[:, 0]
        return d.norm(dim=-1)


class Angle(Variable):
    """The angle of three atoms, the second in the middle, in radians."""

    def __init__(self, i: int, j: int, k: int) -> None:
        self.atoms = _different(i, j, k)

    def __call__(self, positions: Tensor, cell: Tensor | None = None, pbc: cells.Periodic = ALL) -> Tensor:
        a, b, c = _of(positions, self.atoms).unbind(1)
        u, v = a - b, c - b
        return torch.atan2(torch.linalg.cross(u, v).norm(dim=-1), (u * v).sum(-1))


class Torsion(Variable):
    """The dihedral angle of four atoms, in radians from -pi to pi (IUPAC: 0 is cis)."""

    period = 2 * math.pi

    def __init__(self, i: int, j: int, k: int, l: int) -> None:  # noqa: E741
        self.atoms = _different(i, j, k, l)

    def __call__(self, positions: Tensor, cell: Tensor | None = None, pbc: cells.Periodic = ALL) -> Tensor:
        a, b, c, d = _of(positions, self.atoms).unbind(1)
        u, v, w = b - a, c - b, d - c
        m, n = torch.linalg.cross(u, v), torch.linalg.cross(v, w)
        return torch.atan2((u * n).sum(-1) * v.norm(dim=-1), (m * n).sum(-1))


class RadiusOfGyration(Variable):
    """The radius of gyration of a group of atoms of equal weight."""

    def __init__(self, atoms: Sequence[int]) -> None:
        self.atoms = _group(atoms)

    def __call__(self, positions: Tensor, cell: Tensor | None = None, pbc: cells.Periodic = ALL) -> Tensor:
        x = _of(positions, self.atoms)
        return (x - x.mean(1, keepdim=True)).square().sum(-1).mean(1).sqrt()


class Coordination(Variable):
    """How many atoms of a group are near an atom: the sum of 1 / (1 + (r/r0)^n), nearest images."""

    def __init__(self, center: int, atoms: Sequence[int], radius: float, power: int = 6) -> None:
        if not (radius > 0 and power > 0):
            raise ValueError(f"a coordination number with radius {radius} and power {power} cannot be")
        self.center, self.atoms, self.radius, self.power = _group(int(center)), _group(atoms), radius, power

    def __call__(self, positions: Tensor, cell: Tensor | None = None, pbc: cells.Periodic = ALL) -> Tensor:
        d = _of(positions, self.atoms) - _of(positions, self.center)
        if cell is not None:
            d = cells.minimum_image(d, cell, pbc)
        return (1 / (1 + (d.norm(dim=-1) / self.radius) ** self.power)).sum(-1)


def _group(atoms: Any) -> Tensor:
    indices = torch.as_tensor(atoms, dtype=torch.int64).reshape(-1)
    if not len(indices) or len(torch.unique(indices)) < len(indices):
        raise ValueError(f"a group of atoms is empty or names an atom twice: {indices.tolist()}")
    if int(indices.min()) < 0:
        raise ValueError(f"a variable names atom {int(indices.min())}; atoms are numbered from 0")
    return indices


def _different(*atoms: int) -> Tensor:
    if len(set(atoms)) < len(atoms):
        raise ValueError(f"a variable names an atom twice: {list(atoms)}")
    return _group(atoms)


def _of(positions: Tensor, atoms: Tensor) -> Tensor:
    """Positions (R, n, 3) of atoms (n)."""
    if (last := int(atoms.max())) >= positions.shape[1]:
        raise ValueError(f"a variable names atom {last}, but there are {positions.shape[1]} atoms (from 0)")
    return positions[:, atoms]
