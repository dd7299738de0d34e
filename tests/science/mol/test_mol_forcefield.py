"""Force fields from files against OpenMM's Reference platform, term by term; boxes of water."""

import gc
import json
import math
import random
import warnings
from pathlib import Path

import pytest
import torch

from tutti.science.mol.forcefield import WATER, ForceField, Nonbonding, load_amber, load_openmm, read_system, water_box
from tutti.science.mol.forcefield.files import _refuse_scripts

FOLDER = Path(__file__).parent / "openmm"
REFERENCE = json.loads((FOLDER / "alanine_dipeptide.json").read_text())
TEXT = (FOLDER / "alanine_dipeptide.xml").read_text()
CASES = {  # attributes of the NonbondedForce
    "none": {},
    "cutoff": {"method": 1, "cutoff": 0.6},
    "periodic": {"method": 2, "cutoff": 0.9, "useSwitchingFunction": 1, "switchingDistance": 0.7},
    "pme": {"method": 4, "cutoff": 0.9, "ewaldTolerance": 1e-7},
}
OURS = {"HarmonicBondForce": ["bonds"], "HarmonicAngleForce": ["angles"], "PeriodicTorsionForce": ["torsions"]}


def with_attributes(values: dict) -> str:
    """The file with other attributes of its NonbondedForce, and without a tail correction."""
    lines = TEXT.split("\n")
    (row,) = [k for k, line in enumerate(lines) if 'type="NonbondedForce"' in line]
    for name, value in {"dispersionCorrection": 0, **values}.items():
        head, rest = lines[row].split(f' {name}="', 1)
        lines[row] = f'{head} {name}="{value}"{rest[rest.index(chr(34)) + 1 :]}'
    return "\n".join(lines)


@pytest.mark.parametrize("case", CASES)
def test_alanine_dipeptide_as_openmm_has_it(case):
    """ff14SB, computed by OpenMM 8.6.1 on its Reference platform, in a triclinic cell where there is one."""
    cell = REFERENCE["box"] if case in ("periodic", "pme") else None
    system, field = read_system(with_attributes(CASES[case]), REFERENCE["positions"], cell)
    evaluation = field.evaluate(system.positions, system.cell, field.neighbors(system))
    expected = REFERENCE["cases"][case]
    for name, ours in OURS.items():
        assert sum(float(evaluation.terms[x]) for x in ours) == pytest.approx(expected["energies"][name], rel=1e-9), (
            name
        )
    rest = sum(float(e) for name, e in evaluation.terms.items() if [name] not in OURS.values())
    tolerance = 2e-6 if case == "pme" else 1e-8
    assert rest == pytest.approx(expected["energies"]["NonbondedForce"], rel=20 * tolerance)
    forces = torch.tensor(expected["forces"], dtype=torch.float64)
    assert float((evaluation.forces[0] - forces).norm() / forces.norm()) < tolerance


def test_a_system_has_masses_bonds_and_charges_of_its_file():
    system, field = read_system(TEXT, REFERENCE["positions"])
    assert system.atoms == 22 and len(system.bonds) == 21 and system.pbc == (False,) * 3
    assert float(system.charges.sum()) == pytest.approx(0, abs=1e-9)
    assert system.masses[:2].tolist() == [1.008, 12.01]
    assert len(field.constraints) == 0 and [t.name for t in field.terms][:3] == ["bonds", "angles", "torsions"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<System ", "<!DOCTYPE x><System ", "declares a document type"),
        ('type="System"', 'type="System', "no XML of a force field"),
        ('type="HarmonicAngleForce"', 'type="CMAPTorsionForce"', "has a CMAPTorsionForce, which is not supported"),
        ('<Particle mass="16"/>', '<Particle mass="0"><TwoParticleAverageSite/></Particle>', "particle 5 is a virtual"),
        ('d=".1522"', "", "has no number 'd'"),
        ('<Particle mass="16"/>', "", "positions of 22 atoms, but the force field is of 20"),
    ],
)
def test_what_cannot_be_read_is_named(old, new, message):
    with pytest.raises(ValueError, match=message):
        read_system(TEXT.replace(old, new), REFERENCE["positions"])
    with pytest.raises(ValueError, match="not a System"):
        read_system("<ForceField/>", REFERENCE["positions"])


