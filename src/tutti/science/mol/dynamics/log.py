"""A table of a run: step, time, energies, temperature, volume and pressure, a line for each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.science.folder import append, writing
from tutti.science.mol import cell as cells
from tutti.science.mol.dynamics.output import Output
from tutti.science.mol.units import BAR, LABELS, MD, PRESETS, Units, factor

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation

COLUMNS = ("step", "replica", "time", "potential", "kinetic", "temperature", "conserved", "volume", "pressure")


def units_of(units: Units) -> dict[str, str]:
    """What the columns are in, by their names; empty for units without names, such as reduced ones."""
    if PRESETS.get(units.name) != units or units.name not in LABELS:
        return {}
    energy, time, volume = LABELS[units.name]
    energies = dict.fromkeys(("potential", "kinetic", "conserved"), energy)
    return {"time": time, **energies, "temperature": "K", "volume": volume, "pressure": "bar"}


class Log(Output):
    """A callback that adds a line to a CSV file every `every` steps, in the units of the system, pressure in bar.

    The names of columns have the units, as in "potential (kJ/mol)" and "pressure (bar)". Reduced units and others that
    have no name in `units.PRESETS` are not named, and the pressure is in them too.

    resume: keep the lines up to the simulation's step. pressure: costs an evaluation with virial for each line.
    """

    def __init__(self, path: str | Path, every: int, resume: bool = False, pressure: bool = True) -> None:
        super().__init__(path, every, resume)
        self.pressure = pressure

    def begin(self, simulation: Simulation) -> None:
        with writing(self.path):
            self.path.write_text(_line(_header(simulation.system.units)), encoding="utf-8")

    def cut(self, simulation: Simulation) -> None:
        keep = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            if not line.endswith(b"\n"):  # the last one, which was interrupted
                break
            try:
                words = line.decode().strip().split(",")
                if len(words) != len(COLUMNS) or (number == 0 and words != _header(simulation.system.units)):
                    raise ValueError
                numbers = [float(word or 0) for word in words] if number else [-1]
                if numbers[0] >= simulation.count:
                    break
            except ValueError:
                raise ValueError(
                    f"{self.path}, line {number + 1}: no line of such a log; remove it, or move the file away"
                ) from None
            keep += len(line)
        if keep:
            os.truncate(self.path, keep)
        else:
            self.begin(simulation)

    def add(self, simulation: Simulation) -> None:
        system = simulation.system
        periodic = system.cell is not None and all(system.pbc)
        pressure: list[Any] = [""] * system.replicas
        if self.pressure and periodic:
            bar = BAR / factor("pressure", system.units, MD) if units_of(system.units) else 1.0
            pressure = (simulation.pressure() / bar).tolist()
        volume = cells.volume(system.cell).tolist() if periodic and system.cell is not None else [""] * system.replicas
        conserved = simulation.updater.conserved(simulation)
        columns = [
            simulation.evaluation.energy.tolist(), simulation.kinetic_energy.tolist(), simulation.temperature.tolist(),
            [""] * system.replicas if conserved is None else conserved.tolist(), volume, pressure,
        ]  # fmt: skip
        rows = ([simulation.count, r, simulation.time, *x] for r, x in enumerate(zip(*columns, strict=True)))
        append(self.path, "".join(map(_line, rows)))


def _header(units: Units) -> list[str]:
    labels = units_of(units)
    return [f"{name} ({labels[name]})" if name in labels else name for name in COLUMNS]


def _line(values: Sequence[object]) -> str:
    return ",".join(map(str, values)) + "\n"
