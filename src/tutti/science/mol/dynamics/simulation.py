"""A system, a potential and an updater that moves the atoms: dynamics and minimisation have one interface.

simulation = Simulation(system, potential, Langevin(0.002, 300.0, friction=1.0))
simulation.run(10_000, [Log("log.csv", 100), Trajectory("run.h5md", 100)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.launch.progress import progress
from tutti.science.mol import cell as cells
from tutti.science.mol.dynamics.constraints import Constraints, whole
from tutti.science.mol.dynamics.guard import Guard, Unstable
from tutti.science.mol.dynamics.integrators import temperatures
from tutti.science.mol.dynamics.noise import VELOCITIES, normal
from tutti.science.mol.dynamics.output import Output
from tutti.science.mol.dynamics.pace import Pace
from tutti.science.mol.potential import Potential, parts
from tutti.science.mol.system import System, check_atoms, check_replicas

SKIN = 0.12  # of the cutoff, if no skin is given


class Updater(Protocol):
    """Moves the atoms of a simulation by one step."""

    @property
    def dt(self) -> float:
        """The time step, 0 for minimisers."""
        ...

    @property
    def keeps_momentum(self) -> bool: ...

    def start(self, simulation: Simulation) -> None:
        """Called once, before the first step."""
        ...

    def step(self, simulation: Simulation) -> None: ...

    def conserved(self, simulation: Simulation) -> Tensor | None:
        """(R): what the exact equations of motion keep, None if there is no such thing."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a restart needs besides positions, velocities and forces."""
        ...

    def restore(self, state: dict[str, Tensor]) -> None: ...


class Callback(Protocol):
    every: int

    def __call__(self, simulation: Simulation) -> None: ...


