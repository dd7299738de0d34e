"""Topology optimization by the adjoint: a splitter from one dielectric waveguide to two, in two dimensions (TM).

The density of a design region is smoothed by a disc, projected by tanh, and gives eps_r between 1 and 4. The loss is
minus the energy that arrives in the two arms. The projection sharpens while it goes on.

    python runs/waveguide_splitter.py          # 60 steps of Adam
    python runs/waveguide_splitter.py --quick  # 3 steps
"""

from __future__ import annotations

from typing import Any

import torch
from support import Results, image, options, picture
from torch import Tensor

from tutti.science.em.fdtd import CPML, Current, Grid, Probe, Simulation, pulse
from tutti.science.em.fdtd.grid import C0

CELL, WAVELENGTH, STEPS = 0.05e-6, 1.55e-6, 500
SHAPE, REGION, WIDTH, ARMS = (120, 100), (slice(40, 80), slice(25, 75)), 5, (34, 66)
RADIUS, ETA = 2.5, 0.5


def guides() -> Tensor:
    """eps_r of cells without the design."""
    eps = torch.ones(SHAPE)
    eps[:40, 50 - WIDTH : 50 + WIDTH] = 4.0
    for arm in ARMS:
        eps[80:, arm - WIDTH : arm + WIDTH] = 4.0
    return eps


def permittivity(design: Tensor, sharpness: float) -> Tensor:
    """eps_r of cells from a design (40, 50) of any numbers."""
    at = torch.arange(-3, 4).float()
    disc = (RADIUS - (at[:, None] ** 2 + at[None] ** 2).sqrt()).clamp(min=0)
    x = torch.sigmoid(design)[None, None]
    x = torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, (3, 3, 3, 3), mode="replicate"), (disc / disc.sum())[None, None]
    )
    low, high = torch.tanh(torch.tensor(sharpness * ETA)), torch.tanh(torch.tensor(sharpness * (1 - ETA)))
    x = (low + torch.tanh(sharpness * (x[0, 0] - ETA))) / (low + high)
    eps = guides()
    return eps.index_put((torch.arange(40, 80)[:, None], torch.arange(25, 75)[None]), 1 + 3 * x)


def scene() -> Simulation:
    frequency = C0 / WAVELENGTH
    source = Current("Ez", (16, slice(50 - WIDTH + 1, 50 + WIDTH)), pulse(frequency, 0.1 * frequency), 1e7)
    arms = [(104, y) for arm in ARMS for y in range(arm - WIDTH, arm + WIDTH + 1)]
    return Simulation(Grid(SHAPE, CELL), CPML(10), [source], [Probe("arms", "Ez", arms)], design=REGION)


def optimize(count: int) -> dict[str, Any]:
    simulation, design = scene(), torch.zeros(40, 50, requires_grad=True)
    with torch.no_grad():
        unit = float(simulation.run(permittivity(design, 2.0), STEPS)["arms"].square().sum())
    optimizer, gains = torch.optim.Adam([design], 0.2), []
    for i in range(count):
        optimizer.zero_grad()
        gain = simulation.run(permittivity(design, 2 + 10 * i / count), STEPS)["arms"].square().sum() / unit
        (-gain).backward()
        optimizer.step()
        gains.append(float(gain.detach()))
    return {"gains": gains, "eps_r": permittivity(design.detach(), 12.0).tolist()}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    run = options(__doc__, "out/waveguide_splitter", argv, training=False)
    results = Results(run.out)
    found = results.get("splitter", lambda: optimize(3 if run.quick else 60))

    def gains(axes: Any) -> None:
        axes.plot(found["gains"])
        axes.set(xlabel="step of Adam", ylabel="energy in the arms, relative to a uniform design")

    length = (SHAPE[0] * CELL * 1e6, SHAPE[1] * CELL * 1e6)
    picture(run.out, {"design": image(found["eps_r"], length, "um", "eps_r"), "energy in the arms": gains},
            "quick run: 3 of 60 steps" if run.quick else "")  # fmt: skip
    print(f"energy in the arms: {found['gains'][0]:.3f} to {found['gains'][-1]:.3f} of a uniform design's")
    return results.values


if __name__ == "__main__":
    main()