def test_force_field_files_with_scripts_are_refused(tmp_path):
    (tmp_path / "a.xml").write_text('<ForceField><Include file="b.xml"/></ForceField>')
    (tmp_path / "b.xml").write_text("<ForceField><Script>print('run')</Script></ForceField>")
    with pytest.raises(ValueError, match=r"b\.xml contains a <Script>"):
        _refuse_scripts(tmp_path / "a.xml", set())


def test_the_reader_of_other_files_is_named():
    try:
        import openmm  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ModuleNotFoundError, match="pip install openmm"):
            load_openmm("x.pdb", ["amber14-all.xml"])


@pytest.mark.parametrize("model", WATER)
def test_a_box_of_water(model):
    system, field = water_box(50, model, density=1.0)
    assert system.atoms == 150 and len(field.constraints) == 150
    grams = float(system.masses.sum()) / 6.02214076e23
    assert grams / (float(system.cell[0, 0, 0]) * 1e-7) ** 3 == pytest.approx(1.0)
    x = system.positions[0]
    d = (x[field.constraints[:, 1]] - x[field.constraints[:, 0]]).norm(dim=-1)
    torch.testing.assert_close(d, field.lengths)
    assert float(system.charges.sum()) == pytest.approx(0, abs=1e-12)
    oo = torch.cdist(x[::3], x[::3]) + torch.eye(50)
    assert float(oo.min()) > 0.2
    evaluation = field.evaluate(system.positions, system.cell, field.neighbors(system, 0.1), virial=True)
    assert set(evaluation.terms) == {
        "lennard_jones", "tail", "ewald_real", "ewald_fourier", "ewald_self", "ewald_intra"
    }  # fmt: skip
    pairs = field.neighbors(system).pairs
    torch.testing.assert_close(evaluation.energy, field.energy(system.positions, system.cell, pairs))


def test_flexible_water_has_terms_in_place_of_constraints():
    system, field = water_box(27, "spce", rigid=False, nonbonding=Nonbonding("reaction_field", 0.4))
    assert len(field.constraints) == 0
    evaluation = field.evaluate(system.positions, system.cell, field.neighbors(system))
    assert float(evaluation.terms["bonds"]) == pytest.approx(0, abs=1e-9)
    assert float(evaluation.terms["angles"]) == pytest.approx(0, abs=1e-9)


