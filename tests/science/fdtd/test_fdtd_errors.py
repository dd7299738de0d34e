"""What a simulation says of arguments and places that mean nothing."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from tutti.science.em.fdtd import (
    CPML,
    Current,
    Energy,
    Grid,
    PlaneWave,
    Port,
    Probe,
    Simulation,
    Snapshots,
    Spectrum,
    drude,
    gaussian_up_to,
    lorentz,
    mie,
    pulse,
)
from tutti.science.em.fdtd.media.subpixel import conductor, permittivity
from tutti.science.em.fdtd.observation.farfield import scattering_width, surface
from tutti.science.em.fdtd.observation.farfield3d import amplitude, surface3d
from tutti.science.em.fdtd.resolution import highest

GRID, WAVE = Grid((40, 40), 0.01), gaussian_up_to(1e9)
SOURCE, F = Current("Ez", (20, 20), WAVE), torch.tensor([5e8, 1e9])


@pytest.mark.parametrize("make, message", [
    (lambda: Simulation((40, 40)), r"grid: a Grid, .* not \(40, 40\)"),
    (lambda: Simulation(GRID, 10), "cpml: a CPML, such as"),
    (lambda: Simulation(GRID, sources=SOURCE), r"sources: a list of them, not Current\(component='Ez'"),
    (lambda: Simulation(GRID, sources=[WAVE]), r"sources: Current, PlaneWave, Port .* not Gaussian\("),
    (lambda: Simulation(GRID, monitors=Probe("p", "Ez", [(1, 1)])), "monitors: a list of them, not Probe"),
    (lambda: Simulation(GRID, monitors=["p"]), "monitors: Probe, Snapshots, Spectrum, Energy or LinePlane, not 'p'"),
    (lambda: Simulation(GRID, monitors=[surface(((12, 28),) * 2, F)]), r"unpack it with \*"),
    (lambda: Probe("p", "Ez", (20, 30)), r"points of p: a list of them, such as .* not \(20, 30\)"),
    (lambda: Simulation(GRID, monitors=[Probe("p", "Ez", [(0.2, 0.3)])]).run(1.0, 2),
     "monitor p: 0.2 is no index; places are numbers of nodes, metres over 0.01 here"),
    (lambda: Simulation(GRID, sources=[Current("Ez", 5, WAVE)]).run(1.0, 2), "2 indices or slices, not 5"),
    (lambda: Simulation(GRID).run(1.0, 2.5), "steps: at least 1, not 2.5"),
    (lambda: Current("Ez", (20, 20), 5.0), "source of Ez: a waveform is a function of times .* not 5.0"),
    (lambda: Port("Ez", (20, 20), 50.0, 1e9), "port: a waveform is a function"),
    (lambda: PlaneWave([(9, 31)] * 2, "+x", "Ez", 1.0), "plane wave: a waveform is a function"),
    (lambda: Simulation(GRID, sources=[Current("Ez", (20, 20), lambda t: 1.0)]).run(1.0, 2),
     "a waveform that gives 1.0 for 2 times"),
    (lambda: gaussian_up_to(-1e9), r"frequency of a Gaussian: positive and finite, not -1e\+09"),
    (lambda: gaussian_up_to(math.nan), "frequency of a Gaussian: positive and finite, not nan"),
    (lambda: gaussian_up_to(0), "not 0"),
    (lambda: Grid(60, 0.01), r"shape of a grid: numbers of cells by axis, such as \(60, 60\), not 60"),
    (lambda: Grid((60.5, 60), 0.01), "shape of a grid"),
    (lambda: Grid((60, 60), math.inf), "spacing: 2 positive lengths in metres, or one, not inf"),
    (lambda: Grid((60, 60), "a"), "spacing: 2 positive lengths"),
    (lambda: CPML(2.5), "cells of absorbing layers: whole numbers, or pairs by axis, not 2.5"),
    (lambda: CPML([10, 10]), r"or pairs by axis, not \[10, 10\]"),
    (lambda: Spectrum("s", "Ez", (5, 5), None), "frequencies of s: a list of numbers in Hz, not None"),
    (lambda: Snapshots("s", "Ez", (5, 5), 1.5), "every: at least one step, not 1.5"),
    (lambda: Probe("p", "Ez", []), "points of p: a list of them"),
    (lambda: Simulation(GRID, monitors=None), "monitors: a list of them, not None"),
    (lambda: Simulation(GRID, sources=None), "sources: a list of them, not None"),
    (lambda: Simulation(GRID).run("fr4", 2), "eps_r: a number, a tensor over cells, .* not 'fr4'"),
    (lambda: Simulation(GRID).run(1.0, 2, sigma=[0.1]), "sigma: a number, a tensor over cells"),
    (lambda: Simulation(GRID).run(1.0, 2, poles=drude(1e9, 1e8)), r"poles: a list of them, .* not Pole\(strength"),
    (lambda: Simulation(GRID).run(1.0, 2, poles=[1.0]), r"poles: a list of them, .* not .1."),
    (lambda: Simulation(GRID).run(1.0, 2, after=3), "after: the result of a run, not 3"),
    (lambda: PlaneWave([(9, 31)] * 2, "x", "Ez", WAVE), "a plane wave along 'x' cannot have 'Ez': along is one of .x"),
    (lambda: PlaneWave([(9, 31)] * 2, "+x", "Hz", WAVE), r"and the polarization Ex, Ey, Ez across"),
    (lambda: PlaneWave([(9.5, 31)] * 2, "+x", "Ez", WAVE), r"box: \(first, last\) node for each axis, not"),
    (lambda: PlaneWave(None, "+x", "Ez", WAVE), "box: .* not None"),
    (lambda: drude(-1e9, 1e8), "plasma frequency: at least 0, in rad/s, not -1"),
    (lambda: mie.sphere(0, 2.0), "ka of the sphere: positive and finite, not 0"),
    (lambda: mie.cylinder(-1, 2.0, np.zeros(1)), "ka of the cylinder"),
    (lambda: permittivity(Grid((2, 2, 2), 1.0), torch.zeros(4, 4, 4), -1.0), "inside of the solid: positive"),
    (lambda: conductor(Grid((2, 2, 2), 1.0), torch.zeros(4, 4, 4), 5.0), "least: a share of a face"),
    (lambda: pulse(1e9, 0.0), "bandwidth of a pulse: positive and finite, not 0"),
    (lambda: pulse(math.inf, 1e9), "frequency of a pulse"),
    (lambda: Simulation(GRID).run(2 - 0.1j, 2), r"eps_r: real, not \(2-0.1j\); losses are sigma= \(S/m\), or poles="),
    (lambda: Simulation(GRID).run(torch.full((40, 40), 2 - 0.1j), 2), "eps_r: real, not complex64"),
    (lambda: Simulation(GRID).run(1.0, 2, sigma=np.full((40, 40), 1j)), "sigma: real, not complex128"),
    (lambda: Simulation(GRID).run({"Ez": torch.full((41, 41), 2 + 0j)}, 2), "eps_r: real, not complex64"),
    (lambda: Simulation(GRID).run(1.0, 2, mu_r=torch.tensor(1 + 1j)), "mu_r: real, not"),
    (lambda: drude(torch.tensor(1 + 1j), 1e8), "plasma frequency: at least 0, in rad/s, not"),
    (lambda: lorentz(1 + 1j, 1e10, 1e8), "strength of a pole: real, not"),
    (lambda: lorentz(1.0, 1e10, 1e8, torch.ones(40, 40)), "where of a pole: a boolean tensor over cells, not float32"),
    (lambda: Simulation(GRID).run(1.0, 2, sigma=math.nan), "sigma of Ez is nan$"),
    (lambda: Simulation(Grid((40, 40), 0.01, "TE"), monitors=surface(((12, 28),) * 2, F)),
     "far fields in two dimensions need a TM grid, not one in mode TE"),
    (lambda: Simulation(GRID, monitors=[Spectrum("s", "Ez", (5, 5), [1e12])]).run(1.0, 2),
     r"monitor s: 1e\+12 Hz is above the Nyquist frequency of the time step, 2.355\d*e\+10 Hz"),
])  # fmt: skip
def test_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_missing():
    with pytest.raises(ValueError, match="no CUDA device: PyTorch finds none for device='cuda'"):
        Simulation(GRID, device="cuda")


@pytest.mark.parametrize("monitor", [
    Snapshots("m", "Ez", (5, 5), 9), Spectrum("m", "Ez", (5, 5), [1e8], 9), Energy("m", 9),
])  # fmt: skip
def test_monitors_that_a_run_is_too_short_for_are_told(monitor):
    with pytest.warns(UserWarning, match="monitor m: every 9 steps, of a run of 8, sees nothing of it"):
        Simulation(GRID, monitors=[monitor]).run(1.0, 8)


@pytest.mark.parametrize("box, message", [
    ((8, 28), "along x: between 8 and 32, where absorbing layers begin, not from 8 to 28"),
    ((12, 32), "along x: between 8 and 32"),
    ((15, 28), "along x, 15 to 28, must enclose the box of the plane wave, 15 to 25"),
    ((18, 22), "must enclose the box"),
])  # fmt: skip
def test_surfaces_of_far_fields_see_the_scattered_field(box, message):
    wave = PlaneWave([(15, 25)] * 2, "+x", "Ez", WAVE)
    Simulation(GRID, CPML(8), [wave], surface(((12, 28),) * 2, F))
    with pytest.raises(ValueError, match=message):
        Simulation(GRID, CPML(8), [wave], surface((box, (12, 28)), F))
    with pytest.raises(ValueError, match=r"first, last. node, from 1 on, for each of two axes"):
        surface(((12, 8), (12, 28)), F)


@pytest.mark.starts
@pytest.mark.filterwarnings("ignore:monitor .*nothing arrives")
def test_far_fields_are_those_that_were_recorded():
    box, angles = ((12, 28),) * 2, torch.zeros(1)
    result = Simulation(GRID, CPML(8), [SOURCE], surface(box, F)).run(1.0, 20)
    assert scattering_width(box, result, F, angles, torch.ones(2)).shape == (2, 1)
    with pytest.raises(ValueError, match=r"box: the run has the surface \(\(12, 28\), \(12, 28\)\), not"):
        scattering_width(((13, 28),) * 2, result, F, angles, torch.ones(2))
    with pytest.raises(ValueError, match=r"frequencies: the run has .500000000.0, 1000000000.0. Hz, not .5000"):
        scattering_width(box, result, F[:1], angles, torch.ones(1))
    with pytest.raises(ValueError, match="incident: a number for each of 2 frequencies"):
        scattering_width(box, result, F, angles, torch.ones(()))
    bare = Simulation(GRID).run(1.0, 2)
    with pytest.raises(ValueError, match="the run has no surface of a far field"):
        amplitude([(3, 5)] * 3, bare, F, torch.eye(3), (0, 0, 0))
    with pytest.raises(ValueError, match="absorbing layers of 1 axes"):
        Simulation(GRID, CPML((8,)), [SOURCE], surface(box, F))
    with pytest.raises(ValueError, match="for each of 2 axes"):
        wave = PlaneWave([(16, 24)], "+x", "Ez", WAVE)
        Simulation(GRID, CPML(8), [wave], surface(box, F)).run(1.0, 2)
    with pytest.raises(ValueError, match=r"has 3 axes, .* the grid 2"):
        Simulation(GRID, monitors=surface3d([(3, 5)] * 3, F))


@pytest.mark.starts
def test_sources_in_absorbing_layers_are_told():
    with pytest.warns(UserWarning, match=r"a source at node \[3, 20\] lies in absorbing layers"):
        Simulation(GRID, CPML(8), [Current("Ez", (3, 20), WAVE)]).run(1.0, 2)
    across = Current("Ez", (20, slice(1, 40)), WAVE)  # its ends alone lie in layers
    Simulation(GRID, CPML(8), [across]).run(1.0, 2)


@pytest.mark.starts
def test_coarse_cells_are_told():
    eps = torch.ones(40, 40)
    eps[20:, 20:] = 100.0
    with pytest.warns(UserWarning, match=r"3.1 cells .* reach 9.66e\+08 Hz, .* .index 10. .* at most 0.00388 m"):
        Simulation(GRID, sources=[SOURCE]).run(eps, 2)
    Simulation(GRID, sources=[SOURCE]).run(4.0, 2)
    wave = Current("Ez", (20, 20), lambda t: torch.sin(2 * math.pi * 20e9 * t))
    with pytest.warns(UserWarning, match=r"1.5 cells per wavelength: sources reach 1.99e\+10 Hz"):
        Simulation(GRID, sources=[wave]).run(1.0, 300)


@pytest.mark.starts
def test_coarse_cells_are_told_once():
    simulation = Simulation(GRID, sources=[SOURCE])
    with pytest.warns(UserWarning, match="cells per wavelength") as caught:
        for eps in (100.0, 110.0):
            simulation.run(eps, 2)
    assert len(caught) == 1


@pytest.mark.starts
def test_silent_sources_and_the_tails_of_waveforms_are_not_coarse():
    Simulation(GRID, sources=[Current("Ez", (20, 20), torch.zeros(100))]).run(1.0, 100)
    simulation = Simulation(GRID, sources=[Current("Ez", (20, 20), lambda t: WAVE(t))])
    result = simulation.run(1.0, 150)
    for _ in range(3):
        result = simulation.run(1.0, 150, after=result)


@pytest.mark.parametrize("waveform", [gaussian_up_to(2e9), pulse(3e9, 1e9)])
def test_the_highest_frequency_of_a_waveform(waveform):
    """Where its spectrum has fallen to a tenth."""
    dt = 1e-11
    t = torch.arange(1000, dtype=torch.float64) * dt
    spectrum = torch.fft.rfft(waveform(t)).abs()
    last = int((spectrum > 0.1 * spectrum.max()).nonzero()[-1])
    assert waveform.highest == pytest.approx(last / (1000 * dt), abs=1 / (1000 * dt))
    tone = torch.sin(2 * math.pi * 3e9 * t)
    assert highest(None, tone, dt) == pytest.approx(3e9, rel=0.05) and highest(None, tone[:20], dt) == 0


def test_plasma_frequencies_may_differ_by_cell():
    plasma = torch.tensor([[1e9, 0.0]], requires_grad=True)
    assert drude(plasma, 1e8).strength.requires_grad
    with pytest.raises(ValueError, match="plasma frequency: at least 0"):
        drude(-plasma, 1e8)


@pytest.mark.starts
@pytest.mark.filterwarnings("ignore:monitor .*nothing arrives")
def test_results_are_shown_in_a_line():
    monitors = [Probe("p", "Ez", [(1, 1)]), Snapshots("s", "Ez", (slice(0, 3), 2))]
    text = repr(Simulation(GRID, sources=[SOURCE], monitors=monitors).run(1.0, 20))
    assert text.startswith("Result(values={p: float32 (20, 1) from 0 to 0, s: float32 (20, 3) from 0 to 0}, ")
    assert "grid=Grid(shape=(40, 40), " in text and "dt=2.12" in text and "steps=20" in text and "\n" not in text


def said(simulation, *run, **options):
    """Warnings of a run, each of one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulation.run(*run, **options)
    lines = [str(each.message) for each in caught]
    assert not any("\n" in line for line in lines)
    return lines


