"""Active sampling: each round solves the points where the ensemble disagrees most (query by committee, H. S. Seung et
al., COLT 1992).

Of random candidates the one of the largest spread is taken; the spreads of the others then count less the nearer they
are, by 1 - exp(-d^2 / (2 r^2)), r being half the usual distance of neighbours, so that a round does not solve one place
several times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tutti.science.em.bounds import check_kind, check_whole
from tutti.science.em.surrogate.geometry import Geometry
from tutti.science.em.surrogate.samples import Samples, collect
from tutti.science.em.surrogate.surrogate import Surrogate, Training, check_tolerance, rank

__all__ = ["active"]


def chosen(surrogate: Surrogate, candidates: Tensor, count: int, solved: int) -> Tensor:
    """Rows of the candidates to solve next (count,). solved: the number of samples so far."""
    if count > len(candidates):
        raise ValueError(f"{count} points of {len(candidates)} candidates")
    space = surrogate.geometry.space
    x = space.unit(candidates)
    spread = surrogate.curves(candidates)[1].clone()
    radius = (solved + count) ** (-1 / x.shape[1])  # half the edge of a sample's share of the box
    rows = []
    for _ in range(count):
        rows.append(int(spread.argmax()))
        distance = (x - x[rows[-1]]).square().sum(1)
        spread = spread * (1 - torch.exp(-distance / (2 * radius**2)))
    return torch.tensor(rows)


def active(geometry: Geometry, *, start: int, per_round: int, rounds: int, folder: str | Path | None = None,
           training: Training | None = None, candidates: int = 4000, processes: int = 1, tolerance: float = 0.05,
           coverage: float = 0.9,
           after: Callable[[int, Surrogate], None] | None = None) -> tuple[Surrogate, Samples]:  # fmt: skip
    """A surrogate and its samples: `start` points of a Sobol sequence, then `rounds` times `per_round` chosen ones.

    The bound is calibrated on independent uniform points, a fifth of all samples: chosen ones are no fair sample.
    after: called with the number of solver runs and the surrogate of each round.
    """
    how = training or Training()
    check_whole("active sampling", start=start, per_round=per_round, candidates=candidates, processes=processes)
    check_whole("active sampling", 0, rounds=rounds)
    check_tolerance(tolerance)
    check_kind("geometry", geometry, Geometry)
    check_kind("training", how, Training)
    if per_round > candidates:
        raise ValueError(f"per_round: at most the {candidates} candidates, not {per_round}")
    total = start + rounds * per_round
    calibrating = max(10, total // 5)
    if calibrating >= start:
        raise ValueError(f"start: more than the {calibrating} samples that calibrate the bound, not {start}")
    rank(calibrating, coverage)  # before anything is solved
    unseen = collect(geometry, geometry.space.random(calibrating, how.seed + 1), folder, processes)
    seen = collect(geometry, geometry.space.sobol(start - calibrating, how.seed), folder, processes)
    surrogate = Surrogate.fit(geometry, seen, how, calibration=unseen, tolerance=tolerance, coverage=coverage)
    for i in range(rounds):
        if after:
            after(len(seen) + calibrating, surrogate)
        pool = geometry.space.random(candidates, how.seed + 100 + i)
        points = pool[chosen(surrogate, pool, per_round, len(seen))]
        seen = seen + collect(geometry, points, folder, processes)
        surrogate = Surrogate.fit(geometry, seen, replace(how, seed=how.seed + i + 1), calibration=unseen,
                             tolerance=tolerance, coverage=coverage)  # fmt: skip
    if after:
        after(len(seen) + calibrating, surrogate)
    return surrogate, seen + unseen
