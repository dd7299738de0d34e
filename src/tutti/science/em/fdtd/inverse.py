"""Inverse scattering: the permittivity of a region from fields at receivers (the AD-FDTD example of MindElec, TM).

Four transmitters, eight receivers, 350 steps of 100 x 100 cells of 1 cm. The unknown rho gives eps_r = 1 + elu(rho)
inside of 40 x 40 cells; Adam with rate 0.1. Labels are the fields of two discs of eps_r 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import elu, pad

from tutti.science.em.fdtd.excitation.sources import Current
from tutti.science.em.fdtd.excitation.waveforms import gaussian_up_to
from tutti.science.em.fdtd.grid import Grid
from tutti.science.em.fdtd.media.cpml import CPML
from tutti.science.em.fdtd.observation.monitors import Probe
from tutti.science.em.fdtd.simulation import Simulation

STEPS, REGION = 350, slice(30, 70)
TRANSMITTERS = ((20, 50), (50, 20), (80, 50), (50, 80))
RECEIVERS = ((25, 25), (25, 50), (25, 75), (50, 25), (50, 75), (75, 25), (75, 50), (75, 75))
DISCS = ((0.40, 0.40, 0.05), (0.55, 0.55, 0.06))  # centre and radius in metres


def scene(dtype: torch.dtype = torch.float32) -> Simulation:
    transmitters = [Current("Ez", x, gaussian_up_to(1.4e9), shot=i) for i, x in enumerate(TRANSMITTERS)]
    layers = CPML(10, order=4, factor=1.5, kappa=11, alpha=0, offset=0.25)
    return Simulation(Grid((100, 100), 0.01), layers, transmitters, [Probe("received", "Ez", RECEIVERS)],
                      design=(REGION, REGION), dtype=dtype)  # fmt: skip


def truth() -> Tensor:
    """eps_r of cells."""
    at = (torch.arange(100, dtype=torch.float64) + 0.5) * 0.01
    out = torch.ones(100, 100)
    for x, y, radius in DISCS:
        out[(at[:, None] - x) ** 2 + (at[None, :] - y) ** 2 <= radius**2] = 4.0
    return out


def permittivity(rho: Tensor) -> Tensor:
    """eps_r of cells from rho (40, 40)."""
    return pad(1 + elu(rho, 0.01), (30, 30, 30, 30), value=1.0)


def reconstruct(epochs: int = 100, rate: float = 0.1) -> tuple[Tensor, list[float]]:
    """eps_r after Adam, and the losses: sums of squares before each step."""
    simulation = scene()
    labels = simulation.run(truth(), STEPS)["received"]
    rho = torch.zeros(40, 40, requires_grad=True)
    optimizer, losses = torch.optim.Adam([rho], rate), []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = (simulation.run(permittivity(rho), STEPS)["received"] - labels).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return permittivity(rho.detach()), losses


def psnr(x: Tensor, target: Tensor) -> float:
    """Peak signal over noise in dB; the peak is the range of the target."""
    scale = float(target.max() - target.min())
    return 20 * math.log10(scale / float((x - target).double().square().mean().sqrt()))


def ssim(x: Tensor, target: Tensor) -> float:
    """Structural similarity of whole images, as MindElec computes it: its constants, 0.01 and 0.03 times the range of
    the target, are not squared as in Z. Wang et al. (2004), whose values are others."""
    x, target = x.double(), target.double()
    mx, my = x.mean(), target.mean()
    vx, vy, both = (x - mx).square().mean(), (target - my).square().mean(), ((x - mx) * (target - my)).mean()
    scale = target.max() - target.min()
    c1, c2 = 0.01 * scale, 0.03 * scale
    return float((2 * mx * my + c1) * (2 * both + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2)))
