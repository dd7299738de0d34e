"""Smooth particle mesh Ewald (Essmann et al., J. Chem. Phys. 103, 8577 (1995)), in cells of any shape.

The charges are put on a grid by B-splines of order p, and the structure factor of Ewald's sum is approximated by its
Fourier transform, S(k) = b(k) F(k). Wave vectors at the edge of the grid's band, whose sign the grid cannot tell, are
left out.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol import native
from tutti.science.mol.terms.ewald import Electrostatics, splitting
from tutti.science.mol.units import MD

ORDERS = (5, 6, 7, 8)
TRANSFORM, SPREAD = 10, 1.1  # ns of a point of the grid and of an atom and point near it, on an EPYC core
ATOMS_PER_THREAD = 1000  # fewer are faster on one thread


def splines(w: Tensor, order: int) -> Tensor:
    """M_p(w + j), j = 0 .. p - 1, in a last dim, for 0 <= w < 1."""
    m = [w, 1 - w]
    for n in range(3, order + 1):
        f = 1 / (n - 1)
        inner = [f * ((w + j) * m[j] + (n - w - j) * m[j - 1]) for j in range(1, n - 1)]
        m = [f * w * m[0], *inner, f * (1 - w) * m[-1]]
    return torch.stack(m, -1)


def moduli(size: int, order: int) -> Tensor:
    """|b(n)|^2 of the wave numbers n = 0 .. size - 1 along an axis."""
    m = splines(torch.zeros((), dtype=torch.float64), order)[1:]  # M_p(1) .. M_p(p - 1)
    phases = 2 * math.pi / size * torch.arange(size, dtype=torch.float64)[:, None] * torch.arange(order - 1)
    total = (m * torch.exp(1j * phases)).sum(-1).abs() ** 2
    return torch.where(total > 1e-10, 1 / total.clamp(min=1e-10), 0.0)


def good_size(least: int) -> int:
    """The next size whose transform is fast: only factors 2, 3, 5 and 7."""
    while True:
        rest = least
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return least
        least += 1


class PME(Electrostatics):
    """Electrostatics by particle mesh Ewald: as `Ewald`, with a grid of so many points in place of wave vectors.

    `PME.accurate` chooses alpha and grid.

    >>> from tutti.science.mol.system import System
    >>> salt = System([[0.0, 0, 0], [0.5, 0.5, 0.5]], charges=[1.0, -1.0], cell=1.0)
    >>> term = PME.accurate(salt.charges, salt.cell, cutoff=1.0, tolerance=1e-6, coulomb=1.0)
    >>> found = term.evaluate(salt.positions, salt.cell, term.neighbors(salt))
    >>> round(-float(found.energy) * 3 ** 0.5 / 2, 4)
    1.7627
    """

    name = "pme"

    def __init__(
        self,
        charges: Any,
        cutoff: float,
        alpha: float,
        grid: Sequence[int],
        order: int = 5,
        coulomb: float = MD.coulomb,
        exclusions: Any = None,
    ) -> None:
        super().__init__(charges, cutoff, alpha, coulomb, exclusions)
        if order not in ORDERS:
            raise ValueError(f"the order {order} of splines is not one of {ORDERS}")
        self.grid, self.order = tuple(int(n) for n in grid), order
        if len(self.grid) != 3 or min(self.grid) < order:
            raise ValueError(f"the grid {tuple(grid)} has three sizes of at least the order, {order}")
        b = [moduli(n, order) for n in self.grid]
        numbers = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) for n in self.grid]
        for n, size in zip(numbers, self.grid, strict=True):
            if size % 2 == 0:
                n[size // 2] = torch.nan  # of unknown sign
        half = self.grid[2] // 2 + 1
        mesh = torch.meshgrid(*numbers[:2], numbers[2][:half], indexing="ij")
        self.waves = torch.stack(mesh, -1)  # (K0, K1, half, 3)
        self.moduli = b[0][:, None, None] * b[1][:, None] * b[2][:half]
        finite = ~self.waves.isnan().any(-1)
        finite[0, 0, 0] = False
        self.moduli = torch.where(finite, self.moduli, 0.0)
        self.moduli[..., 1:] *= 2  # n and -n
        self.waves = torch.where(finite[..., None], self.waves, 1.0)
        self._sizes = (ctypes.c_int64 * 3)(*self.grid)
        self._influence: tuple[Tensor, ...] | None = None

    @classmethod
    def accurate(
        cls,
        charges: Any,
        cell: Tensor,
        cutoff: float,
        tolerance: float = 1e-5,
        order: int | None = None,
        coulomb: float = MD.coulomb,
        exclusions: Any = None,
    ) -> PME:
        """alpha and grid for a relative error of forces (root mean square) of at most about `tolerance`, in the cell
        given here. The constants were fitted to water and to random charges in skewed cells. order: order of splines,
        by default the one whose transforms and spreading of charges take the least time together."""
        if not 0 < tolerance < 0.5:
            raise ValueError(f"the tolerance {tolerance} of PME must lie between 0 and 0.5")
        alpha = splitting(cutoff, tolerance / 4)
        edges = cell.reshape(-1, 3, 3).norm(dim=-1).amax(0)

        def grid(order: int) -> list[int]:
            points = 2 * alpha / (3 * (tolerance / 2) ** (1 / order))  # per length
            return [good_size(max(math.ceil(points * float(a)), order)) for a in edges]

        def time(order: int) -> float:
            return TRANSFORM * math.prod(grid(order)) + SPREAD * len(charges) * order**3

        order = min(ORDERS, key=time) if order is None else order
        return cls(charges, cutoff, alpha, grid(order), order, coulomb, exclusions)

    def influence(self, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """G (R, K0, K1, half) with E = sum G |F|^2, the wave vectors, and their squares."""
        k = 2 * math.pi * torch.einsum("abcn,rdn->rabcd", self.waves, torch.linalg.inv(cell))
        k2 = (k * k).sum(-1)
        factor = 2 * math.pi * self.coulomb / cells.volume(cell)
        return factor[:, None, None, None] * self.moduli * torch.exp(-k2 / (4 * self.alpha**2)) / k2, k, k2

    def charges_on_grid(self, positions: Tensor, cell: Tensor) -> Tensor:
        """(R, K0, K1, K2), differentiable."""
        sizes = torch.tensor(self.grid, dtype=torch.float64)
        s = cells.fractional(positions, cell)
        u = (s - s.detach().floor()) * sizes
        base = u.detach().floor()
        m = splines(u - base, self.order)  # (R, N, 3, p)
        at = (base[..., None].to(torch.int64) - torch.arange(self.order)) % torch.tensor(self.grid)[:, None]
        index = (at[:, :, 0, :, None] * self.grid[1] + at[:, :, 1, None])[..., None] * self.grid[2]
        index = index + at[:, :, 2, None, None]
        q = self.charges[:, None, None, None] * torch.einsum("rna,rnb,rnc->rnabc", *m.unbind(2))
        flat = positions.new_zeros(len(positions), math.prod(self.grid))
        return flat.scatter_add(1, index.flatten(1), q.flatten(1)).reshape(-1, *self.grid)

    def fourier_energy(self, positions: Tensor, cell: Tensor) -> Tensor:
        f = torch.fft.rfftn(self.charges_on_grid(positions, cell), dim=(1, 2, 3))
        return (self.influence(cell)[0] * (f.real**2 + f.imag**2)).sum((1, 2, 3))

    def add_fourier(self, positions: Tensor, cell: Tensor, forces: Tensor, virial: Tensor | None) -> Tensor:
        if self._influence is None or not torch.equal(self._influence[0], cell):
            self._influence = (cell.clone(), torch.linalg.inv(cell).contiguous(), *self.influence(cell))
        _, inverse, g, k, k2 = self._influence
        replicas, atoms, _ = positions.shape
        positions = positions.contiguous()
        library, x, q = native.library(), positions.data_ptr(), self.charges.data_ptr()
        threads = min(torch.get_num_threads(), max(replicas * atoms // ATOMS_PER_THREAD, 1))
        places = (self.order, replicas, atoms, x, inverse.data_ptr(), q, self._sizes)
        grid = torch.empty(replicas, *self.grid, dtype=torch.float64)
        library.pme_spread(*places, grid.data_ptr(), threads)
        self.add_up(grid)
        f = torch.fft.rfftn(grid, dim=(1, 2, 3))
        each = g * (f.real**2 + f.imag**2)
        total = each.sum((1, 2, 3))
        if virial is not None:
            along = each * (2 / k2 + 1 / (2 * self.alpha**2))
            virial.diagonal(dim1=-2, dim2=-1).add_(total[:, None])
            virial -= torch.einsum("rxyz,rxyza,rxyzb->rab", along, k, k)
        # dE/dQ = 2 sum over all n of G F exp(...): g holds 2 G where the last number is not 0, as it stands for -n too
        f *= g
        f[..., 0] *= 2
        potential = torch.fft.irfftn(f, s=self.grid, dim=(1, 2, 3), norm="forward")
        library.pme_collect(*places, potential.contiguous().data_ptr(), forces.data_ptr(), threads)
        return total
