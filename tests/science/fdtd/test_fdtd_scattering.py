"""Scattering against exact solutions: Mie's series of a cylinder, Fresnel's coefficients of slabs, absorbing layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tutti.science.em.fdtd import (
    CPML,
    Current,
    Grid,
    PlaneWave,
    Probe,
    Simulation,
    Snapshots,
    drude,
    gaussian_up_to,
    lorentz,
    pulse,
)
from tutti.science.em.fdtd.grid import C0
from tutti.science.em.fdtd.mie import cylinder
from tutti.science.em.fdtd.observation.farfield import scattering_width, surface

pytestmark = pytest.mark.starts


def test_mie_series():
    """Values of the literature for eps_r 4: forward and backward."""
    for ka, forward, backward in ((0.5, 1.901300, 1.569998), (1, 14.258944, 1.683575), (2, 82.477417, 4.255854),
                                  (5, 310.725117, 7.242679)):  # fmt: skip
        assert cylinder(ka, 4.0, np.array([0, math.pi])) == pytest.approx([forward, backward], rel=2e-6)


def disc(n: int, radius: float, eps_r: float, parts: int = 16):
    """eps_r of cells with the share of each that is in a disc in the middle."""
    at = (torch.arange(n * parts, dtype=torch.float64) + 0.5) / parts - n / 2
    inside = (at[:, None] ** 2 + at[None, :] ** 2 <= radius**2).double()
    return 1 + (eps_r - 1) * inside.reshape(n, parts, n, parts).mean((1, 3))


def cylinder_error(radius: int) -> float:
    """The greatest relative error of k sigma over angles, as a share of its maximum, at ka = 1 and 2."""
    delta, gap = 1.0 / radius, 6
    n = 2 * (radius + 3 * gap + 10)
    box = ((10 + 2 * gap, n - 10 - 2 * gap),) * 2
    around = ((10 + gap, n - 10 - gap),) * 2
    frequencies = torch.tensor([1.0, 2.0], dtype=torch.float64) * C0 / (2 * math.pi)
    wave = pulse(1.5 * C0 / (2 * math.pi), 1.2 * C0 / (2 * math.pi))
    grid = Grid((n, n), delta)
    simulation = Simulation(grid, CPML(10), [PlaneWave(box, "+x", "Ez", wave)], surface(around, frequencies),
                            dtype=torch.float64)  # fmt: skip
    steps = int(90 / (C0 * simulation.dt))  # until the cylinder has rung down
    result = simulation.run(disc(n, radius, 4.0), steps)
    times = torch.arange(1, steps + 1, dtype=torch.float64) * simulation.dt
    incident = (wave(times) * torch.exp(-2j * math.pi * frequencies[:, None] * times)).sum(-1) * simulation.dt
    angles = torch.linspace(0, 2 * math.pi, 73, dtype=torch.float64)
    width = scattering_width(around, result, frequencies, angles, incident).numpy()
    exact = np.stack([cylinder(ka, 4.0, angles.numpy()) for ka in (1, 2)])
    return float((np.abs(width - exact).max(1) / exact.max(1)).max())


def test_a_dielectric_cylinder_scatters_as_mie_says():
    assert cylinder_error(16) < 0.02


@pytest.mark.slow
def test_a_dielectric_cylinder_converges():
    errors = [cylinder_error(radius) for radius in (12, 24, 48)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.001


@pytest.mark.parametrize(
    "pole", [drude(2 * math.pi * 3e9, 1e9), lorentz(1.5, 2 * math.pi * 2e9, 1e9)], ids=["Drude", "Lorentz"]
)
def test_reflection_of_a_dispersive_slab(pole):
    """Normal incidence: a wave between two plates, on 20 mm of a medium, cells of 0.5 mm."""
    delta, n, first, last = 0.5e-3, 400, 200, 240
    where = torch.zeros(n, 1, dtype=torch.bool)
    where[first:last] = True
    grid = Grid((n, 1), (delta, delta), "TE")
    layers = CPML(((20, 20), 0))
    simulation = Simulation(grid, layers, [PlaneWave([(60, 340), (-1, 3)], "+x", "Ey", gaussian_up_to(4e9))],
                            [Probe("back", "Ey", [(40, 0)]), Probe("in", "Ey", [(100, 0)])],
                            dtype=torch.float64)  # fmt: skip
    steps = 12000
    pole = type(pole)(pole.strength, pole.resonance, pole.damping, where)
    back = simulation.run(1.0, steps, poles=[pole])["back"].flatten()
    incident = simulation.run(1.0, steps)["in"].flatten()
    frequencies = torch.linspace(0.5e9, 4e9, 30, dtype=torch.float64)
    times = torch.arange(1, steps + 1, dtype=torch.float64) * simulation.dt
    factors = torch.exp(-2j * math.pi * frequencies[:, None] * times)
    reflection = ((factors @ back.to(torch.complex128)) / (factors @ incident.to(torch.complex128))).abs()
    index = torch.sqrt(1 + pole.susceptibility(frequencies))
    index = torch.where(index.imag > 0, -index, index)
    r = (1 - index) / (1 + index)
    round_trip = torch.exp(-4j * math.pi * frequencies / C0 * index * (last - first) * delta)
    exact = (r * (1 - round_trip) / (1 - r**2 * round_trip)).abs()
    assert float((reflection - exact).abs().max()) < 0.02


def test_absorbing_layers_reflect_below_60_db():
    """Against the same source in a grid so large that no wave returns."""
    traces = []
    for n, layers in ((50, CPML(10)), (290, None)):
        middle = n // 2
        simulation = Simulation(Grid((n, n), 0.01), layers, [Current("Ez", (middle, middle), gaussian_up_to(2e9))],
                                [Probe("x", "Ez", [(middle + 13, middle), (middle + 13, middle + 13)])],
                                dtype=torch.float64)  # fmt: skip
        traces.append(simulation.run(1.0, 330)["x"])
    worst = (traces[0] - traces[1]).abs().amax(0) / traces[1].abs().amax(0)
    assert 20 * math.log10(float(worst.max())) < -60


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
@pytest.mark.parametrize("along", ["+x", "-x", "+y", "-y"])
def test_nothing_leaks_out_of_the_total_field(mode, along):
    """The wave has 1 V/m, and the grid is empty."""
    shape = (40, 36) if mode != "3D" else (30, 28, 24)
    grid = Grid(shape, (0.01, 0.012) if mode != "3D" else (0.01, 0.012, 0.011), mode)
    polarization = "Ez" if mode != "TE" else "Ey" if along[1] == "x" else "Ex"
    wave = PlaneWave([(9, n - 9) for n in shape], along, polarization, gaussian_up_to(2.5e9))
    every = Snapshots("E", polarization, tuple(slice(0, n + 1) for n in shape))
    e = Simulation(grid, CPML(5), [wave], [every], dtype=torch.float64).run(1.0, 160)["E"]
    inside = e[(slice(None), *(slice(10, n - 10) for n in shape))].clone()
    e[(slice(None), *(slice(8, n - 7) for n in shape))] = 0
    assert 0.9 < float(inside.abs().max()) < 1.1 and float(e.abs().max()) < 1e-12


def test_a_plane_wave_goes_on_in_a_later_run():
    grid = Grid((40, 12), 0.01, "TE")
    wave = PlaneWave([(12, 28), (-1, 13)], "+x", "Ey", gaussian_up_to(2e9))
    probe = Probe("E", "Ey", [(20, 6), (9, 6)])
    simulation = Simulation(grid, CPML((8, 0)), [wave], [probe], dtype=torch.float64)
    whole, first = simulation.run(1.0, 150)["E"], simulation.run(1.0, 60)
    rest = simulation.run(1.0, 90, after=first)["E"]
    assert torch.equal(rest, whole[60:]) and float(rest[:, 0].abs().max()) > 0.9
    assert float(rest[:, 1].abs().max()) < 1e-12


@pytest.mark.parametrize("box, medium, message", [
    (((-1, 100), (-1, 30)), {}, "box along x: nodes from 1 to 59, first below last, not -1 to 100"),
    (((65, 80), (-1, 30)), {}, "box along x"),
    (((40, 20), (-1, 30)), {}, "box along x"),
    (((20, 40), (15, 5)), {}, "box along y: nodes from 0 to 20"),
    (((20, 40), (25, 30)), {}, "box along y"),
    (((2, 52), (-1, 30)), {}, "reaches into absorbing layers"),
    (((8, 51), (-1, 30)), {}, "reaches into absorbing layers"),
    (((20, 40), (-1, 30)), {"eps_r": 4.0}, "passes through a medium"),
    (((20, 40), (5, 15)), {"sigma": 0.1}, "passes through a medium"),
    (((20, 40), (-1, 30)), {"poles": [drude(1e10, 1e9)]}, "passes through a dispersive medium"),
    (((20, 40), (-1, 30)), {"pec": torch.arange(60)[:, None].expand(60, 20) > 35}, "passes through a conductor"),
])  # fmt: skip
def test_boxes_lie_in_vacuum(box, medium, message):
    grid = Grid((60, 20), 0.01, "TE")
    simulation = Simulation(grid, CPML((8, 0)), [PlaneWave(box, "+x", "Ey", gaussian_up_to(2e9))])
    with pytest.raises(ValueError, match=message):
        simulation.run(**medium, steps=10)


def test_a_box_across_the_polarization_is_closed():
    with pytest.raises(ValueError, match="box along y: nodes from 1 to 19"):
        Simulation(Grid((60, 20), 0.01), None, [PlaneWave(((20, 40), (-1, 30)), "+x", "Ez", torch.sin)]).run(1.0, 10)
