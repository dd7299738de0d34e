"""Restarts are bitwise; files that are damaged or of other systems are refused; guards stop what explodes."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from mol_systems import fluid, lennard_jones
from safetensors.torch import save_file

from tutti.science.mol.biases import ReplicaExchange, ladder
from tutti.science.mol.dynamics import (
    CellRescaling,
    Guard,
    Langevin,
    LeapFrog,
    NoseHooverChain,
    Simulation,
    Unstable,
    VelocityVerlet,
    minimize,
)
from tutti.science.mol.dynamics.log import COLUMNS, Log
from tutti.science.mol.dynamics.restart import Restart, load, save
from tutti.science.mol.dynamics.trajectory import Trajectory, read_h5md
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.observables import RadialDistribution
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED

UPDATERS = {
    "verlet": lambda: VelocityVerlet(0.004),
    "leap-frog": lambda: LeapFrog(0.004),
    "langevin": lambda: Langevin(0.004, 1.0, 1.0),
    "chain": lambda: NoseHooverChain(0.004, 1.0, 0.4),
    "barostat": lambda: CellRescaling(Langevin(0.004, 1.0, 1.0), 2.0, 1.0, 0.1),
}


@pytest.mark.parametrize("name", UPDATERS)
def test_a_run_that_goes_on_equals_one_that_never_stopped(name, tmp_path):
    path = tmp_path / "run.restart"
    whole = Simulation(fluid().replicate(2), lennard_jones(), UPDATERS[name](), seed=3).thermalize(1.0)
    whole.run(60, [Restart(path, 30)])
    first = Simulation(fluid().replicate(2), lennard_jones(), UPDATERS[name](), seed=3).thermalize(1.0)
    first.run(30, [Restart(path, 30)])
    again = Simulation(fluid().replicate(2), lennard_jones(), UPDATERS[name]())
    load(again, path)
    again.run(30, [Restart(path, 30)])
    assert again.count == 60
    for what in ("positions", "velocities", "cell", "forces"):
        assert torch.equal(getattr(again, what), getattr(whole, what)), what


def test_a_run_of_rigid_water_goes_on(tmp_path):
    system, field = water_box(16, "spce", nonbonding=Nonbonding("pme", 0.35))
    system = minimize(system, field, 500.0, 50)

    def simulation() -> Simulation:
        return Simulation(system, field, Langevin(0.001, 300.0, 5.0), skin=0.03, seed=1)

    whole = simulation().thermalize(300.0).run(20, [Restart(tmp_path / "a", 10)])
    simulation().thermalize(300.0).run(10, [Restart(tmp_path / "b", 10)])
    again = simulation()
    load(again, tmp_path / "b")
    again.run(10, [Restart(tmp_path / "b", 10)])
    assert torch.equal(again.positions, whole.positions)


def test_files_that_are_no_restart_of_the_system(tmp_path):
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004))
    path = tmp_path / "a.restart"
    with pytest.raises(ValueError, match="there is no restart file"):
        load(simulation, path)
    save(simulation, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"is no restart file of a simulation, or damaged"):
        load(simulation, path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"is no restart file of a simulation, or damaged"):
        load(simulation, path)
    save_file({"positions": torch.zeros(3)}, path, {"tutti.md": json.dumps({"format": 2, "step": "many", "seed": 0})})
    with pytest.raises(ValueError, match=r"or damaged: 'updater'"):
        load(simulation, path)
    save_file({"positions": torch.zeros(3)}, path, {"tutti.md": json.dumps({"format": 1, "step": 1})})
    with pytest.raises(ValueError, match="has format 1; this version reads 2"):
        load(simulation, path)
    path.write_bytes(whole)
    with pytest.raises(
        ValueError, match=r"a time step of 0.004, this simulation of 0.002, .*; load it into one of 0.0"
    ):
        load(Simulation(fluid(), lennard_jones(), VelocityVerlet(0.002)), path)
    with pytest.raises(ValueError, match="is of VelocityVerlet in units reduced, this simulation has Langevin"):
        load(Simulation(fluid(), lennard_jones(), Langevin(0.004, 1.0, 1.0)), path)
    with pytest.raises(ValueError, match=r"positions is \(1, 108, 3\) .*, this system has \(1, 32, 3\)"):
        load(Simulation(fluid(2), lennard_jones(1.5), VelocityVerlet(0.004)), path)


@pytest.mark.parametrize("suffix", ["xyz", "h5md"])
def test_trajectories_go_on_after_a_restart(suffix, tmp_path):
    pytest.importorskip("ase")
    system = fluid()
    whole = Simulation(system, lennard_jones(), VelocityVerlet(0.004), seed=1).thermalize(1.0)
    whole.run(40, [Trajectory(tmp_path / f"whole.{suffix}", 10, velocities=True)])
    first = Simulation(system, lennard_jones(), VelocityVerlet(0.004), seed=1).thermalize(1.0)
    path, log = tmp_path / f"part.{suffix}", tmp_path / "log.csv"
    first.run(20, [Restart(tmp_path / "r", 20)])
    first = Simulation(system, lennard_jones(), VelocityVerlet(0.004), seed=1).thermalize(1.0)
    first.run(30, [Trajectory(path, 10, velocities=True), Log(log, 10)])  # frames of step 30 come twice
    again = Simulation(system, lennard_jones(), VelocityVerlet(0.004))
    load(again, tmp_path / "r")
    again.run(20, [Trajectory(path, 10, velocities=True, resume=True), Log(log, 10, resume=True)])
    if suffix == "h5md":
        a, b = read_h5md(path), read_h5md(tmp_path / "whole.h5md")
        assert a["step"].tolist() == [10, 20, 30, 40] == b["step"].tolist()
        assert np.allclose(a["positions"], b["positions"], atol=1e-8) and a["velocities"].shape == (4, 108, 3)
        assert np.allclose(a["cells"][0], np.eye(3) * float(system.cell[0, 0, 0]))
    else:
        from ase.io import read

        frames = read(path, ":")
        assert [f.info["step"] for f in frames] == [10, 20, 30, 40]
        assert np.allclose(frames[-1].positions, whole.positions[0].numpy(), atol=1e-6)
        assert np.allclose(frames[-1].cell[:], system.cell[0].numpy())
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40]
    energies = [float(row["conserved"]) for row in rows]
    assert max(energies) - min(energies) < 0.2


def test_what_trajectories_refuse(tmp_path):
    with pytest.raises(ValueError, match=r"no format '.pkl'; there are .xyz"):
        Trajectory(tmp_path / "a.pkl", 10)
    (tmp_path / "a.h5md").write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 100)
    with pytest.raises(ValueError, match="is no H5MD trajectory, or damaged"):
        read_h5md(tmp_path / "a.h5md")
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004))
    with pytest.raises(ValueError, match="is no H5MD file that can go on"):
        Trajectory(tmp_path / "a.h5md", 1, resume=True)(simulation)
    Trajectory(tmp_path / "b.h5md", 1)(simulation)
    for other, atoms in ((fluid(2), 32), (fluid(2).replicate(2), 32)):
        with pytest.raises(ValueError, match=rf"is of another system: its atoms are .*'all': 108.*, not .*{atoms}"):
            Trajectory(tmp_path / "b.h5md", 1, resume=True)(
                Simulation(other, lennard_jones(1.5), VelocityVerlet(0.004))
            )
    with pytest.raises(ValueError, match="holds one replica"):
        Trajectory(tmp_path / "a.xyz", 1)(Simulation(fluid().replicate(2), lennard_jones(), VelocityVerlet(0.004)))


def test_a_run_that_explodes_is_stopped_with_step_and_atoms(tmp_path):
    frames = Trajectory(tmp_path / "a.h5md", 1)
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.03), guard=Guard(every=1)).thermalize(2.0)
    with pytest.raises(Unstable, match=r"step \d+: .*[Aa]toms? .*shorter time step"):
        simulation.run(1000, [frames])
    assert np.isfinite(read_h5md(tmp_path / "a.h5md")["positions"]).all()


def test_overlapping_atoms_are_stopped_at_once():
    x = fluid().positions.clone()
    x[0, 1] = x[0, 0] + 1e-4
    system = System(x, masses=1.0, cell=fluid().cell, units=REDUCED)
    simulation = Simulation(system, lennard_jones(), VelocityVerlet(0.004), guard=Guard(every=1))
    with pytest.raises(Unstable, match=r"[Aa]toms? .*0"):
        simulation.run(10)


def test_a_drift_of_the_energy_is_stopped():
    guard = Guard(every=10, drift=1e-3)
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.02), guard=guard).thermalize(1.5)
    with pytest.raises(Unstable, match="the conserved energy has changed by"):
        simulation.run(2000)


def test_replica_exchange_goes_on_with_its_walkers(tmp_path):
    def simulation() -> Simulation:
        langevin = Langevin(0.004, ladder(1.0, 1.1, 3), 1.0)
        return Simulation(fluid(2).replicate(3), lennard_jones(1.5), langevin).thermalize(1.0)

    whole, first, again = ReplicaExchange(5), ReplicaExchange(5), ReplicaExchange(5)
    simulation().run(100, [whole, Restart(tmp_path / "whole", 50)])
    simulation().run(50, [first, Restart(tmp_path / "r", 50, [first])])
    second = simulation()
    load(second, tmp_path / "r", [again])
    second.run(50, [again])
    assert again.walkers.tolist() == whole.walkers.tolist() and again.tried.tolist() == [10, 10]
    assert torch.equal(again.acceptance, whole.acceptance) and float(whole.acceptance.min()) > 0


@contextmanager
def room(size: int):
    """No file may be longer, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("name", "size"), [("a.h5md", 300_000), ("a.xyz", 20_000)])
