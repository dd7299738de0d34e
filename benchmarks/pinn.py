"""Physics-informed networks against an exact solution and against finite differences in the time domain.

    python benchmarks/pinn.py [--quick]

Errors are relative L2 norms. The published ones are of MindElec: Helmholtz with k = 2, and a point source with Ex, Ey
and Hz after 6000 epochs of 8192 points on an accelerator, in a setting of its own; they are targets, no comparison of
equal problems. One thread.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import harness
from tutti.science.em.pinn.helmholtz import Helmholtz
from tutti.science.em.pinn.maxwell import PointSource

PUBLISHED = {"helmholtz": 0.01733, "Ex": 0.0356, "Ey": 0.0343, "Hz": 0.0230}


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    helmholtz = Helmholtz()
    error = helmholtz.error(helmholtz.fit(300 if quick else 1500))
    result: dict[str, Any] = {"published": PUBLISHED, "helmholtz": error, "seconds": time.perf_counter() - begin}
    harness.say(f"Helmholtz: {error:.5f}")
    problem, begin = PointSource(), time.perf_counter()
    steps = 300 if quick else 6000
    model = problem.fit(steps, 512, after=lambda i, loss: harness.say(f"step {i}: loss {loss:.3f}"))
    seconds = time.perf_counter() - begin
    errors = problem.errors(model, problem.reference(50 if quick else 100))
    return result | {"point source": errors, "steps": steps, "points": 512, "seconds_point_source": seconds}


if __name__ == "__main__":
    harness.main(run, __file__)
