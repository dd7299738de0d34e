"""Systems of atoms, their units, and the way to ASE and back."""

import math

import pytest
import torch
from ase import Atoms
from ase import units as ase_units

from tutti.science.mol.system import System
from tutti.science.mol.units import CODATA_2010, ELECTRONVOLT, KELVIN_2010, MD, REDUCED, factor, physical


def water() -> Atoms:
    atoms = Atoms("OH2", [[0, 0, 0.1], [0.76, 0, 0.7], [-0.76, 0, 0.7]], cell=[[9, 0, 0], [1, 8, 0], [0, 2, 10]])
    atoms.pbc = (True, False, True)
    atoms.set_initial_charges([-0.8, 0.4, 0.4])
    atoms.set_velocities([[0.01, 0, 0], [0, 0.02, 0], [0, 0, 0.03]])
    return atoms


@pytest.mark.parametrize("units", [MD, ELECTRONVOLT], ids=lambda x: x.name)
def test_atoms_of_ase_return_as_they_were(units):
    atoms = water()
    system = System.from_ase(atoms, units)
    assert (system.replicas, system.atoms, system.pbc) == (1, 3, (True, False, True))
    back = system.to_ase()
    assert back.numbers.tolist() == atoms.numbers.tolist()
    for name in ("positions", "masses", "initial_charges", "velocities", "cell"):
        one, other = (torch.tensor(getattr(x, f"get_{name}")()[:]) for x in (atoms, back))
        torch.testing.assert_close(one, other)
    kinetic = 0.5 * (system.masses[:, None] * system.velocities[0] ** 2).sum()
    assert float(kinetic) * factor("energy", units, ELECTRONVOLT) == pytest.approx(atoms.get_kinetic_energy(), rel=1e-7)


def test_units_agree_with_ase():
    assert MD.boltzmann == pytest.approx(ase_units.kB / (ase_units.kJ / ase_units.mol), rel=2e-6)
    assert ELECTRONVOLT.coulomb == pytest.approx(14.399645, rel=1e-6)
    assert MD.coulomb == pytest.approx(138.93545764, rel=1e-9)
    assert factor("time", MD, ELECTRONVOLT) == pytest.approx(1000 * ase_units.fs, rel=1e-6)
    assert factor("pressure", ELECTRONVOLT, MD) * ase_units.bar == pytest.approx(0.060221408, rel=1e-6)
    assert KELVIN_2010.boltzmann == 1.0
    assert physical("kcal", 0.1, 4.184, constants=CODATA_2010).coulomb == pytest.approx(332.0637, rel=1e-6)


def test_reduced_units_have_no_size():
    assert REDUCED.boltzmann == REDUCED.coulomb == 1
    assert factor("length", REDUCED, REDUCED) == 1
    with pytest.raises(ValueError, match="reduced units have no size"):
        factor("length", REDUCED, MD)
    with pytest.raises(ValueError, match="'luminosity' is not known"):
        factor("luminosity", MD, ELECTRONVOLT)


def test_arguments_may_be_short():
    system = System([[0.0, 0, 0], [1, 1, 1]], species=["O", 1], cell=[3.0, 4.0, 5.0])
    assert system.positions.shape == system.velocities.shape == (1, 2, 3)
    assert system.cell.tolist() == [[[3, 0, 0], [0, 4, 0], [0, 0, 5]]]
    assert system.masses.tolist() == [15.999, 1.008]
    assert system.replicate(3).cell.shape == (3, 3, 3)
    assert System([[0.0, 0, 0]]).pbc == (False, False, False)
    assert System([[-1.0, 0, 0]], cell=3.0).wrapped().tolist() == [[[2, 0, 0]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": [[0.0, 0]]}, "positions have shape"),
        ({"positions": [[math.nan, 0, 0]]}, "atom 0 of replica 0 is not finite"),
        ({"positions": [[0.0, 0, 0]], "species": ["Xx"]}, "there is no element 'Xx'"),
        ({"positions": [[0.0, 0, 0]], "masses": [1.0, 2.0]}, "masses have shape"),
        ({"positions": [[0.0, 0, 0]], "masses": [math.nan]}, "masses must be finite, but entry 0 is nan"),
        ({"positions": [[0.0, 0, 0]], "masses": [math.inf]}, "masses must be finite, but entry 0 is inf"),
        ({"positions": [[0.0, 0, 0]], "charges": [math.nan]}, "charges must be finite, but entry 0 is nan"),
        ({"positions": [[0.0, 0, 0]], "pbc": True}, "there is no cell"),
        ({"positions": [[0.0, 0, 0]], "cell": [1.0, 1.0, 0.0]}, "not independent"),
        ({"positions": [[0.0, 0, 0]], "cell": [[1.0, 1.0]]}, "the cell has shape"),
        ({"positions": [[0.0, 0, 0]], "bonds": [[0, 1]]}, "bonds 0 joins atoms"),
        ({"positions": [[0.0, 0, 0]], "names": ["a", "b"]}, "2 names for 1 atoms"),
    ],
)
def test_errors_name_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        System(**options)
