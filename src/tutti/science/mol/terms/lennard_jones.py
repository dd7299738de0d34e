"""Lennard-Jones pairs: 4 epsilon ((sigma / r)^12 - (sigma / r)^6), truncated at the cutoff in one of four ways.

| truncation | within the cutoff |
|---|---|
| cut | u(r); the energy jumps at the cutoff |
| shift | u(r) - u(rc); the force jumps |
| force_shift | u(r) - u(rc) - (r - rc) u'(rc); neither jumps |
| switch | u(r) S(x), x = (r - switch) / (rc - switch), S = 1 - 10 x^3 + 15 x^4 - 6 x^5 beyond `switch` |

Tail corrections add what is missing if the density beyond is uniform (Allen and Tildesley, Computer Simulation of
Liquids, section 2.8): U = 2 pi / V sum_ab N_a N_b int r^2 (u - u_truncated) dr, and to the virial
W = -2 pi / V sum_ab N_a N_b int r^3 (u' - u'_truncated) dr, a third on each diagonal element.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.science.mol.cell import volume
from tutti.science.mol.neighbors import NeighborList, Pairs, unique_pairs
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Potential, copy_without_caches
from tutti.science.mol.terms.coulomb import Coulomb
from tutti.science.mol.terms.ewald import Electrostatics
from tutti.science.mol.terms.nonbonded import Nonbonded, PairKernel

TRUNCATIONS = ("cut", "shift", "force_shift", "switch")
MIXING = {  # sigma and epsilon of pairs of species
    "lorentz_berthelot": lambda s, e: ((s[:, None] + s) / 2, (e[:, None] * e).sqrt()),
    "geometric": lambda s, e: ((s[:, None] * s).sqrt(), (e[:, None] * e).sqrt()),
}


def pair_energy(r: Tensor, sigma: Tensor, epsilon: Tensor) -> Tensor:
    x6 = (sigma / r) ** 6
    return 4 * epsilon * (x6 * x6 - x6)


def pair_slope(r: Tensor, sigma: Tensor, epsilon: Tensor) -> Tensor:
    """du/dr."""
    x6 = (sigma / r) ** 6
    return 24 * epsilon * (x6 - 2 * x6 * x6) / r


def switching(r: Tensor, start: float, end: float) -> Tensor:
    x = ((r - start) / (end - start)).clamp(0, 1)
    return 1 - x**3 * (10 - 15 * x + 6 * x * x)


class LennardJones(Potential):
    """Lennard-Jones interactions of all pairs within the cutoff.

    sigma, epsilon: numbers, one for each type, or tables (T, T) of pairs of types. types: (N) from 0; may be left out
    if there is one type, or as many as atoms. tail: add tail corrections, with truncation cut or switch in periodic
    cells.

    >>> from tutti.science.mol.system import System
    >>> pair = System([[0.0, 0, 0], [2 ** (1 / 6), 0, 0]])
    >>> term = LennardJones(sigma=1.0, epsilon=1.0, cutoff=2.5)
    >>> round(float(term.evaluate(pair.positions, pair.cell, term.neighbors(pair)).energy), 12)
    -1.0
    """

    name = "lennard_jones"
    half = None
    exclusions: Tensor

    def __init__(
        self,
        sigma: Any,
        epsilon: Any,
        cutoff: float,
        types: Any = None,
        truncation: str = "cut",
        switch: float | None = None,
        tail: bool = False,
        mixing: str = "lorentz_berthelot",
        exclusions: Any = None,
    ) -> None:
        if truncation not in TRUNCATIONS:
            raise ValueError(f"truncation {truncation!r} is not known; there are {', '.join(TRUNCATIONS)}")
        if mixing not in MIXING:
            raise ValueError(f"mixing {mixing!r} is not known; there are {', '.join(MIXING)}")
        if not 0 < cutoff < math.inf:
            raise ValueError(f"the cutoff {cutoff} of Lennard-Jones must be positive and finite")
        if (truncation == "switch") != (switch is not None):
            raise ValueError("truncation='switch' and the distance switch= go together")
        if switch is not None and not 0 <= switch < cutoff:
            raise ValueError(f"the switch {switch} must lie below the cutoff {cutoff}")
        if tail and truncation not in ("cut", "switch"):
            raise ValueError(f"tail corrections are for truncation 'cut' or 'switch', not {truncation!r}")
        self.sigma, self.epsilon = _tables(sigma, epsilon, mixing)
        self.types = _types(types, len(self.sigma))
        self.cutoff, self.truncation, self.switch, self.tail = float(cutoff), truncation, switch, tail
        self.exclusions = unique_pairs(exclusions)
        self._tails: dict[int, tuple[float, float]] = {}  # by the number of atoms

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        replicas, atoms = positions.shape[:2]
        r = pairs.vectors(positions, cell).norm(dim=-1)
        types = self.types_of(atoms)
        a, b = types[pairs.i], types[pairs.j]
        u = self.truncated(r, self.sigma[a, b], self.epsilon[a, b])
        total = pairs.sum(torch.where(r < self.cutoff, u, 0.0), replicas) * (1 if pairs.half else 0.5)
        return total + self.tail_energy(atoms, cell) if self.tail else total

    def truncated(self, r: Tensor, sigma: Tensor, epsilon: Tensor) -> Tensor:
        """The energy of pairs within the cutoff."""
        u, end = pair_energy(r, sigma, epsilon), torch.full_like(r, self.cutoff)
        if self.truncation == "cut":
            return u
        if self.truncation == "switch":
            assert self.switch is not None
            return u * switching(r, self.switch, self.cutoff)
        u = u - pair_energy(end, sigma, epsilon)
        return u if self.truncation == "shift" else u - (r - self.cutoff) * pair_slope(end, sigma, epsilon)

    def types_of(self, atoms: int) -> Tensor:
        if self.types is None:
            return torch.zeros(atoms, dtype=torch.int64)
        if len(self.types) != atoms:
            raise ValueError(f"Lennard-Jones has types for {len(self.types)} atoms, but there are {atoms}")
        return self.types

    def tail_energy(self, atoms: int, cell: Tensor | None) -> Tensor:
        """(R)."""
        return self._tail_coefficients(atoms)[0] / volume(_periodic(cell))

    def tail_virial(self, atoms: int, cell: Tensor | None) -> Tensor:
        """(R), the trace. It is not the derivative of `tail_energy` where that has to do with an energy that jumps at
        the cutoff: such pairs exert a force there too, which `virial` leaves out and this does not count either."""
        return self._tail_coefficients(atoms)[1] / volume(_periodic(cell))

    @torch.enable_grad()
    def _tail_coefficients(self, atoms: int) -> tuple[float, float]:
        """Energy and trace of the virial, times the volume."""
        if atoms not in (cached := self._tails):
            n = torch.bincount(self.types_of(atoms), minlength=len(self.sigma)).to(torch.float64)
            s6, rc = self.sigma**6, self.cutoff
            energy = 4 * self.epsilon * (s6 * s6 / (9 * rc**9) - s6 / (3 * rc**3))
            slope = 24 * self.epsilon * (s6 / (3 * rc**3) - 2 * s6 * s6 / (9 * rc**9))
            if self.switch is not None:  # what switching takes away
                x, w = (torch.from_numpy(y) for y in np.polynomial.legendre.leggauss(64))
                r, w = (rc + self.switch + x * (rc - self.switch)) / 2, w * (rc - self.switch) / 2
                r = r.requires_grad_()
                missing = pair_energy(r, self.sigma[..., None], self.epsilon[..., None])
                missing = missing * (1 - switching(r, self.switch, rc))
                grads = [torch.autograd.grad(m.sum(), r, retain_graph=True)[0] for m in missing.reshape(-1, len(r))]
                energy = energy + (w * r**2 * missing).detach().sum(-1)
                slope = slope + (w * r**3 * torch.stack(grads).reshape(missing.shape)).detach().sum(-1)
            pairs = 2 * math.pi * (n @ energy @ n), -2 * math.pi * (n @ slope @ n)
            cached[atoms] = float(pairs[0]), float(pairs[1])
        return cached[atoms]

    def end_energy(self, end: Tensor) -> Tensor:
        """What truncation subtracts at the cutoff, for tables of pairs of types."""
        shifted = self.truncation in ("shift", "force_shift")
        return pair_energy(end, self.sigma, self.epsilon) if shifted else torch.zeros_like(end)

    def end_slope(self, end: Tensor) -> Tensor:
        return pair_slope(end, self.sigma, self.epsilon)

    @cached_property
    def kernel(self) -> PairKernel:
        return PairKernel(self, None)

    def join(self, other: Potential) -> Potential | None:
        return Nonbonded(self, other) if isinstance(other, Coulomb | Electrostatics) else None

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        energies = self.kernel.add(positions, cell, neighbors, forces, virial)
        return {self.name: energies[0]} | self.add_tail(positions, cell, virial)

    def divide(self, part: Part) -> LennardJones:
        divided = copy_without_caches(self)
        divided.types = None if self.types is None else part.of_atoms(self.types, "types")
        divided.exclusions = part.pairs(self.exclusions)
        divided.tail = self.tail and part.first
        if divided.tail:
            divided._tails = {len(part.numbers): self._tail_coefficients(part.atoms)}
        return divided

    def add_tail(self, positions: Tensor, cell: Tensor | None, virial: Tensor | None) -> dict[str, Tensor]:
        if not self.tail:
            return {}
        atoms = positions.shape[1]
        if virial is not None:
            virial.diagonal(dim1=-2, dim2=-1).add_(self.tail_virial(atoms, cell)[:, None] / 3)
        return {"tail": self.tail_energy(atoms, cell)}


def _periodic(cell: Tensor | None) -> Tensor:
    if cell is None:
        raise ValueError("tail corrections need a periodic cell; use tail=False without one")
    return cell


def _tables(sigma: Any, epsilon: Any, mixing: str) -> tuple[Tensor, Tensor]:
    s, e = (torch.as_tensor(x, dtype=torch.float64) for x in (sigma, epsilon))
    if s.ndim == 0:
        s = s.expand(e.shape) if e.ndim else s[None]
    if e.ndim == 0:
        e = e.expand(s.shape)
    if s.shape != e.shape or s.ndim > 2 or (s.ndim == 2 and s.shape[0] != s.shape[1]):
        raise ValueError(f"sigma {tuple(s.shape)} and epsilon {tuple(e.shape)} are numbers, (T,) or tables (T, T)")
    if not bool((s >= 0).all() & (e >= 0).all() & s.isfinite().all() & e.isfinite().all()):
        raise ValueError("sigma and epsilon must be finite and not negative")
    if s.ndim == 1:
        return MIXING[mixing](s, e)
    if not bool((s == s.T).all() & (e == e.T).all()):
        raise ValueError("tables of sigma and epsilon must be symmetric")
    return s, e


def _types(type_numbers: Any, number: int) -> Tensor | None:
    if type_numbers is None:
        return torch.arange(number) if number > 1 else None
    types = torch.as_tensor(type_numbers, dtype=torch.int64)
    if types.ndim != 1 or bool(((types < 0) | (types >= number)).any()):
        raise ValueError(f"types are (N) numbers from 0 to {number - 1}")
    return types
