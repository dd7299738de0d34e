"""The same time loop in plain PyTorch: what the kernels are tested against, and what runs on other devices.

A step makes new tensors, so that autograd can go through it. Additions are in the order of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from tutti.science.em.fdtd.excitation.sources import HARD, MAGNETIC, SOFT
from tutti.science.em.fdtd.problem import Problem, direction, entries_of, source, updated


def mask(problem: Problem, component: int) -> Tensor:
    """1 where a component changes."""
    place = torch.arange(prod(problem.array), device=problem.device)
    return updated(problem.array, component, place).to(problem.dtype).view(problem.array)


def difference(x: Tensor, d: int, h: int) -> Tensor:
    """Backward for E, forward for H, along an axis of the kernels; zero at the end where a neighbour is missing."""
    n = x.shape[d + 1]
    y = x.narrow(d + 1, 1, n - 1) - x.narrow(d + 1, 0, n - 1)
    around = [0, 0] * (3 - d - 1) + ([0, 1] if h else [1, 0])
    return pad(y, around)


def along(x: Tensor, d: int) -> Tensor:
    shape = [1, 1, 1]
    shape[d] = len(x)
    return x.reshape(shape)


class Reference:
    """Steps of a problem. `a`, `b`: coefficients of E0, E1 and E2. gains: gains of poles. By default all are those of
    the problem."""

    def __init__(self, problem: Problem, a: Sequence[Tensor] = (), b: Sequence[Tensor] = (),
                 gains: Sequence[Sequence[Tensor]] = ()):  # fmt: skip
        self.problem = problem
        self.a = [*(a or problem.a[:3]), *problem.a[3:]]
        self.b = [*(b or problem.b[:3]), *problem.b[3:]]
        self.gains = gains or [pole.gain for pole in problem.poles]
        none = torch.empty(0, dtype=problem.dtype, device=problem.device)
        self.masks = [mask(problem, i) if here else none for i, here in enumerate(problem.present)]
        self.entries = {kind: entries_of(problem, kind) for kind in (SOFT, HARD, MAGNETIC)}
        self.rows = [[(x.at >= 0).nonzero().flatten().to(problem.device) for x in side] for side in problem.lines]

    def curl(self, state: list[Tensor], h: int, p: int) -> Tensor:
        """Advances psi in `state`."""
        problem, total = self.problem, None
        for t in (0, 1):
            other = source(h, p, t)
            if not problem.present[3 * (1 - h) + other]:
                continue
            d = direction(h, p, t)
            w, decay, drive, _ = problem.packed[12 * h + 4 * d : 12 * h + 4 * d + 4]
            y = (-1 if t else 1) * along(w, d) * difference(state[3 * (1 - h) + other], d, h) * self.masks[3 * h + p]
            total = y if total is None else total + y
            rows, at = self.rows[h][d], 6 + 6 * h + 2 * p + t
            if len(rows):
                state[at] = along(decay, d) * state[at] + along(drive, d) * y.index_select(d + 1, rows)
                total = total.index_add(d + 1, rows, state[at])
        assert total is not None
        return total

    def add(self, field: Tensor, kind: int, p: int, waves: Tensor, b: Tensor | None) -> Tensor:
        """`field` with the source entries of a kind."""
        if p not in self.entries[kind]:
            return field
        at, place, column, amount = self.entries[kind][p]
        values = amount * waves[column]
        if kind == HARD:
            return field.flatten().index_put((at,), values).reshape(field.shape)
        if b is not None:
            values = values * (b.flatten()[place] if b.numel() > 1 else b)
        return field.flatten().index_put((at,), values, accumulate=True).reshape(field.shape)

    def step(self, state: Sequence[Tensor], waves: Tensor) -> list[Tensor]:
        """The state after a step. waves: (columns)."""
        problem, state = self.problem, list(state)
        for p in range(3):
            if problem.present[3 + p]:
                cur = self.curl(state, 1, p)
                decayed = state[3 + p] if not self.a[3 + p].numel() else self.a[3 + p] * state[3 + p]
                state[3 + p] = self.add(decayed + self.b[3 + p] * cur, MAGNETIC, 3 + p, waves, None)
        for p in range(3):
            if not problem.present[p]:
                continue
            cur = self.curl(state, 0, p)
            for i, pole in enumerate(problem.poles):
                gain = self.gains[i][p]
                j, q = 18 + 6 * i + p, 21 + 6 * i + p
                box = (slice(None), *(slice(x, y) for x, y in zip(pole.start, pole.stop, strict=True)))
                m = self.masks[p]
                assert m is not None
                state[j] = pole.keep * state[j] + gain * state[p][box] * m[box[1:]] - pole.spring * state[q]
                state[q] = state[q] + pole.dt * state[j]
                around = [x for d in (2, 1, 0) for x in (pole.start[d], problem.array[d] - pole.stop[d])]
                cur = cur - pad(state[j], around)
            decayed = state[p] if not self.a[p].numel() else self.a[p] * state[p]
            m = self.masks[p]
            field = self.add(decayed + self.b[p] * (cur * m), SOFT, p, waves, self.b[p])
            state[p] = self.add(field, HARD, p, waves, None)
        return state

    def read(self, state: Sequence[Tensor], results: list[list[Tensor]], step: int) -> None:
        """Append what is read after a step: numbers, or terms of the Fourier sums."""
        for reading, out in zip(self.problem.readings, results, strict=True):
            if (step + 1) % reading.every:
                continue
            whole = [state[i].flatten(1) for i in range(6) if state[i].numel()]
            numbers = [i for i in range(6) if state[i].numel()]
            which = numbers.index(int(reading.component[0]))
            value = whole[which][:, reading.place]
            if reading.phase.numel():
                term = value[:, None, :, None] * reading.phase[step][None, :, None, :]
                out[:] = [out[0] + term] if out else [term]
            else:
                out.append(value)

    def run(self, waves: Tensor, state: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Results by reading, as the kernels return them, and the state at the end."""
        state = list(state or self.problem.state())
        results: list[list[Tensor]] = [[] for _ in self.problem.readings]
        for step in range(len(waves)):
            state = self.step(state, waves[step])
            self.read(state, results, step)
        pairs = zip(self.problem.readings, results, strict=True)
        return [out[0] if x.phase.numel() else torch.stack(out) for x, out in pairs], state
