"""Responses of a two-dimensional earth to plane waves, and their derivatives by the adjoint method.

    A u = f,   q = q(u, m)    =>    dq/dm = explicit - g^T (dA/dm u),    A g = (dq/du)^T

for the complex quantity q of each site (ln Z, whose derivative is dZ/Z), m the log10 resistivity of cells. One LU of
each frequency gives the fields u, and as A is symmetric also the adjoint fields g, one right-hand side a site.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutti.science.em.mt.mesh import MU0, Mesh2D, positive_frequencies, skin_depth
from tutti.science.em.mt.solvers import SOLVERS, Block, Factorization, SuperLU
from tutti.science.em.mt.stencil import LN10, Readout, contract, interpolation, spread
from tutti.science.em.mt.te import TE
from tutti.science.em.mt.tm import TM

MODES = ("TE", "TM", "tipper")
OUTPUTS = ("apparent", "impedance")
AIR_HEIGHT, AIR_RHO = 1e5, 100.0  # the air is as high as the larger of these: metres, and the skin depth in these ohm-m
T = TypeVar("T")


@dataclass
class Fields:
    """One polarisation at some frequencies: fields, what sites see, and the factors to go on with."""

    physics: TE | TM
    log_rho: Tensor
    iwmu: Tensor
    factors: Factorization
    u: Tensor
    readout: Readout

    def corners(self) -> Tensor:
        return self.physics.corners(self.u, self.log_rho, self.iwmu)

    def adjoint(self, rows: Tensor) -> Tensor:
        """A^{-1} of rows on the surface and the nodes below, seen on nodes of the earth. rows: (b, r, 2, nx + 1)."""
        surface = self.physics.surface
        rhs = rows.new_zeros(*rows.shape[:2], *self.u.shape[1:])
        rhs[:, :, surface : surface + 2] = rows
        return self.factors.solve(rhs)[:, :, surface:]

    def jacobian(self) -> Tensor:
        """dq/dm, complex (b, r, nz, nx)."""
        out = contract(self.adjoint(self.readout.rows), self.corners()).neg_()
        out[:, :, 0] += self.readout.explicit
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
        """Re(weights dq/dm) summed over sites, for each frequency. weights: complex (b, r). Returns (b, nz, nx)."""
        rows = torch.einsum("br,brsx->bsx", weights, self.readout.rows)
        out = contract(self.adjoint(rows[:, None]), self.corners())[:, 0].neg_()
        out[:, 0] += torch.einsum("br,brx->bx", weights, self.readout.explicit)
        return out.real


class MT2D:
    """Magnetotelluric responses of a section: `problem(log_rho) -> d`, differentiable once.

    frequencies: Hz. sites: x in metres, on the surface; fields are interpolated linearly between nodes. modes: any of
    "TE", "TM" and "tipper". d is float64, of `shape` (mode, frequency, site, 2), flattened. The last two numbers are
    log10 of the apparent resistivity in ohm-m and the phase in degrees; with outputs="impedance" the real and
    imaginary part of Z = E/H in ohm; of the tipper Hz/Hy (x along strike, y along the profile, z down) always these.

    log_rho: log10 ohm-m of cells, (nz, nx) or flat. solver: "splu" (CPU) or "block" (the device of log_rho). threads:
    of "splu", frequencies at the same time; all cores by default. Results do not depend on either.

    >>> problem = MT2D(Mesh2D.for_survey([1.0, 10.0], [0.0, 500.0], (10, 100)), [1.0, 10.0], [0.0, 500.0])
    >>> d = problem(torch.full(problem.mesh.shape, 2.0)).view(problem.shape)
    >>> d.shape, [round(x, 1) for x in d[1, 0, 0].tolist()]  # TM at 1 Hz over 100 ohm-m
    (torch.Size([2, 2, 2, 2]), [2.0, 45.0])
    """

    def __init__(self, mesh: Mesh2D, frequencies: Sequence[float] | Tensor, sites: Sequence[float] | Tensor,
                 modes: Sequence[str] = ("TE", "TM"), *, solver: str = "splu", outputs: str = "apparent",
                 threads: int | None = None) -> None:  # fmt: skip
        self.mesh, self.modes = mesh, (modes,) if isinstance(modes, str) else tuple(modes)
        self.frequencies, self.sites = positive_frequencies(frequencies), tuple(float(x) for x in sites)
        if not self.sites:
            raise ValueError("sites are x positions in metres; got none")
        if not self.modes or len(set(self.modes)) < len(self.modes) or not set(self.modes) <= set(MODES):
            raise ValueError(f"modes must be one or more of {MODES}, each once; got {self.modes}")
        if solver not in SOLVERS:
            raise ValueError(f"solver must be one of {tuple(SOLVERS)}; got {solver!r}")
        if outputs not in OUTPUTS:
            raise ValueError(f"outputs must be one of {OUTPUTS}; got {outputs!r}")
        self.solver, self.log, self.threads = solver, outputs == "apparent", threads or os.cpu_count() or 1
        self.at = interpolation(mesh, self.sites)
        self._physics: dict[torch.device, list[tuple[TE | TM, SuperLU | Block, list[int]]]] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(mode, frequency, site, 2): of the data."""
        return len(self.modes), len(self.frequencies), len(self.sites), 2

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __call__(self, log_rho: Tensor) -> Tensor:
        return _Response.apply(log_rho, self)  # type: ignore[return-value]

    def jacobian(self, log_rho: Tensor) -> tuple[Tensor, Tensor]:
        """d and its derivatives by each cell, float64 of shape (data, cells)."""
        at = self.linearize(log_rho)
        return at.data, at.jacobian()

    def jvp(self, log_rho: Tensor, change: Tensor) -> Tensor:
        """The derivative of d along a change of the model."""
        return self.linearize(log_rho).jvp(change)

    def vjp(self, log_rho: Tensor, weights: Tensor) -> Tensor:
        """The gradient of (weights * d).sum(), in the shape of log_rho."""
        return self.linearize(log_rho).vjp(weights).view(log_rho.shape)

    @torch.no_grad()
    def linearize(self, log_rho: Tensor) -> Linearization:
        """The response at a model, and what its derivatives need: each frequency is factored once."""
        return Linearization(self, self._checked(log_rho))

    def _checked(self, log_rho: Tensor) -> Tensor:
        if log_rho.shape not in (self.mesh.shape, (self.mesh.cells,)):
            raise ValueError(
                f"log_rho must have the shape {self.mesh.shape} (nz, nx) of the mesh or ({self.mesh.cells},);"
                f" got {tuple(log_rho.shape)}"
            )
        if not (finite := torch.isfinite(log_rho)).all():
            raise ValueError(
                f"log_rho must be finite: {int((~finite).sum())} cells are not; it is log10 of resistivity in ohm-m"
                " (log_resistivity() converts and checks)"
            )
        if self.solver == "splu" and log_rho.device.type != "cpu":
            raise ValueError(f"solver 'splu' runs on the CPU; use solver='block' for log_rho on {log_rho.device}")
        return log_rho.detach().double().reshape(self.mesh.shape)

    def physics(self, device: torch.device) -> list[tuple[TE | TM, SuperLU | Block, list[int]]]:
        """The polarisations with their solvers and the modes read from them."""
        if device not in self._physics:
            height = max(AIR_HEIGHT, skin_depth(AIR_RHO, min(self.frequencies)))
            names = {"TE": "impedance", "tipper": "tipper"}
            electric = [i for i, mode in enumerate(self.modes) if mode in names]
            found: list[tuple[TE | TM, list[int]]] = []
            if electric:
                channels = tuple(names[self.modes[i]] for i in electric)
                found.append((TE(self.mesh, self.at, height, channels, device), electric))
            if "TM" in self.modes:
                found.append((TM(self.mesh, self.at, device), [self.modes.index("TM")]))
            self._physics[device] = [
                (p, SOLVERS[self.solver]((p.surface + self.mesh.nz + 1, self.mesh.nx + 1)), modes) for p, modes in found
            ]
        return self._physics[device]

    def each(self, work: Callable[..., T], jobs: Sequence[Any]) -> list[T]:
        """work(job) for each, in order; with SuperLU in threads."""
        if self.solver == "block" or self.threads == 1 or len(jobs) == 1:
            return [work(job) for job in jobs]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(work, jobs))


