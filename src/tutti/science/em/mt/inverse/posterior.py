"""How certain a model is: posterior standard deviations, resolution, and samples.

Near the model, with G = W J D of all N data (not divided by sqrt(N)) and the penalty's matrix R, the posterior of the
parameters is normal with covariance (G^T G + a N beta R)^-1. beta is that of the inversion: the largest that fits the
data, which makes the smoothest model and says nothing of how rough the earth is. Alone (a = 1) it makes deviations too
small: 35 % of the cells of 16 truths of a basin lay beyond 2 of them, where 4.6 % should. So a is the one that the
model's own penalty is evidence for (MacKay, 1992, Neural Computation 4, 415): it makes the penalty what is expected of
it,

    a N beta R(p) = number of parameters that the data determine = trace of G (G^T G + a N beta R)^-1 G^T,

and at most 1. On other truths, ten of the basin's prior and ten outside of it, 0.5 % and 9 % of cells then lie beyond 2
deviations, and 16 % and 20 % beyond 1 (of a normal distribution 4.6 % and 32 %): they are wide for smooth earths, and
too small at sharp boundaries, which neither the penalty nor the linearisation knows (39 % in the worst section, a
resistor over a conductor). Samples are by randomised maximum likelihood (Oliver, He and Reynolds, 1996): data and prior
are perturbed by their own noise and the inversion is repeated from the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.launch.progress import progress
from tutti.science.em.mt.inverse.inversion import Inversion, Result, System
from tutti.science.em.shown import Brief

COVERAGE = (
    "of synthetic sections 0.5 % (smooth) to 9 % (sharp boundaries) of cells lie beyond 2 of them, in single ones more"
)


@dataclass(frozen=True, repr=False)
class Posterior(Brief):
    """sd: posterior standard deviation of log10 resistivity (nz, nx). prior: that of the prior. resolution: how much of
    a change of a cell the model shows in that cell, 0 to 1 (nz, nx): the diagonal of the resolution matrix of the
    inversion, with its beta. strength: a, of the prior in units of the inversion's penalty."""

    sd: Tensor
    prior: Tensor
    resolution: Tensor
    strength: float


def normal_system(inversion: Inversion, result: Result) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """At a result: G (data, parameters), the prior precision N beta R, and the parts of G: W J (data, cells) and D."""
    at = inversion.problem.linearize(result.model, trial=True)
    local = result.parameters.linearize(result.p)
    j = at.jacobian()[inversion.keep] * inversion.weights[:, None] * inversion.data.count**0.5
    d = torch.from_numpy(local.jacobian.toarray())
    if sd := inversion.shift_sd:  # unknown shifts add to the covariance of the data
        c = inversion.shift_columns * inversion.data.count**0.5
        noise = torch.eye(len(c), dtype=torch.float64) + sd**2 * (c @ c.T)
        j = torch.linalg.solve_triangular(torch.linalg.cholesky(noise), j, upper=False)
    precision = inversion.data.count * _beta(result) * torch.from_numpy(local.matrix.toarray())
    return j @ d, precision, (j, d)


def prior_strength(g: Tensor, inverse: Tensor, penalty: float) -> float:
    """The a of the module's formula, by iteration. inverse: (N beta R)^-1. penalty: N beta R(p)."""
    if not penalty > 0:
        return 1.0
    factor = torch.linalg.cholesky(inverse)
    half = g @ factor
    spectrum = torch.linalg.eigvalsh(half @ half.T if len(half) < half.shape[1] else half.T @ half).clamp_min(0)
    strength = 1.0
    for _ in range(100):
        strength, last = min(1.0, float((spectrum / (spectrum + strength)).sum()) / penalty), strength
        if abs(strength - last) < 1e-6 * last:
            break
    return max(strength, 1e-6)


def posterior(inversion: Inversion, result: Result) -> Posterior:
    """The linearised uncertainty of a result. It needs a matrix of parameters x parameters."""
    with progress("uncertainty: derivatives of the data") as tell:
        g, precision, (j, d) = normal_system(inversion, result)
        tell(f"uncertainty: covariance of {len(precision)} parameters before the data")
        before = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        strength = prior_strength(g, before, _penalty(inversion, result))
        tell(f"uncertainty: covariance of {len(precision)} parameters")
        normal = g.T @ g
        inverse = d @ torch.cholesky_inverse(torch.linalg.cholesky(normal + precision))
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(normal + strength * precision))
    shape = result.model.shape
    return Posterior(
        ((d @ covariance) * d).sum(1).clamp_min(0).sqrt().view(shape),
        ((d @ before) * d).sum(1).clamp_min(0).div(strength).sqrt().view(shape),
        ((inverse @ g.T) * j.T).sum(1).view(shape),
        strength,
    )


def ensemble(inversion: Inversion, result: Result, count: int = 16, *, steps: int = 2, seed: int = 0) -> Tensor:
    """Models of the posterior around the result, (count, nz, nx). steps: Gauss-Newton steps of each."""
    if count < 1:
        raise ValueError(f"an ensemble has 1 or more samples; got {count}")
    generator = torch.Generator().manual_seed(seed)
    n, parameters, models = inversion.data.count, result.parameters, []
    g, precision, _ = normal_system(inversion, result)
    before = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    strength = prior_strength(g, before, _penalty(inversion, result))
    beta = strength * _beta(result)
    first = parameters.linearize(result.p)
    centre = (1 / strength - 1) * first.gradient  # a weaker prior around what makes the result its mode
    factor = torch.linalg.cholesky(torch.from_numpy(first.matrix.toarray()))

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def sample() -> Tensor:
        noise = normal(len(inversion.keep)) / n**0.5
        noise += inversion.shift_columns @ (inversion.shift_sd * normal(inversion.shift_columns.shape[1]))
        away = (
            torch.linalg.solve_triangular(factor.T, normal(len(factor))[:, None], upper=True)[:, 0] / (n * beta) ** 0.5
        )
        p = result.p.clone()
        for _ in range(steps):
            at = inversion.problem.linearize(parameters.model(p), trial=True)
            local = parameters.linearize(p)
            local = local._replace(gradient=local.gradient + centre - local.matrix @ away.numpy())
            system = System(inversion, at, local, inversion.residual(at.data, result.shift) + noise, result.shift)
            change, _ = system.step(beta)
            p = p + change / max(1.0, float((change.abs() / parameters.cap).max()))
        return parameters.model(p).clone()

    with progress("drawing models") as tell:
        for i in range(count):
            tell.count(i, count)
            models.append(sample())
    return torch.stack(models)


def _penalty(inversion: Inversion, result: Result) -> float:
    return inversion.data.count * _beta(result) * result.parameters.linearize(result.p).penalty


def _beta(result: Result) -> float:
    if not result.beta > 0:
        raise ValueError("the inversion made no step, so its result has no weight of the penalty")
    return result.beta
