"""SchNet, PaiNN and MolCT trained on one set in equal time: errors on held-out configurations of alanine dipeptide.

Energies and forces are those of Amber's ff14SB without a cutoff, by the package's own terms; configurations come of
Langevin dynamics at 300 to 600 K, held-out ones of replicas of their own. Each network has as many steps as fit into
the same time of one processor core, which other programs on the machine do not change. `errors`: those of the energy
per atom in meV, and of components of forces in meV/angstrom; `baseline` predicts the mean energy and no forces.
"""

from __future__ import annotations

import json
import math
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from tutti.science.mol.elements import MASSES
from tutti.science.mol.forcefield import read_system
from tutti.science.mol.networks import MolCT, Network, PaiNN, SchNet, Structure, Training, errors, fit
from tutti.science.mol.system import System
from tutti.science.mol.units import ELECTRONVOLT, MD, factor

FOLDER = Path(__file__).parents[1] / "tests" / "science" / "mol" / "openmm"
CUTOFF = 5.0  # angstrom
TEMPERATURES = (300.0, 400.0, 500.0, 600.0)
OPTIONS: dict[str, Any] = {"level": "O0", "cluster": "cpu:1", "plan": "single"}  # of the Trainer
STEP, FRICTION = 0.0005, 5.0  # ps, 1/ps


def alanine_dipeptide() -> tuple[System, Any]:
    """The file names no elements: they follow from the masses."""
    positions = json.loads((FOLDER / "alanine_dipeptide.json").read_text())["positions"]
    system, field = read_system((FOLDER / "alanine_dipeptide.xml").read_text(), positions, None)
    masses = torch.tensor(MASSES[1:], dtype=torch.float64)
    return replace(system, species=(system.masses[:, None] - masses).abs().argmin(1) + 1), field


def sample(replicas: int, frames: int, seed: int, warm: int = 2000, every: int = 100) -> tuple[Tensor, ...]:
    """Energies (frames, replicas), positions and forces (frames, replicas, N, 3): BAOAB, a temperature by replica."""
    system, field = alanine_dipeptide()
    system = system.replicate(replicas)
    draw = torch.Generator().manual_seed(seed)
    kt = MD.boltzmann * torch.tensor(TEMPERATURES, dtype=torch.float64).repeat(replicas)[:replicas, None, None]
    x, m, neighbors = system.positions.clone(), system.masses[:, None], field.neighbors(system)
    keep = math.exp(-FRICTION * STEP)

    def noise() -> Tensor:
        return (kt / m).sqrt() * torch.randn(x.shape, generator=draw, dtype=torch.float64)

    v, evaluation = noise(), field.evaluate(x, None, neighbors)
    rows = []
    for step in range(warm + frames * every):
        v += 0.5 * STEP * evaluation.forces / m
        x += 0.5 * STEP * v
        v = keep * v + math.sqrt(1 - keep * keep) * noise()
        x += 0.5 * STEP * v
        neighbors.update(x)
        evaluation = field.evaluate(x, None, neighbors)
        v += 0.5 * STEP * evaluation.forces / m
        if step >= warm and (step - warm + 1) % every == 0:
            rows.append((evaluation.energy.clone(), x.clone(), evaluation.forces.clone()))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def structures(sampled: tuple[Tensor, ...], species: Tensor) -> list[Structure]:
    """In angstrom and eV."""
    length, energy = factor("length", MD, ELECTRONVOLT), factor("energy", MD, ELECTRONVOLT)
    frames = []
    for e, x, f in zip(*(y.flatten(0, 1) for y in sampled), strict=True):
        near = (torch.cdist(x, x) * length < CUTOFF).fill_diagonal_(False)
        frames.append(Structure(species, x * length, *near.nonzero(as_tuple=True), energy=float(e) * energy,
                                forces=f * energy / length))  # fmt: skip
    return frames


def networks(features: int, interactions: int) -> dict[str, Network]:
    torch.manual_seed(0)
    return {
        "SchNet": SchNet(features, interactions, 50, CUTOFF),
        "PaiNN": PaiNN(features, interactions, 20, CUTOFF),
        "MolCT": MolCT(features, interactions, 8, 1, CUTOFF),
    }


def steps_within(seconds: float, network: Network, data: list[Structure], how: dict[str, Any]) -> int:
    """From the processor time that 80 more steps of a copy take."""
    times = []
    for steps in (20, 100):
        begin = time.process_time()
        fit(deepcopy(network), data, training=Training(steps=steps, **how), **OPTIONS)
        times.append(time.process_time() - begin)
    return max(20, round(80 * seconds / max(times[1] - times[0], 0.1)))


def row(errors: Any) -> dict[str, float]:
    return {"energy_mae": errors.energy_mae * 1e3, "energy_rmse": errors.energy_rmse * 1e3,
            "force_mae": errors.force_mae * 1e3, "force_rmse": errors.force_rmse * 1e3}  # fmt: skip


def baseline(train: list[Structure], held_out: list[Structure]) -> dict[str, float]:
    mean = sum(float(x.energy or 0) for x in train) / len(train)
    wrong = torch.tensor([(float(x.energy or 0) - mean) / len(x.species) for x in held_out])
    forces = torch.cat([x.forces for x in held_out if x.forces is not None])
    return {"energy_mae": float(wrong.abs().mean()) * 1e3, "force_mae": float(forces.abs().mean()) * 1e3}


def run(quick: bool) -> dict[str, Any]:
    size: dict[str, Any] = {"replicas": 4, "frames": 6, "warm": 100, "every": 20} if quick else {
        "replicas": 16, "frames": 60, "warm": 4000, "every": 100}  # fmt: skip
    features, interactions, seconds = (16, 1, 0.0) if quick else (64, 3, 115.0)
    species = alanine_dipeptide()[0].species
    begin = time.perf_counter()
    train = structures(sample(seed=1, **size), species)
    held_out = structures(sample(seed=2, **(size | {"replicas": 4})), species)
    harness.say(f"{len(train)} + {len(held_out)} structures in {time.perf_counter() - begin:.1f} s")
    how = {"batch": 4 if quick else 10, "rate": 5e-3 if quick else 1e-3, "energy_weight": 10.0, "force_weight": 1.0}
    table: dict[str, Any] = {}
    for name, network in networks(features, interactions).items():
        steps = 80 if quick else steps_within(seconds, network, train, how)
        begin = time.process_time()
        fit(network, train, training=Training(steps=steps, **how), **OPTIONS)
        taken, figures = time.process_time() - begin, row(errors(network, held_out))
        parameters = sum(p.numel() for p in network.parameters())
        table[name] = {"errors": figures, "parameters": parameters, "steps": steps, "seconds": taken}
        harness.say(f"{name}: {steps} steps, {figures['energy_mae']:.2f} meV an atom, {figures['force_mae']:.1f} meV/A")
    return {"train": len(train), "held_out": len(held_out), "atoms": len(species), "seconds_each": seconds,
            "features": features, "interactions": interactions, "baseline": baseline(train, held_out),
            "networks": table}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    harness.main(run, __file__)
