"""Magnetotelluric responses of a two-dimensional section, and their derivatives."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutti.science.em.mt.mesh import MU0, Mesh2D, positive_frequencies, skin_depth
from tutti.science.em.mt.response.fields import Fields
from tutti.science.em.mt.response.layered import log10_of_ohm_m
from tutti.science.em.mt.response.solvers import SOLVERS, Solver, one_blas_thread
from tutti.science.em.mt.response.stencil import LN10, Stencil, interpolation
from tutti.science.em.mt.response.te import TE
from tutti.science.em.mt.response.tm import TM
from tutti.science.em.mt.share import Share
from tutti.science.em.mt.suitability import ADVICE, shortcomings

MODES = ("TE", "TM", "tipper")
OUTPUTS = ("apparent", "impedance")
AIR_HEIGHT, AIR_RHO = 1e5, 100.0  # the air is as high as the larger of these: metres, and the skin depth in these ohm-m
T = TypeVar("T")


@dataclass(frozen=True)
class Polarisation:
    """One kind of equations, and the modes of the data that are read from its fields."""

    physics: TE | TM
    solver: Solver
    modes: list[int]


@dataclass(frozen=True)
class Batch:
    """Some of this process's frequencies in one polarisation."""

    of: Polarisation
    stencil: Stencil
    part: slice