def test_a_full_disk_ends_the_run_and_leaves_the_frames_before(name, size, tmp_path):
    path = tmp_path / name
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    with room(size), pytest.raises(OSError, match=rf"^\S*{name} cannot be written: File too large$"):
        simulation.run(200, [Trajectory(path, 1)])
    if name == "a.h5md":
        frames = read_h5md(path)
        assert frames["step"].tolist() == list(range(1, simulation.count))
        assert (np.abs(frames["positions"]).sum((1, 2)) > 0).all()
    else:
        assert len(path.read_text().splitlines()) == 110 * (simulation.count - 1)
    simulation.run(2, [Trajectory(path, 1, resume=True)])  # the frame of the step that failed is left out
    if name == "a.h5md":
        assert len(read_h5md(path)["step"]) == simulation.count - 1


def killed_at(point: int, simulation: Simulation, trajectory: Trajectory) -> None:
    """Kill a process that runs the simulation before (even points) or after a flush; a frame has two of them."""
    h5py = pytest.importorskip("h5py")
    child = os.fork()
    if not child:
        count, whole = 0, h5py.File.flush

        def flush(file):
            nonlocal count
            for act in (lambda: None, lambda: whole(file)):
                act()
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        h5py.File.flush = flush
        try:
            simulation.run(100, [trajectory])
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("point", range(8, 13))
def test_a_trajectory_goes_on_after_a_kill_within_a_frame(point, tmp_path):
    path = tmp_path / "a.h5md"
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    killed_at(point, simulation, Trajectory(path, 1))
    assert read_h5md(path)["step"].tolist() == ([1, 2] if point < 11 else [1, 2, 3])
    simulation.run(2)
    simulation.run(2, [Trajectory(path, 1, resume=True)])
    frames = read_h5md(path)
    assert frames["step"].tolist() == [1, 2, 3, 4]
    assert np.array_equal(frames["positions"][-1], simulation.positions[0].numpy())


