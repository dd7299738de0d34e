"""One simulation among processes, which divide space: each moves the atoms of its box.

Around its box a process has copies of the atoms within the cutoff and skin. A step sends the positions of such atoms
to the processes that have copies, computes each pair and each tuple of atoms in one of the processes, and sends the
forces on copies back. When atoms have moved by the skin, they change to the process of the box they are in, and lists
are built again. Positions are the same numbers in all processes, so results differ from those of one process only by
the order of sums. Noise depends on the number of an atom, not on its process.

    torchrun --nproc-per-node 4 script.py     # in which every process makes the same system and potential

    simulation = DecomposedSimulation(system, potential, Langevin(0.002, 300.0, friction=1.0))
    simulation.run(10_000, [Log("log.csv", 100), Trajectory("run.h5md", 100), Restart("run.safetensors", 1000)])

Every process calls `run` with the same callbacks, which are called in the first one, with a simulation of all atoms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.science.mol.dynamics.barostat import CellRescaling
from tutti.science.mol.dynamics.constraints import groups
from tutti.science.mol.dynamics.domains import Frame, divided
from tutti.science.mol.dynamics.exchange import Exchange, Route
from tutti.science.mol.dynamics.guard import Guard, Unstable
from tutti.science.mol.dynamics.integrators import Integrator
from tutti.science.mol.dynamics.simulation import SKIN, Callback, Simulation, Updater, constraints_of
from tutti.science.mol.part import Part
from tutti.science.mol.potential import Evaluation, Potential
from tutti.science.mol.system import System

MOVED = 4  # numbers sent with positions: failed; the two longest ways, and what their sum must not exceed


class DecomposedSimulation(Simulation):
    """A `Simulation` that the processes of a `torch.distributed` group share. All give the same arguments.

    grid: numbers of processes along the three lattice vectors, by default those that need the fewest copies of atoms.
    group: a Gloo group, by default that of all processes.

    Raises ValueError for potentials that cannot be divided, for replicas, and for minimisers.
    """

    def __init__(
        self, system: System, potential: Potential, updater: Updater, *, skin: float | None = None, seed: int = 0,
        guard: Guard | bool | None = True, grid: Sequence[int] | None = None, group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(_integrator(updater), Integrator):
            raise ValueError(f"{type(updater).__name__} runs in one process; minimise before the simulation is shared")
        if system.replicas != 1:
            raise ValueError(f"processes share a simulation of one replica, not of {system.replicas}")
        self.exchange = Exchange(group)
        self.writes = self.exchange.rank == 0
        skin = SKIN * potential.cutoff if skin is None else skin
        self.reach, self.grid = potential.reach + skin, grid
        self.leader = _leaders(potential, system.atoms)
        self.all_potential, self.all_species, self.all_masses = potential, system.species, system.masses
        self.all_charges = system.charges
        self.failure, self.names, self._builds = "", [], 0
        super().__init__(system, potential, updater, skin=skin, seed=seed, guard=guard)

    def begin(self) -> None:
        x, v = self.positions[0], self.velocities[0]
        self._own(torch.cat([x, v], 1))
        self.hold()
        self.evaluate()
        self.updater.start(self)

    def arrange(self) -> None:
        super().arrange()
        owned, self.numbers = self.part.owned, self.part.numbers
        self.mass = self.mass.clone()
        self.mass[owned:], self.inverse_mass[owned:] = 0, 0  # copies do not move by themselves
        if self.constraints is not None:
            self.constraints.numbers, self.constraints.fail = self.numbers, self._fail

    # --- who has what ---

    def _coordinates(self, positions: Tensor, leader: Tensor) -> Tensor:
        return Frame.of(self.cell, self.system.pbc).coordinates(positions, leader)

    def _own(self, table: Tensor) -> None:
        """Divide space anew, and take the atoms of this process's box from a table (atoms, w) of positions, velocities
        and what else belongs to atoms. The table is that of the first process."""
        table = self.exchange.share(table.contiguous())
        s = self._coordinates(table[:, :3], self.leader)[self.leader]
        whole = replace(self.system, positions=table[:, :3], velocities=None, species=None, masses=1.0, charges=None,
                        names=None, residues=None, bonds=None)  # fmt: skip
        self.plan, self.domains = divided(whole, s, self.reach, self.exchange.size, self.grid)
        numbers = (self.domains.owner(s) == self.exchange.rank).nonzero().flatten()
        self._settle(numbers, table[numbers])

    def _migrate(self) -> None:
        """Give the atoms to the processes in whose boxes they are."""
        table = torch.cat([x[0, : self.part.owned] for x in self._of_atoms()], 1)
        numbers = self.numbers[: self.part.owned]
        leader = torch.searchsorted(numbers, self.leader[numbers])
        owner = self.domains.owner(self._coordinates(table[:, :3], leader)[leader])
        rows = torch.cat([numbers[:, None].to(torch.float64), table], 1)
        rows = torch.cat(self.exchange.send([rows[owner == rank] for rank in range(self.exchange.size)]))
        if bool((self.exchange.gather(torch.tensor([len(rows)], dtype=torch.float64)) == 0).any()):
            self._own(self._of_all(rows)[:, 1:])
            return
        rows = rows[rows[:, 0].argsort()]
        self._settle(rows[:, 0].to(torch.int64), rows[:, 1:])

    def _of_atoms(self) -> list[Tensor]:
        """(1, n, 3) each: positions, velocities, and what the updater keeps of atoms."""
        integrator = _integrator(self.updater)
        more = [getattr(integrator, name) for name in integrator.of_atoms if hasattr(integrator, name)]
        return [self.positions, self.velocities, *more]

    def _settle(self, numbers: Tensor, table: Tensor) -> None:
        """Own the atoms of these numbers, in their order; get copies of those nearby; build the list of pairs."""
        x, exchange = table[:, :3], self.exchange
        s = self._coordinates(x, torch.searchsorted(numbers, self.leader[numbers]))
        boxes = exchange.gather(torch.cat([s.amin(0), s.amax(0), s.new_tensor([len(s)])]))
        if int(boxes[:, 6].sum()) != self.atoms:
            raise ValueError("the processes do not agree on who has which atoms: give all of them the same system")
        frame = Frame.of(self.cell, self.system.pbc)
        margin = self.reach / frame.width * (1 + 1e-9)
        sent = []
        for rank, box in enumerate(boxes):
            low, high = box[:3] - margin - s, box[3:6] + margin - s
            near = torch.where(frame.repeats, low.ceil() <= high.floor(), (low <= 0) & (high >= 0)).all(1)
            sent.append(near.nonzero().flatten() if rank != exchange.rank else torch.zeros(0, dtype=torch.int64))
        rows = exchange.send([torch.cat([numbers[i, None].to(torch.float64), x[i]], 1) for i in sent])
        copies = torch.cat(rows)
        local = torch.cat([numbers, copies[:, 0].to(torch.int64)])
        self.part = Part(local, len(numbers), self.atoms, exchange.rank == 0, exchange.add_up)
        still = torch.zeros(len(copies), table.shape[1] - 3, dtype=torch.float64)
        x, v, *more = torch.cat([table, torch.cat([copies[:, 1:], still], 1)])[None].split(3, 2)
        self.system = replace(
            self.system, positions=x.contiguous(), velocities=v.contiguous(), species=self.all_species[local],
            masses=self.all_masses[local], charges=self.all_charges[local], names=None, residues=None, bonds=None,
        )  # fmt: skip
        for name, values in zip(_integrator(self.updater).of_atoms, more, strict=False):
            setattr(_integrator(self.updater), name, values.contiguous())
        try:
            self.potential = self.all_potential.divide(self.part)
        except ValueError as error:
            self._fail(str(error))
        self._stop_if_failed()
        self.arrange()
        self.neighbors = self.potential.neighbors(self.system, self.skin, self.part)
        self._builds += 1
        if not self.names:
            terms = self.potential.evaluate(self.positions, self.cell, self.neighbors).terms
            self.names = sorted({name for names in exchange.gather_objects(list(terms)) for name in names})
        self.route = Route(exchange, sent, [len(x) for x in rows], max(MOVED, len(self.names) + 9))

    @property
    def builds(self) -> int:
        return self._builds

    # --- forces ---

    def evaluate(self, virial: bool = False) -> None:
        """Energy and forces where the atoms are now: a collective, as are energies, temperature and pressure."""
        x = self.positions
        if not self.failure and not bool(x.sum().isfinite()):
            where = int((~x[0].isfinite().all(-1)).nonzero()[0])
            self._fail(
                f"the position of atom {int(self.numbers[where])} is not finite: {x[0, where].tolist()}; take a shorter"
                " time step or minimise the energy first"
            )
        head = x.new_zeros(self.route.header)
        head[0], head[1:MOVED] = bool(self.failure), self._motion()
        heads, copies = self.route.forward(head, x[0])
        self._stop_if_failed(heads[:, 0])
        if heads[:, 1:3].flatten().topk(2).values.sum() <= heads[:, 3].min():
            x[0, self.part.owned :] = copies
        else:
            self._migrate()
        self._evaluate(virial)

    def _motion(self) -> Tensor:
        """`NeighborList.motion`. What must not be exceeded is that of copies too, which may be beyond the cutoff."""
        motion, skin = self.neighbors.motion(self.positions, self.cell), self.neighbors.skin
        strain = (skin - motion[2]) / (self.neighbors.cutoff + skin)
        motion[2] = skin - strain * self.reach
        return motion

    def _evaluate(self, virial: bool = False) -> None:
        """With copies and lists up to date."""
        here = self.potential.evaluate(self.positions, self.cell, self.neighbors, virial)
        forces, owned = here.forces[0], self.part.owned
        head = forces.new_zeros(self.route.header)
        for k, name in enumerate(self.names):
            head[k] = here.terms[name][0] if name in here.terms else 0
        if here.virial is not None:
            head[len(self.names) : len(self.names) + 9] = here.virial.flatten()
        head = self.route.backward(head, forces[owned:], forces[:owned]).sum(0)
        forces[owned:] = 0
        terms = {name: head[k : k + 1] for k, name in enumerate(self.names)}
        total = head[len(self.names) : len(self.names) + 9].view(1, 3, 3) if virial else None
        self.evaluation = Evaluation(head[: len(self.names)].sum()[None], here.forces, total, terms)

    def virial(self) -> Tensor:
        return self.exchange.gather(super().virial().flatten()).sum(0).view(1, 3, 3)

    def total(self, values: Tensor) -> Tensor:
        return self.exchange.gather(values.sum(1)).sum(0)

    def largest(self, value: float) -> float:
        return float(self.exchange.gather(torch.tensor([value], dtype=torch.float64)).max())

    # --- running ---

    def run(self, steps: int, callbacks: Iterable[Callback] = ()) -> Simulation:
        calls = list(callbacks)
        kinds = self.exchange.gather_objects([(type(call).__name__, call.every) for call in calls])
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"all processes give the same callbacks to run, not {kinds}")
        super().run(steps, calls)
        try:
            self._stop_if_failed()
        except ValueError as error:
            raise Unstable(f"step {self.count}: {error}") from None
        return self

    def _fail(self, message: str) -> None:
        """Note why this process cannot go on. All processes stop at the next evaluation, so none waits for another."""
        self.failure = self.failure or message

    def _stop_if_failed(self, failed: Tensor | None = None) -> None:
        """Raise ValueError in all processes if one has failed. failed: whether each has failed, where all know it
        already."""
        if failed is None:
            failed = self.exchange.gather(torch.tensor([bool(self.failure)], dtype=torch.float64))
        if bool(failed.any()):
            raise ValueError(next(filter(None, self.exchange.gather_objects(self.failure))))

    def watch(self, guard: Guard) -> None:
        """All processes see the same numbers, and find the same."""
        try:
            guard.check(self)
        except Unstable:
            guard.check(self.whole())
            raise

    def call(self, callbacks: Sequence[Callback]) -> None:
        for collective, some in groupby(callbacks, lambda call: getattr(call, "collective", False)):
            if collective:
                super().call(list(some))
                continue
            rest = list(some)
            if self.evaluation.virial is None and any(getattr(call, "pressure", False) for call in rest):
                self.evaluation.virial = self.virial() if self.cell is not None else None
            whole = self._gathered(everywhere=False)
            self.together(lambda whole=whole, rest=rest: whole.call(rest) if whole else None, first=True)

    def together(self, work: Callable[[], None], first: bool = False) -> None:
        error: Exception | None = None
        if self.writes or not first:
            try:
                work()
            except Exception as raised:
                error = raised
        failures = self.exchange.gather_objects("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure:
                raise Unstable(f"step {self.count}: process {rank} stopped: {failure}")

    # --- all atoms ---

    def whole(self) -> Simulation:
        whole = self._gathered(everywhere=True)
        assert whole is not None
        return whole

    def _gathered(self, everywhere: bool) -> Simulation | None:
        """The state of all atoms, in every process or in the first one."""
        rows = self._rows()
        sent = [rows if everywhere or rank == 0 else rows[:0] for rank in range(self.exchange.size)]
        rows = torch.cat(self.exchange.send(sent))
        if not len(rows):
            return None
        f, x, v, *more = rows[rows[:, 0].argsort()][None, :, 1:].split(3, 2)
        return _Whole(self, x, v, f, more)

    def _rows(self) -> Tensor:
        """(owned, w): number, force, position, velocity, and what else belongs to atoms."""
        owned = self.part.owned
        columns = [self.numbers[:owned, None].to(torch.float64), self.forces[0, :owned]]
        return torch.cat([*columns, *(x[0, :owned] for x in self._of_atoms())], 1)

    def _of_all(self, rows: Tensor) -> Tensor:
        """(atoms, w): rows of all processes, by the number that they begin with."""
        rows = torch.cat(self.exchange.send([rows] * self.exchange.size))
        return rows[rows[:, 0].argsort()]

    def adopt(self, whole: Simulation) -> None:
        self.count, self.seed = whole.count, whole.seed
        if self.cell is not None and whole.cell is not None:
            self.cell.copy_(whole.cell)
        integrator = _integrator(whole.updater)
        self.updater.restore(whole.updater.state())
        more = [getattr(integrator, name)[0] for name in integrator.of_atoms]
        self._own(torch.cat([whole.positions[0], whole.velocities[0], *more], 1))
        self._evaluate()

    def renew(self) -> None:
        """Divide space anew and build the lists, as a simulation does that reads a restart file."""
        self._own(self._of_all(self._rows())[:, 4:])
        self._evaluate()


class _Whole(Simulation):
    """The state of all atoms of a simulation that processes share, for callbacks and restart files."""

    def __init__(self, shared: DecomposedSimulation, x: Tensor, v: Tensor, f: Tensor, more: Sequence[Tensor]) -> None:
        cell = None if shared.cell is None else shared.cell.clone()
        self.system = replace(
            shared.system, positions=x, velocities=v, species=shared.all_species, masses=shared.all_masses,
            charges=shared.all_charges, cell=cell,
        )  # fmt: skip
        self.potential, self.seed, self.count = shared.all_potential, shared.seed, shared.count
        self.atoms, self.mobile, self.constraint_count = shared.atoms, shared.mobile, shared.constraint_count
        self.writes, self.guard, self.neighbors = shared.writes, shared.guard, shared.neighbors
        self.evaluation = replace(shared.evaluation, forces=f)
        self.updater = copy.copy(shared.updater)
        if isinstance(self.updater, CellRescaling):
            self.updater.integrator = copy.copy(self.updater.integrator)
        for name, values in zip(_integrator(self.updater).of_atoms, more, strict=False):
            setattr(_integrator(self.updater), name, values.contiguous())
        self.arrange()

    def evaluate(self, virial: bool = False) -> None:
        raise RuntimeError("a gathered state is to be looked at; the processes that share the simulation evaluate it")

    def renew(self) -> None: ...

    def virial(self) -> Tensor:
        raise RuntimeError("a callback that wants the pressure has the attribute pressure = True")


def _integrator(updater: Any) -> Any:
    return updater.integrator if isinstance(updater, CellRescaling) else updater


def _leaders(potential: Potential, atoms: int) -> Tensor:
    """(atoms) int64: the first of the atoms that constraints connect an atom to. They stay in one process."""
    none = torch.zeros(0, 2, dtype=torch.int64)
    group = groups(torch.cat([none, *(pairs for pairs, _ in constraints_of(potential))]), atoms)
    first = torch.full((atoms,), atoms).scatter_reduce(0, group, torch.arange(atoms), "amin")
    return first[group]
