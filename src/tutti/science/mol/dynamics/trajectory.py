"""Trajectories: extended XYZ and H5MD (de Buyl et al. 2014), written frame by frame so that what was written stays."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tutti.extras import extra
from tutti.science.folder import append, writing
from tutti.science.mol.dynamics.output import Output
from tutti.science.mol.units import ELECTRONVOLT, factor

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class Trajectory(Output):
    """A callback that adds a frame to a file every `every` steps.

    path: ends in .xyz (one replica, in angstrom) or .h5md. velocities: whether frames have them. resume: go on with the
    file that is there, without its frames after the simulation's step; else a run from step 0 replaces it. wrap:
    fold atoms into the cell; by default positions are as they moved. Positions in H5MD are in the units of the system,
    which it names.
    """

    def __new__(cls, path: str | Path, *args: Any, **options: Any) -> Trajectory:
        kinds = {".xyz": XYZ, ".extxyz": XYZ, ".h5md": H5MD, ".h5": H5MD}
        if (suffix := Path(path).suffix) not in kinds:
            raise ValueError(f"trajectory {path}: no format {suffix!r}; there are {', '.join(kinds)}")
        return super().__new__(kinds[suffix])

    def __init__(
        self, path: str | Path, every: int, velocities: bool = False, resume: bool = False, wrap: bool = False
    ) -> None:
        super().__init__(path, every, resume)
        self.velocities, self.wrap = velocities, wrap

    def positions(self, simulation: Simulation) -> torch.Tensor:
        return simulation.system.wrapped() if self.wrap else simulation.positions


class XYZ(Trajectory):
    def begin(self, simulation: Simulation) -> None:
        if simulation.system.replicas > 1:
            raise ValueError(f"{self.path} holds one replica; write .h5md for {simulation.system.replicas}")
        self.path.write_text("")

    def cut(self, simulation: Simulation) -> None:
        keep, number = 0, 1
        with open(self.path, "rb") as file:
            while head := file.readline():
                if str(simulation.atoms).encode().startswith(head):  # without the end of the line: interrupted
                    break
                line = file.readline()
                try:
                    if (count := int(head)) != simulation.atoms:
                        raise ValueError
                    atoms = list(islice(file, count))
                    whole = len(atoms) == count and atoms[-1].endswith(b"\n")
                    if whole and _step(line.decode()) >= simulation.count:
                        break
                except (ValueError, OverflowError):
                    raise ValueError(
                        f"{self.path}, line {number}: no frame of {simulation.atoms} atoms with its step; move the file"
                        " away, or pass another path"
                    ) from None
                if not whole:  # the last one, which was interrupted
                    break
                keep += len(head) + len(line) + sum(map(len, atoms))
                number += 2 + len(atoms)
        os.truncate(self.path, keep)

    def add(self, simulation: Simulation) -> None:
        from tutti.science.mol.elements import SYMBOLS

        system = simulation.system
        length, velocity = (factor(x, system.units, ELECTRONVOLT) if system.units.length_nm else 1.0
                            for x in ("length", "velocity"))  # fmt: skip
        columns = [self.positions(simulation)[0] * length]
        properties = "species:S:1:pos:R:3"
        if self.velocities:
            columns.append(simulation.velocities[0] * velocity)
            properties += ":vel:R:3"
        cell = "" if system.cell is None else 'Lattice="{}" '.format(
            " ".join(f"{x:.10g}" for x in (system.cell[0] * length).flatten().tolist()))  # fmt: skip
        pbc = " ".join("T" if p else "F" for p in system.pbc)
        head = f'{cell}Properties={properties} pbc="{pbc}" time={simulation.time:.10g} step={simulation.count} '
        symbols = [SYMBOLS[z] for z in system.species.tolist()]
        rows = torch.cat(columns, 1).tolist()
        body = "".join(f"{s} {' '.join(f'{x:.8f}' for x in row)}\n" for s, row in zip(symbols, rows, strict=True))
        append(self.path, f"{system.atoms}\n{head}\n{body}")


def _step(line: str) -> int:
    """Raises ValueError without one."""
    return int(line.rpartition(" step=")[2])


class H5MD(Trajectory):
    """H5MD 1.1. Replicas are the groups `particles/replica0` and so on; a single one is `particles/all`."""

    def begin(self, simulation: Simulation) -> None:
        with extra("mol"):
            import h5py
        system = simulation.system
        with writing(self.path), h5py.File(self.path, "w") as file:  # libver="latest" is unreadable after a kill
            meta = file.create_group("h5md")
            meta.attrs["version"] = np.array([1, 1])
            meta.create_group("author").attrs["name"] = "unknown"
            creator = meta.create_group("creator")
            creator.attrs["name"], creator.attrs["version"] = "tutti", "0.1"
            for r in range(system.replicas):
                group = file.create_group(f"particles/{_name(r, system.replicas)}")
                group["species"] = system.species.numpy()
                group["mass"] = system.masses.numpy()
                box = group.create_group("box")
                box.attrs["dimension"] = 3
                box.attrs["boundary"] = np.array([b"periodic" if p else b"none" for p in system.pbc])
                shapes = {"position": (system.atoms, 3)} | ({"velocity": (system.atoms, 3)} if self.velocities else {})
                for name, shape in shapes.items():
                    _element(group.create_group(name), shape)
                if system.cell is not None:
                    _element(box.create_group("edges"), (3, 3))
                group["position/value"].attrs["unit"] = {1.0: "nm", 0.1: "Angstrom"}.get(
                    system.units.length_nm or 0, ""
                )

    def cut(self, simulation: Simulation) -> None:
        import h5py

        try:
            with h5py.File(self.path, "r+") as opened:
                file: Any = opened
                groups, system = file["particles"], simulation.system
                expected = {_name(r, system.replicas): system.atoms for r in range(system.replicas)}
                atoms = {name: len(groups[name]["species"]) for name in groups}
                if atoms != expected:
                    raise ValueError(f"{self.path} is of another system: its atoms are {atoms}, not {expected}")
                elements = _elements(file)
                keep = min(int(np.searchsorted(element["step"][:], simulation.count)) for element in elements)
                for element in elements:
                    for name in ("step", "time", "value"):
                        element[name].resize(keep, 0)
        except (OSError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is no H5MD file that can go on: {error}; move it away") from None

    def add(self, simulation: Simulation) -> None:
        """A frame that was interrupted has no step, as steps are written when the rest is in the file."""
        import h5py

        system = simulation.system
        elements = {"position": self.positions(simulation), "velocity": simulation.velocities}
        if system.cell is not None:
            elements["box/edges"] = system.cell
        size = sum(values.nbytes for values in elements.values())
        with writing(self.path):
            _reserve(self.path, size + SLACK * system.replicas)
            with h5py.File(self.path, "r+") as opened:
                file: Any = opened
                for part, number in {"time": simulation.time, "value": None, "step": simulation.count}.items():
                    if part == "step":
                        file.flush()
                    for r in range(system.replicas):
                        group = file[f"particles/{_name(r, system.replicas)}"]
                        for name in filter(group.__contains__, elements):
                            data, count = group[name][part], len(group[name]["step"])
                            data.resize(count + 1, 0)
                            data[count] = elements[name][r].numpy() if number is None else number
                file.flush()


SLACK = 1 << 17  # bytes of metadata and of chunks of steps and times that a frame of a replica may need


def _reserve(path: Path, size: int) -> None:
    """See that the disk has room, as HDF5 leaves a broken file and a broken library where it has not: make the file
    longer, which the next use of it by HDF5 takes back. Raises OSError, and leaves the file as it was."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), end, size)
            else:
                file.write(bytes(size))
                file.flush()
        except OSError:
            file.truncate(end)
            raise


