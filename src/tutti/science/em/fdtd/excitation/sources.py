"""Sources: what is added to fields, or prescribed, at each step.

In step n electric currents are taken at (n + 1/2) dt, magnetic ones at n dt, and prescribed E at (n + 1) dt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.waveforms import Waveform, check_waveform
from tutti.science.em.fdtd.grid import Grid, changing
from tutti.science.em.shown import Brief, brief

if TYPE_CHECKING:
    from tutti.science.em.fdtd.problem import Setting

Where = Sequence[int | slice]
SOFT, HARD, MAGNETIC = range(3)


@dataclass
class Entries:
    """Places of one component. kind: SOFT adds b amount wave to E, HARD sets E, MAGNETIC adds amount wave to H.

    place: flat indices into the array of the component. column: column of `waves` (steps, columns) for each place.
    shot: the run that has the source, None for all.
    """

    kind: int
    component: int
    place: Tensor
    amount: Tensor
    column: Tensor
    waves: Tensor
    shot: int | None


class Source(Protocol):
    """It may have `shot`, the run that has it, and a method `conductivity(grid)`: what it adds in S/m, as (component,
    flat places, value)."""

    def entries(self, setting: Setting) -> list[Entries]: ...


def places(grid: Grid, where: Where, what: str) -> tuple[Tensor, tuple[int, ...]]:
    """Flat places of node indices, each an integer or a slice, and the shape without the axes of integers.

    Raises ValueError outside of the grid.
    """
    if not hasattr(where, "__len__") or len(where) != len(grid.nodes):
        raise ValueError(f"{what}: {len(grid.nodes)} indices or slices, not {where}")
    ranges, shape = [], []
    for x, n, delta in zip(where, grid.nodes, grid.lengths, strict=True):
        if isinstance(x, slice):
            ranges.append(torch.arange(n)[x])
            shape.append(len(ranges[-1]))
        elif not hasattr(x, "__index__"):
            raise ValueError(f"{what}: {x} is no index; places are numbers of nodes, metres over {delta:g} here")
        elif 0 <= x < n:
            ranges.append(torch.tensor([x]))
        else:
            raise ValueError(f"{what}: index {x} is not one of {n} nodes")
    flat = torch.zeros((), dtype=torch.int64)
    for axis, (r, n) in enumerate(zip(ranges, grid.nodes, strict=True)):
        shape_of = [1] * len(ranges)
        shape_of[axis] = len(r)
        flat = flat * n + r.reshape(shape_of)
    if not flat.numel():
        raise ValueError(f"{what}: {tuple(where)} contains no nodes")
    return flat.flatten(), tuple(shape)


def driven(grid: Grid, component: str, where: Where, what: str) -> tuple[Tensor, tuple[int, ...]]:
    """As `places`, where steps update. Raises ValueError for tangential E and normal H of walls, and beyond the last
    cell."""
    driven_places = places(grid, where, what)
    spans = changing(grid.array, grid.component(component))
    for axis, (x, n) in enumerate(zip(where, grid.nodes, strict=True)):
        first, end = spans[grid.axes[axis]]
        nodes = range(n)[x] if isinstance(x, slice) else (x,)
        if min(nodes) < first or max(nodes) >= end:
            raise ValueError(f"{what}: {component} changes at {first} to {end - 1} along {'xyz'[axis]} only, not at "
                             f"{min(nodes)} to {max(nodes)}: the outermost nodes are perfect conductors")  # fmt: skip
    return driven_places


def sampled(waveform: Waveform | Tensor, times: Tensor, what: str) -> Tensor:
    """A waveform at times, as a column. A tensor holds one number per step."""
    x = waveform if isinstance(waveform, Tensor) else waveform(times)
    if not isinstance(x, Tensor):
        raise ValueError(f"{what}: a waveform that gives {x!r} for {len(times)} times, not a tensor of as many numbers")
    if x.shape != times.shape:
        raise ValueError(f"{what}: a waveform of shape {tuple(x.shape)} for {len(times)} steps")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{what}: a waveform that is {float(x[~torch.isfinite(x)][0])} at some steps")
    return x[:, None]


@dataclass(frozen=True, repr=False)
class Current(Brief):
    """A current density in A/m^2 (of H: a magnetic one in V/m^2) in a component at nodes.

    waveform: a function of time, or a tensor with a number per step (gradients reach it). amplitude: its factor, a
    number or a tensor over the region (without the axes of integers). shot: the run that has it, if there are several;
    None for all. hard: the field is prescribed instead, in V/m.
    """

    component: str
    where: Where
    waveform: Waveform | Tensor
    amplitude: float | Tensor = 1.0
    shot: int | None = None
    hard: bool = False

    def __post_init__(self) -> None:
        check_waveform(self.waveform, f"source of {self.component}")

    def entries(self, setting: Setting) -> list[Entries]:
        grid = setting.grid
        number = grid.component(self.component)
        what = f"source of {self.component}"
        place, region = driven(grid, self.component, self.where, what)
        half = {SOFT: 0.5, HARD: 1.0, MAGNETIC: 0.0}
        kind = MAGNETIC if number >= 3 else HARD if self.hard else SOFT
        if kind == MAGNETIC and self.hard:
            raise ValueError(f"only E can be prescribed, not {self.component}")
        amount = torch.as_tensor(self.amplitude, dtype=torch.float64)
        if amount.requires_grad:
            raise ValueError(f"{what}: gradients reach waveforms, not amplitudes")
        if tuple(amount.shape) not in ((), region) or not bool(torch.isfinite(amount).all()):
            raise ValueError(f"{what}: the amplitude is a finite number, or {region} of them, not {self.amplitude}")
        amount = amount.expand(region).flatten()
        if kind == SOFT:
            amount = -amount
        if kind == MAGNETIC:
            amount = -amount * grid.h_sign * setting.gain(number, place)
        waves = sampled(self.waveform, setting.times(half[kind]), what)
        return [Entries(kind, number, place, amount, torch.zeros_like(place), waves, self.shot)]


def check_sources(sources: Any) -> None:
    if not isinstance(sources, Sequence) or isinstance(sources, str):
        raise ValueError(f"sources: a list of them, not {brief(sources)}: write [...] around it")
    for x in sources:
        if not hasattr(x, "entries"):
            raise ValueError(f"sources: Current, PlaneWave, Port or another with `entries`, not {brief(x)}")


def shots(sources: Sequence[Any]) -> int:
    """How many runs the sources tell apart."""
    numbers = [x.shot for x in sources if getattr(x, "shot", None) is not None]
    if min(numbers, default=0) < 0:
        raise ValueError(f"shot: a number from 0, not {min(numbers)}")
    return max(numbers, default=0) + 1
