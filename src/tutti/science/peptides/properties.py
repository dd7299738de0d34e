"""Properties of peptides by formulas, over whole lists.

    charge       net charge at pH 7, in elementary charges: Henderson-Hasselbalch with the pK values of EMBOSS (Rice et
                 al. 2000, program `iep`)
    isoelectric  pH at which that charge is zero
    moment       hydrophobic moment per residue: Eisenberg, Weiss and Terwilliger 1982 and 1984, PNAS 81, 140, with
                 their consensus scale and 100 degrees a residue
    gravy        grand average of hydropathy: Kyte and Doolittle 1982, J. Mol. Biol. 157, 105
    mass         average molecular mass in Da, from the residue masses of ExPASy (isotope abundances of IUPAC)
    length       number of residues

>>> values = properties(["GIGKFLHSAKKFGKAFVGEIMNS", "KK"])
>>> {name: round(float(x[0]), 3) for name, x in values.items()}
{'charge': 3.217, 'isoelectric': 10.803, 'moment': 0.455, 'gravy': 0.083, 'mass': 2466.927, 'length': 23.0}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tutti.models.peptides import RESIDUES

__all__ = ["gravy", "hydrophobic_moment", "isoelectric_point", "length", "mass", "net_charge", "properties"]

POSITIVE = {"K": 10.8, "R": 12.5, "H": 6.5}
NEGATIVE = {"D": 3.9, "E": 4.1, "C": 8.5, "Y": 10.1}
AMINO_END, CARBOXYL_END = 8.6, 3.6
"""pK of side chains and ends."""
CONSENSUS = {
    "A": 0.62, "R": -2.53, "N": -0.78, "D": -0.90, "C": 0.29, "Q": -0.85, "E": -0.74, "G": 0.48, "H": -0.40, "I": 1.38,
    "L": 1.06, "K": -1.50, "M": 0.64, "F": 1.19, "P": 0.12, "S": -0.18, "T": -0.05, "W": 0.81, "Y": 0.26, "V": 1.08,
}  # fmt: skip
"""Eisenberg's consensus scale of hydrophobicity, dimensionless."""
HYDROPATHY = {
    "A": 1.8, "R": -4.5, "N": -3.5, "D": -3.5, "C": 2.5, "Q": -3.5, "E": -3.5, "G": -0.4, "H": -3.2, "I": 4.5,
    "L": 3.8, "K": -3.9, "M": 1.9, "F": 2.8, "P": -1.6, "S": -0.8, "T": -0.7, "W": -0.9, "Y": -1.3, "V": 4.2,
}  # fmt: skip
"""Kyte and Doolittle's scale, dimensionless."""
MASSES = {
    "A": 71.0788, "R": 156.1875, "N": 114.1038, "D": 115.0886, "C": 103.1388, "Q": 128.1307, "E": 129.1155,
    "G": 57.0519, "H": 137.1411, "I": 113.1594, "L": 113.1594, "K": 128.1741, "M": 131.1926, "F": 147.1766,
    "P": 97.1167, "S": 87.0782, "T": 101.1051, "W": 186.2132, "Y": 163.1760, "V": 99.1326,
}  # fmt: skip
"""Average masses of residues, in Da."""
WATER = 18.01524  # Da
AMIDE = -0.98476  # Da: NH2 in place of OH

NUMBERS = np.full(256, -1, np.int8)
NUMBERS[[ord(x) for x in RESIDUES]] = np.arange(len(RESIDUES))


def encode(peptides: Sequence[str]) -> np.ndarray:
    """(peptides, longest) int8: numbers of residues in `RESIDUES`, and -1 after the end.

    Raises ValueError for an empty peptide and for letters that are not one of the 20 amino acids.
    """
    longest = max((len(x) for x in peptides), default=0)
    codes = np.full((len(peptides), longest), -1, np.int8)
    for i, peptide in enumerate(peptides):
        row = NUMBERS[np.frombuffer(peptide.encode("latin-1", "replace"), np.uint8)]
        if not len(row) or row.min() < 0:
            wrong = "is empty" if not peptide else f"has {peptide[int(row.argmin())]!r}"
            raise ValueError(f"peptide {i} {wrong}; a peptide has one or more of the letters {RESIDUES}")
        codes[i, : len(row)] = row
    return codes


