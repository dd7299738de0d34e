"""One autograd.Function around the whole time loop, with checkpoints.

The forward pass copies the state at the start of each segment. The backward pass recomputes a segment from its copy,
which gives the same bits, stores the curl of each step, and transposes the segment. The last segment is stored in the
forward pass. With n steps in segments of length l,

    bytes = ceil(n / l) state + l curl + state (of the adjoint) + gradients,

least for l = sqrt(n state / curl). A single segment stores everything and recomputes nothing.

What is allocated and copied here takes one thread: PyTorch's would go on spinning, beside those of the time loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from tutti.hardware.threads import threads
from tutti.science.em.fdtd.observation.energy import Watch
from tutti.science.em.fdtd.problem import Problem, within
from tutti.science.em.fdtd.stepping import kernels
from tutti.science.em.fdtd.stepping.pieces import pieces, reports
from tutti.science.em.fdtd.stepping.slabs import Slab

ROOM = 256 * 2**20  # bytes of history that are stored without being asked: nothing is recomputed


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted: those of b and a of E, of the gains of poles, of the waves. a and gains come with
    b."""

    b: bool = False
    a: bool = False
    gains: bool = False
    waves: bool = False


def step_bytes(problem: Problem, needs: Needs) -> int:
    """The bytes of the history of one step."""
    if not needs.b:
        return 0
    arrays = sum(problem.present[:3]) * (1 + (needs.a or needs.gains))
    return arrays * problem.shots * prod(problem.box_shape) * problem.dtype.itemsize


def gradient_bytes(problem: Problem, needs: Needs) -> int:
    size = problem.dtype.itemsize
    of_box = sum(problem.present[:3]) * problem.shots * prod(problem.box_shape) * size
    gains = sum(g.numel() for pole in problem.poles for g in pole.gain) * problem.shots * size
    return of_box * (needs.b + needs.a) + gains * needs.gains


