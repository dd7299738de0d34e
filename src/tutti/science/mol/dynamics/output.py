"""What callbacks that add to a file have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.science.mol.dynamics.simulation import Simulation


class Output:
    """A callback that adds to a file every `every` steps.

    resume: go on with the file that is there, without what it has from the step of the first call on. Else a run that
    begins at step 0 replaces the file, and a later one is refused (ValueError) where there is one.
    """

    def __init__(self, path: str | Path, every: int, resume: bool = False) -> None:
        if every < 1:
            raise ValueError(f"{path}: output every {every} steps cannot be; leave the callback out for none")
        self.path, self.every, self.resume = Path(path), every, resume
        self._checked = self._begun = False

    def check(self, simulation: Simulation) -> None:
        """Before a run: raise ValueError if it would replace what an earlier run of the simulation wrote."""
        if simulation.count and not (self.resume or self._checked) and self.path.exists():
            raise ValueError(
                f"{self.path} exists, and the simulation is at step {simulation.count}: pass resume=True to go on with"
                " the file, or another path"
            )
        self._checked = True

    def __call__(self, simulation: Simulation) -> None:
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.resume and self.path.exists():
                self.cut(simulation)
            else:
                self.begin(simulation)
            self._begun = True
        self.add(simulation)

    def begin(self, simulation: Simulation) -> None:
        """Make the file."""
        raise NotImplementedError

    def cut(self, simulation: Simulation) -> None:
        """Leave out what the file has from the simulation's step on. Raises ValueError for a damaged file."""
        raise NotImplementedError

    def add(self, simulation: Simulation) -> None:
        raise NotImplementedError
