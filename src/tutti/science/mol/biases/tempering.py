"""Integrated tempering (Gao 2008): one run on a potential that samples a range of temperatures at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol.neighbors import NeighborList, Pairs
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Evaluation, Potential, check_part
from tutti.science.mol.system import System

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation

WINDOW, MOST = 20, 2.0  # calls between changes of the weights; the largest change of a logarithm


class IntegratedTempering(Potential):
    """U' = -1/beta ln sum_k n_k exp(-beta_k U) in place of a potential's U, and the callback that adapts the n_k.

    temperature: temperature of the run. temperatures: those to sample, which enclose it. boltzmann: Boltzmann's
    constant in the system's units. every: steps between two adaptations, for as long as the object is among the
    callbacks; the weights make all temperatures equally likely. `weights(energies, temperature)` reweights samples.
    """

    name = "integrated_tempering"

    def __init__(
        self, potential: Potential, temperature: float, temperatures: Sequence[float] | Tensor, boltzmann: float,
        every: int = 100,
    ) -> None:  # fmt: skip
        t = torch.as_tensor(temperatures, dtype=torch.float64)
        if len(t) < 2 or not bool((t > 0).all()) or not float(t.min()) <= temperature <= float(t.max()):
            raise ValueError(f"temperatures {t.tolist()} are two or more above 0 that enclose {temperature}")
        self.potential, self.every = potential, every
        self.cutoff, self.half, self.exclusions = potential.cutoff, potential.half, potential.exclusions
        self.beta, self.betas = 1 / (boltzmann * temperature), 1 / (boltzmann * t)
        self.log_weights = torch.zeros(len(t), dtype=torch.float64)
        self.visits = torch.full((len(t),), -math.inf, dtype=torch.float64)  # log of the sums of probabilities
        self.calls = torch.zeros((), dtype=torch.int64)
        self.energies: Tensor = torch.empty(0)

    def evaluate(
        self, positions: Tensor, cell: Tensor | None, neighbors: NeighborList, virial: bool = False
    ) -> Evaluation:
        plain = self.potential.evaluate(positions, cell, neighbors, virial)
        self.energies = plain.energy
        logs = self._logs(plain.energy)
        total = torch.logsumexp(logs, 1)
        scale = (torch.exp(logs - total[:, None]) * self.betas).sum(1) / self.beta
        energy = -total / self.beta
        w = None if plain.virial is None else plain.virial * scale[:, None, None]
        return Evaluation(energy, plain.forces * scale[:, None, None], w, {self.name: energy})

    def energy(self, positions: Tensor, cell: Tensor | None, pairs: Pairs) -> Tensor:
        plain = self.potential.energy(positions, cell, pairs)
        self.energies = plain.detach()
        return -torch.logsumexp(self._logs(plain), 1) / self.beta

    def neighbors(self, system: System, skin: float = 0.0, part: Part | None = None) -> NeighborList:
        return self.potential.neighbors(system, skin, part)

    def _logs(self, energy: Tensor) -> Tensor:
        return self.log_weights - self.betas * energy[:, None]

    def __call__(self, simulation: Simulation) -> None:
        """Note how likely each temperature is; after WINDOW calls, lower the weights of those that were likelier."""
        check_part(self, simulation.potential)
        logs = self._logs(self.energies)
        share = torch.logsumexp(logs - torch.logsumexp(logs, 1, keepdim=True), 0)
        self.visits = torch.logaddexp(self.visits, share)
        self.calls = self.calls + 1
        if int(self.calls) % WINDOW == 0:
            surplus = self.visits - torch.logsumexp(self.visits, 0) + math.log(len(self.betas))
            self.log_weights = self.log_weights - surplus.clamp(-MOST, MOST)
            self.log_weights = self.log_weights - self.log_weights.max()
            self.visits = torch.full_like(self.visits, -math.inf)
            simulation.evaluate()

    def weights(self, energies: Tensor, temperature: float, boltzmann: float) -> Tensor:
        """(T): weights, of sum 1, of samples with potential energies (T), for averages at a temperature."""
        logs = -energies / (boltzmann * temperature) - torch.logsumexp(self._logs(energies), 1)
        return torch.softmax(logs, 0)

    def state(self) -> dict[str, Tensor]:
        return {"log_weights": self.log_weights, "visits": self.visits, "calls": self.calls}

    def restore(self, state: dict[str, Tensor]) -> None:
        if state["log_weights"].shape != self.log_weights.shape:
            raise ValueError(f"there are {len(state['log_weights'])} temperatures, here {len(self.log_weights)}")
        self.log_weights, self.visits, self.calls = (state[k].clone() for k in ("log_weights", "visits", "calls"))
