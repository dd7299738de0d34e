"""FDTD on a GPU: Mcell-steps/s of the Triton updates in 3-D and 2-D, float32, against plain PyTorch there.

The bytes of a step: E and H read and written, b of E, and E and H of the other update once more: 27 numbers a cell in
3-D. `fraction` is that traffic over the bandwidth of `torch.add` on large tensors.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import harness
from tutti.science.em.fdtd import CPML, Current, Grid, Simulation, gaussian_up_to
from tutti.science.em.fdtd.stepping import elsewhere
from tutti.science.em.fdtd.stepping.reference import Reference


def seconds(run: Any) -> float:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def bandwidth() -> float:
    x, y = torch.zeros(2**27, device="cuda"), torch.ones(2**27, device="cuda")
    return 3 * 4 * x.numel() / seconds(lambda: torch.add(x, y, out=x))


def case(shape: tuple[int, ...], layers: int, steps: int) -> dict[str, float]:
    middle = tuple(n // 2 for n in shape)
    simulation = Simulation(Grid(shape, 0.01), CPML(layers) if layers else None,
                            [Current("Ez", middle, gaussian_up_to(1e9))], device="cuda")  # fmt: skip
    eps = 1 + torch.rand(shape, device="cuda")
    problem, waves, _, _ = simulation.prepare(eps, steps, None, 1.0, None, (), None)
    state, cells = problem.state(), simulation.grid.cells
    ours = seconds(lambda: elsewhere.forward(problem, state, waves)) / steps
    model = Reference(problem)
    plain = seconds(lambda: model.run(waves[:5])) / 5
    return {"Mcells_per_s": cells / ours / 1e6, "plain_Mcells_per_s": cells / plain / 1e6, "times": plain / ours}


def run(quick: bool) -> dict[str, Any]:
    sizes = [(128, 128, 128)] if quick else [(128, 128, 128), (256, 256, 256), (400, 400, 400)]
    out: dict[str, Any] = {"bytes_per_second": bandwidth(), "cases": {}}
    for shape in [*sizes, (2048, 2048)]:
        for layers in (0, 10):
            name = f"{'x'.join(map(str, shape))}, {layers or 'no'} layers"
            out["cases"][name] = figures = case(shape, layers, 100)
            if len(shape) == 3:
                figures["fraction"] = figures["Mcells_per_s"] * 1e6 * 27 * 4 / out["bytes_per_second"]
            harness.say(f"{name}: {figures}")
    return out


if __name__ == "__main__":
    harness.main(run, __file__)
