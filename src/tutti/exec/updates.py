"""How often optimizers have updated each parameter, as torch counts: an update may leave out some parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tutti.ir.step_graph import StepGraph


class Updates(dict[str, int]):
    """Numbers of updates, by parameter name."""

    def add(self, names: Iterable[str] | Mapping[str, int]) -> None:
        """Count an update of each of these parameters, or so many."""
        for name in names:
            self[name] += names[name] if isinstance(names, Mapping) else 1

    def behind(self, most: int) -> dict[str, int]:
        """By how many updates each parameter is behind `most`."""
        return {name: most - n for name, n in self.items()}

    def alike(self, graph: StepGraph, most: int | None = None) -> bool:
        """Whether the parameters that a graph updates with one input for their number still have one number.

        most: the number of those that have no input of their own in the graph of a step.
        """
        if any(len({self[name] for name in names}) > 1 for names in graph.counts.values()):
            return False
        apart = {name for names in graph.counts.values() for name in names}
        return most is None or all(self[name] == most for name in graph.updated if name not in apart)
