"""Fields of one polarisation at some frequencies, what the sites see of them, and derivatives by the adjoint method.

    A u = f,   q = q(u, m)    =>    dq/dm = explicit - g^T (dA/dm u),    A g = (dq/du)^T

for the complex quantity q of each site (ln Z, whose derivative is dZ/Z), m the log10 resistivity of cells. A is
symmetric: the factors of A give the fields u, and the adjoint fields g with one right-hand side a site.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.science.em.mt.response.solvers import Factorization, Solver
from tutti.science.em.mt.response.stencil import Readout, Stencil, contract, spread
from tutti.science.em.mt.response.te import TE
from tutti.science.em.mt.response.tm import TM


@dataclass
class Fields:
    """Fields at b frequencies, as r quantities: one for each site, for TE perhaps two."""

    physics: TE | TM
    log_rho: Tensor  # (nz, nx)
    iwmu: Tensor  # i w mu0 (b)
    factors: Factorization
    u: Tensor  # (b, nodes in z, nodes in x)
    readout: Readout

    @classmethod
    def solve(
        cls, physics: TE | TM, solver: Solver, stencil: Stencil, log_rho: Tensor, iwmu: Tensor, log: bool
    ) -> Fields:
        """log: read ln Z, not Z in ohm."""
        factors = solver.factor(stencil, iwmu)
        u = factors.solve(physics.rhs(stencil, iwmu)[:, None])[:, 0]
        return cls(physics, log_rho, iwmu, factors, u, physics.readout(u, log_rho, iwmu, log))

    def corners(self) -> Tensor:
        return self.physics.corners(self.u, self.log_rho, self.iwmu)

    def adjoint(self, rows: Tensor) -> Tensor:
        """g on nodes of the earth for rows on the surface and the nodes below it, (b, r, 2, nx + 1)."""
        surface = self.physics.surface
        rhs = rows.new_zeros(*rows.shape[:2], *self.u.shape[1:])
        rhs[:, :, surface : surface + 2] = rows
        return self.factors.solve(rhs)[:, :, surface:]

    def jacobian(self, which: slice = slice(None)) -> Tensor:
        """dq/dm of these quantities, complex (b, r, nz, nx)."""
        out = contract(self.adjoint(self.readout.rows[:, which]), self.corners()).neg_()
        out[:, :, 0] += self.readout.explicit[:, which]
        return out

    def jvp(self, change: Tensor) -> Tensor:
        """dq for a change of m (nz, nx). Returns (b, r)."""
        surface = self.physics.surface
        rhs = torch.zeros_like(self.u)
        rhs[:, surface:] = spread(self.corners(), change)
        if isinstance(self.physics, TM):
            rhs[:, 0] = 0  # H is given there
        du = self.factors.solve(-rhs[:, None])[:, 0, surface : surface + 2]
        return torch.einsum("brsx,bsx->br", self.readout.rows, du) + self.readout.explicit @ change[0].to(du.dtype)

    def vjp(self, weights: Tensor) -> Tensor:
        """Re(weights dq/dm) summed over quantities, for each frequency. weights: (b, r). Returns (b, nz, nx)."""
        rows = torch.einsum("br,brsx->bsx", weights, self.readout.rows)
        out = contract(self.adjoint(rows[:, None]), self.corners())[:, 0].neg_()
        out[:, 0] += torch.einsum("br,brx->bx", weights, self.readout.explicit)
        return out.real
