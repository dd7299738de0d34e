"""A nanosecond of alanine dipeptide with a PaiNN that was trained on Amber's ff14SB by the package's own terms.

The molecule is in vacuum without constraints, at 300 K (Langevin, 1/ps, steps of 0.5 fs). Training sets come of
dynamics at 300 to 600 K. Bond lengths and the torsions phi and psi of the network's run are compared with those of a
run with the force field, and as `control` those of two runs with the force field: `bond_mean` and `bond_spread` are the
largest differences of a bond's mean and standard deviation in pm; `torsions` the total variation distance of the
distributions of phi and psi, 36 bins each, which is 0 for equal ones and 1 for disjoint ones; `within`: the share of
bonds' means whose difference is below two combined standard errors, of 20 blocks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import harness
import mol_training
from tutti.science.mol.dynamics import Langevin, Simulation, minimize
from tutti.science.mol.networks import NetworkPotential, PaiNN, Training, compile_for_md, errors, fit
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System

TEMPERATURE, DT, FRICTION = 300.0, 0.0005, 1.0  # K, ps, 1/ps
TORSIONS = {"phi": (4, 6, 8, 14), "psi": (6, 8, 14, 16)}
BLOCKS, BINS = 20, 36


class Frames:
    """A callback that keeps positions (R, N, 3) and the temperature (R)."""

    every = 100

    def __init__(self) -> None:
        self.positions: list[Tensor] = []
        self.temperature: list[Tensor] = []

    def __call__(self, simulation: Simulation) -> None:
        self.positions.append(simulation.positions.clone())
        self.temperature.append(simulation.temperature)


def move(system: System, potential: Potential, steps: int, seed: int) -> tuple[Tensor, float]:
    """Positions (frames, R, N, 3) of so many steps after a tenth of them, and the mean temperature."""
    simulation = Simulation(system, potential, Langevin(DT, TEMPERATURE, FRICTION), seed=seed).thermalize(TEMPERATURE)
    frames = Frames()
    simulation.run(steps // 10).run(steps, [frames])
    return torch.stack(frames.positions), float(torch.stack(frames.temperature).mean())


def torsion(x: Tensor, atoms: tuple[int, int, int, int]) -> Tensor:
    """In degrees (frames), from -180 to 180, 180 for trans."""
    a, b, c = (x[:, atoms[k + 1]] - x[:, atoms[k]] for k in range(3))
    n, m = torch.linalg.cross(a, b), torch.linalg.cross(b, c)
    sine = (torch.linalg.cross(n, m) * b).sum(-1) / b.norm(dim=-1)
    return torch.rad2deg(torch.atan2(sine, (n * m).sum(-1)))


def histogram(x: Tensor, atoms: tuple[int, int, int, int]) -> Tensor:
    """Shares of a torsion in bins from -180 to 180 degrees."""
    return torch.histc(torsion(x, atoms), BINS, -180, 180) / len(x)


def compare(one: Tensor, other: Tensor, bonds: Tensor) -> dict[str, Any]:
    """Compare positions (frames, N, 3) in nm: see above."""
    a, b = (1e3 * (x[:, bonds[:, 1]] - x[:, bonds[:, 0]]).norm(dim=-1) for x in (one, other))  # pm
    blocks = [torch.stack([part.mean(0) for part in x.tensor_split(BLOCKS)]) for x in (a, b)]
    error = (sum(x.var(0) for x in blocks) / BLOCKS).sqrt()  # pyright: ignore
    difference = (a.mean(0) - b.mean(0)).abs()
    histograms = {name: [histogram(x, atoms) for x in (one, other)] for name, atoms in TORSIONS.items()}
    return {
        "within": float((difference < 2 * error).double().mean()), "bond_mean": float(difference.max()),
        "bond_spread": float((a.std(0) - b.std(0)).abs().max()),
        "torsions": {name: float((x - y).abs().sum() / 2) for name, (x, y) in histograms.items()},
    }  # fmt: skip


def train(quick: bool) -> tuple[PaiNN, dict[str, float]]:
    size: dict[str, Any] = {"replicas": 4, "frames": 6, "warm": 100, "every": 20} if quick else {
        "replicas": 16, "frames": 120, "warm": 4000, "every": 100}  # fmt: skip
    species = mol_training.alanine_dipeptide()[0].species
    data = mol_training.structures(mol_training.sample(seed=1, **size), species)
    held_out = mol_training.structures(mol_training.sample(seed=2, **(size | {"replicas": 4})), species)
    torch.manual_seed(0)
    network = PaiNN(64, 2, 20, mol_training.CUTOFF)
    how = Training(steps=20 if quick else 9000, batch=5, rate=2e-3, energy_weight=10.0, force_weight=1.0)
    fit(network, data, training=how, **mol_training.OPTIONS)
    return network, mol_training.row(errors(network, held_out))


def run(quick: bool) -> dict[str, Any]:
    steps = 2000 if quick else 2_000_000
    begin = time.perf_counter()
    network, force_errors = train(quick)
    training = time.perf_counter() - begin
    harness.say(f"trained for {training:.0f} s: {force_errors}")
    system, field = mol_training.alanine_dipeptide()
    system = minimize(system, field, 50.0, 1000)
    compiled = compile_for_md(network)
    begin = time.perf_counter()
    learned, temperature = move(system, NetworkPotential(compiled, system.species), steps, 1)
    seconds = time.perf_counter() - begin
    harness.say(f"network: {steps * DT / 1000:g} ns at {temperature:.1f} K, {1.1 * steps / seconds:.0f} steps/s")
    both, of_field = move(system.replicate(2), field, steps, 2)
    runs = {"network": learned[:, 0], "force field": both[:, 0], "control": both[:, 1]}
    agreement = {name: compare(runs[name], runs["force field"], system.bonds) for name in ("network", "control")}
    return {
        "atoms": system.atoms, "nanoseconds": steps * DT / 1000, "training_seconds": training, "errors": force_errors,
        "table_error": compiled.tables.error, "steps_per_second": 1.1 * steps / seconds,  # pyright: ignore
        "temperatures": {"network": temperature, "force field": of_field}, "agreement": agreement,
        "histograms": {which: {name: histogram(x, atoms).tolist() for name, x in runs.items()}
                       for which, atoms in TORSIONS.items()},
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    harness.main(run, __file__)
