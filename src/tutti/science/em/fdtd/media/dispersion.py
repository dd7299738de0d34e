"""Dispersive media by auxiliary differential equations.

A pole adds the polarization current J to a medium: dJ/dt + 2 damping J + resonance^2 P = eps0 strength E, J = dP/dt.
P is known with E, J with H, so that a step is explicit:

    J = keep J + gain E - spring P,   P = P + dt J,   E = a E + b (curl H - J),

keep = (1 - damping dt) / (1 + damping dt), gain = eps0 strength dt / (1 + damping dt), spring = resonance^2 dt / (1 +
damping dt). It is stable for (2 / dt)^2 > 4 c^2 sum 1 / delta^2 + sum of (strength + resonance^2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from tutti.science.em.shown import Brief, brief


@dataclass(frozen=True, repr=False)
class Pole(Brief):
    """`strength`: 1/s^2, a number or a tensor over cells (it may require gradients); resonance, damping: 1/s.

    where: cells in which a number holds, as a boolean tensor over cells; all if not given.
    """

    strength: float | Tensor
    resonance: float
    damping: float
    where: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("strength", "resonance", "damping"):
            x = torch.as_tensor(getattr(self, name)).detach()
            if x.is_complex():
                raise ValueError(f"{name} of a pole: real, not {brief(x)}")
            wrong = x[~(torch.isfinite(x) & (x >= 0))]
            if len(wrong):
                raise ValueError(f"{name} of a pole: finite and at least 0, not {float(wrong[0])}")
        if self.where is not None and not (isinstance(self.where, Tensor) and self.where.dtype == torch.bool):
            raise ValueError(f"where of a pole: a boolean tensor over cells, not {brief(self.where)}")

    def susceptibility(self, frequency: Tensor, dt: float = 0.0) -> Tensor:
        """The susceptibility of a pole with a number as strength, at frequencies in Hz; with `dt`, of the discrete
        equations.

        The time factor is exp(+i omega t).
        """
        omega = 2 * pi * frequency.to(torch.complex128)
        if dt:
            slope, mean = 2 / dt * torch.sin(omega * dt / 2), torch.cos(omega * dt / 2)
            return self.strength / (self.resonance**2 - slope**2 + 2j * self.damping * slope * mean)
        return self.strength / (self.resonance**2 - omega**2 + 2j * self.damping * omega)


def drude(plasma: float | Tensor, collision: float, where: Tensor | None = None) -> Pole:
    """eps = 1 - plasma^2 / (omega^2 - i omega collision); both in rad/s."""
    if torch.as_tensor(plasma).is_complex() or bool((torch.as_tensor(plasma) < 0).any()):
        raise ValueError(f"plasma frequency: at least 0, in rad/s, not {plasma}")
    return Pole(plasma**2, 0.0, collision / 2, where)


def lorentz(delta_eps: float, resonance: float, damping: float, where: Tensor | None = None) -> Pole:
    """delta_eps resonance^2 / (resonance^2 - omega^2 + 2 i omega damping); resonance and damping in rad/s."""
    return Pole(delta_eps * resonance**2, resonance, damping, where)
