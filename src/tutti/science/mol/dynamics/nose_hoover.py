"""Constant temperature by a chain of thermostats (Nose 1984, Hoover 1985, Martyna, Klein and Tuckerman 1992)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol import native
from tutti.science.mol.dynamics.integrators import Integrator, temperatures
from tutti.science.mol.system import check_replicas

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class NoseHooverChain(Integrator):
    """Velocity Verlet between half steps of a chain of thermostats, deterministic and time-reversible.

    period: period of the thermostats' oscillation, in units of time; some hundred time steps. length: number of
    thermostats in the chain. The equations are those of Martyna et al. 1996, with their Suzuki-Yoshida splitting of
    order 4 (Yoshida 1990).
    """

    temperature: Tensor

    def __init__(self, dt: float, temperature: float | Tensor, period: float, length: int = 3) -> None:
        super().__init__(dt)
        self.temperature, self.period, self.length = temperatures(temperature), float(period), int(length)
        if not self.period > 0 or self.length < 1:
            raise ValueError(
                f"a chain of {length} thermostats with period {period} cannot be: give at least 1, above 0"
            )
        self.position = self.velocity = torch.empty(0)

    def start(self, simulation: Simulation) -> None:
        check_replicas("temperatures", self.temperature, simulation.system.replicas)
        kt = simulation.system.units.boltzmann * self.temperature
        self.kt = kt.expand(simulation.system.replicas).clone()  # (R)
        if not bool((self.kt > 0).all()):
            raise ValueError("a Nose-Hoover chain needs a temperature above 0")
        self.degrees = simulation.degrees
        of_chain = torch.ones(self.length, dtype=torch.float64)
        of_chain[0] = self.degrees
        self.inertia = self.kt[:, None] * (self.period / (2 * torch.pi)) ** 2 * of_chain  # (R, length)
        if self.velocity.shape != self.inertia.shape:
            self.position = torch.zeros_like(self.inertia)
            self.velocity = torch.zeros_like(self.inertia)

    def step(self, simulation: Simulation) -> None:
        self._thermostat(simulation)
        self.kick(simulation, self.dt / 2)
        self.drift(simulation, self.dt)
        simulation.evaluate()
        self.kick(simulation, self.dt / 2)
        self.hold(simulation)
        self._thermostat(simulation)

    def _thermostat(self, simulation: Simulation) -> None:
        """Half a step of the chain, which scales the velocities."""
        twice, scale = 2 * simulation.kinetic_energy, torch.empty_like(self.kt)
        native.library().chain_half_step(
            len(twice), self.length, self.dt, self.degrees,
            *(t.data_ptr() for t in (self.kt, twice, self.inertia, self.position, self.velocity, scale)),
        )  # fmt: skip
        simulation.velocities.mul_(scale[:, None, None])

    def conserved(self, simulation: Simulation) -> Tensor | None:
        chain = 0.5 * (self.inertia * self.velocity.square()).sum(1)
        heat = self.kt * (self.degrees * self.position[:, 0] + self.position[:, 1:].sum(1))
        return simulation.evaluation.energy + simulation.kinetic_energy + chain + heat

    def state(self) -> dict[str, Tensor]:
        return {"position": self.position, "velocity": self.velocity}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.position, self.velocity = state["position"].clone(), state["velocity"].clone()
