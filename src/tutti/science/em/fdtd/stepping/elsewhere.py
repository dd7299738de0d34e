"""The time loop on devices other than the CPU: in Triton where no gradients are asked for, else in plain PyTorch.

Gradients are those of autograd through segments that are recomputed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tutti.science.em.fdtd.excitation.sources import HARD, MAGNETIC, SOFT
from tutti.science.em.fdtd.problem import Problem, entries_of
from tutti.science.em.fdtd.stepping.march import results_of
from tutti.science.em.fdtd.stepping.reference import Reference


@cache
def triton_kernels() -> Any:
    """The module of kernels, or None where triton is not installed."""
    try:
        from tutti.science.em.fdtd.stepping import kernels_triton
    except ImportError:
        return None
    return kernels_triton


class Sources:
    """Entries of each kind by component, as indices of a field."""

    def __init__(self, problem: Problem):
        self.entries: list[tuple[int, int, Tensor, Tensor, Tensor]] = []
        for kind in (MAGNETIC, SOFT, HARD):
            for p, (at, place, column, scale) in entries_of(problem, kind).items():
                if kind == SOFT:
                    b = problem.b[p]
                    scale = scale * (b.flatten()[place] if b.numel() > 1 else b)
                self.entries.append((kind, p, at, scale, column))

    def add(self, state: list[Tensor], electric: bool, waves: Tensor) -> None:
        for kind, p, at, scale, column in self.entries:
            if (kind == MAGNETIC) == electric:
                continue
            values = scale * waves[column]
            if kind == HARD:
                state[p].view(-1).index_copy_(0, at, values)
            else:
                state[p].view(-1).index_add_(0, at, values)


def forward(problem: Problem, state: list[Tensor], waves: Tensor) -> list[Tensor]:
    """Advance `state` in place by as many steps as `waves` has rows, with Triton. Returns what is read."""
    kernels, sources = triton_kernels(), Sources(problem)
    results = results_of(problem, len(waves))
    where = [int(x.component[0]) for x in problem.readings]
    for step in range(len(waves)):
        for p in range(3):
            if problem.present[3 + p]:
                kernels.update(problem, state, 1, p)
        sources.add(state, False, waves[step])
        for p in range(3):
            if problem.present[p]:
                poles(problem, state, p)
        for p in range(3):
            if problem.present[p]:
                kernels.update(problem, state, 0, p)
                current(problem, state, p)
        sources.add(state, True, waves[step])
        for x, component, out in zip(problem.readings, where, results, strict=True):
            if (step + 1) % x.every:
                continue
            value = state[component].flatten(1)[:, x.place]
            if x.phase.numel():
                out += value[:, None, :, None] * x.phase[step][None, :, None, :]
            else:
                out[(step + 1) // x.every - 1] = value
    return results


def poles(problem: Problem, state: list[Tensor], p: int) -> None:
    """Advance J and P from E before the step."""
    for i, pole in enumerate(problem.poles):
        j, q = state[18 + 6 * i + p], state[21 + 6 * i + p]
        box = (slice(None), *(slice(x, y) for x, y in zip(pole.start, pole.stop, strict=True)))
        j.mul_(pole.keep).add_(pole.gain[p] * state[p][box]).sub_(q, alpha=pole.spring)
        q.add_(j, alpha=pole.dt)


def current(problem: Problem, state: list[Tensor], p: int) -> None:
    """E -= b J. E of walls stays zero, since J there is."""
    for i, pole in enumerate(problem.poles):
        box = tuple(slice(x, y) for x, y in zip(pole.start, pole.stop, strict=True))
        b = problem.b[p]
        state[p][(slice(None), *box)].sub_((b[box] if b.numel() > 1 else b) * state[18 + 6 * i + p])


def differentiable(problem: Problem, parameters: list[Tensor], waves: Tensor, state: list[Tensor],
                   length: int) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Results and the final state by the reference, recomputed in segments of `length` steps for gradients."""
    gains = parameters[6:]
    model = Reference(problem, parameters[3:6], parameters[:3], [gains[i : i + 3] for i in range(0, len(gains), 3)])
    parts: list[list[Tensor]] = [[] for _ in problem.readings]

    def segment(start: int, *state: Tensor) -> tuple[Tensor, ...]:
        own: list[list[Tensor]] = [[] for _ in problem.readings]
        now = list(state)
        for step in range(start, min(start + length, len(waves))):
            now = model.step(now, waves[step])
            model.read(now, own, step)
        counts.append([len(x) for x in own])
        return (*now, *(y for x in own for y in x))

    for start in range(0, len(waves), length):
        counts: list[list[int]] = []
        out = checkpoint(segment, start, *state, use_reentrant=False)
        assert out is not None
        state, rest = list(out[: len(state)]), list(out[len(state) :])
        for x, own, count in zip(problem.readings, parts, counts[0], strict=True):
            new, rest = rest[:count], rest[count:]
            own[:] = [own[0] + new[0]] if x.phase.numel() and own and new else [*own, *new]
    empty = results_of(problem, len(waves))
    pairs = zip(problem.readings, parts, empty, strict=True)
    return [(own[0] if x.phase.numel() else torch.stack(own)) if own else none for x, own, none in pairs], state
