"""The microstrip low-pass filter of D. M. Sheen et al., IEEE Trans. Microw. Theory Tech. 38, 849 (1990), figure 6.

A substrate of eps_r 2.2, 0.794 mm thick over ground; lines of 2.413 mm (50 ohm) to a patch of 20.32 mm x 2.54 mm.
Cells of 0.4064 x 0.4233 x 0.265 mm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.science.em.fdtd.excitation.ports import LinePlane, Port, s_parameters
from tutti.science.em.fdtd.excitation.waveforms import gaussian_up_to
from tutti.science.em.fdtd.grid import Grid
from tutti.science.em.fdtd.media.cpml import CPML
from tutti.science.em.fdtd.simulation import Simulation

LAYERS, AIR, FREQUENCY = 8, 3, 20e9
OFFSET = LAYERS + AIR  # of the substrate
GRID = Grid(tuple(n + 2 * OFFSET for n in (50, 46, 3)), (0.4064e-3, 0.4233e-3, 0.265e-3))
PLATES = (((14, 20), (0, 20)), ((30, 36), (26, 46)), ((0, 50), (20, 26)))  # at the top: x and y nodes


def node(*at: int) -> tuple[int, ...]:
    return tuple(x + OFFSET for x in at)


def materials() -> tuple[Tensor, dict[str, Tensor]]:
    """eps_r of cells, and perfect conductors by component."""
    eps = torch.ones(GRID.shape)
    (x0, y0, z0), (x1, y1, z1) = node(0, 0, 0), node(50, 46, 3)
    eps[x0:x1, y0:y1, z0:z1] = 2.2
    pec = {name: torch.zeros(GRID.nodes, dtype=torch.bool) for name in ("Ex", "Ey")}
    for (a, b), (c, d), z in (*((*plate, 3) for plate in PLATES), ((0, 50), (0, 46), 0)):
        (i0, j0, k), (i1, j1, _) = node(a, c, z), node(b, d, z)
        pec["Ex"][i0:i1, j0 : j1 + 1, k] = True
        pec["Ey"][i0 : i1 + 1, j0:j1, k] = True
    return eps, pec


def filter_lines() -> list[LinePlane]:
    """Reference planes ten cells from the ports."""
    one = LinePlane("in", "y", "z", (14 + OFFSET, 20 + OFFSET), 10 + OFFSET, OFFSET, 3 + OFFSET, 1)
    two = LinePlane("out", "y", "z", (30 + OFFSET, 36 + OFFSET), 36 + OFFSET, OFFSET, 3 + OFFSET, -1)
    return [one, two]


def simulation() -> Simulation:
    height = slice(OFFSET, OFFSET + 3)
    source = Port("Ez", (slice(14 + OFFSET, 21 + OFFSET), OFFSET, height), 50.0, gaussian_up_to(FREQUENCY))
    load = Port("Ez", (slice(30 + OFFSET, 37 + OFFSET), 46 + OFFSET, height), 50.0)
    layers = CPML(LAYERS, order=3, factor=1.3, kappa=7, alpha=0.05, offset=0.25)
    return Simulation(GRID, layers, [source, load], filter_lines())


def solve(frequencies: Tensor, steps: int = 3000) -> Tensor:
    """S11 and S21: complex (2, frequencies), in Hz."""
    eps, pec = materials()
    line = simulation()
    result = line.run(eps, steps, pec=pec)
    return s_parameters(filter_lines(), result, frequencies)