class MT2D:
    """Magnetotelluric responses of a section: `problem(log_rho) -> d`, differentiable once.

    frequencies: Hz. sites: x in metres, on the surface; fields are interpolated linearly between nodes. modes: any of
    "TE", "TM" and "tipper". d is float64, of `shape` (mode, frequency, site, 2), flattened. The last two numbers are
    log10 of the apparent resistivity in ohm-m and the phase in degrees; with outputs="impedance" the real and
    imaginary part of Z = E/H in ohm; of the tipper Hz/Hy (x along strike, y along the profile, z down) always these.

    log_rho: log10 ohm-m of cells, (nz, nx) or flat. solver: "splu" (CPU), "block" or "block32" (the device of log_rho;
    see `solvers`). threads: number of frequencies that "splu" solves at the same time; all cores by default. group:
    processes that share the work; all get all results. Results depend on none of these. Raises ValueError for sites
    outside of the mesh and models that are not finite or beyond 10^10 ohm-m, which were not given as log10. Warns,
    once, of a mesh that is too coarse or too small for a model (`suitability`).

    >>> problem = MT2D(Mesh2D.for_survey([1.0, 10.0], [0.0, 500.0], (10, 100)), [1.0, 10.0], [0.0, 500.0])
    >>> d = problem(torch.full(problem.mesh.shape, 2.0)).view(problem.shape)
    >>> d.shape, [round(x) for x in d[1, 0, 0].tolist()]  # TM at 1 Hz over 100 ohm-m
    (torch.Size([2, 2, 2, 2]), [2, 45])
    """

    def __init__(self, mesh: Mesh2D, frequencies: Sequence[float] | Tensor, sites: Sequence[float] | Tensor,
                 modes: Sequence[str] = ("TE", "TM"), *, solver: str = "splu", outputs: str = "apparent",
                 threads: int | None = None, group: dist.ProcessGroup | None = None) -> None:  # fmt: skip
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
        self.at, self.share = interpolation(mesh, self.sites), Share(len(self.frequencies), len(self.sites), group)
        self._polarisations: dict[torch.device, list[Polarisation]] = {}
        self._warned = self.share.rank > 0

    def __repr__(self) -> str:
        return f"MT2D({self.mesh}, (mode, frequency, site, 2) = {self.shape}, modes={self.modes})"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (mode, frequency, site, 2) of the data."""
        return len(self.modes), len(self.frequencies), len(self.sites), 2

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __call__(self, log_rho: Tensor) -> Tensor:
        self.warn(log_rho)
        return _Response.apply(log_rho, self)  # type: ignore[return-value]

    def jacobian(self, log_rho: Tensor) -> tuple[Tensor, Tensor]:
        """d and its derivatives by each cell, float64 of shape (data, cells)."""
        self.warn(log_rho)
        at = Linearization(self, log_rho, jacobian=True)
        assert at.derivatives is not None
        return at.data, at.derivatives

    def jvp(self, log_rho: Tensor, change: Tensor) -> Tensor:
        """The derivative of d along a change of the model."""
        return self.linearize(log_rho).jvp(change)

    def vjp(self, log_rho: Tensor, weights: Tensor) -> Tensor:
        """The gradient of (weights * d).sum(), in the shape of log_rho."""
        return self.linearize(log_rho).vjp(weights).view(log_rho.shape)

    def linearize(self, log_rho: Tensor, *, trial: bool = False) -> Linearization:
        """The response at a model with the factors of all frequencies, for many products with the Jacobian."""
        return Linearization(self, log_rho, keep=True, trial=trial)

    def checked(self, log_rho: Tensor, trial: bool = False) -> Tensor:
        """log_rho as float64 (nz, nx). Raises ValueError for a wrong shape, values that are not finite and, unless it
        is a trial model of an inversion, values that are no log10 of ohm-m."""
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
        if not trial:
            log10_of_ohm_m(log_rho)
        if self.solver == "splu" and log_rho.device.type != "cpu":
            raise ValueError(f"solver 'splu' runs on the CPU; use solver='block' for log_rho on {log_rho.device}")
        return log_rho.detach().double().reshape(self.mesh.shape)

    def warn(self, log_rho: Tensor, *, trial: bool = False) -> None:
        """Warn if the mesh does not suit a model, unless this problem has warned before."""
        if self._warned:
            return
        if faults := shortcomings(self.mesh, self.checked(log_rho, trial), self.frequencies, self.sites):
            self._warned = True
            warnings.warn(f"{'; '.join(faults)}: responses may be far off; {ADVICE}", stacklevel=3)

    def polarisations(self, device: torch.device) -> list[Polarisation]:
        if device not in self._polarisations:
            height = max(AIR_HEIGHT, skin_depth(AIR_RHO, min(self.frequencies)))
            names = {"TE": "impedance", "tipper": "tipper"}
            electric = [i for i, mode in enumerate(self.modes) if mode in names]
            physics_and_modes: list[tuple[TE | TM, list[int]]] = []
            if electric:
                channels = tuple(names[self.modes[i]] for i in electric)
                physics_and_modes.append((TE(self.mesh, self.at, height, channels, device), electric))
            if "TM" in self.modes:
                physics_and_modes.append((TM(self.mesh, self.at, device), [self.modes.index("TM")]))
            solver = SOLVERS[self.solver]
            nodes = self.mesh.nz + 1, self.mesh.nx + 1
            self._polarisations[device] = [
                Polarisation(physics, solver((physics.surface + nodes[0], nodes[1])), modes)
                for physics, modes in physics_and_modes
            ]
        return self._polarisations[device]

    def scales(self, mode: int) -> tuple[float, float]:
        """From the real and imaginary part of a quantity to the data."""
        return (2 / LN10, 180 / math.pi) if self.log and self.modes[mode] != "tipper" else (1.0, 1.0)


class Linearization:
    """The response of a problem at one model, `data`, and its derivatives.

    keep: keep the factors for `jvp` and `vjp`. jacobian: compute `derivatives`, (data, cells). trial: a model of an
    inversion's step, which may be far off: any finite one will do.
    """

    @torch.no_grad()
    def __init__(self, problem: MT2D, log_rho: Tensor, keep: bool = False, jacobian: bool = False,
                 trial: bool = False) -> None:  # fmt: skip
        self.problem, self.log_rho = problem, problem.checked(log_rho, trial)
        w = 2 * math.pi * torch.tensor(problem.frequencies, dtype=torch.float64, device=log_rho.device)
        own, own_sites = problem.share.own()
        self.iwmu = 1j * MU0 * w[own]
        self.batches: list[Batch] = []
        for of in problem.polarisations(log_rho.device):
            stencil, size = of.physics.stencil(self.log_rho), of.solver.batch
            self.batches += [Batch(of, stencil, slice(i, i + size)) for i in range(0, len(self.iwmu), size)]
        modes, count = len(problem.modes), len(self.iwmu)
        sites = len(range(len(problem.sites))[own_sites])
        own_rows = w.new_empty(modes, count, sites, 2, problem.mesh.cells) if jacobian else None

        def work(batch: Batch) -> tuple[Tensor, Fields | None]:
            of = batch.of
            iwmu = self.iwmu[batch.part]
            fields = Fields.solve(of.physics, of.solver, batch.stencil, self.log_rho, iwmu, problem.log)
            if own_rows is not None:
                self._fill(own_rows, batch, fields, own_sites)
            return fields.readout.value, fields if keep else None

        done = self._each(work, self.batches)
        self.fields = [fields for _, fields in done if fields is not None]
        self.data = self._data([value for value, _ in done], offset=(w * MU0).log10())
        self.derivatives: Tensor | None = None
        if own_rows is not None:
            self.derivatives = problem.share.gather(own_rows, split_sites=True).view(-1, problem.mesh.cells)

    def _each(self, work: Callable[..., T], *jobs: Sequence) -> list[T]:
        """work of each job, in order, in threads where that pays."""
        if not all(batch.of.solver.threaded for batch in self.batches):
            return [work(*job) for job in zip(*jobs, strict=True)]
        with one_blas_thread():
            if self.problem.threads == 1 or len(self.batches) == 1:
                return [work(*job) for job in zip(*jobs, strict=True)]
            with ThreadPoolExecutor(self.problem.threads) as pool:
                return list(pool.map(work, *jobs))

    def _data(self, values: list[Tensor], offset: Tensor | None = None) -> Tensor:
        """Real data of all from complex quantities of each batch; offset: log10(w mu0) (frequency)."""
        problem = self.problem
        q = self.iwmu.new_empty(len(problem.modes), len(self.iwmu), len(problem.sites))
        for value, batch in zip(values, self.batches, strict=True):
            of = batch.of.modes
            q[of, batch.part] = value.unflatten(1, (len(of), -1)).transpose(0, 1)
        out = problem.share.gather(torch.view_as_real(q), split_sites=False).clone()
        for mode in range(len(problem.modes)):
            out[mode] *= out.new_tensor(problem.scales(mode))
            if offset is not None and problem.scales(mode) != (1.0, 1.0):
                out[mode, :, :, 0] -= offset[:, None]
        return out.flatten()

    def _fill(self, out: Tensor, batch: Batch, fields: Fields, sites: slice) -> None:
        """out: (mode, own frequency, own site, 2, cell)."""
        everywhere = len(self.problem.sites)
        for k, mode in enumerate(batch.of.modes):
            which = range(k * everywhere, (k + 1) * everywhere)[sites]
            q = fields.jacobian(slice(which.start, which.stop, which.step)).flatten(2)
            a, b = self.problem.scales(mode)
            for row, into in zip(q, out[mode, batch.part], strict=True):
                torch.mul(row.real, a, out=into[:, 0])
                torch.mul(row.imag, b, out=into[:, 1])

    @torch.no_grad()
    def jacobian(self) -> Tensor:
        """(data, cells), from the factors that were kept."""
        own_sites = self.problem.share.own()[1]
        sites = len(range(len(self.problem.sites))[own_sites])
        out = self.data.new_empty(len(self.problem.modes), len(self.iwmu), sites, 2, self.problem.mesh.cells)
        self._each(lambda b, fields: self._fill(out, b, fields, own_sites), self.batches, self.fields)
        return self.problem.share.gather(out, split_sites=True).view(-1, self.problem.mesh.cells)

    @torch.no_grad()
    def jvp(self, change: Tensor) -> Tensor:
        """The derivative of d along a change of the model, (data,)."""
        change = change.to(self.log_rho).reshape(self.log_rho.shape)
        return self._data(self._each(lambda fields: fields.jvp(change), self.fields))

    @torch.no_grad()
    def vjp(self, weights: Tensor) -> Tensor:
        """The gradient of (weights * d).sum(), (nz, nx). Sums over frequencies are in one order on all processes."""
        problem = self.problem
        w = weights.to(self.data).reshape(problem.shape).clone()
        for mode in range(len(problem.modes)):
            w[mode] *= w.new_tensor(problem.scales(mode))
        c = torch.complex(w[..., 0], -w[..., 1])[:, problem.share.own()[0]]  # Re(c dq) = a Re dq + b Im dq

        def one(batch: Batch, fields: Fields) -> Tensor:
            return fields.vjp(c[batch.of.modes][:, batch.part].transpose(0, 1).flatten(1))

        parts = torch.cat(self._each(one, self.batches, self.fields))
        parts = parts.view(-1, len(self.iwmu), 1, *self.log_rho.shape)  # (polarisation, own frequency, 1, nz, nx)
        return problem.share.gather(parts, split_sites=False).sum((0, 1, 2))


class _Response(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_rho: Tensor, problem: MT2D) -> Tensor:  # type: ignore[override]
        ctx.at = Linearization(problem, log_rho, keep=ctx.needs_input_grad[0])
        ctx.like = log_rho.shape, log_rho.dtype
        return ctx.at.data.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, weights: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shape, dtype = ctx.like
        return ctx.at.vjp(weights).view(shape).to(dtype), None
