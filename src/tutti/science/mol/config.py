"""Configs of `tutti md`: which system, which forces, which run, what is written.

All numbers are in nm, ps, kJ/mol, amu, kelvin and bar, or in reduced units for `kind = "lennard_jones"`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from tutti.config.build import checked
from tutti.science.mol.dynamics import CellRescaling, Langevin, NoseHooverChain, VelocityVerlet
from tutti.science.mol.dynamics.decomposed import DecomposedSimulation
from tutti.science.mol.dynamics.guard import Guard
from tutti.science.mol.dynamics.simulation import Simulation, Updater
from tutti.science.mol.forcefield import Nonbonding, load_amber, load_openmm, read_system, water_box
from tutti.science.mol.networks.fast.for_md import compile_for_md
from tutti.science.mol.networks.potential import NetworkPotential
from tutti.science.mol.networks.saved import load_any
from tutti.science.mol.potential import Potential
from tutti.science.mol.system import System
from tutti.science.mol.terms import LennardJones
from tutti.science.mol.units import BAR, MD, REDUCED

WATER_COMPRESSIBILITY = 4.5e-5  # per bar


@dataclass(frozen=True)
class SystemTable:
    """kind: lennard_jones (reduced units), argon, water, openmm (a PDB file and force-field files), amber (prmtop and
    coordinates), serialized (a serialized OpenMM system, and coordinates that ASE reads), coordinates (that ASE reads,
    the last configuration of the file; the forces come from a network). Velocities are drawn anew.

    atoms: number of atoms, 4 n^3 for an integer n (lennard_jones and argon). density: density in sigma^-3
    (lennard_jones) or g/cm^3 (others). molecules: number of water molecules; model: model of the water, also of that
    which solvates. solvate: nm of water between periodic copies of the molecule, with ions that neutralise it (openmm).
    coordinates, files: paths, relative to the config. replicas: number of runs beside each other with other noise.
    """

    kind: Literal["lennard_jones", "argon", "water", "openmm", "amber", "serialized", "coordinates"]
    atoms: int = 864
    density: float = 0.0
    molecules: int = 216
    model: Literal["spce", "tip3p"] = "spce"
    coordinates: str = ""
    files: tuple[str, ...] = ()
    solvate: float = 0.0
    replicas: int = 1


@dataclass(frozen=True)
class ForcesTable:
    """method: method of electrostatics (pme, ewald, reaction_field, shift, cut, none). cutoff, skin: lengths, 0 for
    what suits the system. truncation: truncation of Lennard-Jones for the kinds lennard_jones and argon. rigid: whether
    water is rigid. constraints: constraints of molecules from files (HBonds, AllBonds, HAngles).

    network: folder of a saved network or ensemble, relative to the config. It takes the place of the classical forces
    and of the constraints of any kind of system. compile: whether `compile_for_md` compiles the network; false for
    networks without a kernel."""

    method: Literal["pme", "ewald", "reaction_field", "shift", "cut", "none"] = "pme"
    cutoff: float = 0.0
    switch: float = 0.0
    skin: float = 0.0
    tolerance: float = 1e-5
    truncation: Literal["cut", "shift", "force_shift"] = "force_shift"
    rigid: bool = True
    constraints: Literal["", "HBonds", "AllBonds", "HAngles"] = ""
    network: str = ""
    compile: bool = True


CLASSICAL = ("method", "cutoff", "switch", "tolerance", "truncation", "constraints")  # keys that no network heeds


@dataclass(frozen=True)
class RunTable:
    """ensemble: nve, nvt or npt. thermostat: langevin (friction) or nose_hoover (period). equilibrate: steps before
    anything is measured. minimize: steps of FIRE before these. drift: change of the conserved energy per atom beyond
    which the run stops, 0 for none."""

    steps: int
    dt: float
    temperature: float
    ensemble: Literal["nve", "nvt", "npt"] = "nve"
    thermostat: Literal["langevin", "nose_hoover"] = "langevin"
    friction: float = 1.0
    period: float = 0.0
    pressure: float = 1.0
    pressure_period: float = 0.0
    compressibility: float = WATER_COMPRESSIBILITY
    equilibrate: int = 0
    minimize: int = 0
    drift: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class OutputTable:
    """Steps between lines of the log, frames of the trajectory and restart files; 0 for none. rdf: largest distance of
    g(r), with a configuration for every line of the log; pairs: the two elements of g(r). format: format of the
    trajectory."""

    log: int = 100
    trajectory: int = 0
    restart: int = 1000
    format: Literal["h5md", "xyz"] = "h5md"
    velocities: bool = False
    rdf: float = 0.0
    pairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class MDConfig:
    system: SystemTable
    run: RunTable
    forces: ForcesTable = field(default_factory=ForcesTable)
    output: OutputTable = field(default_factory=OutputTable)

    @classmethod
    def load(cls, path: Path) -> MDConfig:
        """Read a TOML file. Raises ValueError that names the file, the key and the remedy."""
        return checked(cls, path)

    def check(self) -> None:
        for section in fields(self):
            for name, value in vars(getattr(self, section.name)).items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"{section.name}.{name} = {value} is not finite")
        for section, names in {"run": ("dt", "steps"), "system": ("atoms", "molecules", "replicas")}.items():
            for name in names:
                if not getattr(getattr(self, section), name) > 0:
                    raise ValueError(f"{section}.{name} = {getattr(getattr(self, section), name)} should be above 0")
        lowest = {
            "run": ("temperature", "equilibrate", "minimize", "drift", "friction", "period"),
            "output": ("log", "trajectory", "restart", "rdf"),
            "forces": ("cutoff", "switch", "skin"),
            "system": ("density", "solvate"),
        }
        for section, names in lowest.items():
            for name in names:
                if getattr(getattr(self, section), name) < 0:
                    raise ValueError(f"{section}.{name} = {getattr(getattr(self, section), name)} is negative")
        if self.run.ensemble != "nve" and not self.run.temperature > 0:
            raise ValueError(f"run.ensemble = {self.run.ensemble!r} needs run.temperature above 0")
        kind, forces = self.system.kind, self.forces
        from_files = {"coordinates": ("coordinates",)} | dict.fromkeys(
            ("openmm", "amber", "serialized"), ("coordinates", "files")
        )
        for name in from_files.get(kind, ()):
            if not getattr(self.system, name):
                raise ValueError(f"system.kind = {kind!r} needs system.{name}")
        if self.system.solvate and kind != "openmm":
            raise ValueError(f"system.solvate is of system.kind = 'openmm', not of {kind!r}")
        if forces.method == "none" and (kind == "water" or self.system.solvate):
            what = "system.solvate gives the molecule" if self.system.solvate else f"system.kind = {kind!r} has"
            raise ValueError(f"forces.method = 'none' is for molecules without a cell, and {what} one; take 'pme'")
        if kind == "coordinates" and not forces.network:
            raise ValueError("system.kind = 'coordinates' needs forces.network, as coordinates alone have no forces")
        if kind == "lennard_jones" and forces.network:
            raise ValueError("forces.network needs elements, which system.kind = 'lennard_jones' has not; take 'argon'")
        if not forces.network and not forces.compile:
            raise ValueError("forces.compile = false is for networks: give forces.network, or leave it out")
        for name in CLASSICAL if forces.network else ():
            if getattr(forces, name) != getattr(ForcesTable, name):
                raise ValueError(f"forces.{name} is of classical forces, which forces.network replaces: leave it out")
        if self.output.pairs and len(self.output.pairs) != 2:
            raise ValueError(f"output.pairs = {list(self.output.pairs)} should be two elements")

    # --- what it describes ---

    def build(self, folder: Path) -> tuple[System, Potential]:
        """Build the system and its potential. folder: folder of the config, for relative paths."""
        system, potential = self._classical(folder)
        if self.forces.network:
            potential = self._network(system, folder / self.forces.network)
        assert potential is not None  # `check` saw to it
        return (system.replicate(self.system.replicas) if self.system.replicas > 1 else system), potential

    def _network(self, system: System, path: Path) -> NetworkPotential:
        try:
            network: Any = load_any(path)
            if self.forces.compile:
                try:
                    network = compile_for_md(network)
                except ValueError as error:
                    raise ValueError(f"{error}, by forces.compile = false") from None
            return NetworkPotential(network, system.species, system.units)
        except ValueError as error:
            raise ValueError(f"forces.network: {error}") from None

    def _classical(self, folder: Path) -> tuple[System, Potential | None]:
        """Without replicas; coordinates alone have no potential."""
        table, forces = self.system, self.forces
        if table.kind == "coordinates":
            atoms = _read_atoms(folder / table.coordinates)
            try:
                return System.from_ase(atoms), None
            except ValueError as error:
                raise ValueError(f"system.coordinates = {table.coordinates!r}: {error}") from None
        if table.kind in ("lennard_jones", "argon"):
            system, potential = self._atoms()
        elif table.kind == "water":
            density = table.density or 0.997
            nonbonding = self._nonbonding(forces.cutoff or self._water_cutoff(density))
            system, potential = water_box(
                table.molecules, table.model, density, nonbonding, forces.rigid, self.run.seed
            )
        else:
            paths = [str(folder / name) if (folder / name).exists() else name for name in table.files]
            at, nonbonding = str(folder / table.coordinates), self._nonbonding(forces.cutoff or 1.0)
            constraints = forces.constraints or None
            if table.kind == "openmm":
                system, potential = load_openmm(
                    at, paths, nonbonding, constraints, forces.rigid, table.solvate, table.model
                )
            elif table.kind == "amber":
                system, potential = load_amber(paths[0], at, nonbonding, constraints, forces.rigid)
            else:
                system, potential = _serialized(Path(paths[0]), Path(at), nonbonding)
        return system, potential

    def _atoms(self) -> tuple[System, Potential]:
        table, n = self.system, round((self.system.atoms / 4) ** (1 / 3))
        if 4 * n**3 != table.atoms:
            raise ValueError(f"system.atoms = {table.atoms} fill no face-centred cubic lattice; near are"
                             f" {4 * max(1, n) ** 3} and {4 * (n + 1) ** 3}")  # fmt: skip
        reduced = table.kind == "lennard_jones"
        sigma, epsilon, units = (1.0, 1.0, REDUCED) if reduced else (0.3405, 0.99607, MD)  # argon: Rahman 1964
        number = (table.density or 0.8442) if reduced else (table.density or 1.374) * 602.214076 / 39.948
        edge = (4 / number) ** (1 / 3)
        corners = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=torch.float64)
        grid = torch.cartesian_prod(*[torch.arange(n, dtype=torch.float64)] * 3).view(-1, 3)
        x = (grid[:, None] + corners).reshape(-1, 3) * edge
        species = None if reduced else ["Ar"] * len(x)
        system = System(x, species, masses=1.0 if reduced else None, cell=n * edge, units=units)
        cutoff = self.forces.cutoff or 2.5 * sigma
        tail = self.forces.truncation == "cut"
        return system, LennardJones(sigma, epsilon, cutoff, truncation=self.forces.truncation, tail=tail)

    def _nonbonding(self, cutoff: float) -> Nonbonding:
        forces = self.forces
        return Nonbonding(forces.method, cutoff, forces.switch or None, tolerance=forces.tolerance)

    def _water_cutoff(self, density: float) -> float:
        edge = (self.system.molecules * 18.015 / (density * 602.214076)) ** (1 / 3)
        return min(0.9, 0.98 * edge / 2)

    def updater(self) -> Updater:
        run = self.run
        if run.ensemble == "nve":
            return VelocityVerlet(run.dt)
        bath = (
            Langevin(run.dt, run.temperature, run.friction)
            if run.thermostat == "langevin"
            else NoseHooverChain(run.dt, run.temperature, run.period or 200 * run.dt)
        )
        if run.ensemble == "nvt":
            return bath
        bar = 1.0 if self.system.kind == "lennard_jones" else BAR
        period = run.pressure_period or 1000 * run.dt
        return CellRescaling(bath, run.pressure * bar, period, run.compressibility / bar)

    def simulation(self, system: System, potential: Potential, shared: bool = False) -> Simulation:
        """shared: by all processes of `torch.distributed`."""
        guard = Guard(drift=self.run.drift or None)
        return (DecomposedSimulation if shared else Simulation)(
            system, potential, self.updater(), skin=self.forces.skin or None, seed=self.run.seed, guard=guard
        )


def _serialized(path: Path, coordinates: Path, nonbonding: Nonbonding) -> tuple[System, Potential]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    atoms = _read_atoms(coordinates)
    cell = atoms.cell[:] / 10 if any(atoms.pbc) else None
    system, field = read_system(path.read_text("utf-8"), atoms.positions / 10, cell, nonbonding, atoms.numbers.tolist())
    return system, field


def _read_atoms(path: Path) -> Any:
    """`ase.Atoms` of a file, the last of several."""
    from tutti.extras import extra

    with extra("mol"):
        from ase.io import read as read_atoms
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        atoms: Any = read_atoms(path)
    except Exception as error:
        raise ValueError(f"{path} cannot be read by ASE: {type(error).__name__}: {error}") from None
    if atoms.constraints:
        raise ValueError(f"{path} has constraints of ASE ({type(atoms.constraints[0]).__name__}), which simulations do"
                         " not hold: remove them")  # fmt: skip
    return atoms
