"""One simulation among the processes of a `torch.distributed` group: slabs of planes of axis 0 with deep halos.

A process owns the planes [low, high) and computes `halo` planes more on each side. A step carries numbers by one plane,
forward as well as in its transpose. So each process advances `halo` steps alone, in the same loop as one process,
and then takes the planes of its halos (fields, psi, J and P) from its neighbours, who own them. One message to each
neighbour in `halo` steps, for 2 halo planes computed twice: messages of a Gloo group cost as much as many planes,
and neither time loop has to stop in the middle of a step. Both loops do the same operations for a plane in whatever
slab it lies: results, and gradients of materials, have the same bits as those of one process.

The transposed loop is divided like the forward one: halos of dL/dE, dL/dH and dL/dpsi are taken from neighbours and
the gradients of the results within them are known to all. Of what it adds up, each process contributes its own planes.

Planes of a process, a = max(0, low - halo) and b = min(planes, high + halo + 1):

    a ... low ... high ... high + halo, one more that is only read

Neither loop updates the last plane of its array. Forward, tangential E of plane a stays as it is, as on a wall: no
plane before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.science.em.fdtd.media.cpml import Lines
from tutti.science.em.fdtd.problem import PoleArrays, Problem, Reading, direction, within
from tutti.science.em.fdtd.stepping import kernels


def widths(planes: int, count: int, halo: int) -> tuple[int, ...]:
    """Planes of each of `count` slabs, so that all compute equally many with their halos: those at the ends own more.

    Raises ValueError if a slab would own fewer planes than a halo has.
    """
    if count == 1:
        return (planes,)
    each, more = divmod(planes + 2 * halo * (count - 1), count)
    computed = [each + (i < more) for i in range(count)]
    own = [n - halo * (1 if i in (0, count - 1) else 2) for i, n in enumerate(computed)]
    if min(own) < halo:
        each, more = divmod(planes, count)
        own = [each + (i < more) for i in range(count)]
    if min(own) < halo:
        raise ValueError(f"{planes} planes are too few for {count} slabs with halos of {halo}: use at most "
                         f"{max(planes // halo, 1)} processes, or a smaller halo")  # fmt: skip
    return tuple(own)


def divided(planes: int, count: int, halo: int, owned: Sequence[int] = ()) -> tuple[int, ...]:
    """`owned`, or by default `widths`. Raises ValueError unless these are slabs of the planes."""
    if halo < 1:
        raise ValueError(f"halo: at least one plane, not {halo}")
    owned = tuple(owned) or widths(planes, count, halo)
    if len(owned) != count or sum(owned) != planes or (count > 1 and min(owned) < halo):
        raise ValueError(f"slabs: {count} numbers of planes, each at least the {halo} of a halo, whose sum is "
                         f"{planes}, not {owned}")  # fmt: skip
    return owned


def part_of_lines(x: Lines, first: int, last: int) -> Lines:
    """The places [first, last) of an axis."""
    at = x.at[first:last]
    rows = at[at >= 0]
    begin, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return Lines(x.w[first:last], x.decay[begin:end], x.drive[begin:end], torch.where(at >= 0, at - begin, -1), x.ends)


def part_of_table(x: Sequence[Tensor], shots: int, array: tuple[int, int, int], first: int, last: int,
                  counted: range) -> list[Tensor]:  # fmt: skip
    """Source entries in planes [first, last); those outside of `counted` with amount 0."""
    starts, component, place, column, amount = x
    planes = place // (array[1] * array[2])
    here = (planes >= first) & (planes < last)
    counts = (starts[1:] - starts[:-1]).view(shots, array[0])[:, first:last].flatten()
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    amount = torch.where((planes >= counted.start) & (planes < counted.stop), amount, 0)
    return [begin, component[here], place[here] - first * array[1] * array[2], column[here], amount[here].contiguous()]


def part_of_reading(x: Reading, stride: int, first: int, last: int, low: int, high: int) -> tuple[Reading, slice]:
    """Places in planes [low, high), for an array of the planes [first, last); and which of all places they are."""
    begin, end = int(x.first[low]), int(x.first[high])
    starts = x.first[first : last + 1].clamp(begin, end) - begin
    return replace(x, first=starts, component=x.component[begin:end].contiguous(),
                   place=x.place[begin:end] - first * stride), slice(begin, end)  # fmt: skip


def part_of_pole(x: PoleArrays, first: int, last: int) -> PoleArrays:
    begin, end = max(x.start[0], first), min(x.stop[0], last)
    if begin >= end:
        return replace(x, start=(0, 0, 0), stop=(0, 0, 0), gain=[g[:0] if g.numel() else g for g in x.gain])
    gain = [g[begin - x.start[0] : end - x.start[0]] if g.numel() else g for g in x.gain]
    return replace(x, start=(begin - first, *x.start[1:]), stop=(end - first, *x.stop[1:]), gain=gain)


class Slab:
    """What a process owns of a problem. `sent`: numbers of messages and of their bytes so far.

    `problem`: problem of the forward loop, which reads the process's own planes. `transposed`: problem of the adjoint,
    which reads the halos as well, and gives waves the gradients of sources in the process's own planes.
    """

    def __init__(self, whole: Problem, group: dist.ProcessGroup, halo: int, owned: Sequence[int] = ()):
        self.whole, self.group, self.halo, self.sent = whole, group, halo, [0, 0]
        self.rank, count = dist.get_rank(group), dist.get_world_size(group)
        planes = whole.array[0]
        edges = [0, *accumulate(divided(planes, count, halo, owned))]
        self.low, self.high = edges[self.rank], edges[self.rank + 1]
        self.first, self.last = max(0, self.low - halo), min(planes, self.high + halo + 1)
        self.problem, self.read = self.part(self.low, self.high, forward=True)
        seen = min(self.high + halo, planes)
        self.transposed, self.seen_places = self.part(self.first, seen, forward=False)

    def part(self, low: int, high: int, forward: bool) -> tuple[Problem, list[slice]]:
        """The problem on the planes of this process, which reads [low, high); and which readings those are."""
        x, first, last = self.whole, self.first, self.last
        stride = x.array[1] * x.array[2]
        counted = range(first, last) if forward else range(self.low, self.high)
        readings = [part_of_reading(r, stride, first, last, low, high) for r in x.readings]
        sources = [part_of_table(x.sources[i : i + 5], x.shots, x.array, first, last, counted) for i in (0, 5, 10)]
        box = [
            min(max(x.box[0], first), last) - first,
            *x.box[1:3],
            min(max(x.box[3], first), last) - first,
            *x.box[4:],
        ]
        wall = (0 if forward or first == 0 else -1, last - first - 1)
        return Problem(
            (last - first, *x.array[1:]), x.flat, x.present, x.shots, x.dtype, x.device,
            [[part_of_lines(side[0], first, last), *side[1:]] for side in x.lines],
            [a[first:last] if a.numel() > 1 else a for a in x.a], [b[first:last] if b.numel() > 1 else b for b in x.b],
            [part_of_pole(p, first, last) for p in x.poles], [t for table in sources for t in table],
            [r for r, _ in readings], wall, tuple(box),
        ), [s for _, s in readings]  # fmt: skip

    def rows(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """(number of a tensor of the state, first row, last row) of planes [low, high) of the whole."""
        low, high, x, out = low - self.first, high - self.first, self.problem, []
        for number in range(18 + 6 * len(x.poles)):
            begin, end = low, high
            if 6 <= number < 18:
                h, p, t = (number - 6) // 6, (number - 6) // 2 % 3, number % 2
                if direction(h, p, t) == 0:
                    at = x.lines[h][0].at
                    begin, end = int((at[:low] >= 0).sum()), int((at[:high] >= 0).sum())
            elif number >= 18:
                pole = x.poles[(number - 18) // 6]
                begin, end = (min(max(y, pole.start[0]), pole.stop[0]) - pole.start[0] for y in (low, high))
            if end > begin:
                out.append((number, begin, end))
        return out

    @cached_property
    def sides(self) -> list[tuple[int, list[tuple[int, int, int]], list[tuple[int, int, int]]]]:
        """(neighbour, rows to send, rows to receive)."""
        out = []
        if self.rank > 0:
            out.append((self.rank - 1, self.rows(self.low, self.low + self.halo), self.rows(self.first, self.low)))
        if self.rank < dist.get_world_size(self.group) - 1:
            out.append((self.rank + 1, self.rows(self.high - self.halo, self.high),
                        self.rows(self.high, self.high + self.halo)))  # fmt: skip
        return out

    def exchange(self, state: Sequence[Tensor]) -> None:
        """Take the halos of a state from the neighbours."""
        work, arriving = [], []
        for neighbour, send, receive in self.sides:
            peer = dist.get_global_rank(self.group, neighbour)
            parts = [state[i][:, a:b].flatten() for i, a, b in send if state[i].numel()]
            message = torch.cat(parts)
            views = [state[i][:, a:b] for i, a, b in receive if state[i].numel()]
            buffer = message.new_empty(sum(x.numel() for x in views))
            work += [dist.isend(message, peer, self.group), dist.irecv(buffer, peer, self.group)]
            arriving.append((buffer, views, message))
            self.sent[0] += 1
            self.sent[1] += message.nbytes
        for x in work:
            assert x is not None
            x.wait()
        for buffer, views, _ in arriving:
            for view, x in zip(views, buffer.split([v.numel() for v in views]), strict=True):
                view.copy_(x.view_as(view))

    def chunks(self, steps: int) -> list[tuple[int, int]]:
        """(offset, steps) between exchanges."""
        return [(i, min(self.halo, steps - i)) for i in range(0, steps, self.halo)]

    def forward(self, state: Sequence[Tensor], waves: Tensor, results: Sequence[Tensor], start: int, steps: int,
                history: Sequence[Tensor] = ()) -> None:  # fmt: skip
        """As `kernels.forward`, of own planes."""
        for offset, n in self.chunks(steps):
            self.exchange(state)
            kernels.forward(self.problem, state, waves, within(self.problem, results, start, offset, n),
                            start + offset, n, [x[offset : offset + n] for x in history])  # fmt: skip

    def adjoint(self, state: Sequence[Tensor], cotangents: Sequence[Tensor], start: int, steps: int,
                history: Sequence[Tensor], gradients: Sequence[Tensor], columns: int) -> Tensor | None:  # fmt: skip
        """As `kernels.adjoint`; cotangents: from `seen`."""
        parts = []
        for offset, n in reversed(self.chunks(steps)):
            self.exchange(state)
            part = kernels.adjoint(self.transposed, state, within(self.transposed, cotangents, start, offset, n),
                                   start + offset, n, [x[offset : offset + n] for x in history], gradients,
                                   columns)  # fmt: skip
            parts.append(part)
        return torch.cat(parts[::-1]) if columns else None

    def seen(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """The parts of the gradients of all results that own planes and halos need."""
        return [g[:, :, s].contiguous() for g, s in zip(cotangents, self.seen_places, strict=True)]

    def gathered(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The results of all processes, from those of each."""
        out = []
        for x, part, r in zip(results, self.read, self.whole.readings, strict=True):
            y = x.new_zeros(*x.shape[:2], len(r.place), *x.shape[3:])
            y[:, :, part] = x
            out.append(y)
        return self.summed(out)

    def whole_gradients(self, own: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the parameters of the whole, from those of `problem` on each process."""
        keep = slice(self.low - self.first, self.high - self.first)
        out: list[Tensor | None] = []
        for i, x in enumerate(own):
            if x is None:
                out.append(None)
            elif i < 6:
                y = x.new_zeros(self.whole.array)
                y[self.low : self.high] = x[keep]
                out.append(y)
            else:
                mine, pole = self.problem.poles[(i - 6) // 3], self.whole.poles[(i - 6) // 3]
                y = x.new_zeros(pole.shape)
                begin, end = max(pole.start[0], self.low), min(pole.stop[0], self.high)
                if begin < end:
                    a = begin - self.first - mine.start[0]
                    y[begin - pole.start[0] : end - pole.start[0]] = x[a : a + end - begin]
                out.append(y)
        self.summed([x for x in out if x is not None])
        return out

    def summed(self, parts: list[Tensor]) -> list[Tensor]:
        """In place over processes, of tensors to which each adds other places: exact."""
        for x in parts:
            dist.all_reduce(x, group=self.group)
        return parts

    def least(self, number: int) -> int:
        x = torch.tensor([number])
        dist.all_reduce(x, dist.ReduceOp.MIN, group=self.group)
        return int(x)