@pytest.mark.starts
@pytest.mark.parametrize("waveform", [gaussian_up_to(1.4), pulse(1.4, 0.5), pulse(1.4e3, 1e3)])
def test_frequencies_that_are_not_in_hertz_are_told(waveform):
    (line,) = said(Simulation(GRID, CPML(8), [Current("Ez", (20, 20), waveform)]), 1.0, 30)
    assert line.startswith("the grid is 0.566 m across, ") and f"reach {waveform.highest:.3g} Hz" in line
    assert "frequencies are in Hz (1.4 GHz is 1.4e9) and lengths in metres" in line


@pytest.mark.starts
def test_lengths_in_millimetres_are_told():
    (line,) = said(Simulation(Grid((40, 40), 10.0), CPML(8), [SOURCE]), 1.0, 2)
    assert line.startswith("0.031 cells per wavelength") and line.endswith("(lengths are in metres, frequencies in Hz)")


@pytest.mark.starts
def test_a_time_step_far_below_the_courant_limit_is_told():
    (line,) = said(Simulation(GRID, CPML(8), [SOURCE], dt=2e-15), 1.0, 2)
    assert line.startswith("dt = 2e-15 s is 8.5e-05 of the Courant limit 2.36e-11 s: steps hardly advance")


@pytest.mark.starts
@pytest.mark.parametrize("monitor", [
    Spectrum("m", "Ez", (30, 20), F), Probe("m", "Ez", [(30, 20), (31, 20)]), Snapshots("m", "Hx", (30, slice(3, 30))),
])  # fmt: skip
def test_a_run_that_ends_before_waves_arrive_is_told(monitor):
    """The Gaussian reaches a thousandth of its peak 0.935 ns after the start, and light takes 0.334 ns for 10 cells."""
    simulation = Simulation(GRID, CPML(8), [SOURCE], [monitor])
    (line,) = said(simulation, 1.0, 58)
    assert line.startswith("monitor m: 58 steps end at 1.23e-09 s, and nothing arrives before 1.27e-09 s")
    assert "use 60 steps and those of the signal" in line
    assert said(Simulation(GRID, CPML(8), [SOURCE], [Probe("m", "Ez", [(30, 20)])]), 1.0, 60) == []
    slow = said(Simulation(GRID, CPML(8), [SOURCE], [monitor]), 4.0, 60)
    assert len(slow) == 1 and "before 1.6e-09 s" in slow[0], "in a medium of index 2"


