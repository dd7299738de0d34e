"""Branches on values that depend on parameters: which way the traced Python code goes, and what the other way means.

`if torch.isinf(h).any(): h = h.clamp(...)` and `if not torch.isfinite(loss): raise` ask for a value that only a run
knows. Capture takes one way, then traces once more with the other one:

- it raises: the branch is a check. The graph keeps the condition as an output, and a step in which it differs raises.
- it gives the same graph: the branch changes nothing (a warning, a log).
- it gives another graph: the model really branches. Both ways are computed, where they can be (`tracing.both_ways`).
"""

from __future__ import annotations

import linecache
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
LIBRARY = tuple(f"{OURS[0]}/{part}" for part in ("distributions/", "nn/", "functional.py"))  # Python that may branch
MOST_ASKED = 1000  # times at one place


@dataclass(frozen=True)
class Site:
    """A line of Python that asks for the value of a boolean tensor."""

    file: str
    number: int
    line: str = field(compare=False)
    code: CodeType | None = field(compare=False, default=None)

    at: int = 0  # of its bytecode: a line may ask several times

    def __str__(self) -> str:
        return f"{self.file}:{self.number}, `{self.line}`"

    @property
    def is_compound(self) -> bool:
        """Whether the line may ask for another boolean, by `and` or `or`."""
        return bool(re.search(r"\b(and|or)\b", self.line))


@dataclass
class Decisions:
    """The way taken at each site; False where nothing is said. conditions: the traced booleans, by site, in order."""

    taken: dict[Site, bool] = field(default_factory=dict)
    conditions: dict[Site, list[torch.Tensor]] = field(default_factory=dict)
    asked: list[Site] = field(default_factory=list)
    late: set[Site] = field(default_factory=set)  # asked for in the backward pass
    backward: bool = False  # whether that runs now

    def decide(self, condition: torch.Tensor) -> bool | None:
        """Which way to go where Python asks for a boolean; None outside of any code that could be named."""
        site = site_of_caller(LIBRARY)
        if site is None:
            return None
        self.asked.append(site)
        if self.backward:
            self.late.add(site)
        self.conditions.setdefault(site, []).append(condition)
        if len(self.conditions[site]) > MOST_ASKED:
            raise Endless(site)
        return self.taken.setdefault(site, False)

    def differing(self) -> list[torch.Tensor]:
        """For each site how often a condition differs from the way taken, 0-d float32."""
        return [
            torch.stack([(c if not self.taken[site] else ~c).reshape(()) for c in conditions]).sum(dtype=torch.float32)
            for site, conditions in self.conditions.items()
        ]

    def forget(self) -> None:
        """Before other code is run."""
        self.taken.clear()
        self.begin()

    def begin(self) -> None:
        """Before the code is run again."""
        self.conditions.clear()
        self.asked.clear()
        self.late.clear()
        self.backward = False


class Endless(ValueError):
    """A loop that ends by values."""

    def __init__(self, site: Site):
        super().__init__(
            f"{site}: a loop that ends by the values of tensors is not captured; take a fixed number of steps"
        )


def site_of_caller(library: tuple[str, ...] = ()) -> Site | None:
    """The innermost line of Python that is neither Tutti's nor torch's, but for these parts of torch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*OURS, "<")) or file.startswith(library):
            line = linecache.getline(file, frame.f_lineno).strip()
            return Site(file, frame.f_lineno, line, frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None
