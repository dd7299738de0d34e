"""Whether a learned prior suits the data, and what to do where it does not.

If columns of the truth are like those that the prior was learned from, the target is reached by codes whose mean
square is that of posterior means, 1 - (mean posterior variance). Otherwise codes must leave the prior, or cannot fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tutti.science.em.mt.inverse.inversion import Inversion, Result
from tutti.science.em.mt.inverse.parameters import Coded, Pixel
from tutti.science.em.mt.inverse.posterior import normal_system
from tutti.science.em.shown import Brief

MOST = 1.8  # mean square of codes over its expectation; over 50 truths of the basin's prior it stayed below 1.65


@dataclass(frozen=True, repr=False)
class Mismatch(Brief):
    """codes: mean square of all codes over what is expected in the prior. columns: the mean square of the codes of each
    column. reasons: why the prior is suspected; empty if it is not."""

    codes: float
    columns: Tensor
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.reasons)


def mismatch(inversion: Inversion, result: Result) -> Mismatch:
    """The diagnostics of an inversion with codes. It needs a matrix of parameters x parameters."""
    parameters = result.parameters
    if not isinstance(parameters, Coded):
        raise ValueError("diagnostics of the prior need an inversion with Coded parameters")
    columns = result.p[: parameters.codes].view(-1, parameters.vae.codes).square().mean(1)
    g, precision, _ = normal_system(inversion, replace(result, beta=1 / inversion.data.count))
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(g.T @ g + precision))
    determined = (1 - covariance.diagonal()[: parameters.codes]).mean().item()
    codes, reasons = columns.mean().item() / determined, []
    if not result.reached:
        reasons.append(f"columns of the prior do not fit the data: chi stays at {result.chi:.2f}")
    if codes > MOST:
        reasons.append(f"the mean square of the codes is {codes:.1f} times what is expected; the largest is that of"
                       f" column {int(columns.argmax())} of the region")  # fmt: skip
    return Mismatch(codes, columns, tuple(reasons))


@dataclass(frozen=True)
class Checked:
    """The result to trust, that of the codes, and why they differ, if they do."""

    result: Result
    coded: Result
    mismatch: Mismatch


def checked(inversion: Inversion, coded: Coded, start: Tensor | float = 2.0, *,
            tell: Callable[[str], Any] = lambda text: None, **pixel: float) -> Checked:  # fmt: skip
    """Invert with codes; where the diagnostics suspect the prior, invert cells instead. tell: is called with what is
    inverted next, and why. pixel: options of `Pixel`."""
    tell("inversion of codes")
    coded_result = inversion.run(coded, start)
    suspicion = mismatch(inversion, coded_result)
    if not suspicion:
        return Checked(coded_result, coded_result, suspicion)
    for reason in suspicion.reasons:
        tell(f"the prior may not suit these data: {reason}")
    tell("inversion of cells, without the prior")
    return Checked(inversion.run(Pixel(coded.mesh, **pixel), start), coded_result, suspicion)