def _name(replica: int, replicas: int) -> str:
    return "all" if replicas == 1 else f"replica{replica}"


def _element(group: Any, shape: tuple[int, ...]) -> None:
    """A time-dependent element of H5MD without frames."""
    group.create_dataset("step", (0,), np.int64, maxshape=(None,), chunks=(1024,))
    group.create_dataset("time", (0,), np.float64, maxshape=(None,), chunks=(1024,))
    group.create_dataset("value", (0, *shape), np.float64, maxshape=(None, *shape), chunks=(1, *shape))


def _elements(file: Any) -> list[Any]:
    groups: list[Any] = []
    for particles in file["particles"].values():
        groups += [particles[n] for n in ("position", "velocity") if n in particles]
        groups += [particles["box/edges"]] if "box/edges" in particles else []
    return groups


def read_h5md(path: str | Path, replica: int | None = None) -> dict[str, np.ndarray]:
    """`step`, `time`, `positions` (T, N, 3), and `velocities`, `cells` (T, 3, 3) if they are there. Raises ValueError
    for what is no H5MD file."""
    with extra("mol"):
        import h5py
    try:
        with h5py.File(path, "r") as opened:
            file: Any = opened
            group = file["particles"]["all" if replica is None else f"replica{replica}"]
            names = {"positions": "position", "velocities": "velocity", "cells": "box/edges"}
            names = {k: name for k, name in names.items() if name in group}
            whole = min(
                len(group[name]["step"]) for name in ("position", *names.values())
            )  # the last may be unfinished
            frames = {part: group["position"][part][:whole] for part in ("step", "time")}
            return frames | {k: group[name]["value"][:whole] for k, name in names.items()}
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no H5MD trajectory, or damaged: {error}") from None
