"""Branches on values that depend on parameters: which side the traced Python code takes, and what the other side means.

`if torch.isinf(h).any(): h = h.clamp(...)` and `if not torch.isfinite(loss): raise` need a value known only at run
time. Capture takes one side, then traces once more with the other one:

- it raises: the branch is a check. The condition becomes an output, and a step in which it differs raises.
- it gives the same graph: the branch has no effect on the result (a warning, a log).
- it gives another graph: the model really branches. Both sides are computed if possible (`tracing.trace.both_ways`).
"""

from __future__ import annotations

import linecache
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
LIBRARY = tuple(f"{OURS[0]}/{part}" for part in ("distributions/", "nn/", "functional.py"))  # Python that may branch
MAX_EVALUATIONS = 1000  # evaluations of one condition


@dataclass(frozen=True)
class Site:
    """A line of Python that evaluates a boolean tensor."""

    file: str
    number: int
    line: str = field(compare=False)
    code: CodeType | None = field(compare=False, default=None)

    at: int = 0  # offset in the bytecode: a line may have several conditions

    def __str__(self) -> str:
        return f"{self.file}:{self.number}, `{self.line}`"

    @property
    def is_compound(self) -> bool:
        """Whether the line may evaluate another boolean, by `and` or `or`."""
        return bool(re.search(r"\b(and|or)\b", self.line))


@dataclass
class Decisions:
    """The side taken at each site, False by default. conditions: the traced booleans, by site, in order.

    evaluated: the sites in the order of evaluation.
    """

    taken: dict[Site, bool] = field(default_factory=dict)
    conditions: dict[Site, list[torch.Tensor]] = field(default_factory=dict)
    evaluated: list[Site] = field(default_factory=list)
    late: set[Site] = field(default_factory=set)  # evaluated in the backward pass
    backward: bool = False  # whether the backward pass is running

    def decide(self, condition: torch.Tensor) -> bool | None:
        """Return the side to take for a boolean, or None if it is not in user code."""
        site = site_of_caller(LIBRARY)
        if site is None:
            return None
        self.evaluated.append(site)
        if self.backward:
            self.late.add(site)
        self.conditions.setdefault(site, []).append(condition)
        if len(self.conditions[site]) > MAX_EVALUATIONS:
            raise Endless(site)
        return self.taken.setdefault(site, False)

    def differing(self) -> list[torch.Tensor]:
        """Return for each site how often a condition differed from the side taken, 0-d float32."""
        return [
            torch.stack([(c if not self.taken[site] else ~c).reshape(()) for c in conditions]).sum(dtype=torch.float32)
            for site, conditions in self.conditions.items()
        ]

    def forget(self) -> None:
        """Reset for other code."""
        self.taken.clear()
        self.begin()

    def begin(self) -> None:
        """Reset for another run of the same code."""
        self.conditions.clear()
        self.evaluated.clear()
        self.late.clear()
        self.backward = False


class Endless(ValueError):
    """The model loops until a tensor has some value."""

    def __init__(self, site: Site):
        super().__init__(
            f"{site}: a loop that ends by the values of tensors is not captured; take a fixed number of steps"
        )


def site_of_caller(library: tuple[str, ...] = ()) -> Site | None:
    """The innermost line of Python outside Tutti and torch, or in these parts of torch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*OURS, "<")) or file.startswith(library):
            line = linecache.getline(file, frame.f_lineno).strip()
            return Site(file, frame.f_lineno, line, frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None
