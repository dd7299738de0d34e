"""Velocity Verlet, leap-frog and Langevin dynamics (BAOAB), with constraints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol.dynamics.noise import THERMOSTAT
from tutti.science.mol.system import check_replicas

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class Integrator:
    """What integrators share: the time step, and steps of positions and velocities that hold constraints.

    dt: time step, in units of time. Atoms without mass do not move.
    """

    keeps_momentum = True
    temperature: Tensor | None = None  # (1) or (R) of thermostats
    of_atoms: tuple[str, ...] = ()  # attributes (R, N, 3) that belong to atoms, as velocities do

    def __init__(self, dt: float) -> None:
        if not 0 < dt < math.inf:
            raise ValueError(f"time step {dt} is not above 0")
        self.dt = float(dt)

    def start(self, simulation: Simulation) -> None: ...

    def kick(self, simulation: Simulation, interval: float) -> None:
        """Velocities by forces."""
        simulation.velocities.addcmul_(simulation.forces, simulation.inverse_mass, value=interval)

    def drift(self, simulation: Simulation, interval: float, velocities: Tensor | None = None) -> None:
        """Positions by velocities, by default those of the simulation; they follow what constraints do to positions."""
        x, constraints = simulation.positions, simulation.constraints
        v = simulation.velocities if velocities is None else velocities
        old = x.clone() if constraints else x
        x.add_(v, alpha=interval)
        if constraints:
            constraints.positions(old, x, v, interval)

    def hold(self, simulation: Simulation) -> None:
        if simulation.constraints:
            simulation.constraints.velocities(simulation.positions, simulation.velocities)

    def step(self, simulation: Simulation) -> None:
        raise NotImplementedError

    def conserved(self, simulation: Simulation) -> Tensor | None:
        return simulation.evaluation.energy + simulation.kinetic_energy

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None: ...


class VelocityVerlet(Integrator):
    """Constant energy. Symplectic; the error of the energy is of order dt^2 (Swope et al. 1982; with constraints
    RATTLE, Andersen 1983)."""

    def step(self, simulation: Simulation) -> None:
        self.kick(simulation, self.dt / 2)
        self.drift(simulation, self.dt)
        simulation.evaluate()
        self.kick(simulation, self.dt / 2)
        self.hold(simulation)


class LeapFrog(Integrator):
    """Constant energy, by velocities half a step between positions (Hockney 1970). The trajectory is that of
    velocity Verlet; `velocities` are the means of the two half steps about the positions."""

    of_atoms = ("half",)

    def start(self, simulation: Simulation) -> None:
        self.half = simulation.velocities - self.dt / 2 * simulation.forces * simulation.inverse_mass

    def step(self, simulation: Simulation) -> None:
        self.half.addcmul_(simulation.forces, simulation.inverse_mass, value=self.dt)
        self.drift(simulation, self.dt, self.half)
        simulation.evaluate()
        change = simulation.forces * simulation.inverse_mass
        simulation.velocities.copy_(self.half).add_(change, alpha=self.dt / 2)
        self.hold(simulation)

    def state(self) -> dict[str, Tensor]:
        return {"half": self.half}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.half = state["half"].clone()


class Langevin(Integrator):
    """Constant temperature by friction and noise, split as B A O A B (Leimkuhler and Matthews 2013).

    temperature: in units of temperature, one for all replicas or one each. friction: rate per unit of time. Noise
    depends on the simulation's seed, the step, the replica and the atom alone.
    """

    keeps_momentum = False
    temperature: Tensor

    def __init__(self, dt: float, temperature: float | Tensor, friction: float) -> None:
        super().__init__(dt)
        self.temperature = temperatures(temperature)
        if not friction >= 0:
            raise ValueError(f"friction {friction} is negative")
        self.friction = float(friction)
        self.keep = math.exp(-self.friction * dt)

    def start(self, simulation: Simulation) -> None:
        check_replicas("temperatures", self.temperature, simulation.system.replicas)
        kt = simulation.system.units.boltzmann * self.temperature.view(-1, 1, 1)
        self.variance = kt * (1 - self.keep**2)  # (R or 1, 1, 1), times the mass

    def step(self, simulation: Simulation) -> None:
        v = simulation.velocities
        self.kick(simulation, self.dt / 2)
        self.hold(simulation)
        self.drift(simulation, self.dt / 2)
        v.mul_(self.keep).addcmul_(simulation.noise(THERMOSTAT), (self.variance * simulation.inverse_mass).sqrt())
        self.hold(simulation)
        self.drift(simulation, self.dt / 2)
        simulation.evaluate()
        self.kick(simulation, self.dt / 2)
        self.hold(simulation)

    def conserved(self, simulation: Simulation) -> Tensor | None:
        return None


def temperatures(kelvin: float | Tensor) -> Tensor:
    """(1) or (R) float64. Raises ValueError if one is negative or not finite."""
    value = torch.as_tensor(kelvin, dtype=torch.float64).reshape(-1)
    if not bool(((value >= 0) & value.isfinite()).all()):
        raise ValueError(f"temperature {value.tolist()} is negative or not finite")
    return value
