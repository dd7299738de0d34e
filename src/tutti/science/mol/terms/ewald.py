"""Ewald's sum for charges in periodic cells of any shape, with a conducting boundary (tin foil).

| term | energy |
|---|---|
| real | k sum over pairs q_i q_j erfc(a r) / r, r < cutoff |
| fourier | 2 pi k / V sum over k != 0 of exp(-k^2 / 4 a^2) / k^2 abs(sum_j q_j exp(i k r_j))^2 |
| self | -k a / sqrt(pi) sum q_i^2 |
| intra | -k sum over excluded pairs q_i q_j erf(a r) / r, of their nearest images |
| background | -pi k (sum q_i)^2 / (2 a^2 V): a uniform charge that makes the cell neutral |

Wave vectors are k = 2 pi n h^-T with integers n and the cell h.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol.neighbors import NeighborList, Pairs, unique_pairs
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Potential, copy_without_caches
from tutti.science.mol.system import check_finite
from tutti.science.mol.terms.nonbonded import PairKernel
from tutti.science.mol.terms.tuples import TupleKernel
from tutti.science.mol.units import MD


def splitting(cutoff: float, tolerance: float) -> float:
    """a with erfc(a cutoff) = tolerance."""
    low, high = 0.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(middle) > tolerance else (low, middle)
    return low / cutoff


def erf_over_r(r2: Tensor, alpha: float) -> Tensor:
    """erf(a r) / r, smooth at r = 0."""
    small = r2 * alpha**2 < 1e-8
    r = torch.where(small, 1.0, r2).sqrt()
    x2 = r2 * alpha**2
    return torch.where(small, 2 * alpha / math.sqrt(math.pi) * (1 - x2 / 3), torch.erf(alpha * r) / r)


class Electrostatics(Potential):
    """What Ewald's sum and PME share: all but the sum over wave vectors."""

    name = "ewald"
    half = None
    exclusions: Tensor

    def __init__(self, charges: Any, cutoff: float, alpha: float, coulomb: float, exclusions: Any) -> None:
        if not (0 < cutoff < math.inf and 0 < alpha < math.inf):
            raise ValueError(f"cutoff {cutoff} and alpha {alpha} of Ewald's sum must be positive and finite")
        self.charges = torch.as_tensor(charges, dtype=torch.float64)
        check_finite("charges", self.charges)
        self.cutoff, self.alpha, self.coulomb = float(cutoff), float(alpha), float(coulomb)
        self.exclusions = unique_pairs(exclusions)
        self.part: Part | None = None
        self.whole = self  # of which it is a part

    def real_energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        r = pairs.vectors(positions, cell).norm(dim=-1)
        qq = self.coulomb * self.charges[pairs.i] * self.charges[pairs.j]
        u = torch.where(r < self.cutoff, qq * torch.erfc(self.alpha * r) / r, 0.0)
        return pairs.sum(u, positions.shape[0]) * (1 if pairs.half else 0.5)

    def fourier_energy(self, positions: Tensor, cell: Tensor) -> Tensor:
        raise NotImplementedError

    def self_energy(self) -> Tensor:
        return -self.coulomb * self.alpha / math.sqrt(math.pi) * (self.charges**2).sum()

    def intra_energy(self, positions: Tensor, cell: Tensor, pbc: cells.Periodic) -> Tensor:
        i, j = self.exclusions.T
        d = cells.minimum_image(positions[:, j] - positions[:, i], cell, pbc)
        qq = self.coulomb * self.charges[i] * self.charges[j]
        return -(qq * erf_over_r((d * d).sum(-1), self.alpha)).sum(-1)

    def background_energy(self, cell: Tensor) -> Tensor:
        total = self.whole.charges.sum()
        return -math.pi * self.coulomb * total**2 / (2 * self.alpha**2 * cells.volume(cell))

    def parts(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> dict[str, Tensor]:
        """Energies (R) by name."""
        h = self.check(positions, cell, pairs.pbc)
        energies = {
            "ewald_real": self.real_energy(positions, h, pairs),
            "ewald_fourier": self.fourier_energy(positions, h),
            "ewald_self": self.self_energy().expand(len(positions)),
        }
        if len(self.exclusions):
            energies["ewald_intra"] = self.intra_energy(positions, h, pairs.pbc)
        if self.charged:
            energies["ewald_background"] = self.background_energy(h)
        return energies

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        return sum(self.parts(positions, cell, pairs).values(), start=positions.new_zeros(len(positions)))

    @cached_property
    def charged(self) -> bool:
        return float(self.whole.charges.sum().abs()) > 1e-6

    def check(self, positions: Tensor, cell: Tensor | None, pbc: cells.Periodic) -> Tensor:
        if cell is None or not all(pbc):
            raise ValueError(
                f"Ewald's sum needs a cell that is periodic along all three vectors, but pbc is {pbc};"
                " use Coulomb(method='reaction_field' or 'cut') otherwise"
            )
        if len(self.charges) != positions.shape[1]:
            raise ValueError(f"there are charges for {len(self.charges)} atoms, but there are {positions.shape[1]}")
        return cell

    @cached_property
    def kernel(self) -> PairKernel:
        return PairKernel(None, self)

    def accumulate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor, virial: Tensor | None
    ) -> dict[str, Tensor]:
        self.check(positions, cell, neighbors.pbc)
        _, energy = self.kernel.add(positions, cell, neighbors, forces, virial)
        return self.add_rest(energy, positions, cell, neighbors, forces, virial)

    def add_rest(
        self, pair_energy: Tensor, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, forces: Tensor,
        virial: Tensor | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """All but the real-space pairs, whose energy is given."""
        h = self.check(positions, cell, neighbors.pbc)
        terms = {"ewald_real": pair_energy}
        if len(self.exclusions):
            terms["ewald_intra"] = self.intra.add(positions, h, neighbors, forces, virial)
        first = self.part is None or self.part.first
        if self.part is not None:
            positions, forces = positions[:, : self.part.owned], forces[:, : self.part.owned]
        fourier = self.add_fourier(positions, h, forces, virial if first else None)
        if first:
            terms |= {"ewald_fourier": fourier, "ewald_self": self._self.expand(len(positions))}
        if first and self.charged:
            terms["ewald_background"] = self.background_energy(h)
            if virial is not None:
                virial.diagonal(dim1=-2, dim2=-1).add_(terms["ewald_background"][:, None])
        return terms

    def divide(self, part: Part) -> Electrostatics:
        """Each process has the structure factors, which are summed over all; the first one counts their energy."""
        divided = copy_without_caches(self)
        divided.part, divided.whole = part, self
        divided.charges = part.of_atoms(self.charges, "charges")
        divided.exclusions = part.pairs(self.exclusions)
        return divided

    @cached_property
    def _self(self) -> Tensor:
        return self.whole.self_energy()

    @cached_property
    def intra(self) -> TupleKernel:
        pairs = self.exclusions
        if self.part is not None:
            pairs = self.whole.exclusions[self.part.rows(self.whole.exclusions)]
            pairs = self.part.tuples(pairs, "excluded pair")
        i, j = pairs.T
        qq = self.coulomb * self.charges[i] * self.charges[j]
        return TupleKernel("erf", pairs, [qq, torch.full_like(qq, self.alpha)])

    def add_fourier(self, positions: Tensor, cell: Tensor, forces: Tensor, virial: Tensor | None) -> Tensor:
        """Energies (R) of all atoms; positions and forces are of those that this process owns."""
        raise NotImplementedError

    def add_up(self, of_atoms: Tensor) -> Tensor:
        """A sum over the atoms of this process as the sum over all, in place."""
        if self.part is not None:
            self.part.add_up(of_atoms)
        return of_atoms


class Ewald(Electrostatics):
    """Electrostatics by Ewald's sum, for small systems; PME for large ones.

    alpha: how the sum is split. kmax: largest integers n of wave vectors, one or three. kmax_squared: leave out n with
    n.n of this or more. wave_cutoff: leave out longer wave vectors. `Ewald.accurate` chooses all of them.

    >>> from tutti.science.mol.system import System
    >>> salt = System([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]],
    ...               charges=[1.0, -1, -1, -1, 1, 1, 1, -1], cell=2.0)
    >>> term = Ewald.accurate(salt.charges, salt.cell, cutoff=2.0, tolerance=1e-9, coulomb=1.0)
    >>> madelung = -2 * term.evaluate(salt.positions, salt.cell, term.neighbors(salt)).energy / 8
    >>> round(float(madelung), 6)
    1.747565
    """

    def __init__(
        self,
        charges: Any,
        cutoff: float,
        alpha: float,
        kmax: int | Sequence[int],
        kmax_squared: float | None = None,
        wave_cutoff: float | None = None,
        coulomb: float = MD.coulomb,
        exclusions: Any = None,
    ) -> None:
        super().__init__(charges, cutoff, alpha, coulomb, exclusions)
        limits = (kmax,) * 3 if isinstance(kmax, int) else tuple(kmax)
        if len(limits) != 3 or min(limits) < 0:
            raise ValueError(f"kmax {kmax} is one number or three, not negative")
        self.wave_cutoff = wave_cutoff
        half = [n for n in itertools.product(*[range(-m, m + 1) for m in limits]) if n > (0, 0, 0)]
        self.waves = torch.tensor(half, dtype=torch.float64).reshape(-1, 3)  # (K, 3), one of n and -n
        if kmax_squared is not None:
            self.waves = self.waves[(self.waves**2).sum(-1) < kmax_squared]

    @classmethod
    def accurate(
        cls,
        charges: Any,
        cell: Tensor,
        cutoff: float,
        tolerance: float = 1e-5,
        coulomb: float = MD.coulomb,
        exclusions: Any = None,
    ) -> Ewald:
        """Both sums are truncated where their terms have fallen by `tolerance`, in the cell given here."""
        alpha = splitting(cutoff, tolerance)
        wave_cutoff = 2 * alpha * math.sqrt(-math.log(tolerance))
        edges = cell.reshape(-1, 3, 3).norm(dim=-1).amax(0)  # n = k . a / 2 pi
        kmax = [math.ceil(wave_cutoff * float(a) / (2 * math.pi)) for a in edges]
        return cls(charges, cutoff, alpha, kmax, None, wave_cutoff, coulomb, exclusions)

    def fourier_energy(self, positions: Tensor, cell: Tensor) -> Tensor:
        inverse = torch.linalg.inv(cell)
        total = positions.new_zeros(len(positions))
        for waves in self.waves.split(1024):
            k = 2 * math.pi * waves @ inverse.transpose(-1, -2)  # (R, K, 3)
            k2 = (k * k).sum(-1)
            weight = torch.exp(-k2 / (4 * self.alpha**2)) / k2
            if self.wave_cutoff is not None:
                weight = torch.where(k2 <= self.wave_cutoff**2, weight, 0.0)
            phase = positions @ k.transpose(-1, -2)  # (R, N, K)
            real, imaginary = self.charges @ phase.cos(), self.charges @ phase.sin()
            total = total + (weight * (real**2 + imaginary**2)).sum(-1)
        return 4 * math.pi * self.coulomb / cells.volume(cell) * total

    def add_fourier(self, positions: Tensor, cell: Tensor, forces: Tensor, virial: Tensor | None) -> Tensor:
        """By wave vectors in blocks, without autograd's memory of all phases."""
        charges = self.charges[: positions.shape[1]]
        inverse, total = torch.linalg.inv(cell), positions.new_zeros(len(positions))
        factor = 4 * math.pi * self.coulomb / cells.volume(cell)
        for waves in self.waves.split(256):
            k = 2 * math.pi * waves @ inverse.transpose(-1, -2)  # (R, K, 3)
            k2 = (k * k).sum(-1)
            weight = factor[:, None] * torch.exp(-k2 / (4 * self.alpha**2)) / k2
            if self.wave_cutoff is not None:
                weight = torch.where(k2 <= self.wave_cutoff**2, weight, 0.0)
            phase = positions @ k.transpose(-1, -2)  # (R, N, K)
            cosine, sine = phase.cos(), phase.sin()
            real, imaginary = self.add_up(torch.stack([charges @ cosine, charges @ sine]))
            energy = weight * (real**2 + imaginary**2)
            total += energy.sum(-1)
            slopes = sine.mul_((weight * real)[:, None]) - cosine.mul_((weight * imaginary)[:, None])
            forces += 2 * charges[:, None] * (slopes @ k)
            if virial is not None:
                along = energy * (2 / k2 + 1 / (2 * self.alpha**2))
                virial.diagonal(dim1=-2, dim2=-1).add_(energy.sum(-1)[:, None])
                virial -= torch.einsum("rk,rka,rkb->rab", along, k, k)
        return total
