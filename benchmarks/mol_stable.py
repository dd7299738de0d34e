"""A nanosecond of liquid argon with a SchNet that was trained on our own Lennard-Jones forces, and what it costs.

The network (`runs/md_schnet.py`) learns from 32 atoms at 94 to 600 K and 1.2 to 1.5 g/cm^3. 108 atoms at 94.4 K and
1.374 g/cm^3 then move with it, compiled for dynamics, by steps of 5 fs: 200,000 with a Langevin thermostat, whose g(r)
is compared with that of a run with the Lennard-Jones forces themselves, and 200,000 at constant energy. `control`
compares two runs with the Lennard-Jones forces. Standard errors come of 40 blocks. `within`: the share of bins whose
difference is below two combined standard errors, 0.95 if both are the same; `probability`: that of differences at
least as large if both are the same, by Hotelling's test on the means of ten shells, which correlate.

`speed`: wall time of a step of the whole simulation with one thread, in turns: the network by `compile_for_md`, by
`torch.compile`, and by autograd as it is.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from tutti.science.mol.dynamics import Langevin, Simulation, VelocityVerlet
from tutti.science.mol.networks import NetworkPotential, SchNet, Structure, compile_for_md, errors
from tutti.science.mol.observables import RadialDistribution, standard_error
from tutti.science.mol.potential import Potential

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
import md_schnet  # pyright: ignore[reportMissingImports]

DT, FRICTION = 0.005, 0.5  # ps, 1/ps
TEMPERATURE, DENSITY = md_schnet.LIQUID
BLOCKS, SHELLS = 40, 10
REACHED = 0.01  # of g(r), above which a bin is compared


class Series:
    """A callback that notes the temperature and the conserved energy."""

    every = 20

    def __init__(self) -> None:
        self.temperature: list[float] = []
        self.conserved: list[float] = []

    def __call__(self, simulation: Simulation) -> None:
        self.temperature.append(float(simulation.temperature))
        energy = simulation.updater.conserved(simulation)
        if energy is not None:
            self.conserved.append(float(energy))


def liquid(potential: Potential | None, seed: int, equilibrate: int, temperature: float = TEMPERATURE) -> Simulation:
    """108 atoms in equilibrium at constant temperature. potential: by default the Lennard-Jones forces."""
    start = md_schnet.argon((temperature, DENSITY), 108, seed)
    bath = Langevin(DT, temperature, FRICTION)
    simulation = Simulation(start.system, potential or start.potential, bath, seed=seed)
    return simulation.run(equilibrate)


def distribution(simulation: Simulation, steps: int) -> tuple[RadialDistribution, Series]:
    """g(r) up to nearly half the cell, and the temperature, of so many steps."""
    g, series = RadialDistribution(0.85, 85, 20), Series()
    simulation.run(steps, [g, series])
    return g, series


def compare(one: RadialDistribution, other: RadialDistribution) -> dict[str, float]:
    """How far two g(r) differ: see above."""
    a, b = (torch.stack([x.mean(0) for x in torch.stack(g.each).tensor_split(BLOCKS)]) for g in (one, other))
    reached = (a.mean(0) + b.mean(0)) / 2 > REACHED
    a, b = a[:, reached], b[:, reached]
    difference, error = a.mean(0) - b.mean(0), ((a.var(0) + b.var(0)) / BLOCKS).sqrt()
    z = (difference / error).abs()
    return {
        "bins": int(reached.sum()), "within": float((z < 2).double().mean()), "largest_sigma": float(z.max()),
        "largest_difference": float(difference.abs().max()), "mean_error": float(error.mean()),
        "probability": hotelling(*(shells(x) for x in (a, b))),
    }  # fmt: skip


def shells(blocks: Tensor) -> Tensor:
    return torch.stack([part.mean(1) for part in blocks.tensor_split(SHELLS, 1)], 1)


def hotelling(a: Tensor, b: Tensor) -> float:
    """The probability of means of (n, p) samples that differ at least as much, if both are of one normal distribution
    (H. Hotelling 1931)."""
    from scipy.stats import f

    n, p = a.shape
    difference, centred = a.mean(0) - b.mean(0), torch.cat([a - a.mean(0), b - b.mean(0)])
    covariance = centred.T @ centred / (2 * n - 2)
    t2 = n / 2 * float(difference @ torch.linalg.solve(covariance, difference))
    return float(f.sf(t2 * (2 * n - p - 1) / ((2 * n - 2) * p), p, 2 * n - p - 1))


def constant_energy(simulation: Simulation, steps: int) -> dict[str, float]:
    """From where a simulation is. drift: the slope of the energy per atom, in kJ/mol/ns; fluctuation: its RMS."""
    run = Simulation(simulation.system, simulation.potential, VelocityVerlet(DT))
    series = Series()
    run.run(steps, [series])
    energy = torch.tensor(series.conserved, dtype=torch.float64) / run.system.atoms
    t = torch.arange(len(energy), dtype=torch.float64) * series.every * DT / 1000
    t -= t.mean()
    slope = float((t * energy).sum() / t.square().sum())
    rest = energy - energy.mean() - slope * t
    return {"drift": slope, "fluctuation": float(rest.square().mean().sqrt()),
            "temperature": sum(series.temperature) / len(series.temperature)}  # fmt: skip


@dataclass
class Case:
    """One way to compute the network, in a simulation of its own."""

    name: str
    simulation: Simulation

    def turn(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.simulation.run(1)
            seconds.append(time.perf_counter() - begin)
        return seconds

    def close(self) -> None: ...


def speed(network: SchNet, rounds: int, steps: int) -> dict[str, Any]:
    inductor: Any = deepcopy(network)
    inductor.atomic = torch.compile(inductor.atomic, dynamic=True)
    ways = {"compile_for_md": compile_for_md(network), "torch.compile": inductor, "autograd": network}
    start = md_schnet.argon(md_schnet.LIQUID, 108, 1).run(500)
    cases = []
    for name, x in ways.items():
        potential = NetworkPotential(x, start.system.species)
        cases.append(Case(name, Simulation(start.system, potential, VelocityVerlet(DT))))
    times = harness.take_turns(cases, rounds, steps, 5)
    return {
        "ms": {name: harness.summary(turns)["median"] * 1e3 for name, turns in times.items()},
        "steps_per_second": {name: 1 / harness.summary(turns)["median"] for name, turns in times.items()},
        "times_autograd": harness.ratio(times, ["compile_for_md"], ["autograd"]),
        "times_torch_compile": harness.ratio(times, ["compile_for_md"], ["torch.compile"]),
    }  # fmt: skip


def force_error(network: SchNet, structures: list[Structure]) -> dict[str, float]:
    """RMS error of components of forces in meV/angstrom, and relative to the forces."""
    rmse = errors(network, structures).force_rmse
    rms = float(torch.cat([x.forces for x in structures if x.forces is not None]).square().mean().sqrt())
    return {"rmse": rmse * 1e3, "relative": rmse / rms}


def run(quick: bool) -> dict[str, Any]:
    frames, steps, equilibrate, md = (4, 60, 200, 2000) if quick else (60, 8000, 10_000, 200_000)
    begin = time.perf_counter()
    network, _ = md_schnet.train(frames, steps)
    training = time.perf_counter() - begin
    forces = {
        "liquid": force_error(network, md_schnet.samples([md_schnet.LIQUID], 2 if quick else 20, 200)),
        "hottest": force_error(network, md_schnet.samples([md_schnet.STATES[-1]], 2 if quick else 20, 300)),
    }
    harness.say(f"trained for {training:.0f} s; relative errors of forces "
                + ", ".join(f"{name} {x['relative']:.2%}" for name, x in forces.items()))  # fmt: skip
    compiled = compile_for_md(network)
    simulations = {
        "network": liquid(NetworkPotential(compiled, ["Ar"] * 108), 1, equilibrate),
        "reference": liquid(None, 2, equilibrate),
        "control": liquid(None, 3, equilibrate),
    }
    distributions, temperatures = {}, {}
    for name, simulation in simulations.items():
        distributions[name], series = distribution(simulation, md)
        values = torch.tensor(series.temperature)
        temperatures[name] = {"mean": float(values.mean()), "error": standard_error(values)}
        harness.say(f"{name}: {md * DT / 1000:g} ns at {temperatures[name]['mean']:.2f} K")
    agreement = {name: compare(distributions[name], distributions["reference"]) for name in ("network", "control")}
    energies = {name: constant_energy(simulations[name], md) for name in ("network", "reference")}
    harness.say(f"g(r) {agreement['network']}, constant energy {energies}")
    return {
        "atoms": 108, "nanoseconds": md * DT / 1000, "training_seconds": training, "force_error": forces,
        "table_error": compiled.tables.error, "agreement": agreement,  # pyright: ignore
        "temperatures": temperatures, "target": TEMPERATURE, "constant_energy": energies,
        "r": distributions["network"].r.tolist(), "g": {name: x.g.tolist() for name, x in distributions.items()},
        "speed": speed(network, *((2, 5) if quick else (7, 60))),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    harness.main(run, __file__)
