"""Stops a simulation that explodes, with the step and the atoms named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class Unstable(ValueError):
    """A simulation cannot go on from here."""


@dataclass
class Guard:
    """Looks every `every` steps whether positions and energies are finite, and atoms slow enough for the time step.

    drift: largest change of the conserved energy per atom, in units of energy; None: it may change. reach: an atom may
    move so much of the cutoff in a step.
    """

    every: int = 50
    drift: float | None = None
    reach: float = 0.2
    _first: Tensor | None = field(default=None, repr=False)

    def check(self, simulation: Simulation) -> None:
        """Raise `Unstable` if the run explodes."""
        energy = simulation.evaluation.energy
        if not bool((energy + simulation.kinetic_energy).isfinite().all()):
            size = torch.where(simulation.forces.isfinite(), simulation.forces, torch.inf)
            self._stop(simulation, size, f"the energy is {energy.tolist()}")
        fastest = simulation.largest(float(simulation.velocities.abs().max())) * simulation.updater.dt
        cutoff = simulation.potential.cutoff
        if 0 < self.reach * cutoff < fastest:
            self._stop(simulation, simulation.velocities, f"an atom moves by {fastest:.3g} in one step")
        if self.drift is not None and (now := simulation.updater.conserved(simulation)) is not None:
            if self._first is None:
                self._first = now
            worst = float((now - self._first).abs().max()) / simulation.atoms
            if worst > self.drift:
                change = f"the conserved energy has changed by {worst:.3g} per atom, more than {self.drift:g}"
                self._stop(simulation, simulation.velocities, change)

    def state(self) -> dict[str, Tensor]:
        """The conserved energy that a drift is measured from, for restart files."""
        return {} if self._first is None else {"first": self._first}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._first = state.get("first")

    def _stop(self, simulation: Simulation, size: Tensor, why: str) -> None:
        norms = size.norm(dim=-1)
        replica = int(norms.amax(1).argmax())
        worst = norms[replica].topk(min(5, norms.shape[1])).indices.tolist()
        raise Unstable(
            f"step {simulation.count}: {why}. Atoms {worst} of replica {replica} are the worst, the first at"
            f" {[round(x, 4) for x in simulation.positions[replica, worst[0]].tolist()]}. Take a shorter time step than"
            f" {simulation.updater.dt:g}, or minimise the energy before the run"
        )
