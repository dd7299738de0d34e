"""Spheres in three dimensions against Mie's series, through the near-to-far transform."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.science.em.cad import fill
from tutti.science.em.cad import sphere as ball
from tutti.science.em.fdtd import CPML, Grid, PlaneWave, Simulation, pulse
from tutti.science.em.fdtd.grid import C0
from tutti.science.em.fdtd.media.subpixel import conductor, permittivity
from tutti.science.em.fdtd.mie import sphere
from tutti.science.em.fdtd.observation.farfield3d import amplitude, cross_section, extinction, surface3d


def test_series_of_the_literature():
    """C. Bohren and D. Huffman, appendix A: Q_ext 3.10543, Q_back 2.92534."""
    series = sphere(2 * math.pi * 0.525 / 0.6328, 1.55)
    assert series.extinction == pytest.approx(3.105426, rel=2e-7) and series.back == pytest.approx(2.925341, rel=2e-7)
    assert series.scattering == pytest.approx(series.extinction, rel=1e-13)
    assert sphere(2.0, 1.5 + 0.1j).scattering < sphere(2.0, 1.5 + 0.1j).extinction


def test_series_of_the_table():
    for ka, back, q in ((0.5, 0.52958, 0.045664), (1, 3.63757, 0.796830), (2, 1.00814, 4.770440),
                        (5, 1.16884, 2.852516)):  # fmt: skip
        assert sphere(ka, None).back == pytest.approx(back, rel=1e-5)
        assert sphere(ka, 2.0).extinction == pytest.approx(q, rel=1e-5)
        assert sphere(ka, 2.0).forward >= (sphere(ka, 2.0).extinction * ka / 2) ** 2 * 0.999  # optical theorem


def scattered(ka: list[float], radius: int, metal: bool, duration: float, gap: int = 4,
              pml: int = 8) -> dict[str, list[float]]:  # fmt: skip
    """Efficiencies of a sphere of `radius` cells. duration: in radii over c."""
    n = 2 * (radius + 3 * gap + pml)
    grid = Grid((n, n, n), 1.0 / radius)
    box, around = ((pml + 2 * gap, n - pml - 2 * gap),) * 3, ((pml + gap, n - pml - gap),) * 3
    frequencies = torch.tensor(ka, dtype=torch.float64) * C0 / (2 * math.pi)
    middle, half = (max(ka) + min(ka)) / 2 * C0 / (2 * math.pi), max(0.6, (max(ka) - min(ka)) / 2) * C0 / (2 * math.pi)
    wave = PlaneWave(box, "+x", "Ez", pulse(middle, half))
    courant = 0.45 if metal else 0.9
    simulation = Simulation(grid, CPML(pml), [wave], surface3d(around, frequencies), courant=courant)
    steps = int(duration / (C0 * simulation.dt))
    edges = torch.arange(4 * n + 1, dtype=torch.float64) / 4
    share = fill(ball((n / 2, n / 2, n / 2), radius), edges, edges, edges, samples=1)
    material = conductor(grid, share) if metal else {"eps_r": permittivity(grid, share, 4.0)}
    result = simulation.run(steps=steps, **material)
    ways = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])
    f = amplitude(around, result, frequencies, ways, (n / 2,) * 3)
    incident = wave.spectrum(result, frequencies, n // 2)
    sections = cross_section(f, incident) / math.pi
    return {
        "forward": sections[:, 0].tolist(),
        "back": sections[:, 1].tolist(),
        "extinction": (extinction(f[:, 0], frequencies, 2, incident) / math.pi).tolist(),
    }


@pytest.mark.starts
def test_a_conducting_sphere_scatters_back_as_mie_says():
    """Eight cells in a radius."""
    efficiencies = scattered([0.5, 1], 8, True, 30)
    assert efficiencies["back"] == pytest.approx([sphere(x, None).back for x in (0.5, 1)], rel=0.04)


@pytest.mark.starts
def test_a_dielectric_sphere_takes_from_the_wave_what_mie_says():
    """eps_r 4, eight cells in a radius, 12 in a wavelength inside at ka = 2."""
    efficiencies, exact = scattered([0.5, 1, 2], 8, False, 40), [sphere(x, 2.0) for x in (0.5, 1, 2)]
    assert efficiencies["extinction"] == pytest.approx([x.extinction for x in exact], rel=0.05)
    assert efficiencies["forward"] == pytest.approx([x.forward for x in exact], rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("metal", [True, False], ids=["conductor", "dielectric"])
def test_spheres_converge(metal):
    ka, name = [0.5, 1, 2], "back" if metal else "extinction"
    exact = [getattr(sphere(x, None if metal else 2.0), name) for x in ka]
    errors = []
    for radius in (8, 12, 18):
        efficiencies = scattered(ka, radius, metal, 60, max(4, radius // 3))[name]
        errors.append(sum(abs(x / y - 1) for x, y in zip(efficiencies, exact, strict=True)))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.03


@pytest.mark.slow
def test_spheres_of_many_wavelengths():
    """ka = 5: a circumference of five wavelengths."""
    assert scattered([5.0], 30, True, 30, 10)["back"] == pytest.approx([sphere(5.0, None).back], rel=0.04)
    assert scattered([5.0], 24, False, 60, 8)["extinction"] == pytest.approx([sphere(5.0, 2.0).extinction], rel=0.03)