def test_a_run_that_explodes_between_two_looks_of_the_guard_is_an_error(tmp_path):
    path = tmp_path / "a.restart"
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.05)).thermalize(2.0)
    save(simulation, path)
    before = path.read_bytes()
    with pytest.raises(Unstable, match=r"step 30: an atom moves"):
        simulation.run(30)
    with pytest.raises(Unstable, match=r"step 30: an atom moves"):
        save(simulation, path)
    assert path.read_bytes() == before
    with pytest.raises(Unstable, match=r"step 30: "):
        Simulation(fluid(), lennard_jones(), VelocityVerlet(0.05)).thermalize(2.0).run(49, [Restart(path, 30)])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.restart"]


def test_the_restart_before_the_last_stays(tmp_path):
    path = tmp_path / "a.restart"
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    simulation.run(30, [Restart(path, 10)])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"or damaged: .*; put the one before it, \S*a.restart.old, in its place$"):
        load(simulation, path)
    path.with_name("a.restart.old").replace(path)
    load(simulation, path)
    assert simulation.count == 20


def test_the_guard_measures_drift_from_the_first_session(tmp_path):
    def simulation() -> Simulation:
        guard = Guard(every=10, drift=1.0)
        return Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004), guard=guard).thermalize(1.5)

    first = simulation().run(20)
    save(first, tmp_path / "r")
    again = simulation()
    load(again, tmp_path / "r")
    assert again.guard.state()["first"].tolist() == first.guard.state()["first"].tolist()
    again.guard.drift = float((again.updater.conserved(again) - again.guard.state()["first"]).abs()) / 108 / 2
    with pytest.raises(Unstable, match="the conserved energy has changed by"):
        again.run(1)


