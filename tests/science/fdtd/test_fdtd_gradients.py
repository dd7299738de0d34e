"""Gradients against autograd through the reference, and against central differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fdtd_cases import case

from tutti.science.em.fdtd import Current, Grid, Pole, Probe, Simulation, gaussian_up_to
from tutti.science.em.fdtd.stepping.reference import Reference

pytestmark = [
    pytest.mark.starts,  # the compiler
    pytest.mark.filterwarnings("ignore:.* cells per wavelength"),
    pytest.mark.filterwarnings("ignore:a source at node"),
    pytest.mark.filterwarnings("ignore:monitor .*(nothing arrives|absorbing layers|not decayed)"),
]


def loss_of(values):
    weights = torch.Generator().manual_seed(1)
    total = 0
    for name in ("points", "pictures", "spectrum"):
        x = torch.view_as_real(values[name]) * 1e9 if values[name].is_complex() else values[name]
        total = total + (x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum()
    return total


def by_reference(simulation, medium, steps):
    """Results of a run by plain PyTorch, with autograd through it."""
    problem, waves, parameters, orders = simulation.prepare(
        medium["eps_r"], steps, medium.get("sigma"), 1.0, None, medium.get("poles", ()), None)  # fmt: skip
    gains = parameters[6:]
    model = Reference(problem, parameters[3:6], parameters[:3], [gains[i : i + 3] for i in range(0, len(gains), 3)])
    results, _ = model.run(waves)
    return simulation.named(results, orders, problem)


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_results_and_gradients_are_those_of_the_reference(mode):
    simulation, medium, wanted = case(mode)
    own = simulation.run(**medium, steps=40)
    expected = by_reference(simulation, medium, 40)
    for name, x in expected.items():
        torch.testing.assert_close(own[name], x, rtol=1e-11, atol=1e-13 * float(x.detach().abs().max()))
    gradients = torch.autograd.grad(loss_of(own), wanted)
    for x, y in zip(gradients, torch.autograd.grad(loss_of(expected), wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11 * float(y.abs().max()))
        assert y.abs().max() > 0


def test_materials_by_component_may_be_views():
    simulation, medium, _ = case("3D")
    torch.manual_seed(3)
    nodes = {name: 1 + torch.rand(simulation.grid.nodes[::-1], dtype=torch.float64).permute(2, 1, 0)
             for name in simulation.grid.components}  # fmt: skip
    traces = []
    for every in (nodes, {name: x.contiguous() for name, x in nodes.items()}):
        e, h = ({name: x for name, x in every.items() if name[0] == kind} for kind in "EH")
        traces.append(simulation.run(e, 40, mu_r=h, sigma=e, poles=medium["poles"])["points"])
    assert torch.equal(*traces)


@pytest.mark.parametrize("mode", ["TM", "3D"])
def test_segments_give_the_same_bits(mode):
    gradients = []
    for segments in (1, 3, 7, 40):
        simulation, medium, wanted = case(mode, torch.float32)
        loss = loss_of(simulation.run(**medium, steps=40, checkpoints=segments))
        gradients.append(torch.autograd.grad(loss, wanted))
    for other in gradients[1:]:
        assert all(torch.equal(x, y) for x, y in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_central_differences(mode):
    """A random direction in all materials and the waveform."""
    simulation, medium, wanted = case(mode)
    gradients = torch.autograd.grad(loss_of(simulation.run(**medium, steps=40)), wanted)
    torch.manual_seed(2)
    ways = [torch.rand_like(x) * x.detach() for x in wanted]
    slope = sum((g * w).sum() for g, w in zip(gradients, ways, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            for x, w in zip(wanted, ways, strict=True):
                x += step * w
            values.append(loss_of(simulation.run(**medium, steps=40)))
    torch.testing.assert_close((values[0] - values[1]) / 2e-5, slope, rtol=1e-6, atol=0)


def test_gradients_are_taken_once():
    simulation, medium, (eps, *_) = case("TM")
    loss = loss_of(simulation.run(**medium, steps=40))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, eps, create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients of this run were taken before"):
        loss.backward()


def test_a_pole_of_no_strength_has_a_gradient_where_it_is():
    """As one of a tiny strength."""
    grid, gradients = Grid((13, 11), 0.01), []
    simulation = Simulation(grid, None, [Current("Ez", (4, 5), gaussian_up_to(3e9))], [Probe("x", "Ez", [(9, 6)])],
                            dtype=torch.float64)  # fmt: skip
    where = torch.zeros(grid.shape, dtype=torch.bool)
    where[5:8, 4:7] = True
    for value in (0.0, 1.0):
        strength = torch.full(grid.shape, value, dtype=torch.float64, requires_grad=True)
        simulation.run(1.0, 60, poles=[Pole(strength, 2e10, 1e9, where)])["x"].square().sum().backward()
        gradients.append(strength.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=0)
    assert torch.equal(gradients[0] != 0, where)


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_gradients_of_a_design(mode):
    """Those of the whole inside, zero outside; by the kernels and by what other devices run."""
    simulation, medium, (eps, sigma, *_) = case(mode)
    fixed = {"steps": 40, "poles": [replace(medium["poles"][0], strength=medium["poles"][0].strength.detach())]}
    design = (slice(3, 7), slice(2, -3))
    nodes = {x: torch.full(simulation.grid.nodes, 1.5, dtype=torch.float64, requires_grad=True)
             for x in simulation.grid.components if x[0] == "E"}  # fmt: skip
    inside, around = (torch.zeros_like(x, dtype=torch.bool) for x in (eps, next(iter(nodes.values()))))
    inside[design], around[3:8, 2 : inside.shape[1] - 2] = True, True
    of_design = replace(simulation, design=design)
    for materials, wanted in (({"eps_r": eps, "sigma": sigma}, [eps, sigma]), ({"eps_r": nodes}, list(nodes.values()))):
        whole = torch.autograd.grad(loss_of(simulation.run(**materials, **fixed)), wanted)
        for result in (of_design.run(**materials, **fixed), by_reference(of_design, {**materials, **fixed}, 40)):
            for x, y in zip(torch.autograd.grad(loss_of(result), wanted), whole, strict=True):
                expected = torch.where(inside if x.shape == inside.shape else around, y, 0)
                torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-11 * float(y.abs().max()))
                assert torch.equal(x != 0, expected != 0)
    number, alike = torch.tensor(0.05, dtype=torch.float64), torch.full(eps.shape, 0.05, dtype=torch.float64)
    slopes = [torch.autograd.grad(loss_of(of_design.run(1.5, sigma=x.requires_grad_(), **fixed)), x)[0].sum()
              for x in (number, alike)]  # fmt: skip
    torch.testing.assert_close(*slopes)


def test_permeabilities_have_no_gradients():
    simulation = Simulation(Grid((13, 11), 0.01))
    mu = torch.ones(13, 11, requires_grad=True)
    for permeability in (mu, {"Hx": torch.ones(14, 12), "Hy": torch.ones(14, 12, requires_grad=True)}):
        with pytest.raises(ValueError, match="mu_r requires gradients"):
            simulation.run(1.0, 2, mu_r=permeability)
    with torch.no_grad():
        simulation.run(1.0, 2, mu_r=torch.tensor(1.5, dtype=torch.float64, requires_grad=True))


def test_poles_with_gradients_lie_in_the_design():
    simulation, medium, _ = case("TM")
    simulation = replace(simulation, design=(slice(4, 9), slice(2, 9)))
    with pytest.raises(ValueError, match="need a design region that contains it"):
        simulation.run(**medium, steps=40)


@pytest.mark.parametrize("mode, shots", [("TM", 2), ("TE", 1), ("3D", 1), ("3D", 3)])
def test_bits_do_not_depend_on_threads(mode, shots):
    """Results and gradients have the same bits; waveforms, which sum over places of all threads, within rounding."""
    grid = Grid((37, 30, 11), 0.01) if mode == "3D" else Grid((90, 130), 0.01, mode)
    outputs, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            simulation, _, (*_, wave) = case(mode, torch.float32, shots)
            simulation = replace(simulation, grid=grid, dt=0.0)
            eps, sigma = (torch.linspace(1, 2, grid.cells).reshape(grid.shape).requires_grad_() for _ in range(2))
            strength = torch.full(grid.shape, 1e20, requires_grad=True)
            poles = [Pole(strength, 1e10, 2e8)]
            own = simulation.run(eps, 40, sigma=sigma, poles=poles)
            gradients = torch.autograd.grad(loss_of(own), [eps, sigma, strength, wave])
            outputs.append([own["points"], own["pictures"], own["spectrum"], *gradients])
    finally:
        torch.set_num_threads(before)
    for other in outputs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outputs[0][:-1], other[:-1], strict=True))
        torch.testing.assert_close(other[-1], outputs[0][-1], rtol=1e-5, atol=1e-6 * float(outputs[0][-1].abs().max()))
