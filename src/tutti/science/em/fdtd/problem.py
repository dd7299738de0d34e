"""What the kernels work on: one simulation as arrays of one dtype on one device.

| array | shape |
|---|---|
| field of a component | (shots, *grid.array) |
| psi of a component and term | the same, with the rows of the layers in place of the axis of its derivative |
| a, b of a component | grid.array, or one number, or empty (a: 1 everywhere) |
| J, P of a pole and component | (shots, *box of the pole) |

Component p of E has the terms + d_(p+1) H_(p+2) and - d_(p+2) H_(p+1), with p + 1 and p + 2 modulo 3; of -H, the
terms + d_(p+2) E_(p+1) and - d_(p+1) E_(p+2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from tutti.hardware.threads import threads
from tutti.science.em.fdtd.excitation.sources import Entries
from tutti.science.em.fdtd.grid import Grid, changing
from tutti.science.em.fdtd.media.cpml import Lines

STAGGER = 9 * 16  # numbers


def direction(h: int, p: int, term: int) -> int:
    """The axis of the derivative in a term of component p of E (h = 0) or H (1)."""
    return (p + 1 + (1 - term if h else term)) % 3


def source(h: int, p: int, term: int) -> int:
    """The component of the other field in that term."""
    return (p + 2 - (1 - term if h else term)) % 3


@dataclass(frozen=True)
class Setting:
    """What sources need to know. gain: b of a component at flat places, in float64."""

    grid: Grid
    dt: float
    steps: int
    lines: Sequence[Sequence[Lines]]
    gain: Callable[[int, Tensor], Tensor]
    start: int = 0

    def times(self, offset: float) -> Tensor:
        return (torch.arange(self.start, self.start + self.steps, dtype=torch.float64) + offset) * self.dt


@dataclass
class PoleArrays:
    """A pole in its box. start, stop: first node of the box and the one after its last, by axis of the kernels. gain:
    arrays of E0, E1, E2, empty where the grid lacks the component."""

    start: tuple[int, int, int]
    stop: tuple[int, int, int]
    keep: float
    spring: float
    dt: float
    gain: list[Tensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))  # pyright: ignore


@dataclass
class Reading:
    """Places that are read, sorted by plane. phase: (steps, frequencies, 2) of a running Fourier sum, or empty."""

    first: Tensor
    component: Tensor
    place: Tensor
    every: int
    phase: Tensor


def state_numbers(array: Sequence[int], present: Sequence[bool], lines: Sequence[Sequence[Lines]], low: int,
                  high: int) -> int:  # fmt: skip
    """In planes [low, high) of the fields and psi of one shot."""
    cross = array[1] * array[2]
    total = sum(present) * (high - low) * cross
    for h in (0, 1):
        for p in range(3):
            for t in (0, 1):
                d = direction(h, p, t)
                if not (present[3 * h + p] and present[3 * (1 - h) + source(h, p, t)]):
                    continue
                if d == 0:
                    total += int((lines[h][0].at[low:high] >= 0).sum()) * cross
                else:
                    total += (high - low) * len(lines[h][d].decay) * array[3 - d]
    return total


@dataclass
class Problem:
    """See the table of the module. `lines`: [E or H][axis of the kernels]. `wall`: planes of axis 0, -1 for none."""

    array: tuple[int, int, int]
    flat: bool
    present: tuple[bool, ...]
    shots: int
    dtype: torch.dtype
    device: torch.device
    lines: list[list[Lines]]
    a: list[Tensor]
    b: list[Tensor]
    poles: list[PoleArrays]
    sources: list[Tensor]
    readings: list[Reading]
    wall: tuple[int, int]
    box: tuple[int, ...] = ()
    packed: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.packed:
            for x in (x for side in self.lines for x in side):
                self.packed += [x.w.to(self.device, self.dtype), x.decay.to(self.device, self.dtype),
                                x.drive.to(self.device, self.dtype), x.at.to(self.device)]  # fmt: skip

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Nodes of the design region along each axis."""
        return tuple(y - x for x, y in zip(self.box[:3], self.box[3:], strict=True))

    def psi_shape(self, h: int, p: int, term: int) -> tuple[int, ...]:
        d = direction(h, p, term)
        shape = list(self.array)
        shape[d] = len(self.lines[h][d].decay)
        return (self.shots, *shape)

    @threads(1)
    def state(self) -> list[Tensor]:
        """Fields, psi, and J and P of poles, all zero. A copy of these is a checkpoint."""
        none = torch.empty(0, dtype=self.dtype, device=self.device)

        def zeros(shape: Sequence[int]) -> Tensor:
            return torch.zeros(tuple(shape), dtype=self.dtype, device=self.device)

        def staggered(number: int) -> Tensor:
            """So that equal places of different fields are not in one set of a cache."""
            shape, skip = (self.shots, *self.array), number * STAGGER
            return zeros((prod(shape) + skip,))[skip:].view(shape)

        out = [staggered(i) if here else none for i, here in enumerate(self.present)]
        for h in (0, 1):
            for p in range(3):
                for t in (0, 1):
                    here = self.present[3 * h + p] and self.present[3 * (1 - h) + source(h, p, t)]
                    shape = self.psi_shape(h, p, t)
                    out.append(zeros(shape) if here and 0 not in shape else none)
        for pole in self.poles:
            out += [zeros((self.shots, *pole.shape)) if g.numel() else none for g in pole.gain * 2]
        return out

    def state_bytes(self) -> int:
        """The bytes of `state`, without allocating it."""
        of_poles = sum(2 * g.numel() for pole in self.poles for g in pole.gain)
        numbers = state_numbers(self.array, self.present, self.lines, 0, self.array[0])
        return (numbers + of_poles) * self.shots * self.dtype.itemsize


