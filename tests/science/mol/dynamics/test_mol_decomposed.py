"""Processes that share a simulation: states, energies and files are those of one process within rounding."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mol_systems import fluid, lennard_jones

from tutti.science.mol.biases import Distance, Restraint
from tutti.science.mol.dynamics import (
    CellRescaling,
    Fire,
    Langevin,
    LeapFrog,
    NoseHooverChain,
    Simulation,
    VelocityVerlet,
    minimize,
)
from tutti.science.mol.dynamics.decomposed import DecomposedSimulation
from tutti.science.mol.dynamics.domains import Domains, divided, estimates
from tutti.science.mol.dynamics.log import Log
from tutti.science.mol.dynamics.restart import Restart, load, save
from tutti.science.mol.dynamics.trajectory import Trajectory, read_h5md
from tutti.science.mol.forcefield import Nonbonding, read_system, water_box
from tutti.science.mol.networks import MolCT, NetworkPotential, PaiNN, SchNet, compile_for_md
from tutti.science.mol.observables import RadialDistribution
from tutti.science.mol.potential import Sum
from tutti.science.mol.system import System
from tutti.science.mol.terms import Ewald, HarmonicBonds, LennardJones
from tutti.science.mol.units import REDUCED

pytestmark = pytest.mark.starts
OPENMM = Path(__file__).parent.parent / "openmm"
UPDATERS = {
    "verlet": lambda dt, t: VelocityVerlet(dt),
    "leap-frog": lambda dt, t: LeapFrog(dt),
    "langevin": lambda dt, t: Langevin(dt, t, 1.0),
    "chain": lambda dt, t: NoseHooverChain(dt, t, 100 * dt),
    "barostat": lambda dt, t: CellRescaling(Langevin(dt, t, 1.0), 2.0, 1.0, 0.02, every=5),
}


def crystal():
    return fluid(4), lennard_jones(), 0.004, 1.0


def droplet():
    """Without a cell, and most atoms in a corner."""
    system = fluid(4)
    far = torch.tensor([[9.0, 9, 9], [9, 9, 10.2], [9, 10.2, 9], [30, 0, 0]], dtype=torch.float64)
    return System(torch.cat([system.positions[0], far]), masses=1.0, units=REDUCED), lennard_jones(), 0.004, 0.3


def skewed():
    """A triclinic cell that repeats in two directions, and atoms outside of it."""
    system, cell = fluid(3), torch.tensor([[5.04, 0, 0], [2.1, 5.04, 0], [-1.0, 1.3, 5.04]], dtype=torch.float64)
    x = system.positions[0] @ torch.linalg.inv(system.cell[0]) @ cell
    x[:7] += torch.tensor([3, -2, 0], dtype=torch.float64) @ cell
    return System(x, masses=1.0, cell=cell, pbc=(True, True, False), units=REDUCED), lennard_jones(), 0.003, 0.5


def salt():
    """Charges and flexible pairs, by Ewald's sum; some of the pairs lie across faces, one atom has no mass."""
    system = fluid(3)
    charges = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(54)
    pairs = torch.arange(108).view(-1, 2)
    field = Sum([LennardJones(1.0, 1.0, 2.0, truncation="switch", switch=1.5, tail=True, exclusions=pairs),
                 Ewald.accurate(charges, system.cell, 2.0, 1e-4, coulomb=1.0, exclusions=pairs),
                 HarmonicBonds(pairs, 1.1, 50.0)])  # fmt: skip
    masses = torch.ones(108)
    masses[17] = 0
    return System(system.positions, masses=masses, charges=charges, cell=system.cell, units=REDUCED), field, 0.003, 0.5


def water():
    """Rigid molecules by particle mesh Ewald."""
    system, field = water_box(64, "spce", nonbonding=Nonbonding(cutoff=0.55, tolerance=1e-4))
    return minimize(system, field, tolerance=100.0, steps=50), field, 0.002, 300.0


def dipeptide():
    """Bonds, angles, torsions and 1-4 pairs of Amber's force field, by particle mesh Ewald."""
    reference = json.loads((OPENMM / "alanine_dipeptide.json").read_text())
    nonbonding = Nonbonding(cutoff=0.9, tolerance=1e-5)
    text = (OPENMM / "alanine_dipeptide.xml").read_text()
    return *read_system(text, reference["positions"], reference["box"], nonbonding), 0.0005, 300.0


