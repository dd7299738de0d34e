"""How often optimizers have updated each parameter, as torch counts: an update may leave out some parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tutti.ir.step_graph import StepGraph


class Updates(dict[str, int]):
    """Numbers of updates, by parameter name. done: the number of steps so far that were not skipped."""

    done = 0

    def add(self, updates: Mapping[str, int] | Iterable[str]) -> None:
        """Count a step that has updated these parameters, or updated each so often."""
        self.done += 1
        for name in updates:
            self[name] += updates[name] if isinstance(updates, Mapping) else 1

    def recount(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of some parameters. If they are those of all, the steps begin after the largest."""
        self |= counts
        if counts.keys() >= self.keys():
            self.done = max(self.values(), default=0)

    def behind(self) -> dict[str, int]:
        """By how many updates parameters are behind the steps, for those that are."""
        return {name: self.done - n for name, n in self.items() if n != self.done}

    def alike(self, graph: StepGraph) -> bool:
        """Whether the parameters that a graph updates with one input for their number still have one number."""
        return all(len({self[name] for name in names}) <= 1 for names in graph.counts.values())

    def punctual(self, graph: StepGraph) -> bool:
        """Whether a step has updated all others that a graph updates each time: their number is that of the steps."""
        apart = {name for names in graph.counts.values() for name in names}
        return all(self[name] == self.done for name in graph.updated if name not in apart)