class Linearization:
    """The response of a problem at one model: `data`, and derivatives from the same factors."""

    def __init__(self, problem: MT2D, log_rho: Tensor) -> None:
        self.problem, self.log_rho = problem, log_rho
        w = 2 * math.pi * torch.tensor(problem.frequencies, dtype=torch.float64, device=log_rho.device)
        self.iwmu = 1j * MU0 * w
        jobs = []
        for physics, solver, modes in problem.physics(log_rho.device):
            stencil = physics.stencil(log_rho)
            jobs += [(physics, solver, modes, stencil, part) for part in torch.arange(len(w)).split(solver.batch)]
        self.fields = problem.each(self._solve, jobs)
        self.places = [(modes, part) for _, _, modes, _, part in jobs]
        q = self._gather([fields.readout.value for fields in self.fields])
        self.data = self._parts(q, offset=(w * MU0).log10()).flatten()

    def _solve(self, job: tuple[TE | TM, SuperLU | Block, list[int], Any, Tensor]) -> Fields:
        physics, solver, _, stencil, part = job
        iwmu = self.iwmu[part.to(self.iwmu.device)]
        factors = solver.factor(stencil, iwmu)
        u = factors.solve(physics.rhs(stencil, iwmu)[:, None])[:, 0]
        return Fields(physics, self.log_rho, iwmu, factors, u, physics.readout(u, self.log_rho, iwmu, self.problem.log))

    def _gather(self, values: list[Tensor]) -> Tensor:
        """Complex quantities (mode, frequency, site) from those of each of `fields`."""
        out = self.iwmu.new_empty(self.problem.shape[:3])
        for value, (modes, part) in zip(values, self.places, strict=True):
            for mode, q in zip(modes, value.unflatten(1, (len(modes), -1)).unbind(1), strict=True):
                out[mode, part] = q
        return out

    def _scales(self, mode: str) -> tuple[float, float]:
        """From the real and imaginary part of a quantity to the data."""
        return (2 / LN10, 180 / math.pi) if self.problem.log and mode != "tipper" else (1.0, 1.0)

    def _parts(self, q: Tensor, offset: Tensor | None = None) -> Tensor:
        """Real data (mode, frequency, site, 2) from complex quantities; offset: log10(w mu0)."""
        out = torch.view_as_real(q.resolve_conj()).clone()
        for i, mode in enumerate(self.problem.modes):
            out[i] *= out.new_tensor(self._scales(mode))
            if offset is not None and self.problem.log and mode != "tipper":
                out[i, :, :, 0] -= offset[:, None]
        return out

    @torch.no_grad()
    def jacobian(self) -> Tensor:
        """(data, cells)."""
        modes, frequencies, sites, _ = self.problem.shape
        out = self.data.new_empty(modes, frequencies, sites, 2, self.problem.mesh.cells)

        def fill(i: int) -> None:
            q = self.fields[i].jacobian().flatten(2)
            of, part = self.places[i]
            for k, mode in enumerate(of):
                a, b = self._scales(self.problem.modes[mode])
                for j, f in enumerate(part.tolist()):
                    rows = q[j, k * sites : (k + 1) * sites]
                    torch.mul(rows.real, a, out=out[mode, f, :, 0])
                    torch.mul(rows.imag, b, out=out[mode, f, :, 1])

        self.problem.each(fill, range(len(self.fields)))
        return out.view(-1, self.problem.mesh.cells)

    @torch.no_grad()
    def jvp(self, change: Tensor) -> Tensor:
        change = change.to(self.log_rho).reshape(self.log_rho.shape)
        values = self.problem.each(lambda fields: fields.jvp(change), self.fields)
        return self._parts(self._gather(values)).flatten()

    @torch.no_grad()
    def vjp(self, weights: Tensor) -> Tensor:
        """The gradient (nz, nx)."""
        w = weights.to(self.data).reshape(self.problem.shape).clone()
        for i, mode in enumerate(self.problem.modes):
            w[i] *= w.new_tensor(self._scales(mode))
        c = torch.complex(w[..., 0], -w[..., 1])  # Re(c dq) = a Re dq + b Im dq

        def one(i: int) -> Tensor:
            modes, part = self.places[i]
            return self.fields[i].vjp(c[modes][:, part].transpose(0, 1).flatten(1))

        return torch.cat(self.problem.each(one, range(len(self.fields)))).sum(0)


class _Response(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_rho: Tensor, problem: MT2D) -> Tensor:  # type: ignore[override]
        at = problem.linearize(log_rho)
        if ctx.needs_input_grad[0]:
            ctx.at, ctx.like = at, (log_rho.shape, log_rho.dtype)
        return at.data.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, weights: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shape, dtype = ctx.like
        return ctx.at.vjp(weights).view(shape).to(dtype), None
