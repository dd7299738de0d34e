"""An open stub across a lossless line of 50 ohm: S-parameters in closed form (D. M. Pozar, Microwave Engineering, 4.2).

The stub has the admittance Y = j tan(beta l) / Z_s, and with y = 50 ohm Y: S11 = -y / (2 + y), S21 = 2 / (2 + y).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import pi

import torch
from torch import Tensor

from tutti.science.em.fdtd.grid import C0
from tutti.science.em.surrogate.geometry import Geometry
from tutti.science.em.surrogate.parameters import Parameter, Space

FREQUENCIES = torch.linspace(1e9, 10e9, 46, dtype=torch.float64)


def solve(values: Mapping[str, float]) -> Tensor:
    """S11 and S21: complex128 (2, frequencies)."""
    beta = 2 * pi * FREQUENCIES / C0 * values["eps_r"] ** 0.5
    y = 1j * torch.tan(beta * values["length"]) * (50 / values["impedance"])
    return torch.stack([-y / (2 + y), 2 / (2 + y)])


STUB = Geometry("stub", Space((Parameter("length", 4e-3, 8e-3, "m"), Parameter("impedance", 40.0, 90.0, "ohm"),
                               Parameter("eps_r", 2.0, 3.0))), FREQUENCIES, ("S11", "S21"), solve)  # fmt: skip
