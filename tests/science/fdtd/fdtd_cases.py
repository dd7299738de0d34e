"""Small simulations that use everything, for the tests of gradients and kernels."""

from __future__ import annotations

import torch

from tutti.science.em.fdtd import CPML, Current, Grid, Probe, Simulation, Snapshots, Spectrum, gaussian_up_to, lorentz

GRIDS = {"TM": Grid((13, 11), (0.01, 0.012), "TM"), "TE": Grid((13, 11), (0.01, 0.012), "TE"),
         "3D": Grid((9, 8, 7), (0.01, 0.011, 0.012))}  # fmt: skip


def case(mode: str, dtype: torch.dtype = torch.float64, shots: int = 2, steps: int = 40):
    """A simulation with layers, sources of all kinds and monitors of all kinds, and materials that need gradients."""
    grid = GRIDS[mode]
    e, h = ("Ez", "Hx") if mode != "TE" else ("Ey", "Hz")
    middle = tuple(n // 2 for n in grid.shape)
    wave = torch.sin(torch.arange(steps, dtype=torch.float64) / 3).requires_grad_()
    sources = [
        Current(e, middle, wave, 1.0, shot=0),
        Current(h, tuple(x + 1 for x in middle), gaussian_up_to(3e9), 50.0, shot=shots - 1),
        Current(e, tuple(x - 2 for x in middle), gaussian_up_to(2e9), 0.01, hard=True),
    ]
    inside = tuple(slice(2, 6) for _ in grid.shape)
    monitors = [
        Probe("points", e, [tuple(x + 2 for x in middle), tuple(x - 1 for x in middle)]),
        Snapshots("pictures", h, inside, every=7),
        Spectrum("spectrum", e, inside, torch.tensor([1e9, 2e9]), every=2),
    ]
    simulation = Simulation(grid, CPML(3), sources, monitors, courant=0.7, dtype=dtype)
    torch.manual_seed(0)
    eps = (1 + torch.rand(grid.shape, dtype=torch.float64)).requires_grad_()
    sigma = (0.05 * torch.rand(grid.shape, dtype=torch.float64)).requires_grad_()
    where = torch.zeros(grid.shape, dtype=torch.bool)
    where[tuple(slice(3, 6) for _ in grid.shape)] = True
    strength = torch.where(where, 1e20 * torch.rand(grid.shape, dtype=torch.float64), 0).requires_grad_()
    pole = lorentz(1.0, 1.0, 2e8, where)
    pole = type(pole)(strength, 1e10, 2e8)
    return simulation, {"eps_r": eps, "sigma": sigma, "poles": [pole]}, [eps, sigma, strength, wave]