class Simulation:
    """The state of a run. `system` is copied: what is given stays as it is. Where constraints join atoms across faces
    of the cell, as in files that wrap each atom, the copy has whole molecules: atoms are shifted by lattice vectors.

    skin: skin of the neighbour list, in the system's unit of length; by default 12 % of the cutoff. seed: seed of all
    random numbers. guard: `Guard` that stops runs that explode; by default one of its own, None for none.
    """

    def __init__(
        self, system: System, potential: Potential, updater: Updater, *, skin: float | None = None, seed: int = 0,
        guard: Guard | bool | None = True,
    ) -> None:  # fmt: skip
        if not bool((finite := system.velocities.isfinite()).all()):
            r, n = (~finite).any(-1).nonzero()[0].tolist()
            raise ValueError(
                f"the velocity of atom {n} of replica {r} is not finite: {system.velocities[r, n].tolist()}"
            )
        copies = {"positions": system.positions.detach().clone(), "velocities": system.velocities.detach().clone()}
        self.system = replace(system, cell=None if system.cell is None else system.cell.clone(), **copies)
        self.potential, self.updater, self.seed, self.count = potential, updater, seed, 0
        self.guard = Guard() if guard is True else guard or None
        self.skin = SKIN * potential.cutoff if skin is None else skin
        self.atoms, self.mobile = system.atoms, int((system.masses > 0).sum())
        self.constraint_count = sum(len(pairs) for pairs, _ in constraints_of(potential))
        if self.constraint_count and self.system.cell is not None:
            pairs, lengths = map(torch.cat, zip(*constraints_of(potential), strict=True))
            check_atoms("constraint", pairs, self.atoms)
            whole(self.positions, self.system.cell, self.system.pbc, pairs, lengths)
        self.begin()

    def begin(self) -> None:
        self.arrange()
        self.neighbors = self.potential.neighbors(self.system, self.skin)
        self.hold()
        self.evaluate()
        self.updater.start(self)

    def arrange(self) -> None:
        """What follows from the atoms and the potential alone."""
        self.numbers = torch.arange(self.system.atoms)
        self.mass = self.system.masses[:, None]
        self.inverse_mass = torch.where(self.mass > 0, 1 / self.mass, 0.0)
        self.constraints: Constraints | None = None
        if self.constraint_count:
            none = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
            pairs, lengths = (torch.cat(x) for x in zip(none, *constraints_of(self.potential), strict=True))
            self.constraints = Constraints(pairs, lengths, self.system.masses)

    writes = True  # whether this process writes files

    # --- what is where ---

    @property
    def positions(self) -> Tensor:
        return self.system.positions

    @property
    def velocities(self) -> Tensor:
        return self.system.velocities

    @property
    def cell(self) -> Tensor | None:
        return self.system.cell

    @property
    def forces(self) -> Tensor:
        return self.evaluation.forces

    @property
    def builds(self) -> int:
        """How often the neighbour list was built."""
        return self.neighbors.builds

    @property
    def time(self) -> float:
        return self.count * self.updater.dt

    def evaluate(self, virial: bool = False) -> None:
        """Energy and forces where the atoms are now."""
        self.neighbors.update(self.positions, self.cell)
        self.evaluation = self.potential.evaluate(self.positions, self.cell, self.neighbors, virial)

    def hold(self) -> None:
        """Bring the lengths of constraints and the velocities to what is held."""
        if self.constraints:
            self.constraints.positions(self.positions.clone(), self.positions)
            self.constraints.velocities(self.positions, self.velocities)

    # --- thermodynamics ---

    @property
    def degrees(self) -> int:
        """Degrees of freedom of a replica."""
        free = self.mobile == self.atoms and self.updater.keeps_momentum
        return max(1, 3 * self.mobile - self.constraint_count - (3 if free and self.mobile > 1 else 0))

    @property
    def kinetic_energy(self) -> Tensor:
        """(R)"""
        return 0.5 * self.total((self.mass * self.velocities.square()).sum(-1))

    def total(self, values: Tensor) -> Tensor:
        """The sum over atoms or molecules of values (R, N, ...)."""
        return values.sum(1)

    def largest(self, value: float) -> float:
        """The largest value among the processes that share the simulation."""
        return value

    def noise(self, stream: int) -> Tensor:
        """(R, N, 3) normal numbers of this step."""
        replicas, atoms = self.positions.shape[:2]
        return normal(self.seed, stream, self.count, replicas, atoms, self.numbers)

    @property
    def temperature(self) -> Tensor:
        """(R), in kelvin (in reduced units, of epsilon / k_B)."""
        return 2 * self.kinetic_energy / (self.degrees * self.system.units.boltzmann)

    def pressure(self) -> Tensor:
        """(R), energy per volume, of the positions and velocities as they are: (2 KE + tr W) / 3 V.

        With constraints it is the pressure of molecules (of their centres), which has the same mean: forces of
        constraints do not enter.
        """
        if self.cell is None or not all(self.system.pbc):
            raise ValueError("a pressure needs a cell that repeats in three directions")
        if self.evaluation.virial is None:
            self.evaluation.virial = self.virial()
        trace = self.evaluation.virial.diagonal(dim1=1, dim2=2).sum(-1)
        kinetic = self.kinetic_energy
        if self.constraint_count:
            assert self.constraints is not None
            centers, momenta, masses = self.molecules()
            inside = self.positions - centers[:, self.constraints.groups]
            trace = trace - self.total((self.forces * inside).sum(-1))
            moving = torch.where(masses > 0, 1 / masses, 0.0)[:, None]
            kinetic = 0.5 * self.total((momenta.square() * moving).sum(-1))
        return (2 * kinetic + trace) / (3 * cells.volume(self.cell))

    def virial(self) -> Tensor:
        """(R, 3, 3), of positions as they are. The forces stay as they are: to look at a run does not change it."""
        virial = self.potential.evaluate(self.positions, self.cell, self.neighbors, virial=True).virial
        assert virial is not None
        return virial

    def molecules(self) -> tuple[Tensor, Tensor, Tensor]:
        """Centres of mass (R, G, 3), momenta (R, G, 3) and masses (G) of what constraints hold together."""
        assert self.constraints is not None
        group = self.constraints.groups
        count = int(group.max()) + 1
        weight = torch.where(self.system.masses > 0, self.system.masses, 1e-12)  # atoms without mass alone in a group
        masses = torch.zeros(count, dtype=torch.float64).index_add(0, group, weight)
        zero = self.positions.new_zeros(self.system.replicas, count, 3)
        centers = zero.index_add(1, group, weight[:, None] * self.positions) / masses[:, None]
        momenta = zero.index_add(1, group, self.mass * self.velocities)
        return centers, momenta, masses

    def thermalize(self, temperature: float | Tensor) -> Simulation:
        """Draw velocities of a temperature, one for all replicas or one each (R), without total momentum, and scale
        them to it exactly."""
        target = temperatures(temperature)
        check_replicas("temperatures", target, self.system.replicas)
        kt = self.system.units.boltzmann * target.view(-1, 1, 1)
        self.velocities.copy_(self.noise(VELOCITIES) * (kt * self.inverse_mass).sqrt())
        if self.updater.keeps_momentum:
            self.stop_drift()
        if self.constraints:
            self.constraints.velocities(self.positions, self.velocities)
        self.velocities.mul_((target / self.temperature.clamp(min=1e-300)).sqrt()[:, None, None])
        self.updater.start(self)
        return self

    def stop_drift(self) -> None:
        """Remove the total momentum, where no atom is fixed."""
        if self.mobile == self.atoms:
            momentum, mass = self.total(self.mass * self.velocities), self.total(self.mass[None])
            self.velocities.sub_((momentum / mass)[:, None])

    # --- running ---

    def run(self, steps: int, callbacks: Iterable[Callback] = ()) -> Simulation:
        """Take so many steps. Each callback is called after every `callback.every` steps of the whole simulation.

        Raises `Unstable` (a ValueError that names step and atoms) where the guard finds a run exploding: every
        `guard.every` steps, at the end, and before a restart file is written.
        """
        calls = list(callbacks)
        self.together(lambda: self._check(calls), first=True)
        guard = self.guard
        with progress("simulation") as tell:
            pace, end = Pace(), self.count + steps
            while self.count < end:
                try:
                    self.updater.step(self)
                except ValueError as error:
                    raise Unstable(f"step {self.count + 1}: {error}") from error
                self.count += 1
                if guard is not None and self.count % guard.every == 0:
                    self.watch(guard)
                self.call([call for call in calls if self.count % call.every == 0])
                if (text := pace.step()) is not None:
                    tell.count(pace.done, steps, text)
            if guard is not None and self.count % guard.every:
                self.watch(guard)
        return self

    def _check(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            if isinstance(callback, Output):
                callback.check(self)

    def watch(self, guard: Guard) -> None:
        guard.check(self)

    def together(self, work: Callable[[], None], first: bool = False) -> None:
        """Do something in every process that shares the simulation, or in the first one. If one fails, all do."""
        work()

    def call(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            callback(self)

    # --- for restarts ---

    def whole(self) -> Simulation:
        """The state of all atoms, in every process; `adopt` takes it back when it was changed."""
        return self

    def adopt(self, whole: Simulation) -> None:
        self.renew()

    def renew(self) -> None:
        """Make the neighbour list and the forces from the positions alone."""
        self.neighbors.update(self.positions, self.cell, force=True)
        self.evaluate()


def constraints_of(potential: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Constraints and lengths of a potential and of all its parts."""
    for part in parts(potential):
        pairs: Any = getattr(part, "constraints", ())
        if len(pairs):
            yield pairs, part.lengths
