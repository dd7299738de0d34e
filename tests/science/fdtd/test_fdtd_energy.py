"""The energy of the discrete equations: constant without loss, decreasing with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tutti.science.em.fdtd import CPML, Current, Energy, Grid, Probe, Simulation, drude, lorentz, pulse
from tutti.science.em.fdtd.grid import EPS0

pytestmark = [
    pytest.mark.starts,
    pytest.mark.filterwarnings("ignore:.* cells per wavelength"),
]

GRIDS = {"TM": Grid((24, 20), (0.01, 0.012)), "TE": Grid((24, 20), (0.01, 0.012), "TE"), "3D": Grid((13, 12, 11), 0.01)}


def energies(mode: str, steps: int = 500, every: int = 1, cpml: CPML | None = None, **options) -> torch.Tensor:
    """After a pulse from a current, which leaves no charges and ends before the first of these, in joules."""
    grid = GRIDS[mode]
    simulation = Simulation(grid, cpml, [Current("Ey" if mode == "TE" else "Ez", tuple(n // 3 for n in grid.shape),
                            pulse(2.5e9, 1.5e9))], [Energy("W", every)], dtype=torch.float64)  # fmt: skip
    torch.manual_seed(0)
    eps, mu = 1 + torch.rand(grid.shape, dtype=torch.float64), 1 + torch.rand(grid.shape, dtype=torch.float64)
    energy = simulation.run(eps, steps, mu_r=mu, **options)["W"]
    assert len(energy) == -(-steps // every) and energy[0] == 0
    return energy[int(2.6e-9 / simulation.dt) // every :]


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_a_cavity_keeps_its_energy(mode):
    """With two materials and a conductor in it."""
    pec = torch.zeros(GRIDS[mode].shape, dtype=torch.bool)
    pec[tuple(slice(7, 9) for _ in GRIDS[mode].shape)] = True
    w = energies(mode, pec=pec)
    assert w.min() > 0
    assert float((w / w[0] - 1).abs().max()) < 1e-12


@pytest.mark.parametrize("mode", ["TM", "3D"])
def test_conductors_lose_energy_in_each_step(mode):
    w = energies(mode, sigma=torch.full(GRIDS[mode].shape, 0.01, dtype=torch.float64))
    assert bool((w[1:] < w[:-1]).all()) and 0 < w[-1] < 0.5 * w[0]


@pytest.mark.parametrize("damping", [0.0, 5e9])
@pytest.mark.parametrize("kind", ["Drude", "Lorentz"])
def test_dispersive_media_are_passive(kind, damping):
    where = torch.zeros(GRIDS["3D"].shape, dtype=torch.bool)
    where[4:10, 3:9, 5:10] = True
    pole = drude(2e10, 2 * damping, where) if kind == "Drude" else lorentz(2.0, 1.5e10, damping, where)
    w = energies("3D", poles=[pole])
    if damping:
        assert bool((w[1:] <= w[:-1] * (1 + 1e-13)).all()) and w[-1] < 0.9 * w[0]
    else:
        assert float((w / w[0] - 1).abs().max()) < 1e-12


def test_absorbing_layers_are_passive():
    w = energies("TM", 1200, 10, CPML(5))
    assert bool((w[1:] <= w[:-1] * (1 + 1e-6)).all()) and w[-1] < 1e-4 * w[0]


def test_the_energy_of_a_field():
    """W = V / 2 sum (eps E^2 + mu H H) of a single start."""
    grid = Grid((10, 8), 0.1)
    simulation = Simulation(grid, monitors=[Energy("W", 3), Probe("x", "Ez", [(4, 4)])], dtype=torch.float64)
    state = simulation.prepare(2.0, 3, None, 1.0, None, (), None)[0].state()
    state[1][0, 4, 0, 4] = 2.0
    w = simulation.run(2.0, 7, after=replace(simulation.run(2.0, 3), state=state, steps=0))["W"]
    assert w.tolist() == pytest.approx([0.01 / 2 * 2 * EPS0 * 4] * 3, rel=1e-13)
    with pytest.raises(ValueError, match="every: at least one step"):
        Energy("W", 0)