@dataclass(frozen=True)
class Schedule:
    """`length`: steps of a segment. bytes: size of checkpoints, history, adjoint state and gradients together."""

    steps: int
    length: int
    bytes: int

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(start, steps) of each."""
        return [(i, min(self.length, self.steps - i)) for i in range(0, self.steps, self.length)]


def schedule(problem: Problem, needs: Needs, steps: int, checkpoints: int | None = None,
             memory: float | None = None) -> Schedule:  # fmt: skip
    """How a gradient is taken. checkpoints: the most segments; of equal length but the last, so that there may be fewer
    (10 steps with 6 make 5). memory: most bytes; the longest segments that fit.

    Raises ValueError if no segments fit in `memory`.
    """
    state, each, rest = problem.state_bytes(), step_bytes(problem, needs), gradient_bytes(problem, needs)

    def total(length: int) -> int:
        count = ceil(steps / length)
        return (count if count > 1 else 0) * state + length * each + 2 * state + rest

    if checkpoints is not None and memory is not None:
        raise ValueError("either checkpoints or memory, not both")
    if checkpoints is not None:
        if not 1 <= checkpoints <= steps:
            raise ValueError(f"checkpoints: from 1 to the {steps} steps, not {checkpoints}")
        length = ceil(steps / checkpoints)
        return Schedule(steps, length, total(length))
    best = max(1, min(steps, round(sqrt(steps * state / max(each, 1)))))
    best = min((x for x in (best, steps)), key=total)
    if memory is None:
        length = steps if steps * each <= ROOM else best
        return Schedule(steps, length, total(length))
    if total(steps) <= memory:
        return Schedule(steps, steps, total(steps))
    least = min(range(1, steps + 1), key=total)
    if total(least) > memory:
        raise ValueError(f"a gradient of {steps} steps needs at least {total(least)} bytes, with {ceil(steps / least)} "
                         f"checkpoints; memory is {int(memory)}")  # fmt: skip
    length = max(x for x in range(1, steps + 1) if total(x) <= memory)
    return Schedule(steps, length, total(length))


def agreed(slab: Slab, needs: Needs, steps: int, checkpoints: int | None, memory: float | None) -> Schedule:
    """The schedule of all processes, whose segments are the shortest that one of them needs.

    Raises ValueError on all if no segments fit in the memory of one.
    """
    error: ValueError | None = None
    try:
        length = schedule(slab.problem, needs, steps, checkpoints, memory).length
    except ValueError as found:
        error, length = found, 0
    length = slab.least(length)
    if not length:
        raise error or ValueError(f"a gradient of {steps} steps does not fit in the memory of another process")
    return schedule(slab.problem, needs, steps, ceil(steps / length))


def results_of(problem: Problem, steps: int) -> list[Tensor]:
    """Zeros for what is read."""
    out = []
    for x in problem.readings:
        fourier = (problem.shots, x.phase.shape[1], len(x.place), 2) if x.phase.numel() else ()
        shape = fourier or (steps // x.every, problem.shots, len(x.place))
        out.append(torch.zeros(shape, dtype=problem.dtype, device=problem.device))
    return out


def loops(what: Problem | Slab) -> tuple[Problem, Problem, Callable[..., None], Callable[..., Tensor | None]]:
    """Return the problem of the loop, the problem of its transpose, the loop and the transpose, for a whole problem
    or for a slab with its halos."""
    if isinstance(what, Slab):
        return what.problem, what.transposed, what.forward, what.adjoint
    return what, what, partial(kernels.forward, what), partial(kernels.adjoint, what)


class March(torch.autograd.Function):
    """(problem or slab, watch, needs, schedule, state, waves, b of E, a of E, gains) -> results.

    `state` becomes the final one. Of a slab, `state` is that of its planes; all else is of the whole. First-order
    gradients only, taken once; RuntimeError otherwise.
    """

    @staticmethod
    def forward(ctx: Any, what: Problem | Slab, watch: Watch | None, needs: Needs, plan: Schedule, state: list[Tensor],
                waves: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
        problem, _, advance, _ = loops(what)
        whole = what.whole if isinstance(what, Slab) else what
        if watch:
            advance = partial(watch.advance, advance)
        results, saved, history = results_of(problem, plan.steps), [], []
        segments = plan.segments
        tracked = needs.b or needs.waves
        with reports(whole, plan.steps, "FDTD") as tell:
            for start, steps in segments:
                if tracked and len(segments) > 1:
                    saved.append(copied(state))
                if needs.b and start == segments[-1][0]:
                    history = empty_history(problem, needs, plan.length)
                for i, n in pieces(whole, start, steps):
                    advance(state, waves, within(problem, results, 0, i, n), i, n, steps_of(history, i - start, n))
                    tell(i + n)
        ctx.saved_run = (what, needs, plan, saved, history, waves.detach()) if tracked else None
        ctx.many = len(parameters)
        return tuple(what.gathered(results) if isinstance(what, Slab) else results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("runs have first derivatives only: take gradients without create_graph")
        if ctx.saved_run is None:
            raise RuntimeError("gradients of this run were taken before, which freed its history: add losses up before "
                               "`backward`, or run again")  # fmt: skip
        what, needs, plan, saved, history, waves = ctx.saved_run
        problem, seen, advance, retreat = loops(what)
        slab = what if isinstance(what, Slab) else None
        whole = slab.whole if slab else problem
        cotangents = tuple(slab.seen(cotangents)) if slab else tuple(x.contiguous() for x in cotangents)
        state, gradients = problem.state(), empty_gradients(problem, needs)
        of_waves = torch.zeros_like(waves) if needs.waves else None
        segments, columns = plan.segments, waves.shape[1] if needs.waves else 0
        with reports(whole, plan.steps, "FDTD, gradient") as tell:
            for number in reversed(range(len(segments))):
                start, steps = segments[number]
                parts = pieces(whole, start, steps)
                if needs.b and number < len(segments) - 1:
                    again = copied(saved[number])
                    for i, n in parts:
                        advance(again, waves, (), i, n, steps_of(history, i - start, n))
                    del again  # its memory counts
                for i, n in reversed(parts):
                    part = retreat(state, within(seen, cotangents, 0, i, n), i, n, steps_of(history, i - start, n),
                                   gradients, columns)  # fmt: skip
                    if of_waves is not None and part is not None:
                        of_waves[i : i + n] = part
                    tell(plan.steps - i)
        ctx.saved_run = None
        own = whole_gradients(problem, gradients, ctx.many)
        if slab and of_waves is not None:
            slab.summed([of_waves])
        return (None, None, None, None, None, of_waves, *(slab.whole_gradients(own) if slab else own))


def steps_of(history: Sequence[Tensor], offset: int, steps: int) -> list[Tensor]:
    """The steps of the history of a segment. Components without a history stay empty."""
    return [x[offset : offset + steps] for x in history]


@threads(1)
def copied(state: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in state]


@threads(1)
def empty_history(problem: Problem, needs: Needs, steps: int) -> list[Tensor]:
    none = torch.empty(0, dtype=problem.dtype, device=problem.device)

    def make(here: bool) -> Tensor:
        shape = (steps, problem.shots, *problem.box_shape)
        return torch.zeros(shape, dtype=problem.dtype, device=problem.device) if here else none

    return [*(make(x) for x in problem.present[:3]),
            *(make(x and (needs.a or needs.gains)) for x in problem.present[:3])]  # fmt: skip


def empty_gradients(problem: Problem, needs: Needs) -> list[Tensor]:
    box, none = problem.box_shape, torch.empty(0, dtype=problem.dtype, device=problem.device)

    def make(here: bool, shape: Sequence[int]) -> Tensor:
        return torch.zeros((problem.shots, *shape), dtype=problem.dtype, device=problem.device) if here else none

    out = [make(x and needs.b, box) for x in problem.present[:3]]
    out += [make(x and needs.a, box) for x in problem.present[:3]]
    return out + [make(bool(g.numel()) and needs.gains, pole.shape) for pole in problem.poles for g in pole.gain]


def whole_gradients(problem: Problem, gradients: Sequence[Tensor], many: int) -> list[Tensor | None]:
    """The gradients of b and a over the whole array, summed over shots; None where there is none."""
    out: list[Tensor | None] = []
    box = tuple(slice(x, y) for x, y in zip(problem.box[:3], problem.box[3:], strict=True))
    for x in gradients[:6]:
        if not x.numel():
            out.append(None)
            continue
        whole = torch.zeros(problem.array, dtype=problem.dtype, device=problem.device)
        whole[box] = x.sum(0)
        out.append(whole)
    out += [x.sum(0) if x.numel() else None for x in gradients[6:]]
    return out[:many]