def test_the_cohesion_of_water_is_that_of_the_liquid():
    """A few steepest-descent steps away from the grid the energy is far below zero, of the order of 40 kJ/mol."""
    system, field = water_box(64, "spce", rigid=False)
    x, neighbors = system.positions.clone(), field.neighbors(system, 0.2)
    for _ in range(200):
        neighbors.update(x, system.cell)
        forces = field.evaluate(x, system.cell, neighbors).forces
        x += forces * (0.001 / forces.norm(dim=-1).max()).clamp(max=2e-6)
    neighbors.update(x, system.cell)
    energy = float(field.evaluate(x, system.cell, neighbors).energy) / 64
    assert -60 < energy < -30


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="'spc' is not known; there are spce, tip3p"):
        water_box(8, "spc")
    with pytest.raises(ValueError, match="both must be positive"):
        water_box(0)
    with pytest.raises(ValueError, match="method 'p3m' is not known"):
        Nonbonding("p3m")
    with pytest.raises(ValueError, match="needs a periodic cell"):
        zeros = torch.zeros(2, dtype=torch.float64)
        Nonbonding("pme").terms(zeros, zeros, zeros, None, torch.zeros(0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="length of constraint 0 is 0"):
        ForceField([], [[0, 1]], [0.0])
    assert math.isclose(WATER["spce"].charge, 0.4238)


def test_a_solvated_molecule_is_that_of_openmm():
    """Water as OpenMM's Modeller adds it, with OpenMM's energy on its Reference platform; the same each time."""
    import openmm
    from openmm import app, unit

    pdb = FOLDER.parents[3] / "runs" / "alanine_dipeptide.pdb"
    files, method = (
        ["amber14/protein.ff14SB.xml", "amber14/tip3p.xml"],
        Nonbonding("pme", 0.6, tail=False, tolerance=1e-5),
    )
    state = random.getstate()
    system, field = load_openmm(pdb, files, method, "HBonds", solvate=0.7)
    again, _ = load_openmm(pdb, files, method, "HBonds", solvate=0.7)
    assert torch.equal(system.positions, again.positions) and random.getstate() == state
    assert (
        system.atoms > 22 and (system.atoms - 22) % 3 == 0 and float(system.cell[0, 0, 0]) == pytest.approx(1.64, 0.2)
    )
    assert system.residues is not None and [r.split()[0] for r in system.residues[21:23]] == ["NME", "HOH"]
    assert len(field.constraints) == 12 + system.atoms - 22  # bonds of hydrogen, rigid water

    forces = app.ForceField(*files)
    whole = app.Modeller(*(lambda x: (x.topology, x.positions))(app.PDBFile(str(pdb))))
    whole.addSolvent(forces, padding=0.7 * unit.nanometer)
    theirs = forces.createSystem(whole.topology, nonbondedMethod=app.PME, nonbondedCutoff=0.6 * unit.nanometer,
                                 constraints=app.HBonds, ewaldErrorTolerance=1e-5, removeCMMotion=False)  # fmt: skip
    next(f for f in theirs.getForces() if isinstance(f, openmm.NonbondedForce)).setUseDispersionCorrection(False)
    context = openmm.Context(theirs, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatform("Reference"))
    context.setPositions(whole.positions)
    energy = context.getState(energy=True).getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    evaluation = field.evaluate(system.positions, system.cell, field.neighbors(system))
    assert float(evaluation.energy) == pytest.approx(energy, rel=2e-5)


@pytest.mark.parametrize("water", ["tip9", "../x"])
def test_water_that_openmm_does_not_have_is_refused(water):
    with pytest.raises(ValueError, match=f"Unknown water model: {water}"):
        load_openmm(
            FOLDER.parents[3] / "runs" / "alanine_dipeptide.pdb",
            ["amber14/protein.ff14SB.xml"],
            solvate=0.5,
            water=water,
        )


def test_a_cell_is_not_dropped_without_a_word(tmp_path):
    pdb = FOLDER.parents[3] / "runs" / "alanine_dipeptide.pdb"
    path = tmp_path / "a.pdb"
    path.write_text("CRYST1   30.000   30.000   30.000  90.00  90.00  90.00 P 1           1\n" + pdb.read_text())
    files = ["amber14/protein.ff14SB.xml"]
    with pytest.raises(ValueError, match=r"have a cell, and method 'none' is for molecules without one; use 'pme'"):
        load_openmm(path, files, Nonbonding("none"))
    assert load_openmm(pdb, files, Nonbonding("none"))[0].cell is None


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (0, "IndexError"),
        (12, r"ValueError: No template found for residue 1 \(ALA\)"),
        (-1, "UnicodeDecodeError"),
        (None, r"FileNotFoundError: \[Errno 2\] No such file"),
    ],
)
def test_structures_that_openmm_cannot_take_are_named(keep, reason, tmp_path):
    pytest.importorskip("openmm")
    path, pdb = tmp_path / "a.pdb", FOLDER.parents[3] / "runs" / "alanine_dipeptide.pdb"
    if keep is not None:
        path.write_bytes(b"".join(pdb.read_bytes().splitlines(True)[:keep]) if keep >= 0 else b"\xff\x80" * 99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # OpenMM leaves files open
        with pytest.raises(ValueError, match=rf"^OpenMM cannot take \S*a.pdb.*: {reason}") as error:
            load_openmm(path, ["amber14/protein.ff14SB.xml"], Nonbonding("none"))
        assert "\n" not in str(error.value)
        if keep is not None:
            with pytest.raises(ValueError, match=r"^OpenMM cannot take \S*a.pdb: .*Error"):
                load_amber(path, path)
        del error
        gc.collect()
