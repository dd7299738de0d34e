"""The time loop and its transpose in C++ (yee.h, forward.cpp, adjoint.cpp), compiled at first use.

| argument | |
|---|---|
| state | fields E0 E1 E2 H0 H1 H2, psi of E then H by component and term, J and P of poles by component |
| waves | (steps, columns) |
| results | by reading: (times, shots, places), or (shots, frequencies, places, 2) of a Fourier sum |
| history | by component of E (steps, shots, *box): the curl minus currents, then E before the step; or [] |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti import compat
from tutti.science.em.fdtd.problem import Problem

FILES = ("yee.h", "forward.cpp", "adjoint.cpp")


@cache
def operators(dtype: torch.dtype) -> tuple[Any, Any]:
    """The time loop and its transpose."""
    real = "double" if dtype == torch.float64 else "float"
    source = "".join(Path(__file__).with_name(name).read_text() for name in FILES)
    library = compat.compile_operators(f"#define REAL {real}\n{source}")
    return getattr(library, f"fdtd_forward_{real}"), getattr(library, f"fdtd_adjoint_{real}")


def arguments(problem: Problem, state: Sequence[Tensor]) -> tuple[Any, ...]:
    """What both operators begin with."""
    fields, poles = list(state[:18]), list(state[18:])
    ends = [x for h in (0, 1) for x in problem.lines[h][2].ends]
    ints = [*problem.array, problem.shots, int(problem.flat), *problem.wall, *ends]
    reals, of_poles = [], []
    for i, pole in enumerate(problem.poles):
        ints += [*pole.start, *pole.stop]
        reals += [pole.keep, pole.spring, pole.dt]
        of_poles += [*pole.gain, *poles[6 * i : 6 * i + 6]]
    coefficients = [*problem.a[:3], *problem.b[:3], *problem.a[3:], *problem.b[3:]]
    return fields, coefficients, problem.packed, of_poles, ints, reals, problem.sources


def read(problem: Problem, start: int, steps: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
    groups, phases, every = [], [], []
    for x in problem.readings:
        groups += [x.first, x.component, x.place]
        phases.append(x.phase[start : start + steps].contiguous() if x.phase.numel() else x.phase)
        every.append(x.every)
    return groups, phases, every


def forward(problem: Problem, state: Sequence[Tensor], waves: Tensor, results: Sequence[Tensor], start: int, steps: int,
            history: Sequence[Tensor] = ()) -> None:  # fmt: skip
    """Advance `state` in place by `steps`, from step `start`. Without results nothing is read."""
    groups, phases, every = read(problem, start, steps) if results else ([], [], [])
    loop, _ = operators(problem.dtype)
    loop(*arguments(problem, state), waves[start : start + steps].contiguous(), groups, list(results), phases, every,
         start, steps, list(history), list(problem.box) if history else [0] * 6)  # fmt: skip


def adjoint(problem: Problem, state: Sequence[Tensor], cotangents: Sequence[Tensor], start: int, steps: int,
            history: Sequence[Tensor], gradients: Sequence[Tensor], columns: int) -> Tensor | None:  # fmt: skip
    """Transpose `forward`: `state` holds dL/d state and is changed in place; gradients are added to.

    cotangents: gradients of the results, empty for none. gradients: gradients of b and a of E (shots, *box), and of the
    gains of poles (shots, *box of the pole), empty if not needed. columns: number of columns of the waves, 0 if their
    gradient is not needed.
    Returns the gradient of the waves (steps, columns).
    """
    groups, phases, every = read(problem, start, steps)
    threads = max(torch.get_num_threads(), 1)
    shape = (threads, steps, columns) if columns else (0,)
    of_waves = torch.zeros(shape, dtype=problem.dtype)
    _, loop = operators(problem.dtype)
    loop(*arguments(problem, state), groups, list(cotangents), phases, every, start, steps, list(history),
         list(problem.box) if history else [0] * 6, list(gradients), of_waves)  # fmt: skip
    return of_waves.sum(0) if columns else None
