"""Minimisers of the energy: FIRE, and any optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class Minimizer:
    """What minimisers share: they have no time, and the potential energy is what they lower."""

    dt = 0.0
    keeps_momentum = False

    def start(self, simulation: Simulation) -> None: ...

    def step(self, simulation: Simulation) -> None:
        raise NotImplementedError

    def conserved(self, simulation: Simulation) -> Tensor | None:
        return None

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None: ...


class Fire(Minimizer):
    """The fast inertial relaxation engine (Bitzek et al. 2006) with their parameters, for each replica on its own.

    first, most: length of the first step and of the longest, as the farthest that an atom may move, in units of length
    (by default 0.2 % and 2 % of the cutoff, or 0.001 and 0.01). Constraints are held.
    """

    GROW, SHRINK, MIX, MIX_SHRINK, WAIT = 1.1, 0.5, 0.1, 0.99, 5

    def __init__(self, first: float | None = None, most: float | None = None) -> None:
        self.first, self.most = first, most

    def start(self, simulation: Simulation) -> None:
        reach = simulation.potential.cutoff if 0 < simulation.potential.cutoff < 1e4 else 0.5
        self.longest = 0.02 * reach if self.most is None else self.most
        first = 0.1 * self.longest if self.first is None else self.first
        force = simulation.forces.norm(dim=-1).amax(1).clamp(min=1e-30)
        self.v = torch.zeros_like(simulation.positions)
        self.h = (first / force).sqrt()  # (R) of a mass of 1
        self.mix = torch.full_like(self.h, self.MIX)
        self.good = torch.zeros_like(self.h)
        self.mobile = (simulation.system.masses > 0).to(self.v.dtype)[:, None]

    def step(self, simulation: Simulation) -> None:
        f = simulation.forces * self.mobile
        if simulation.constraints:
            f = f * simulation.inverse_mass * simulation.mass.mean()
            simulation.constraints.velocities(simulation.positions, f)
        power = (f * self.v).sum((1, 2))
        uphill = power <= 0
        self.good = torch.where(uphill, 0.0, self.good + 1)
        faster = self.good > self.WAIT
        self.h = torch.where(uphill, self.h * self.SHRINK, torch.where(faster, self.h * self.GROW, self.h))
        self.mix = torch.where(uphill, self.MIX, torch.where(faster, self.mix * self.MIX_SHRINK, self.mix))
        size, pull = self.v.square().sum((1, 2)).sqrt(), f.square().sum((1, 2)).sqrt().clamp(min=1e-300)
        mix = self.mix[:, None, None]
        self.v = (1 - mix) * self.v + mix * f * (size / pull)[:, None, None]
        self.v[uphill] = 0
        self.v += self.h[:, None, None] * f
        moved = self.h[:, None, None] * self.v
        farthest = moved.norm(dim=-1).amax(1)
        moved *= (self.longest / farthest.clamp(min=self.longest))[:, None, None]
        old = simulation.positions.clone()
        simulation.positions.add_(moved)
        if simulation.constraints:
            simulation.constraints.positions(old, simulation.positions)
            simulation.constraints.velocities(simulation.positions, self.v)
        simulation.evaluate()


class Descent(Minimizer):
    """Any optimizer of torch: `Descent(torch.optim.LBFGS, line_search_fn="strong_wolfe")`, `Descent(torch.optim.Adam,
    lr=0.01)`. All replicas are one set of parameters. Constraints cannot be held."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.make, self.options = optimizer, options

    def start(self, simulation: Simulation) -> None:
        if simulation.constraints:
            raise ValueError(f"{self.make.__name__} cannot hold constraints; minimise with Fire()")
        self.parameter = nn.Parameter(simulation.positions)  # shares their memory
        self.optimizer = self.make([self.parameter], **self.options)
        self.mobile = (simulation.system.masses > 0).to(torch.float64)[:, None]

    def step(self, simulation: Simulation) -> None:
        def closure() -> float:
            simulation.evaluate()
            self.parameter.grad = -simulation.forces * self.mobile
            return float(simulation.evaluation.energy.sum())

        self.optimizer.step(closure)
        simulation.evaluate()


def minimize(
    system: System, potential: Potential, tolerance: float, steps: int = 1000, minimizer: Minimizer | None = None,
    callbacks: Iterable[Any] = (),
) -> System:  # fmt: skip
    """Lower the energy until no atom feels a force above `tolerance`, or for so many steps. Returns a new system.

    With constraints, the force is what remains along what may move.
    """
    from tutti.science.mol.dynamics.simulation import Simulation

    simulation = Simulation(system, potential, minimizer or Fire(), guard=None)
    calls = list(callbacks)
    for _ in range(0, steps, 10):
        if largest_force(simulation) <= tolerance:
            break
        simulation.run(min(10, steps - simulation.count), calls)
    return simulation.system


def largest_force(simulation: Simulation) -> float:
    """The largest norm of a force on an atom that may move, without what constraints take up."""
    force = simulation.forces * (simulation.mass > 0)
    if simulation.constraints:
        acceleration = force * simulation.inverse_mass
        simulation.constraints.velocities(simulation.positions, acceleration)
        force = acceleration * simulation.mass
    return float(force.norm(dim=-1).max())
