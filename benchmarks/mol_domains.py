"""A simulation that two processes divide, against one process, on two CPU cores.

Wall time of a step at constant energy: Lennard-Jones argon of 4,000, 32,000 and 108,000 atoms, cutoff 2.5 sigma; rigid
SPC/E water of 1,000 and 4,000 molecules, particle mesh Ewald, 1 fs. Each process has one thread. The one process and
the two take turns; ratios are of the medians. `copies` are atoms of the other process that one has beside its own.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import harness
from tutti.launch.launch import launch
from tutti.science.mol.dynamics import DecomposedSimulation, Simulation, VelocityVerlet, minimize
from tutti.science.mol.forcefield import Nonbonding, water_box
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones
from tutti.science.mol.units import REDUCED

STEPS = {"4000 atoms": 200, "32000 atoms": 40, "108000 atoms": 12, "1000 molecules": 40, "4000 molecules": 12}
TURNS = 7


def argon(cells: int) -> tuple[System, Potential, float, float]:
    edge = (4 / 0.8442) ** (1 / 3)
    corners = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
    grid = torch.cartesian_prod(*[torch.arange(cells, dtype=torch.float64)] * 3)
    system = System((grid[:, None] + corners).reshape(-1, 3) * edge, masses=1.0, cell=cells * edge, units=REDUCED)
    return system, LennardJones(1.0, 1.0, 2.5, truncation="force_shift"), 0.004, 1.44


def water(molecules: int) -> tuple[System, Potential, float, float]:
    system, field = water_box(molecules, "spce", nonbonding=Nonbonding("pme", 0.9, tolerance=5e-4))
    return minimize(system, field, 1000.0, 50), field, 0.001, 298.0


def measure(name: str, steps: int, turns: int) -> dict[str, Any]:
    """Seconds of a step: of two processes, and of one. Called in both processes."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    count, kind = name.split()
    system, potential, dt, temperature = (
        argon(round((int(count) / 4) ** (1 / 3))) if kind == "atoms" else water(int(count))
    )
    shared = DecomposedSimulation(system, potential, VelocityVerlet(dt)).thermalize(temperature)
    alone = Simulation(system, potential, VelocityVerlet(dt)).thermalize(temperature) if dist.get_rank() == 0 else None
    times: dict[str, list[float]] = {"two": [], "one": []}
    for turn in range(turns + 1):
        for key, simulation in (("two", shared), ("one", alone)):
            dist.barrier()
            begin = time.perf_counter()
            if simulation is not None:
                simulation.run(steps)
            if simulation is not None and turn:
                times[key].append((time.perf_counter() - begin) / steps)
    assert isinstance(shared, DecomposedSimulation)
    return {"times": times, "atoms": system.atoms, "copies": len(shared.numbers) - shared.part.owned,
            "grid": list(shared.plan.grid)}  # fmt: skip


def run(quick: bool) -> dict[str, Any]:
    from mol_domains import measure  # as processes import it

    results = {}
    for name, steps in {"256 atoms": 10, "64 molecules": 4}.items() if quick else STEPS.items():
        harness.say(name)
        measured = launch(measure, 2, name, steps, 2 if quick else TURNS)[0]
        us = {key: statistics.median(times) * 1e6 for key, times in measured["times"].items()}
        results[name] = {**{k: v for k, v in measured.items() if k != "times"}, "us": us,
                         "times_faster": us["one"] / us["two"]}  # fmt: skip
    return {"systems": results}


if __name__ == "__main__":
    harness.main(run, __file__)
