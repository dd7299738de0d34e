"""Properties against other packages: `peptides` 0.5.0 (charge, isoelectric point, moment, mass), Biopython 1.88 (GRAVY,
mass), modlamp 4.3.3 (mass)."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from tutti.models.peptides import RESIDUES
from tutti.science.peptides import properties as p

PEERS = {  # charge at pH 7 and 5, isoelectric point (pK of EMBOSS), moment, GRAVY, mass by each package
    "GIGKFLHSAKKFGKAFVGEIMNS": (3.216771, 4.119191, 10.8027, 0.454756, 0.082609, 2466.9268, 2466.8972, 2466.91),
    "KWKLFKKIEKVGQNIRDGIIKAGPAVAVVGQATQIAK":
        (5.976833, 6.223428, 11.1848, 0.274537, -0.072973, 4004.8214, 4004.7658, 4004.78),
    "GIGAVLKVLTTGLPALISWIKRKRQQ": (4.975413, 5.038031, 12.5461, 0.352642, 0.273077, 2847.4865, 2847.4471, 2847.46),
    "ILPWKWPWWPWRR": (2.97573, 3.038034, 12.5165, 0.278361, -1.069231, 1907.2992, 1907.2693, 1907.27),
    "ACDEFGHIKLMNPQRSTVWY": (0.18659, 1.19246, 7.3565, 0.057624, -0.49, 2395.7358, 2395.7134, 2395.72),
    "DDEEYC": (-4.05145, -3.591482, 3.295, 0.095045, -2.133333, 772.7382, 772.7342, 772.74),
    "K": (0.975736, 1.038034, 9.7, 1.5, -3.9, 146.1893, 146.1876, 146.19),
}  # fmt: skip


def test_of_other_packages():
    values, expected = p.properties(list(PEERS)), np.array(list(PEERS.values())).T
    assert list(values) == list(p.PROPERTIES)
    for name, column in {"charge": 0, "isoelectric": 2, "moment": 3, "gravy": 4}.items():
        assert values[name] == pytest.approx(expected[column], abs=2e-4 if name == "isoelectric" else 1e-5), name
    assert p.net_charge(list(PEERS), ph=5) == pytest.approx(expected[1], abs=1e-5)
    assert values["mass"] == pytest.approx(expected[5], abs=1e-3)
    for other in expected[6:]:  # these round atomic masses
        assert values["mass"] == pytest.approx(other, rel=2e-5)
    assert values["length"].tolist() == [len(x) for x in PEERS]


def test_of_formulas():
    ends = 1 / (1 + 10**-1.6) - 1 / (1 + 10**-3.4)
    charges = p.net_charge(["GG", "GKG", "GDG"])
    assert charges == pytest.approx([ends, ends + 1 / (1 + 10**-3.8), ends - 1 / (1 + 10**-3.1)])
    assert p.net_charge(["GHG"], 6.5) == pytest.approx(p.net_charge(["GG"], 6.5) + 0.5)
    assert p.net_charge(["GG"], amide=True) == pytest.approx(1 / (1 + 10**-1.6))
    assert p.mass(["GG"], amide=True) == pytest.approx(p.mass(["GG"]) - 0.98476)
    assert p.isoelectric_point(["GG"]) == pytest.approx((8.6 + 3.6) / 2, abs=1e-6)
    assert p.isoelectric_point(["GG"], amide=True) == pytest.approx(14, abs=1e-5)  # it has no acid
    two = math.sqrt(1.38**2 + 2.53**2 + 2 * 1.38 * -2.53 * math.cos(math.radians(100))) / 2
    assert p.hydrophobic_moment(["I", "I" * 18, "IR"]) == pytest.approx([1.38, 0, two])  # 18: five whole turns


def test_lists_are_as_single_peptides():
    draw = np.random.default_rng(0)
    peptides = ["".join(draw.choice(list(RESIDUES), n)) for n in draw.integers(1, 40, 50)]
    together = p.properties(peptides)
    assert list(p.properties(peptides, iter(["mass"]))) == ["mass"]
    for name, of in p.PROPERTIES.items():
        assert together[name] == pytest.approx([of([x])[0] for x in peptides], abs=1e-12)
        assert of([]).shape == (0,)
    assert p.net_charge([x[::-1] for x in peptides]) == pytest.approx(together["charge"])


@pytest.mark.parametrize("wrong", ["", "AXA", "AaA", "A A", "A\u00e9", "A\u4e2d", "*"])
def test_other_letters(wrong):
    with pytest.raises(ValueError, match=r"peptide 1 (is empty|has ).*ACDEFGHIKLMNPQRSTVWY"):
        p.net_charge(["AC", wrong])
    with pytest.raises(ValueError, match="no property 'size'; there are charge, isoelectric"):
        p.properties(["A"], ["size"])


def test_the_example():
    assert doctest.testmod(p).failed == 0
