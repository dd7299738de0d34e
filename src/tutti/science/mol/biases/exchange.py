"""Replica exchange (Sugita and Okamoto 1999): replicas at several temperatures change places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol.dynamics.integrators import Langevin
from tutti.science.mol.dynamics.noise import EXCHANGE, normal

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class ReplicaExchange:
    """A callback that exchanges configurations of neighbouring temperatures every `every` steps.

    Replica k of the simulation keeps the temperature k of its `Langevin` updater; configurations move between replicas,
    with velocities scaled. `walkers` (R) says which configuration a replica has. The cells must be of one volume.
    A `Restart` that has this callback among its parts goes on with walkers and acceptance.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"an exchange every {every} steps cannot be")
        self.every = every
        self.tried = self.done = self.walkers = torch.empty(0)

    def __call__(self, simulation: Simulation) -> None:
        temperature = self._temperatures(simulation)
        replicas = len(temperature)
        if not len(self.walkers):
            self.tried, self.done = torch.zeros(2, replicas - 1, dtype=torch.int64)
            self.walkers = torch.arange(replicas)
        beta = 1 / (simulation.system.units.boltzmann * temperature)
        energy = simulation.evaluation.energy
        first = (simulation.count // self.every) % 2
        noise = normal(simulation.seed, EXCHANGE, simulation.count, replicas, 1)[:, 0, 0]
        chance = 0.5 * (1 + torch.erf(noise / 2**0.5))  # uniform
        order = torch.arange(replicas)
        for k in range(first, replicas - 1, 2):
            self.tried[k] += 1
            if float(torch.log(chance[k])) < float((beta[k] - beta[k + 1]) * (energy[k] - energy[k + 1])):
                self.done[k] += 1
                order[k], order[k + 1] = k + 1, k
        if bool((order == torch.arange(replicas)).all()):
            return
        scale = (temperature / temperature[order]).sqrt()[:, None, None]
        simulation.positions.copy_(simulation.positions[order].clone())
        simulation.velocities.copy_(simulation.velocities[order] * scale)
        self.walkers = self.walkers[order]
        simulation.evaluate()

    def state(self) -> dict[str, Tensor]:
        """Walkers and counts of exchanges, for restart files."""
        return {"tried": self.tried, "done": self.done, "walkers": self.walkers}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Raises KeyError if something is missing."""
        self.tried, self.done, self.walkers = (state[name].clone() for name in ("tried", "done", "walkers"))

    @property
    def acceptance(self) -> Tensor:
        """(R - 1): the share of exchanges between neighbours that happened."""
        return self.done / self.tried.clamp(min=1)

    @staticmethod
    def _temperatures(simulation: Simulation) -> Tensor:
        updater = simulation.updater
        replicas = simulation.system.replicas
        if not isinstance(updater, Langevin) or replicas < 2 or len(updater.temperature) != replicas:
            raise ValueError(
                "replica exchange needs a Langevin updater with a temperature for each of several replicas"
            )
        return updater.temperature


def ladder(low: float, high: float, replicas: int) -> Tensor:
    """(replicas) temperatures in geometric progression, for equal acceptance at constant heat capacity."""
    if not 0 < low < high or replicas < 2:
        raise ValueError(f"a ladder of {replicas} temperatures from {low} to {high} cannot be")
    return low * (high / low) ** (torch.arange(replicas, dtype=torch.float64) / (replicas - 1))
