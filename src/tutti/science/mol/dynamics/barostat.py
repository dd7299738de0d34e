"""Constant pressure by stochastic cell rescaling (Bernetti and Bussi 2020, J. Chem. Phys. 153, 114107)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.science.mol import cell as cells
from tutti.science.mol.dynamics.integrators import Integrator
from tutti.science.mol.dynamics.noise import BAROSTAT, normal

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class CellRescaling:
    """Another integrator at constant pressure: every `every` steps the cell, all positions and momenta are scaled.

    integrator: integrator that keeps the temperature. pressure: energy per volume (1 bar is `units.BAR` kJ/mol/nm^3).
    period: relaxation time. compressibility: volume per energy, on which only the pace depends; that of water is
    4.5e-5 / bar. What constraints hold together moves with its centre. Systems with atoms without mass are refused with
    a ValueError: such atoms stay where they are, and a cell that changes moves all atoms.

    The logarithm of the volume makes a step of its exact stochastic equation in the Ito sense,
    d ln V = (compressibility / period) (P - P0) dt + sqrt(2 kT compressibility / (V period)) dW, where P has the
    instantaneous kinetic energy; the ensemble is that of constant pressure and temperature.
    """

    def __init__(
        self, integrator: Integrator, pressure: float, period: float, compressibility: float, every: int = 10
    ) -> None:
        if not (period > 0 and compressibility > 0 and every >= 1):
            raise ValueError(
                f"a barostat with period {period}, compressibility {compressibility} and {every} steps between"
                " scalings cannot be: all are above 0"
            )
        if not math.isfinite(pressure):
            raise ValueError(f"the pressure {pressure} of a barostat is not finite")
        if getattr(integrator, "temperature", None) is None:
            raise ValueError(f"a barostat needs a thermostat: {type(integrator).__name__} keeps no temperature")
        self.integrator, self.pressure, self.every = integrator, float(pressure), int(every)
        self.rate = compressibility / period

    @property
    def dt(self) -> float:
        return self.integrator.dt

    @property
    def keeps_momentum(self) -> bool:
        return self.integrator.keeps_momentum

    def start(self, simulation: Simulation) -> None:
        if simulation.cell is None or not all(simulation.system.pbc):
            raise ValueError("constant pressure needs a cell that repeats in three directions")
        if fixed := simulation.atoms - simulation.mobile:
            raise ValueError(
                f"constant pressure moves all atoms with the cell, but {fixed} of {simulation.atoms} atoms are fixed as"
                " they have no mass; give them masses, or keep the volume"
            )
        self.integrator.start(simulation)

    def step(self, simulation: Simulation) -> None:
        self.integrator.step(simulation)
        if (simulation.count + 1) % self.every == 0:
            self._rescale(simulation)

    def _rescale(self, simulation: Simulation) -> None:
        cell, temperature = simulation.cell, self.integrator.temperature
        assert cell is not None and temperature is not None
        simulation.evaluate(virial=True)
        volume, interval = cells.volume(cell), self.dt * self.every
        kt = simulation.system.units.boltzmann * temperature
        noise = normal(simulation.seed, BAROSTAT, simulation.count, simulation.system.replicas, 1)[:, 0, 0]
        strain = self.rate * interval * (simulation.pressure() - self.pressure)
        strain = strain + (2 * kt * self.rate * interval / volume).sqrt() * noise
        if not bool((strain.abs() < 0.3).all()):
            raise ValueError(
                f"the logarithm of the volume changes by {float(strain.abs().max()):.3g} at once: take a longer period"
                " of the barostat, or bring the system near its pressure first"
            )
        factor = torch.exp(strain / 3)[:, None, None]
        x, v = simulation.positions, simulation.velocities
        if simulation.constraints:
            centers, momenta, masses = simulation.molecules()
            group = simulation.constraints.groups
            x.add_(((factor - 1) * centers)[:, group])
            v.add_(((1 / factor - 1) * momenta * (1 / masses)[:, None])[:, group])
        else:
            x.mul_(factor)
            v.div_(factor)
        cell.mul_(factor)
        simulation.evaluate()

    def conserved(self, simulation: Simulation) -> Tensor | None:
        return None

    def state(self) -> dict[str, Tensor]:
        return self.integrator.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self.integrator.restore(state)
