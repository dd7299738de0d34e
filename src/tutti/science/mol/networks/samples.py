"""Configurations of a simulation as training data.

samples = Samples(every=100, cutoff=network.cutoff)
simulation.run(10_000, [samples])
fit(network, samples.structures)
"""

from __future__ import annotations

import torch

from tutti.science.mol.dynamics.simulation import Simulation
from tutti.science.mol.neighbors import NeighborList
from tutti.science.mol.networks.batch import Structure
from tutti.science.mol.networks.potential import atomic_numbers
from tutti.science.mol.units import PRESETS, factor


class Samples:
    """A callback that collects `structures` with energies and forces: those that moved the atoms, of each replica.

    cutoff: cutoff of the network in its units, whose name is `units` (`units.PRESETS`).
    """

    def __init__(self, every: int, cutoff: float, units: str = "eV") -> None:
        if units not in PRESETS:
            raise ValueError(f"units of samples: one of {', '.join(PRESETS)}, not {units!r}")
        if every < 1 or not cutoff > 0:
            raise ValueError(f"samples every {every} steps with a cutoff of {cutoff} cannot be")
        self.every, self.cutoff, self.units = every, cutoff, units
        self.structures: list[Structure] = []

    def __call__(self, simulation: Simulation) -> None:
        system, evaluation = simulation.system, simulation.evaluation
        length, energy = (factor(x, system.units, PRESETS[self.units]) for x in ("length", "energy"))
        species = atomic_numbers(system.species)
        for r in range(system.replicas):
            x = system.positions[r : r + 1] * length
            cell = None if system.cell is None else system.cell[r : r + 1] * length
            neighbors = NeighborList(self.cutoff, 0.0, False, system.pbc)
            neighbors.update(x, cell)
            pairs = neighbors.pairs
            order = torch.argsort(pairs.i, stable=True)
            image = {} if cell is None else {"shifts": pairs.shift[order], "cell": cell[0]}
            targets = {
                "energy": float(evaluation.energy[r]) * energy,
                "forces": evaluation.forces[r] * (energy / length),
            }
            self.structures.append(Structure(species, x[0], pairs.i[order], pairs.j[order], **image, **targets))