def network(kind=SchNet, compiled=True, **options):
    """A network of argon that was not trained; an atom depends on others two cutoffs away."""
    torch.manual_seed(0)
    net = kind(16, 2 // options.get("cycles", 1), **options, cutoff=1.5)
    net.units = "reduced"
    net = net.double() if not compiled else compile_for_md(net, dtype=torch.float64)
    x, edge = fluid(10, 0.6).positions[0], (4 / 0.6) ** (1 / 3)
    x = x[(x[:, 1:] < 2.9 * edge).all(1)]  # a long box, of which a process has a part
    species = torch.full((len(x),), 18)
    system = System(x, species, masses=1.0, cell=(10 * edge, 3 * edge, 3 * edge), units=REDUCED)
    return system, NetworkPotential(net, species, REDUCED), 0.003, 1.0


def schnet():
    return network()


def painn():
    return network(PaiNN)


def molct():
    return network(MolCT, compiled=False, heads=2, cycles=2)


SYSTEMS = {f.__name__: f for f in (crystal, droplet, skewed, salt, water, dipeptide, schnet, painn, molct)}


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def group_of(ranks: int):
    groups = [dist.new_group(list(range(k, k + ranks))) for k in range(0, dist.get_world_size(), ranks)]
    return groups[dist.get_rank() // ranks]


def one(system: str, updater: str, steps: int) -> Simulation:
    atoms, potential, dt, t = SYSTEMS[system]()
    return Simulation(atoms, potential, UPDATERS[updater](dt, t), seed=3).thermalize(t).run(steps)


def shared(system: str, updater: str, ranks: int, steps: int, grid=None):
    atoms, potential, dt, t = SYSTEMS[system]()
    simulation = DecomposedSimulation(
        atoms, potential, UPDATERS[updater](dt, t), seed=3, grid=grid, group=group_of(ranks)
    )
    simulation.thermalize(t).run(steps)
    pressure = simulation.pressure() if all(atoms.pbc) else None
    whole = simulation.whole()
    assert len(simulation.numbers) < atoms.atoms or system not in ("schnet", "painn", "molct")
    return whole.positions, whole.velocities, whole.forces, whole.evaluation, whole.temperature, pressure, whole.cell


@pytest.mark.parametrize("system, updater, ranks, grid", [
    ("crystal", "verlet", 4, (2, 2, 1)), ("crystal", "leap-frog", 2, None), ("crystal", "langevin", 4, None),
    ("crystal", "chain", 2, (2, 1, 1)), ("crystal", "barostat", 4, (1, 4, 1)), ("droplet", "verlet", 4, None),
    ("skewed", "langevin", 4, (1, 2, 2)), ("salt", "langevin", 2, None), ("water", "barostat", 4, (2, 1, 2)),
    ("water", "leap-frog", 2, None), ("dipeptide", "langevin", 4, None),
    ("schnet", "langevin", 2, None), ("schnet", "barostat", 2, None), ("painn", "verlet", 4, None),
    ("molct", "verlet", 2, None),
])  # fmt: skip
def test_processes_that_divide_space_are_as_one(pool, system, updater, ranks, grid):
    pool.run(start)
    steps = 40 if system not in ("painn", "molct") else 8
    expected = one(system, updater, steps)
    pressure = expected.pressure() if all(expected.system.pbc) else None
    scale = float(expected.forces.abs().max())
    for x, v, f, evaluation, temperature, p, cell in pool.run(shared, system, updater, ranks, steps, grid):
        torch.testing.assert_close(x, expected.positions, rtol=0, atol=1e-11)
        torch.testing.assert_close(v, expected.velocities, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(f, expected.forces, rtol=0, atol=1e-9 * scale)
        torch.testing.assert_close(temperature, expected.temperature, rtol=1e-10, atol=0)
        assert evaluation.terms.keys() == expected.evaluation.terms.keys()
        for name, energy in evaluation.terms.items():
            torch.testing.assert_close(energy, expected.evaluation.terms[name], rtol=1e-9, atol=1e-9 * scale)
        if pressure is not None:
            torch.testing.assert_close(p, pressure, rtol=1e-8, atol=1e-9 * scale)
            torch.testing.assert_close(cell, expected.cell, rtol=1e-11, atol=0)


def written(ranks: int, folder: Path) -> list[dict]:
    system, potential, dt, _ = crystal()
    updater = LeapFrog(dt)
    if ranks > 1:
        simulation = DecomposedSimulation(system, potential, updater, group=group_of(ranks))
        folder = folder / f"{ranks}" / str(dist.get_rank() // ranks)
    else:
        simulation, folder = Simulation(system, potential, updater), folder / "1"
    distribution = RadialDistribution(2.5, 50, 10)
    simulation.thermalize(1.0)
    simulation.run(60, [Log(folder / "log.csv", 10), Trajectory(folder / "run.h5md", 20, True), distribution,
                        Restart(folder / "run.safetensors", 30)])  # fmt: skip
    return folder, simulation.writes and distribution.g


def test_logs_trajectories_and_distributions_are_those_of_one_process(pool, tmp_path):
    pool.run(start)
    folder, g = written(1, tmp_path)
    expected, frames = (folder / "log.csv").read_text().splitlines(), read_h5md(folder / "run.h5md")
    for other, theirs in pool.run(written, 2, tmp_path)[::2]:
        torch.testing.assert_close(theirs, g)
        lines = (other / "log.csv").read_text().splitlines()
        assert len(lines) == len(expected) == 7 and lines[0] == expected[0]
        for line, same in zip(lines[1:], expected[1:], strict=True):
            values = [torch.tensor([float(x or 0) for x in text.split(",")]) for text in (line, same)]
            torch.testing.assert_close(*values, rtol=1e-6, atol=1e-6)
        for name, values in read_h5md(other / "run.h5md").items():
            assert values == pytest.approx(frames[name], abs=1e-9), name


def resumed(ranks: int, path: Path, updater: str, steps: int, write: bool = False):
    """State after a restart file was written, or read, and `steps` more."""
    system, potential, dt, t = crystal()
    simulation = DecomposedSimulation(system, potential, UPDATERS[updater](dt, t), group=group_of(ranks))
    path = path / f"{dist.get_rank() // ranks}.safetensors"
    if write:
        simulation.thermalize(t).run(30)
        save(simulation, path)
    else:
        load(simulation, path)
        assert simulation.count == 30
    whole = simulation.run(steps).whole()
    return whole.positions, whole.velocities


@pytest.mark.parametrize("updater", ["leap-frog", "chain", "barostat"])
def test_a_restart_is_bitwise_and_takes_any_number_of_processes(pool, tmp_path, updater):
    pool.run(start)
    x, v = pool.run(resumed, 2, tmp_path, updater, 20, True)[0]
    again, velocities = pool.run(resumed, 2, tmp_path, updater, 20)[0]
    assert torch.equal(again, x) and torch.equal(velocities, v)
    (tmp_path / "1.safetensors").unlink()
    other, _ = pool.run(resumed, 4, tmp_path, updater, 20)[0]
    torch.testing.assert_close(other, x, rtol=0, atol=1e-11)
    system, potential, dt, t = crystal()
    alone = Simulation(system, potential, UPDATERS[updater](dt, t))
    load(alone, tmp_path / "0.safetensors")
    torch.testing.assert_close(alone.run(20).positions, x, rtol=0, atol=1e-11)


class Full:
    every = 5

    def __call__(self, simulation: Simulation) -> None:
        raise OSError("no space left on device")


def failure(kind: str) -> str:
    """What is raised; the processes can go on with other work."""
    system, potential, dt, t = crystal()
    calls = []
    try:
        if kind == "explodes":
            dt = 0.2
        if kind == "constraints":
            system, potential, _, t = water()
            dt = 0.05
        if kind == "writes" or (kind == "others" and dist.get_rank() == 2):
            calls = [Full()]
        simulation = DecomposedSimulation(system, potential, VelocityVerlet(dt), grid=(4, 1, 1))
        simulation.thermalize(t).run(300, calls)
        return ""
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind, first, others", [
    ("explodes", "Unstable: step .* Atoms? .*|Unstable: step .*finite", None),
    ("constraints", "Unstable: step .*the distances between atoms .* cannot be held", None),
    ("writes", "OSError: no space left", "Unstable: step 5: process 0 stopped: OSError: no space left"),
    ("others", "ValueError: all processes give the same callbacks to run", None),
])  # fmt: skip
def test_where_one_process_fails_all_stop(pool, kind, first, others):
    pool.run(start)
    messages = pool.run(failure, kind)
    assert re.match(first, messages[0]), messages[0]
    for message in messages[1:]:
        assert message == messages[0] if others is None else re.match(others, message), message


def refused(kind: str) -> str:
    system, potential, dt, _ = crystal()
    updater, grid = VelocityVerlet(dt), None
    if kind == "minimiser":
        updater = Fire()
    elif kind == "bias":
        potential = Sum([potential, Restraint(Distance(0, 1), 1.0, 10.0)])
    elif kind == "replicas":
        system = system.replicate(2)
    elif kind == "grid":
        grid = (3, 1, 1)
    elif kind == "bond":
        potential = Sum([potential, HarmonicBonds([[0, 200]], 1.0, 1.0)])
    with pytest.raises(ValueError) as error:
        DecomposedSimulation(system, potential, updater, grid=grid)
    return str(error.value)


@pytest.mark.parametrize("kind, message", [
    ("minimiser", "Fire runs in one process"), ("bias", "cannot be divided among processes"),
    ("replicas", "a simulation of one replica, not of 2"), ("grid", r"\(3, 1, 1\) has 3 boxes, but there are 4"),
    ("bond", r"the bonds of atoms \[0, 200\] reach farther than the cutoff"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(pool, kind, message):
    pool.run(start)
    messages = pool.run(refused, kind)
    assert any(re.search(message, text) for text in messages), messages


def test_boxes_have_equally_many_atoms_and_the_grid_has_the_fewest_copies():
    x = torch.rand(1000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    for grid in [(1, 1, 1), (4, 1, 1), (2, 3, 4), (1, 5, 2)]:
        counts = torch.bincount(Domains.of(grid, x).owner(x), minlength=grid[0] * grid[1] * grid[2])
        assert int(counts.max() - counts.min()) <= 3
    cell = System(x, masses=1.0, cell=(30.0, 10.0, 10.0), units=REDUCED)
    assert divided(cell, x, 2.0, 4)[0].grid == (4, 1, 1)
    cube = System(x, masses=1.0, cell=20.0, units=REDUCED)
    assert divided(cube, x, 2.0, 8)[0].grid == (1, 2, 4)  # axes that are not cut need no copies
    assert divided(cube, x, 2.0, 8, (2, 2, 2))[0].copies == pytest.approx(1000 / 8 * (1.4**3 - 1))
    flat = x * torch.tensor([1, 1, 0])
    assert divided(System(flat, masses=1.0, units=REDUCED), flat, 0.1, 4)[0].grid[2] == 1
    assert len(estimates(cube, 1.0, 4096)) == 91
    (whole,) = estimates(cell, 2.0, 1)
    assert whole.copies == 0 and whole.owned == 1000
    with pytest.raises(ValueError, match="3 atoms cannot be divided among 4 processes"):
        divided(System(x[:3], masses=1.0, units=REDUCED), x[:3], 0.1, 4)


def drifting() -> tuple[System, LennardJones]:
    """A cluster that flies out of the boxes that were cut for it at first."""
    x = fluid(3).positions[0]
    v = torch.tensor([0.0, 0, 40]) + 0.1 * torch.sin(x * 7)
    return System(x, masses=1.0, velocities=v, units=REDUCED), lennard_jones()


def drifted(ranks: int):
    system, potential = drifting()
    simulation = DecomposedSimulation(system, potential, VelocityVerlet(0.002), grid=(1, 1, ranks), guard=None,
                                      group=group_of(ranks)).run(150)  # fmt: skip
    assert simulation.whole().positions[..., 2].min() > 10
    return simulation.whole().positions


def test_boxes_that_are_empty_are_cut_anew(pool):
    pool.run(start)
    system, potential = drifting()
    expected = Simulation(system, potential, VelocityVerlet(0.002), guard=None).run(150).positions
    for ranks in (2, 4):
        for x in pool.run(drifted, ranks):
            torch.testing.assert_close(x, expected, rtol=0, atol=1e-9)


class Noted:
    collective = True
    every = 5

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def __call__(self, simulation: Simulation) -> None:
        self.notes.append(type(self).__name__)


class First(Noted):
    collective = False


class Last(Noted):
    collective = False


def order() -> list[str]:
    system, potential, dt, t = crystal()
    notes: list[str] = []
    simulation = DecomposedSimulation(system, potential, VelocityVerlet(dt)).thermalize(t)
    simulation.run(5, [First(notes), Noted(notes), Last(notes)])
    return notes


def test_callbacks_are_called_in_the_order_given(pool):
    pool.run(start)
    first, *others = pool.run(order)
    assert first == ["First", "Noted", "Last"] and others == [["Noted"]] * 3
