"""Materials: relative permittivity and permeability, and conductivity in S/m.

Metals: CRC Handbook of Chemistry and Physics, resistivities at 20 degrees C. Laminates: the makers' data sheets at
10 GHz. Losses given as tan(delta) become a conductivity at one frequency, 2 pi f eps0 eps_r tan(delta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches

from scipy import constants

EPS0 = constants.epsilon_0  # F/m


@dataclass(frozen=True)
class Material:
    """eps_r, mu_r: relative. sigma: S/m. loss: tan(delta) of the dielectric."""

    eps_r: float = 1.0
    sigma: float = 0.0
    mu_r: float = 1.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("eps_r", "mu_r"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be positive and finite; got {getattr(self, name)}")
        for name in ("sigma", "loss"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be finite and not negative; got {getattr(self, name)}")

    def conductivity(self, frequency: float = 0.0) -> float:
        """sigma in S/m, with the dielectric loss at a frequency in Hz."""
        return self.sigma + 2 * math.pi * frequency * EPS0 * self.eps_r * self.loss


MATERIALS = {
    "vacuum": Material(),
    "air": Material(1.000536),
    "copper": Material(sigma=5.96e7),
    "silver": Material(sigma=6.30e7),
    "gold": Material(sigma=4.52e7),
    "aluminium": Material(sigma=3.77e7),
    "brass": Material(sigma=1.59e7),
    "steel": Material(sigma=1.45e6),
    "ptfe": Material(2.1, loss=0.0003),
    "rt5880": Material(2.2, loss=0.0009),
    "ro4003": Material(3.55, loss=0.0027),
    "fr4": Material(4.3, loss=0.02),
    "alumina": Material(9.8, loss=0.0001),
    "silicon": Material(11.9, loss=0.004),
    "gaas": Material(12.9, loss=0.0004),
    "glass": Material(5.5, loss=0.003),
    "abs": Material(2.7, loss=0.006),
    "water": Material(80.1, sigma=5.5e-6),
    "seawater": Material(74.0, sigma=4.8),
}


def material(name: str) -> Material:
    """From the table. Raises ValueError with the nearest name."""
    if name not in MATERIALS:
        near = [] if not isinstance(name, str) else get_close_matches(name.lower(), MATERIALS, 1)
        raise ValueError(f"no material {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(MATERIALS)}")
    return MATERIALS[name]
