"""Cavities of perfect conductor: modes of the discrete equations are known exactly.

sin^2(w dt / 2) = (c dt)^2 sum sin^2(k delta / 2) / delta^2 along the axes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from tutti.science.em.fdtd import (
    CPML,
    Current,
    Grid,
    PlaneWave,
    Pole,
    Port,
    Probe,
    Simulation,
    Snapshots,
    Spectrum,
    drude,
)
from tutti.science.em.fdtd.grid import C0
from tutti.science.em.fdtd.stepping.reference import mask

pytestmark = pytest.mark.starts


def discrete_frequency(grid, dt, modes):
    total = sum(
        (math.sin(m * math.pi / (2 * n)) / x) ** 2 for m, n, x in zip(modes, grid.shape, grid.lengths, strict=True)
    )
    return 2 / dt * math.asin(C0 * dt * math.sqrt(total)) / (2 * math.pi)


def measured_frequency(simulation, name, modes, steps=400):
    """The frequency of a mode that is excited alone: its discrete shape as a prescribed start, then free oscillation.

    A sinusoid obeys x(n + 1) + x(n - 1) = 2 cos(w dt) x(n).
    """
    grid = simulation.grid
    shape = torch.ones((), dtype=torch.float64)
    for axis, (m, n) in enumerate(zip(modes, grid.nodes, strict=True)):
        along = [1] * len(modes)
        along[axis] = n
        places = torch.arange(n, dtype=torch.float64)
        own = axis == "xyz".index(name[1])
        wave = torch.cos(m * math.pi * (places + 0.5) / (n - 1)) if own else torch.sin(m * math.pi * places / (n - 1))
        shape = shape * wave.reshape(along)
    problem = simulation.prepare(1.0, steps, None, 1.0, None, (), None)[0]
    state = problem.state()
    state[grid.component(name)].copy_((shape.unsqueeze(1) if grid.flat else shape)[None])
    start = replace(simulation.run(1.0, 1), state=state, steps=0)
    x = simulation.run(1.0, steps, after=start)["x"].flatten()
    cosine = (x[1:-1] * (x[2:] + x[:-2])).sum() / (2 * x[1:-1].square().sum())
    return math.acos(float(cosine)) / simulation.dt / (2 * math.pi)


def test_two_dimensions_follow_the_discrete_dispersion():
    grid = Grid((20, 16), (0.05, 0.0625))
    simulation = Simulation(grid, monitors=[Probe("x", "Ez", [(7, 5)])], dtype=torch.float64)
    for modes in ((1, 1), (2, 3)):
        exact = discrete_frequency(grid, simulation.dt, modes)
        assert measured_frequency(simulation, "Ez", modes) == pytest.approx(exact, rel=1e-12)


def test_three_dimensions_follow_the_discrete_dispersion():
    """TM110 has Ez alone."""
    grid = Grid((10, 12, 8), (0.1, 0.08, 0.125))
    simulation = Simulation(grid, monitors=[Probe("x", "Ez", [(3, 5, 4)])], dtype=torch.float64)
    exact = discrete_frequency(grid, simulation.dt, (1, 1, 0))
    assert measured_frequency(simulation, "Ez", (1, 1, 0)) == pytest.approx(exact, rel=1e-12)


def test_second_order_of_the_first_mode():
    """TM11 of a square of 1 m is at 211.98528 MHz."""
    exact, errors = C0 / math.sqrt(2), []
    for n in (10, 20, 40, 80):
        simulation = Simulation(Grid((n, n), 1 / n), monitors=[Probe("x", "Ez", [(n // 2, n // 2)])], courant=0.5,
                                dtype=torch.float64)  # fmt: skip
        errors.append(abs(measured_frequency(simulation, "Ez", (1, 1), 200) / exact - 1))
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert exact == pytest.approx(211.98528e6, rel=1e-7)
    assert all(abs(order - 2) < 0.02 for order in orders) and errors[-1] < 1e-4


def test_unstable_steps_and_bad_materials_are_errors():
    grid = Grid((10, 10), 0.01)
    limit = grid.courant_limit()
    with pytest.raises(ValueError, match="Courant limit is"):
        Simulation(grid, dt=1.01 * limit).run(1.0, 5)
    with pytest.raises(ValueError, match="Courant limit is"):
        Simulation(grid, dt=0.9 * limit).run(0.5, 5)
    eps = torch.ones(10, 10)
    eps[3, 4] = float("nan")
    with pytest.raises(ValueError, match="eps_r of Ez is nan"):
        Simulation(grid).run(eps, 5)
    with pytest.raises(ValueError, match="mode TM has Ez, Hx, Hy"):
        Simulation(grid, sources=[Current("Ex", (3, 3), lambda t: t)]).run(1.0, 5)
    with pytest.raises(ValueError, match="index 11 is not one of 11 nodes"):
        Simulation(grid, monitors=[Probe("x", "Ez", [(3, 11)])]).run(1.0, 5)


GRID = Grid((10, 10), 0.01)


def driven(source):
    return Simulation(GRID, sources=[source]).run(1.0, 2)


@pytest.mark.parametrize("make, message", [
    (lambda: Simulation(GRID, dt=-1e-9), "dt: a positive number"),
    (lambda: Simulation(GRID, dt=math.nan), "dt: a positive number"),
    (lambda: Simulation(GRID, courant=-0.9), "courant is -0.9"),
    (lambda: Simulation(GRID, CPML((5, 5, 9))), "layers of 3 axes"),
    (lambda: CPML(-1), "cells of absorbing layers"),
    (lambda: CPML((3, (2, 2, 2))), "cells of absorbing layers"),
    (lambda: CPML(factor=-1), "factor of absorbing layers: at least 0, not -1"),
    (lambda: CPML(alpha=math.nan), "alpha of absorbing layers: at least 0, not nan"),
    (lambda: CPML(kappa=0.2), "kappa of absorbing layers: at least 1, not 0.2"),
    (lambda: CPML(eps_r=0), "eps_r of absorbing layers: positive"),
    (lambda: Pole(math.nan, 1e10, 1e9), "strength of a pole: .* not nan"),
    (lambda: Pole(torch.tensor([1.0, -2.0]), 1e10, 1e9), "strength of a pole: .* not -2.0"),
    (lambda: Pole(1e20, math.inf, 1e9), "resonance of a pole: .* not inf"),
    (lambda: drude(1e10, -1e9), "damping of a pole"),
    (lambda: Port("Ez", (5, 5), -50.0), "resistance of a port: positive"),
    (lambda: Spectrum("x", "Ez", (5, 5), torch.tensor([math.nan])), "frequencies of x: .* not .nan"),
    (lambda: Snapshots("x", "Ez", (5, 5), 0), "every: at least one step, not 0, for the monitor x"),
    (lambda: Spectrum("x", "Ez", (5, 5), torch.tensor([1e9]), -1), "every: at least one step, not -1"),
    (lambda: Simulation(GRID, monitors=[Spectrum("x", "Ez", (5, 5), torch.tensor([1e9, -2e9]), 12)]).run(1.0, 20),
     "monitor x: 2e.09 Hz needs a sample in every 11.8 steps, not 12"),
    (lambda: driven(Current("Ez", (5, 5), torch.tensor([0.0, math.nan]))), "waveform that is nan"),
    (lambda: driven(Current("Ez", (5, 5), lambda t: t, math.inf)), "the amplitude is a finite number, .* not inf"),
    (lambda: driven(Current("Ez", (5, slice(2, 5)), lambda t: t, torch.ones(2))), r"number, or \(3,\) of them, not"),
    (lambda: driven(Current("Ez", (5, 5), lambda t: t, torch.ones((), requires_grad=True))), "not amplitudes"),
    (lambda: driven(Current("Ez", (5, 5), lambda t: t, shot=-1)), "shot: a number from 0, not -1"),
    (lambda: driven(PlaneWave([(3, 7), (3, 7)], "+x", "Ez", lambda t: t / 0)), "plane wave: a waveform that is inf"),
])  # fmt: skip
def test_numbers_that_mean_nothing_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("options, message", [
    ({"pec": {"ez": torch.ones(11, 11)}}, "pec is given for 'ez'; a grid in mode TM has Ez"),
    ({"pec": {"Ez": torch.ones(1, 11)}}, r"pec of Ez has shape \(1, 11\); nodes have \(11, 11\)"),
    ({"eps_r": {"Ez": torch.ones(11, 11), "Ex": torch.ones(11, 11)}}, "eps_r is given for 'Ex'"),
    ({"mu_r": {x: torch.ones(11, 11) for x in ("Hx", "Hy", "Ez")}}, "mu_r is given for 'Ez'; .* has Hx, Hy"),
    ({"poles": [drude(1e9, 1e8, torch.ones(10, dtype=torch.bool))]}, r"where of a pole has shape \(10,\)"),
    ({"steps": 0}, "steps: at least 1, not 0"),
])  # fmt: skip
def test_materials_fit_the_grid(options, message):
    for function in (Simulation(GRID).run, Simulation(GRID).adjoint_memory):
        with pytest.raises(ValueError, match=message):
            function(**{"steps": 2, **options})


def test_options_without_effect_are_errors():
    for options in ({"halo": 3}, {"slabs": (5, 6)}):
        with pytest.raises(ValueError, match="options of a group, which is missing"):
            Simulation(GRID, **options)
    with pytest.raises(TypeError, match="sigmma"):
        Simulation(GRID).adjoint_memory(1.0, 2, sigmma=3.0)


def test_a_run_goes_on_only_after_one_of_its_kind():
    simulation = Simulation(Grid((10, 10), 0.01), CPML(2))
    first, shot = simulation.run(1.0, 5), Current("Ez", (5, 5), lambda t: t, shot=1)
    for other, message in ((replace(simulation, dt=0.5 * simulation.dt), "dt = "),
                           (replace(simulation, grid=Grid((12, 10), 0.01)), r"fields of shape \(1, 11, 1, 11\)"),
                           (replace(simulation, cpml=CPML(3)), "absorbing layers of shape"),
                           (replace(simulation, sources=[shot]), r"this one has \(2, 11, 1, 11\)"),
                           (replace(simulation, dtype=torch.float64), "this one has .* torch.float64")):  # fmt: skip
        with pytest.raises(ValueError, match=f"after: a run with .*{message}"):
            other.run(1.0, 5, after=first)
    with pytest.raises(ValueError, match="after: a run with 0 poles; this one has 1"):
        simulation.run(1.0, 5, poles=[drude(1e9, 1e8)], after=first)
    assert simulation.run(2.0, 5, after=first).steps == 10


def test_amplitudes_over_a_region():
    amplitude, probe = torch.rand(2, 3, dtype=torch.float64), Probe("x", "Ez", [(7, 7)])
    whole = Current("Ez", (slice(3, 5), slice(2, 5)), torch.sin, amplitude)
    parts = [Current("Ez", (3 + i, 2 + j), torch.sin, float(amplitude[i, j])) for i in range(2) for j in range(3)]
    traces = [Simulation(GRID, sources=x, monitors=[probe], dtype=torch.float64).run(1.0, 30)["x"]
              for x in ([whole], parts)]  # fmt: skip
    assert torch.equal(*traces) and traces[0].abs().max() > 0


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_sources_lie_where_steps_update(mode):
    """The rule is that of the reference."""
    grid = Grid((4, 3, 3), 0.01) if mode == "3D" else Grid((4, 3), 0.01, mode)
    problem = Simulation(grid, dtype=torch.float64).prepare(1.0, 1, None, 1.0, None, (), None)[0]
    for name in grid.components:
        number, updated = grid.component(name), []
        for where in product(*(range(n) for n in grid.nodes)):
            source = Current(name, where, lambda t: t)
            try:
                Simulation(grid, sources=[source]).prepare(1.0, 1, None, 1.0, None, (), None)
                updated.append(True)
            except ValueError as error:
                assert "the outermost nodes are perfect conductors" in str(error)
                updated.append(False)
        assert updated == mask(problem, number).bool().flatten().tolist()
    for across in (0, slice(None)):
        with pytest.raises(ValueError, match="port: Ez changes at 1 to 3 along x only"):
            where = (across, 1) if mode != "3D" else (across, 1, 1)
            Simulation(Grid(grid.shape, 0.01), sources=[Port("Ez", where, 50.0)]).run(1.0, 1)