@pytest.mark.starts
def test_a_spectrum_of_fields_that_have_not_decayed_is_told():
    monitor = Spectrum("m", "Ez", (30, 20), F)
    (line,) = said(Simulation(GRID, CPML(8), [SOURCE], [monitor]), 1.0, 130)
    assert line.startswith("monitor m: after 130 steps (2.76e-09 s) the field has not decayed; it is still ")
    long, short = (Simulation(GRID, CPML(8), [SOURCE], [monitor]), Simulation(GRID, CPML(8), [SOURCE], [monitor]))
    assert said(long, 1.0, 700) == []
    with pytest.warns(UserWarning, match="has not decayed"):
        cut = short.run(1.0, 130)["m"]
    whole = long.run(1.0, 700)["m"]
    assert ((cut - whole).abs() / whole.abs()).max() > 0.1


@pytest.mark.starts
def test_sources_in_conductors_and_monitors_in_absorbing_layers_are_told():
    metal = torch.zeros(40, 40, dtype=torch.bool)
    metal[18:24, 18:24] = True
    (line,) = said(Simulation(GRID, CPML(8), [SOURCE]), 1.0, 2, pec=metal)
    assert line == "a source at node [20, 20] lies in a perfect conductor, where E stays zero: move it out"
    assert said(Simulation(GRID, CPML(8), [Current("Ez", (18, slice(10, 30)), WAVE)]), 1.0, 2, pec=metal) == []
    inside = [Probe("a", "Ez", [(3, 20)]), Probe("b", "Ez", [(3, 20), (20, 20)])]
    (line,) = said(Simulation(GRID, CPML(8), [SOURCE], inside), 1.0, 200)
    assert line == "monitor a, at node [3, 20], lies in absorbing layers, which attenuate: move it inside"


@pytest.mark.starts
def test_frequencies_of_a_spectrum_in_gigahertz_are_told():
    monitor = Spectrum("m", "Ez", (30, 20), F / 1e9)
    line, *rest = said(Simulation(GRID, CPML(8), [SOURCE], [monitor]), 1.0, 300)
    assert (
        line.startswith("monitor m: frequencies up to 1 have periods of 1 s, and the run lasts 6.37e-09 s") and not rest
    )
