"""Restart files: a simulation goes on from one as if it had not stopped, bit for bit.

One safetensors file, replaced atomically. Saving builds the neighbour list again, as loading does: sums over pairs have
the same order in both, so the interrupted run equals one that saved at the same steps and went on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tutti.checkpoint.tensor_file import read_metadata, read_tensors, write_tensors
from tutti.science.mol.potential import parts as parts_of
from tutti.science.mol.units import PRESETS

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation

__all__ = ["Restart", "load", "save"]

FORMAT = 2


class Restart:
    """A callback that saves the simulation into a file every `every` steps.

    parts: callbacks whose state goes into the file, such as `RadialDistribution` and `ReplicaExchange`. Restart comes
    after them among the callbacks of a run; `load` takes the same parts.
    """

    collective = True  # every process that shares the simulation takes part

    def __init__(self, path: str | Path, every: int, parts: Sequence[Stateful] = ()) -> None:
        if every < 1:
            raise ValueError(f"{path}: a restart file every {every} steps cannot be; leave the callback out for none")
        self.path, self.every, self.parts = Path(path), every, parts

    def __call__(self, simulation: Simulation) -> None:
        save(simulation, self.path, self.parts)


class Stateful(Protocol):
    """Has a state besides that of the simulation, which a restart file holds."""

    def state(self) -> dict[str, torch.Tensor]: ...

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Raises KeyError if something is missing."""
        ...


def save(simulation: Simulation, path: str | Path, parts: Sequence[Stateful] = ()) -> None:
    """Write the state of a simulation, and make its neighbour list anew.

    The file that was there stays as NAME.old. Raises `Unstable`, and writes nothing, if the guard of the simulation
    finds it exploding; OSError if the file cannot be written.

    Where processes share the simulation, all of them call this, and the first one writes.
    """
    if simulation.guard is not None:
        simulation.watch(simulation.guard)
    simulation.renew()
    whole = simulation.whole()
    simulation.together(lambda: _write(whole, Path(path), parts), first=True)


def _write(simulation: Simulation, path: Path, parts: Sequence[Stateful]) -> None:
    tensors = {
        "positions": simulation.positions,
        "velocities": simulation.velocities,
        "species": simulation.system.species,
        "masses": simulation.system.masses,
        **{f"updater.{name}": value for name, value in simulation.updater.state().items()},
        **{f"{key}.{n}": x for key, part in _stateful(simulation, parts).items() for n, x in part.state().items()},
    }
    if simulation.cell is not None:
        tensors["cell"] = simulation.cell
    about = {
        "format": FORMAT,
        "step": simulation.count,
        "seed": simulation.seed,
        "updater": type(simulation.updater).__name__,
        "units": simulation.system.units.name,
        "dt": simulation.updater.dt,
    }
    write_tensors(tensors, path, {"tutti.md": json.dumps(about)}, _previous(path))


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _read(path: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Step, seed, updater, units and time step, and the tensors."""
    if not path.exists():
        raise ValueError(f"there is no restart file {path}")
    try:
        about, tensors = json.loads(read_metadata(path)["tutti.md"]), read_tensors(path, unsigned=True)
        names = ("step", "seed", "updater", "units", "dt") if about["format"] == FORMAT else ()
        header = [about[name] for name in names]
    except (KeyError, TypeError, ValueError) as error:
        old = _previous(path)
        remedy = f"; put the one before it, {old}, in its place" if old.exists() else ""
        raise ValueError(f"{path} is no restart file of a simulation, or damaged: {error}{remedy}") from None
    if not header:
        raise ValueError(f"{path} has format {about['format']}; this version reads {FORMAT}")
    return header, tensors


def load(simulation: Simulation, path: str | Path, parts: Sequence[Stateful] = ()) -> None:
    """Bring a simulation of the same system and kind of updater to the state in a file.

    Where processes share the simulation, all of them call this; the file may be that of any number of processes.
    parts: as in `save`. Raises ValueError for a file that is damaged, of another system, or of another time step.
    """
    content: list[Any] = []
    simulation.together(lambda: content.extend(_read(Path(path))))
    (step, seed, updater, units, dt), tensors = content
    shared, simulation = simulation, simulation.whole()
    system = simulation.system
    if updater != type(simulation.updater).__name__ or units not in PRESETS or PRESETS[units] != system.units:
        raise ValueError(
            f"{path} is of {updater} in units {units}, this simulation has {type(simulation.updater).__name__} and"
            f" {system.units.name}"
        )
    if dt != simulation.updater.dt:
        raise ValueError(
            f"{path} has a time step of {dt}, this simulation of {simulation.updater.dt}, with which its time would be"
            f" wrong; load it into one of {dt}, and begin another with the `system` of that one"
        )
    expected = {name: getattr(system, name) for name in ("positions", "velocities", "species", "masses")}
    if system.cell is not None:
        expected["cell"] = system.cell
    expected |= {f"updater.{name}": value for name, value in simulation.updater.state().items()}
    for name, value in expected.items():
        saved = tensors.get(name)
        if saved is None or saved.shape != value.shape or saved.dtype != value.dtype:
            shape = "missing" if saved is None else f"{tuple(saved.shape)} {saved.dtype}"
            raise ValueError(f"{path}: {name} is {shape}, this system has {tuple(value.shape)} {value.dtype}")
    for name in ("species", "masses"):
        if not torch.equal(tensors[name], expected[name]):
            raise ValueError(f"{path} is of another system: its {name} differ")
    if not (isinstance(step, int) and step >= 0 and isinstance(seed, int)):
        raise ValueError(f"{path}: step {step!r} and seed {seed!r} are no counts")
    for name in ("positions", "velocities", "cell"):
        if name in expected:
            expected[name].copy_(tensors[name])
    simulation.count, simulation.seed = step, seed
    simulation.updater.restore({k.removeprefix("updater."): v for k, v in tensors.items() if k.startswith("updater.")})
    for key, part in _stateful(simulation, parts).items():
        state = {k.removeprefix(f"{key}."): v for k, v in tensors.items() if k.startswith(f"{key}.")}
        try:
            part.restore(state)
        except KeyError as error:
            raise ValueError(f"{path} has no state of {type(part).__name__}: {error}") from None
    shared.adopt(simulation)


def _stateful(simulation: Simulation, parts: Sequence[Stateful]) -> dict[str, Stateful]:
    """What has a state besides positions, velocities, cell and updater, by a key for files."""
    guard = {} if simulation.guard is None else {"guard": simulation.guard}
    return adaptive(simulation) | guard | {f"part.{k}": part for k, part in enumerate(parts)}


def adaptive(simulation: Simulation) -> dict[str, Any]:
    """The parts of the potential that a run changes, such as the hills of metadynamics, by a key for files."""
    changed = (part for part in parts_of(simulation.potential) if hasattr(part, "state"))
    return {f"potential.{k}": part for k, part in enumerate(changed)}
