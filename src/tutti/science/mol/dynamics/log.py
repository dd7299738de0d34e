"""A table of a run: step, time, energies, temperature, volume and pressure, a line for each replica."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.science.mol import cell as cells

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation

COLUMNS = ("step", "replica", "time", "potential", "kinetic", "temperature", "conserved", "volume", "pressure")


class Log:
    """A callback that adds a line to a CSV file every `every` steps, in the units of the system.

    resume: keep the lines up to the simulation's step. pressure: costs an evaluation with virial for each line.
    """

    def __init__(self, path: str | Path, every: int, resume: bool = False, pressure: bool = True) -> None:
        self.path, self.every, self.resume, self.pressure = Path(path), every, resume, pressure
        self._begun = False

    def __call__(self, simulation: Simulation) -> None:
        if not self._begun:
            self._begin(simulation.count)
        system = simulation.system
        periodic = system.cell is not None and all(system.pbc)
        pressure = simulation.pressure().tolist() if self.pressure and periodic else [""] * system.replicas
        volume = cells.volume(system.cell).tolist() if periodic and system.cell is not None else [""] * system.replicas
        kept = simulation.updater.conserved(simulation)
        columns = [
            simulation.evaluation.energy.tolist(), simulation.kinetic_energy.tolist(), simulation.temperature.tolist(),
            [""] * system.replicas if kept is None else kept.tolist(), volume, pressure,
        ]  # fmt: skip
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            rows = (
                [simulation.count, r, simulation.time, *values] for r, values in enumerate(zip(*columns, strict=True))
            )
            csv.writer(file).writerows(rows)

    def _begin(self, step: int) -> None:
        self._begun = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        if self.resume and self.path.exists():
            with open(self.path, newline="", encoding="utf-8") as file:
                lines = [row for row in list(csv.reader(file))[1:] if row[0].isdigit() and int(row[0]) < step
                         and len(row) == len(COLUMNS)]  # fmt: skip
        with open(self.path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *lines])
