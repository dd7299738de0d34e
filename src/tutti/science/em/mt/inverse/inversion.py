"""Gauss-Newton inversion with Occam's rule: the smoothest model that fits the data to within their errors.

An outer iteration takes one Jacobian J and solves, for several weights beta,

    (G^T G + beta R) (q - p) = G^T r - beta R'(p),      G = W J D / sqrt(N),   r = W (d - F(m(p))) / sqrt(N)

W: reciprocals of errors. D: derivatives of the parametrisation. It keeps the model that fits best, and once one reaches
the target, that of the largest beta that does, to within 2 % of the target in chi. Constable, Parker and Constable,
Geophysics 52(3), 1987. Where there are fewer data than parameters, the same step is taken in data space
(Siripunvaraporn and Egbert, Geophysics 65(3), 2000):

    q = p + h + C G^T (G C G^T + beta)^-1 (r - G h),   C = R^-1,   h = -C R'(p)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg
import torch
from torch import Tensor

from tutti.launch.progress import progress
from tutti.science.em.mt.inverse.parameters import Local, Parameters
from tutti.science.em.mt.response.forward import MT2D, Linearization
from tutti.science.em.mt.response.layered import log10_of_ohm_m
from tutti.science.em.mt.surveys.data import Data
from tutti.science.em.shown import Brief

SWEEP = (1.0, 0.2, -0.5, -1.2, -2.0)  # decades around the last beta
DENSE = 8000  # parameters whose penalty is factored as a dense matrix
NEARLY, TRIES = 0.02, 6  # the last step's chi is this near below the target, relative, unless so many betas fail
STRATEGIES = ("occam", "multiplicative")


@dataclass(frozen=True)
class Iteration:
    """One outer iteration. chi: root mean square of weighted residuals. misfit: |d - F| / |d|, which articles call
    residual. beta: weight of the penalty. step: the largest change, as a fraction of its cap. forwards: number of
    models that were computed."""

    chi: float
    misfit: float
    beta: float
    penalty: float
    step: float
    forwards: int
    seconds: float


@dataclass(repr=False)
class Result(Brief):
    """An inversion's outcome. model: log10 ohm-m (nz, nx). response: data of the model, with static shifts. p: vector
    of the parametrisation. shift: static shifts by mode and site. history: the start, then each iteration. reached:
    whether chi is at most the target."""

    model: Tensor
    response: Tensor
    p: Tensor
    parameters: Parameters
    beta: float
    shift: Tensor
    reached: bool
    history: list[Iteration] = field(repr=False)

    leading = ("chi", "misfit")

    @property
    def chi(self) -> float:
        return self.history[-1].chi

    @property
    def misfit(self) -> float:
        return self.history[-1].misfit


class Candidate(NamedTuple):
    """A model that a step leads to, and its beta. at: response of the model. r: weighted residuals. step: the largest
    change, as a fraction of its cap."""

    chi: float
    p: Tensor
    shift: Tensor
    beta: float
    at: Linearization
    r: Tensor
    step: float


class Inversion:
    """The inversion of data.

    shifts: standard deviation of an unknown static shift of each site and mode, in decades of apparent resistivity; 0
    for none. target: chi at which it ends. strategy: "occam", or "multiplicative", whose beta is `weight` times chi^2
    (Habashy and Abubakar, 2004). say: is called with the number of each iteration, 0 at the start.

    Raises ValueError if the problem's responses do not compare with the data.
    """

    def __init__(self, problem: MT2D, data: Data, *, shifts: float = 0.0, target: float = 1.05, steps: int = 15,
                 strategy: str = "occam", weight: float = 1e-3,
                 say: Callable[[int, Iteration], Any] | None = None) -> None:  # fmt: skip
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}; got {strategy!r}")
        outputs = "apparent" if problem.log else "impedance"
        ours, theirs = (problem.modes, problem.frequencies, problem.sites, outputs), (
            data.modes, data.frequencies, data.sites, data.outputs)  # fmt: skip
        if ours != theirs:
            raise ValueError("the problem has other modes, frequencies, sites or outputs than the data: use"
                             " data.problem(mesh)")  # fmt: skip
        if not data.count:
            raise ValueError("the mask leaves no data")
        if shifts < 0 or not target > 0 or steps < 0:
            raise ValueError(
                f"shifts and steps must not be negative, target must be positive: {shifts}, {steps}, {target}"
            )
        if shifts and not problem.log:
            raise ValueError("static shifts need apparent resistivities: these data are impedances")
        self.problem, self.data, self.keep = problem, data, torch.nonzero(data.mask.flatten()).flatten()
        self.values = data.values.flatten()
        self.weights = data.weights[self.keep] / data.count**0.5
        self.target, self.steps, self.strategy, self.weight, self.say = target, steps, strategy, weight, say
        shift = data.shift_jacobian() if problem.log else torch.zeros(data.values.numel(), 0, dtype=torch.float64)
        self.shift_columns, self.shift_sd = shift[self.keep] * self.weights[:, None], shifts

    def shifted(self, response: Tensor, shift: Tensor) -> Tensor:
        """A response with static shifts, which is what compares with the data."""
        return self.data.shifted(response, shift.view(self.problem.shape[0], -1)) if self.shift_sd else response

    def residual(self, response: Tensor, shift: Tensor) -> Tensor:
        """Weighted residuals: their norm is chi."""
        return self.weights * (self.values - self.shifted(response, shift))[self.keep]

    def run(self, parameters: Parameters, start: Tensor | float = 2.0) -> Result:
        """Invert from a model (nz, nx), or from a half-space of this log10 resistivity. Raises ValueError for a
        start beyond 10^10 ohm-m, and parameters of another mesh than the problem's."""
        mesh = self.problem.mesh
        if (other := getattr(parameters, "mesh", mesh)) != mesh:
            raise ValueError(f"the parameters are of another mesh, {other.shape} cells (nz, nx), than the problem,"
                             f" {mesh.shape}")  # fmt: skip
        first = torch.as_tensor(start, dtype=torch.float64)
        log10_of_ohm_m(first)
        p = parameters.start(first.expand(mesh.shape))
        shift = torch.zeros(self.shift_columns.shape[1], dtype=torch.float64)
        beta, history = None, []
        self.problem.warn(parameters.model(p), trial=True)
        with progress("inverting: the first response"):
            at = self.problem.linearize(parameters.model(p), trial=True)
        r = self.residual(at.data, shift)
        local = parameters.linearize(p)
        history.append(self._log_iteration(0, at, shift, r, 0.0, local.penalty, 0.0, 1, 0.0))
        for i in range(self.steps):
            if history[-1].chi <= self.target:
                break
            began = time.perf_counter()
            with progress(f"inverting: iteration {i + 1}, chi {history[-1].chi:.2f}"):
                system = System(self, at, local, r, shift)
                step_found = self._search(system, parameters, p, shift, beta, history[-1])
            if step_found is None:
                break
            (_, p, shift, beta, at, r, step), forwards = step_found
            local = parameters.linearize(p)
            history.append(
                self._log_iteration(
                    i + 1, at, shift, r, beta, local.penalty, step, forwards, time.perf_counter() - began
                )
            )
        self.problem.warn(parameters.model(p), trial=True)
        return Result(parameters.model(p), self.shifted(at.data, shift), p, parameters, beta or 0.0, shift,
                      history[-1].chi <= self.target, history)  # fmt: skip

    def _log_iteration(self, number: int, at: Linearization, shift: Tensor, r: Tensor, beta: float, penalty: float,
                       step: float, forwards: int, seconds: float) -> Iteration:  # fmt: skip
        misfit = self.data.misfit(self.shifted(at.data, shift))
        iteration = Iteration(r.norm().item(), misfit, beta, penalty, step, forwards, seconds)
        if self.say:
            self.say(number, iteration)
        return iteration

    def _betas(self, system: System, beta: float | None, chi: float) -> Sequence[float]:
        if self.strategy == "multiplicative":
            return [self.weight * chi**2]
        first = 30 * system.trace if beta is None else beta
        return [first * 10**x for x in SWEEP]

    def _search(self, system: System, parameters: Parameters, p: Tensor, shift: Tensor, beta: float | None,
                last: Iteration) -> tuple[Candidate, int] | None:  # fmt: skip
        """The best candidate of a sweep of betas, with shorter steps if none is better than the last model; and how
        many were computed."""
        chosen, forwards = None, 0
        for fraction in (1.0, 0.5, 0.25, 0.1, 0.03):
            candidate = partial(self._candidate, system, parameters, p, shift, fraction)
            missed = None
            for each in self._betas(system, beta, last.chi):
                tried = candidate(each)
                forwards += 1
                if not np.isfinite(tried.chi):
                    continue
                if chosen is None or tried.chi < chosen.chi:
                    chosen = tried
                if chosen.chi <= self.target or tried.chi > 1.05 * chosen.chi:
                    break  # betas fall: the first that reaches the target is the smoothest of the sweep
                missed = tried
            if chosen and chosen.chi <= self.target and self.strategy == "occam":
                chosen, more = self._smoothest(candidate, chosen, missed)
                forwards += more
            if chosen and (chosen.chi <= self.target or chosen.chi < last.chi * (1 - 1e-3)):
                return chosen, forwards
        return None

    def _candidate(self, system: System, parameters: Parameters, p: Tensor, shift: Tensor, fraction: float,
                   beta: float) -> Candidate:  # fmt: skip
        change, moved = system.step(beta)
        step = float((change.abs() / parameters.cap).max())
        scale = fraction * min(1.0, 1 / max(step, 1e-30))
        q, s = p + change * scale, shift + moved * scale
        at = self.problem.linearize(parameters.model(q), trial=True)
        r = self.residual(at.data, s)
        return Candidate(r.norm().item(), q, s, beta, at, r, scale * step)

    def _smoothest(self, candidate: Callable[[float], Candidate], fits: Candidate,
                   misses: Candidate | None) -> tuple[Candidate, int]:  # fmt: skip
        """The candidate of the largest beta that reaches the target to within NEARLY, by secants of log chi over log
        beta between one that reaches it and one that does not; and how many were computed, TRIES at most."""
        for tries in range(TRIES):
            if fits.chi >= self.target * (1 - NEARLY) or (misses and misses.beta < fits.beta * (1 + NEARLY)):
                return fits, tries
            beta = 10 * fits.beta
            if misses:
                aim = math.log(self.target * (1 - NEARLY / 2) / fits.chi) / math.log(misses.chi / fits.chi)
                beta = fits.beta * (misses.beta / fits.beta) ** min(max(aim, 0.1), 0.9)
            tried = candidate(beta)
            if tried.chi <= self.target:
                fits = tried
            elif np.isfinite(tried.chi):
                misses = tried
            else:
                return fits, tries + 1
        return fits, TRIES