def updated(array: Sequence[int], component: int, place: Tensor) -> Tensor:
    """Whether a component changes at flat places."""
    out = torch.ones_like(place, dtype=torch.bool)
    for d, (first, end) in enumerate(changing(array, component)):
        at = place // prod(array[d + 1 :]) % array[d]
        out &= (at >= first) & (at < end)
    return out


def table(entries: Sequence[Entries], kind: int, shots: int, array: tuple[int, int, int], columns: Sequence[int],
          dtype: torch.dtype, device: torch.device) -> list[Tensor]:  # fmt: skip
    """Entries of a kind as [first, component, place, column, amount], sorted by shot and plane. Amounts are 0 where the
    field stays zero."""
    parts = []
    for x, column in zip(entries, columns, strict=True):
        if x.kind != kind:
            continue
        for shot in range(shots) if x.shot is None else (x.shot,):
            whole = torch.full_like(x.place, shot), torch.full_like(x.place, x.component), x.place
            parts.append((*whole, x.column + column, x.amount * updated(array, x.component, x.place)))
    none = torch.zeros(0, dtype=torch.int64)
    shot, component, place, column, amount = (
        [torch.cat(x) for x in zip(*parts, strict=True)] if parts else [none] * 4 + [none.double()]
    )
    key = shot * array[0] + place // (array[1] * array[2])
    key, order = key.sort(stable=True)
    first = torch.searchsorted(key, torch.arange(shots * array[0] + 1))
    ints = [x.to(device) for x in (first, component[order], place[order], column[order])]
    return [*ints, amount[order].to(device, dtype)]


def reading(
    component: int, place: Tensor, array: tuple[int, int, int], every: int, phase: Tensor
) -> tuple[Reading, Tensor]:
    """Places to read, and the order to bring the results into."""
    plane, order = (place // (array[1] * array[2])).sort(stable=True)
    first = torch.searchsorted(plane, torch.arange(array[0] + 1))
    device = phase.device
    whole = torch.full_like(place, component).to(device)
    return Reading(first.to(device), whole, place[order].to(device), every, phase), order.argsort().to(device)


def entries_of(problem: Problem, kind: int) -> dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Source entries of a kind by component: places in a field over all shots, places in the array of a component,
    columns of the waves, and amounts."""
    first, component, place, column, amount = problem.sources[5 * kind : 5 * kind + 5]
    counts = (first[1:] - first[:-1]).to(place.device)
    shot = torch.repeat_interleave(torch.arange(len(counts), device=place.device), counts) // problem.array[0]
    at = shot * prod(problem.array) + place
    entries = {}
    for p in component.unique().tolist():
        here = component == p
        entries[p] = at[here], place[here], column[here], amount[here]
    return entries


def within(problem: Problem, results: Sequence[Tensor], start: int, offset: int, steps: int) -> list[Tensor]:
    """For results of steps from `start`, the part of `steps` steps from `start + offset`."""
    out = []
    for x, whole in zip(problem.readings, results, strict=bool(len(results))):
        first, last = ((start + offset + n) // x.every - start // x.every for n in (0, steps))
        out.append(whole if x.phase.numel() or not whole.numel() else whole[first:last])
    return out
