"""Gauss-Newton inversion with Occam's rule: the smoothest model that fits the data to within their errors.

An outer iteration takes one Jacobian J and solves, for several weights beta,

    (G^T G + beta R) (q - p) = G^T r - beta R'(p),      G = W J D / sqrt(N),   r = W (d - F(m(p))) / sqrt(N)

W: reciprocals of errors. D: derivatives of the parametrisation. It keeps the model that fits best, and of those that
reach the target the smoothest. Constable, Parker and Constable, Geophysics 52(3), 1987. Where there are fewer data than
parameters, the same step is taken in data space (Siripunvaraporn and Egbert, Geophysics 65(3), 2000):

    q = p + h + C G^T (G C G^T + beta)^-1 (r - G h),   C = R^-1,   h = -C R'(p)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from tutti.launch.progress import progress
from tutti.science.em.mt.forward import MT2D
from tutti.science.em.mt.parameters import Local, Parameters

SWEEP = (1.0, 0.2, -0.5, -1.2, -2.0)  # decades around the last beta
STRATEGIES = ("occam", "multiplicative")


@dataclass(frozen=True)
class Iteration:
    """One outer iteration. chi: root mean square of weighted residuals. misfit: |W r| / |W d|, which articles call
    residual. beta: weight of the penalty. step: the largest change, of its cap. forwards: models that were computed."""

    chi: float
    misfit: float
    beta: float
    penalty: float
    step: float
    forwards: int
    seconds: float


@dataclass
class Result:
    """An inversion's outcome. model: log10 ohm-m (nz, nx). response: data of the model. p: parameters. shift: static
    shift of each row of `shifts`. history: the start, then each iteration. reached: whether chi reached the target."""

    model: Tensor
    response: Tensor
    p: Tensor
    parameters: Parameters
    beta: float
    shift: Tensor
    reached: bool
    history: list[Iteration] = field(repr=False)

    @property
    def chi(self) -> float:
        return self.history[-1].chi

    @property
    def misfit(self) -> float:
        return self.history[-1].misfit


class Inversion:
    """The inversion of data.

    data, errors: float64 of the problem's size; errors are standard deviations. mask: data that count; those that do
    not may be NaN. shifts: standard deviation of an unknown static shift of each site and mode, in decades of apparent
    resistivity; 0 for none. target: chi at which it ends. strategy: "occam", or "multiplicative", whose beta is
    `weight` times the squared relative misfit (Habashy and Abubakar, 2004).

    Raises ValueError for data or errors that are not finite, or errors that are not positive.
    """

    def __init__(self, problem: MT2D, data: Tensor, errors: Tensor, *, mask: Tensor | None = None, shifts: float = 0.0,
                 target: float = 1.05, steps: int = 15, strategy: str = "occam", weight: float = 1e-4,
                 say: Callable[[Iteration], Any] | None = None) -> None:  # fmt: skip
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}; got {strategy!r}")
        data, errors = (x.double().flatten() for x in (data, errors))
        mask = torch.ones(len(data), dtype=torch.bool) if mask is None else mask.bool().flatten()
        for name, x in (("data", data), ("errors", errors), ("mask", mask)):
            if len(x) != problem.size:
                raise ValueError(f"{name} has {len(x)} numbers; the problem has {problem.size}: {problem.shape}"
                                 " (mode, frequency, site, 2)")  # fmt: skip
        if bad := int((~torch.isfinite(data[mask])).sum()):
            raise ValueError(f"{bad} data are not finite; mask them")
        if bad := int((~(errors[mask] > 0) | errors[mask].isinf()).sum()):
            raise ValueError(f"{bad} errors are not positive and finite; they are standard deviations of the data")
        if not mask.any():
            raise ValueError("the mask leaves no data")
        self.problem, self.data, self.keep = problem, data, torch.nonzero(mask).flatten()
        self.weights = 1 / errors[self.keep] / len(self.keep) ** 0.5
        self.target, self.steps, self.strategy, self.weight, self.say = target, steps, strategy, weight, say
        self.norm = (self.weights * data[self.keep]).norm().item()
        self.shift_columns, self.shift_sd = self._shift_columns(), shifts

    def _shift_columns(self) -> np.ndarray:
        """Which log10 apparent resistivities a static shift of each site and mode moves: (data, shifts), weighted."""
        modes, frequencies, sites, _ = self.problem.shape
        columns = torch.zeros(modes, frequencies, sites, 2, modes * sites, dtype=torch.float64)
        for i, mode in enumerate(self.problem.modes):
            if mode != "tipper" and self.problem.log:
                for site in range(sites):
                    columns[i, :, site, 0, i * sites + site] = 1
        return (columns.flatten(0, 3)[self.keep] * self.weights[:, None]).numpy()

    def residual(self, response: Tensor, shift: Tensor) -> Tensor:
        """Weighted residuals: their norm is chi."""
        difference = (self.data - response)[self.keep]
        return self.weights * difference - torch.from_numpy(self.shift_columns @ shift.numpy())

    def run(self, parameters: Parameters, start: Tensor | float = 2.0) -> Result:
        """Invert from a model (nz, nx), or from a half-space of this log10 resistivity."""
        shape = self.problem.mesh.shape
        p = parameters.start(torch.as_tensor(start, dtype=torch.float64).expand(shape))
        shift = torch.zeros(self.shift_columns.shape[1], dtype=torch.float64)
        beta, history = None, []
        with progress("inverting") as tell:
            at = self.problem.linearize(parameters.model(p))
            r = self.residual(at.data, shift)
            history.append(self._told(r, 0.0, parameters.linearize(p).penalty, 0.0, 1, 0.0))
            for i in range(self.steps):
                if history[-1].chi <= self.target:
                    break
                tell(f"inverting: iteration {i + 1}, chi {history[-1].chi:.2f}")
                began = time.perf_counter()
                local = parameters.linearize(p)
                system = _System(self, at, local, r, shift)
                found = self._search(system, parameters, p, shift, beta, history[-1])
                if found is None:
                    break
                p, shift, beta, at, r, step, forwards = found
                penalty = parameters.linearize(p).penalty
                history.append(self._told(r, beta, penalty, step, forwards, time.perf_counter() - began))
        return Result(parameters.model(p), at.data, p, parameters, beta or 0.0, shift,
                      history[-1].chi <= self.target, history)  # fmt: skip

    def _told(self, r: Tensor, beta: float, penalty: float, step: float, forwards: int, seconds: float) -> Iteration:
        chi = r.norm().item()
        told = Iteration(chi, chi / self.norm, beta, penalty, step, forwards, seconds)
        if self.say:
            self.say(told)
        return told

    def _betas(self, system: _System, beta: float | None, misfit: float) -> Sequence[float]:
        if self.strategy == "multiplicative":
            return [self.weight * misfit**2 * self.norm**2]
        first = 30 * system.trace if beta is None else beta
        return [first * 10**x for x in SWEEP]

    def _search(self, system: _System, parameters: Parameters, p: Tensor, shift: Tensor, beta: float | None,
                last: Iteration) -> tuple | None:  # fmt: skip
        """The best candidate of a sweep of betas, with shorter steps if none is better than the last model."""
        chosen, forwards = None, 0
        for fraction in (1.0, 0.5, 0.25, 0.1, 0.03):
            for each in self._betas(system, beta, last.misfit):
                change, moved = system.step(each)
                step = float(np.abs(change / parameters.cap).max(initial=0.0))
                scale = fraction * min(1.0, 1 / max(step, 1e-30))
                q = p + torch.from_numpy(change) * scale
                s = shift + torch.from_numpy(moved) * scale
                at = self.problem.linearize(parameters.model(q))
                forwards += 1
                r = self.residual(at.data, s)
                chi = r.norm().item()
                if not np.isfinite(chi):
                    continue
                best = chosen[0] if chosen else np.inf
                if chi < best and (best > self.target or chosen is None):
                    chosen = (chi, (q, s, each, at, r, scale * step))
                if chosen and (chosen[0] <= self.target or chi > 1.05 * chosen[0]):
                    break  # betas fall: the first that reaches the target is the smoothest
            if chosen and chosen[0] < last.chi * (1 - 1e-3):
                return *chosen[1], forwards
        return None


class _System:
    """The linear system of an outer iteration, for any beta."""

    def __init__(self, inversion: Inversion, at: Any, local: Local, r: Tensor, shift: Tensor) -> None:
        jacobian = at.jacobian()[inversion.keep] * inversion.weights[:, None]
        self.g = np.ascontiguousarray((local.jacobian.T @ jacobian.numpy().T).T)  # (data, parameters)
        self.local, self.r, self.shift, self.sd = local, r.numpy(), shift.numpy(), inversion.shift_sd
        self.columns = inversion.shift_columns
        self.data_space = self.g.shape[0] < self.g.shape[1]
        self.trace = float((self.g**2).sum() / local.matrix.trace())
        if self.data_space:
            solve = scipy.sparse.linalg.splu(
                local.matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
            ).solve
            self.c = solve(np.ascontiguousarray(self.g.T))  # C G^T
            self.h = -solve(local.gradient)
            self.gram = self.g @ self.c
        else:
            self.normal = self.g.T @ self.g
            self.dense = local.matrix.toarray()

    def step(self, beta: float) -> tuple[np.ndarray, np.ndarray]:
        """The change of parameters and of static shifts."""
        n, sd = len(self.r), self.sd
        noise = np.zeros((n, n))
        known = self.r
        if sd:  # shifts are normal around 0; eliminated, they add to the covariance of the data
            noise = n * sd**2 * (self.columns @ self.columns.T)
            known = self.r + self.columns @ self.shift
        if self.data_space:
            left = self.gram / beta + noise
            left[np.diag_indices(n)] += 1
            dual = scipy.linalg.cho_solve(scipy.linalg.cho_factor(left, lower=True), known - self.g @ self.h)
            change = self.h + self.c @ dual / beta
        else:
            g, normal, right = self.g, self.normal, known
            if sd:
                noise[np.diag_indices(n)] += 1
                factor = scipy.linalg.cho_factor(noise, lower=True)
                solved = scipy.linalg.cho_solve(factor, np.column_stack([g, known]))
                normal, right = g.T @ solved[:, :-1], solved[:, -1]
            left = normal + beta * self.dense
            rhs = g.T @ right - beta * self.local.gradient
            change = scipy.linalg.cho_solve(scipy.linalg.cho_factor(left, lower=True), rhs)
        if not sd:
            return change, np.zeros_like(self.shift)
        rest = known - self.g @ change
        least = self.columns.T @ self.columns + np.eye(len(self.shift)) / (n * sd**2)
        return change, np.linalg.solve(least, self.columns.T @ rest) - self.shift