class System:
    """The linear system of an outer iteration, for any beta."""

    def __init__(self, inversion: Inversion, at: Linearization, local: Local, r: Tensor, shift: Tensor) -> None:
        jacobian = at.jacobian()[inversion.keep] * inversion.weights[:, None]
        self.g = torch.from_numpy(np.ascontiguousarray((local.jacobian.T @ jacobian.numpy().T).T))  # (data, parameters)
        self.gradient, self.r, self.shift, self.sd = torch.from_numpy(local.gradient), r, shift, inversion.shift_sd
        self.columns = inversion.shift_columns
        self.data_space = self.g.shape[0] < self.g.shape[1]
        self.trace = float(self.g.square().sum()) / float(local.matrix.trace())
        if self.data_space:
            solve = _inverse(local.matrix)
            self.c = solve(self.g.T)  # C G^T
            self.h = -solve(self.gradient[:, None])[:, 0]
            self.gram = self.g @ self.c
        else:
            self.normal = self.g.T @ self.g
            self.dense = torch.from_numpy(local.matrix.toarray())

    def step(self, beta: float) -> tuple[Tensor, Tensor]:
        """The change of parameters and of static shifts."""
        n, residual = len(self.r), self.r
        noise = torch.eye(n, dtype=torch.float64)
        if self.sd:  # shifts are normal around 0; eliminated, they add to the covariance of the data
            noise += n * self.sd**2 * (self.columns @ self.columns.T)
            residual = self.r + self.columns @ self.shift
        if self.data_space:
            dual = _solve(self.gram / beta + noise, residual - self.g @ self.h)
            change = self.h + self.c @ dual / beta
        else:
            g, normal, right = self.g, self.normal, residual
            if self.sd:
                solved = torch.linalg.solve(noise, torch.column_stack([g, residual]))
                normal, right = g.T @ solved[:, :-1], solved[:, -1]
            change = _solve(normal + beta * self.dense, g.T @ right - beta * self.gradient)
        if not self.sd:
            return change, torch.zeros_like(self.shift)
        prior = torch.eye(len(self.shift), dtype=torch.float64) / (n * self.sd**2)
        rest = self.columns.T @ (residual - self.g @ change)
        return change, _solve(self.columns.T @ self.columns + prior, rest) - self.shift


def _inverse(matrix: sp.csc_array) -> Callable[[Tensor], Tensor]:
    """Solve with a penalty's matrix for many right-hand sides. SuperLU has fewer operations than a dense factorisation
    and ten times their cost: it serves where a dense matrix would be too large."""
    if len(matrix.indptr) <= DENSE:
        factor = torch.linalg.cholesky(torch.from_numpy(matrix.toarray()))
        return lambda rhs: torch.cholesky_solve(rhs, factor)
    options = {"SymmetricMode": True}
    lu = scipy.sparse.linalg.splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    return lambda rhs: torch.from_numpy(lu.solve(np.asfortranarray(rhs.numpy())))


def _solve(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Solve with a symmetric, positive definite matrix."""
    return torch.cholesky_solve(rhs[:, None], torch.linalg.cholesky(matrix))[:, 0]
