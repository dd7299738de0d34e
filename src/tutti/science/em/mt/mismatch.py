"""Whether a learned prior suits the data, and what to do where it does not.

If columns of the truth are like those that the prior was learned from, codes that fit the data are near a standard
normal and the target is reached. Otherwise codes must leave it, or cannot fit at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tutti.science.em.mt.inversion import Inversion, Result
from tutti.science.em.mt.parameters import Coded, Pixel

MOST = 1.5  # mean square of codes: 1 in the prior, less where data say little
WORST = 4.0  # mean square of the codes of one column


@dataclass(frozen=True)
class Mismatch:
    """codes: mean square of all codes. columns: that of each coded column. reasons: why the prior is suspected; empty
    if it is not."""

    codes: float
    columns: Tensor
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.reasons)


def mismatch(result: Result) -> Mismatch:
    """The diagnostics of an inversion with codes."""
    parameters = result.parameters
    if not isinstance(parameters, Coded):
        raise ValueError("diagnostics of the prior need an inversion with Coded parameters")
    columns = result.p[: parameters.codes].view(-1, parameters.vae.codes).square().mean(1)
    codes, reasons = columns.mean().item(), []
    if not result.reached:
        reasons.append(f"columns of the prior do not fit the data: chi stays at {result.chi:.2f}")
    if codes > MOST:
        reasons.append(f"the mean square of the codes is {codes:.2f}, in the prior it is 1")
    if (worst := columns.max().item()) > WORST:
        reasons.append(f"column {int(columns.argmax())} of the region has codes of mean square {worst:.1f}")
    return Mismatch(codes, columns, tuple(reasons))


@dataclass(frozen=True)
class Checked:
    """The result to trust, that of the codes, and why they differ, if they do."""

    result: Result
    coded: Result
    mismatch: Mismatch


def checked(inversion: Inversion, coded: Coded, start: Tensor | float = 2.0, **pixel: float) -> Checked:
    """Invert with codes; where the diagnostics suspect the prior, invert cells instead. pixel: options of `Pixel`."""
    found = inversion.run(coded, start)
    told = mismatch(found)
    result = inversion.run(Pixel(coded.mesh, **pixel), start) if told else found
    return Checked(result, found, told)