def test_a_distribution_goes_on_with_what_was_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(RadialDistribution, "LONGEST", 16)
    path = tmp_path / "r"

    def run(steps: list[int]) -> RadialDistribution:
        for k, more in enumerate(steps):
            distribution = RadialDistribution(2.0, 50, every=2)
            simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.5)
            if k:
                load(simulation, path, [distribution])
            simulation.run(more, [distribution, Restart(path, 10, [distribution])])
        return distribution

    whole, parts = run([110]), run([50, 20, 40])
    assert whole.configurations == parts.configurations == 55 and whole.stride == parts.stride == 4
    assert torch.equal(whole.g, parts.g) and torch.equal(whole.error, parts.error)
    with pytest.raises(ValueError, match="has no state of RadialDistribution: 'no counts in 51 bins'"):
        load(Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)), path, [RadialDistribution(2.0, 51)])


def test_a_full_disk_leaves_the_restart_before(tmp_path):
    path = tmp_path / "a.restart"
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    save(simulation, path)
    before = path.read_bytes()
    with room(2000), pytest.raises(OSError, match=r"^\S*a.restart cannot be written: .*File too large"):
        save(simulation, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.restart"]


@pytest.mark.parametrize("output", [Log, Trajectory])
def test_a_second_run_does_not_replace_the_file_of_the_first(output, tmp_path):
    path = tmp_path / "a.xyz"
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    first = output(path, 10)
    simulation.run(20, [first]).run(20, [first])
    text = path.read_text()
    with pytest.raises(ValueError, match=r"a.xyz exists, and the simulation is at step 40: pass resume=True to go on"):
        simulation.run(20, [output(path, 10)])
    assert path.read_text() == text and simulation.count == 40
    simulation.run(10, [output(path, 10, resume=True)])
    assert path.read_text().startswith(text) and len(path.read_text()) > len(text)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", b"HEAD\n10,0,0.04,1,2,3,4,5,6\n\n20,0,0.08,1,2,3,4,5,6\n", 3),
        ("a.csv", b"HEAD\n10,0,0.04,1,2,3,4,5\n", 2),
        ("a.csv", b"HEAD\n10,0,0.04,x,2,3,4,5,6\n", 2),
        ("a.csv", b"\xff\xfe\x00\n", 1),
        ("a.csv", b"step,energy\n", 1),
        ("a.xyz", b"garbage\nmore\n", 1),
        ("a.xyz", b"108\n step=1 \n" + b"Ar 0 0 0\n" * 108 + b"\n\n", 111),
        ("a.xyz", b"108\nno number of a step\n" + b"Ar 0 0 0\n" * 108, 1),
        ("a.xyz", b"107\n step=1 \n" + b"Ar 0 0 0\n" * 107, 1),
        ("a.xyz", b"\xff\xfe\n\xff\n\n", 1),
        ("a.xyz", b"-1\n step=1 \n", 1),
        ("a.xyz", b"0\n step=1 \n", 1),
        ("a.xyz", b"9" * 5000 + b"\n step=1 \nAr 0 0 0\n", 1),
    ],
)
def test_damaged_files_are_not_gone_on_with(name, text, line, tmp_path):
    path = tmp_path / name
    text = text.replace(b"HEAD", b",".join(column.encode() for column in COLUMNS))
    path.write_bytes(text)
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    output = (Log if name == "a.csv" else Trajectory)(path, 30, resume=True)
    with pytest.raises(ValueError, match=rf"{name}, line {line}: .* move the file away"):
        simulation.run(30, [output])
    assert path.read_bytes() == text


@pytest.mark.parametrize("name", ["a.csv", "a.xyz"])
def test_a_torn_end_is_left_out(name, tmp_path):
    path = tmp_path / name
    output = Log if name == "a.csv" else Trajectory
    simulation = Simulation(fluid(), lennard_jones(), VelocityVerlet(0.004)).thermalize(1.0)
    simulation.run(20, [output(path, 10)])
    text = path.read_bytes()
    for end in (len(text) - 3, len(text) // 2 + 20, len(text) // 2 + 2, 10, 2, 0):
        path.write_bytes(text[:end])
        output(path, 10, resume=True)(simulation)
        assert path.read_bytes().endswith(text[len(text) // 2 + 40 :])


@pytest.mark.parametrize("output", [Log, Trajectory, Restart])
def test_output_every_no_steps_is_refused(output, tmp_path):
    with pytest.raises(ValueError, match=r"a.xyz: .* every 0 steps cannot be; leave the callback out"):
        output(tmp_path / "a.xyz", 0)