def counts(peptides: Sequence[str]) -> np.ndarray:
    """(peptides, 20) int64: how often each residue occurs."""
    codes = encode(peptides)
    return np.stack([(codes == i).sum(1) for i in range(len(RESIDUES))], 1)


def _scale(table: dict[str, float]) -> np.ndarray:
    return np.array([table.get(x, 0.0) for x in RESIDUES])


def _charge(residues: np.ndarray, ph: np.ndarray, amide: bool) -> np.ndarray:
    def base(pk: float) -> np.ndarray:
        return 1 / (1 + 10 ** (ph - pk))

    def acid(pk: float) -> np.ndarray:
        return 1 / (1 + 10 ** (pk - ph))

    total = base(AMINO_END) - (0 if amide else acid(CARBOXYL_END))
    total = total + sum(residues[:, RESIDUES.index(x)] * base(pk) for x, pk in POSITIVE.items())
    return total - sum(residues[:, RESIDUES.index(x)] * acid(pk) for x, pk in NEGATIVE.items())


def net_charge(peptides: Sequence[str], ph: float = 7.0, amide: bool = False) -> np.ndarray:
    """(peptides,) mean net charge at a pH, in elementary charges. amide: whether the carboxyl end is amidated."""
    residues = counts(peptides)
    return _charge(residues, np.full(len(residues), float(ph)), amide)


def isoelectric_point(peptides: Sequence[str], amide: bool = False) -> np.ndarray:
    """(peptides,) pH at which the net charge is zero, by bisection between 0 and 14 to 1e-6.

    An end of the interval stands for peptides without such a pH in it, as amides without acidic residues.
    """
    residues = counts(peptides)
    low, high = np.zeros(len(residues)), np.full(len(residues), 14.0)
    for _ in range(25):
        middle = (low + high) / 2
        positive = _charge(residues, middle, amide) > 0
        low, high = np.where(positive, middle, low), np.where(positive, high, middle)
    return (low + high) / 2


def hydrophobic_moment(peptides: Sequence[str], angle: float = 100.0) -> np.ndarray:
    """(peptides,) length of the mean of hydrophobicities as vectors around a helix, `angle` degrees apart.

    It is of the whole peptide. Tools that take the largest moment of windows of 11 residues give larger numbers.
    """
    codes = encode(peptides)
    scale = np.append(_scale(CONSENSUS), 0.0)  # -1, past the end, reads the last
    turn = np.exp(1j * np.radians(angle) * np.arange(codes.shape[1]))
    return np.abs(scale[codes] @ turn) / np.maximum((codes >= 0).sum(1), 1)


def gravy(peptides: Sequence[str]) -> np.ndarray:
    """(peptides,) mean hydropathy."""
    residues = counts(peptides)
    return residues @ _scale(HYDROPATHY) / residues.sum(1)


def mass(peptides: Sequence[str], amide: bool = False) -> np.ndarray:
    """(peptides,) average molecular mass in Da."""
    return counts(peptides) @ _scale(MASSES) + WATER + (AMIDE if amide else 0)


def length(peptides: Sequence[str]) -> np.ndarray:
    """(peptides,) float64 numbers of residues."""
    return counts(peptides).sum(1).astype(float)


PROPERTIES: dict[str, Callable[[Sequence[str]], np.ndarray]] = {
    "charge": net_charge,
    "isoelectric": isoelectric_point,
    "moment": hydrophobic_moment,
    "gravy": gravy,
    "mass": mass,
    "length": length,
}


def properties(peptides: Sequence[str], names: Iterable[str] = PROPERTIES) -> dict[str, np.ndarray]:
    """Name -> (peptides,) float64. Raises ValueError for a name that is not one of `PROPERTIES`."""
    names = list(names)
    if unknown := [x for x in names if x not in PROPERTIES]:
        raise ValueError(f"there is no property {unknown[0]!r}; there are {', '.join(PROPERTIES)}")
    return {name: PROPERTIES[name](peptides) for name in names}
