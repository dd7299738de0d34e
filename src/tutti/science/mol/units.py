"""Coherent systems of units: code computes in any of them without conversion factors, and files are converted.

In each system, kinetic energy is m v^2 / 2 and force m a without a factor, so the unit of time follows from those of
length, energy and mass. Charges are in elementary charges; `coulomb` is the energy of two of them at unit distance.

>>> round(MD.coulomb, 4), round(ELECTRONVOLT.coulomb, 4)
(138.9355, 14.3996)
>>> round(factor("time", ELECTRONVOLT, MD), 8)
0.01018051
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Fundamental constants in SI units."""

    boltzmann: float
    avogadro: float
    charge: float
    permittivity: float

    @property
    def gas(self) -> float:
        """The gas constant in kJ/mol/K."""
        return self.boltzmann * self.avogadro / 1000

    @property
    def coulomb(self) -> float:
        """Energy of two elementary charges 1 nm apart, kJ/mol."""
        return self.charge**2 / (4 * math.pi * self.permittivity) * 1e9 * self.avogadro / 1000

    @property
    def electronvolt(self) -> float:
        """One electronvolt in kJ/mol."""
        return self.charge * self.avogadro / 1000


CODATA_2018 = Constants(1.380649e-23, 6.02214076e23, 1.602176634e-19, 8.8541878128e-12)
CODATA_2010 = Constants(1.3806488e-23, 6.02214129e23, 1.602176565e-19, 8.854187817620389e-12)


@dataclass(frozen=True)
class Units:
    """A coherent system. Sizes of its units in nm, kJ/mol and amu; reduced units have none (None)."""

    name: str
    boltzmann: float
    coulomb: float
    length_nm: float | None = None
    energy_kj_mol: float | None = None
    mass_amu: float | None = None

    @property
    def time_ps(self) -> float | None:
        if self.length_nm is None or self.energy_kj_mol is None or self.mass_amu is None:
            return None
        return self.length_nm * math.sqrt(self.mass_amu / self.energy_kj_mol)  # nm sqrt(amu / (kJ/mol)) = 1 ps

    def thermal_energy(self, temperature: float) -> float:
        """k_B T."""
        return self.boltzmann * temperature


def physical(
    name: str, length_nm: float, energy_kj_mol: float, mass_amu: float = 1.0, constants: Constants = CODATA_2018
) -> Units:
    """A system with these units of length, energy and mass, and charges in e."""
    boltzmann, coulomb = constants.gas / energy_kj_mol, constants.coulomb / energy_kj_mol / length_nm
    return Units(name, boltzmann, coulomb, length_nm, energy_kj_mol, mass_amu)


MD = physical("MD", 1.0, 1.0)  # nm, ps, kJ/mol, amu
ELECTRONVOLT = physical("eV", 0.1, CODATA_2018.electronvolt)  # ASE's: angstrom, eV, amu, angstrom sqrt(amu / eV)
KELVIN_2010 = physical("K", 0.1, CODATA_2010.gas, constants=CODATA_2010)  # NIST's tables: angstrom, energy / k_B in K
REDUCED = Units("reduced", 1.0, 1.0)
PRESETS = {units.name: units for units in (MD, ELECTRONVOLT, KELVIN_2010, REDUCED)}

DIMENSIONS = {  # powers of length, energy and mass
    "length": (1, 0, 0),
    "energy": (0, 1, 0),
    "mass": (0, 0, 1),
    "time": (1, -0.5, 0.5),
    "velocity": (0, 0.5, -0.5),
    "force": (-1, 1, 0),
    "pressure": (-3, 1, 0),
    "volume": (3, 0, 0),
}
LABELS = {  # of energy, time and volume in systems whose units have a name
    "MD": ("kJ/mol", "ps", "nm^3"),
    "eV": ("eV", "angstrom sqrt(amu/eV)", "angstrom^3"),
    "K": ("K k_B", "angstrom sqrt(amu/(K k_B))", "angstrom^3"),
}
BAR = 1e5 * 1e-27 * CODATA_2018.avogadro / 1000  # in kJ/mol/nm^3


def factor(dimension: str, source: Units, wanted: Units) -> float:
    """What a number in units `source` is multiplied by to be in units `wanted`."""
    if source == wanted:
        return 1.0
    if dimension not in DIMENSIONS:
        raise ValueError(f"dimension {dimension!r} is not known; there are {', '.join(DIMENSIONS)}")
    result = 1.0
    for power, one, other in zip(DIMENSIONS[dimension], _sizes(source), _sizes(wanted), strict=True):
        if power and (one is None or other is None):
            raise ValueError(
                f"{dimension} cannot be converted from units {source.name!r} to {wanted.name!r}: reduced units have no"
                " size; give sigma, epsilon and the mass by units.physical(...) first"
            )
        if power and one is not None and other is not None:
            result *= (one / other) ** power
    return result


def _sizes(units: Units) -> tuple[float | None, float | None, float | None]:
    return units.length_nm, units.energy_kj_mol, units.mass_amu
