"""Responses and their derivatives: exact cases, refinement, central differences, reciprocity."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
import torch

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.response.forward import MT2D
from tutti.science.em.mt.response.layered import apparent, layered, log_resistivity

SITES, FREQUENCIES = [-1000.0, 0.0, 300.0, 1999.0], [10.0, 0.1]
ALL = ("tipper", "TE", "TM")


@pytest.fixture(scope="module")
def mesh() -> Mesh2D:
    return Mesh2D.for_survey(FREQUENCIES, SITES, (10, 1000), growth=1.4, width=500)


@pytest.fixture(scope="module")
def section(mesh) -> torch.Tensor:
    """Random cells about 100 ohm-m, with half a decade of deviation."""
    return 2 + 0.5 * torch.randn(mesh.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_layers_by_waits_recursion():
    rho, phase = layered([100, 10, 1000], [500, 1500], [100, 1, 0.01])
    assert rho.tolist() == pytest.approx([112.155494, 13.913755, 211.208560], rel=5e-8)
    assert phase.tolist() == pytest.approx([52.461589, 48.316978, 19.962683], rel=1e-7)
    rho, phase = layered([100, 100], [700], [1e3, 1, 1e-3])
    assert rho.tolist() == pytest.approx([100] * 3, rel=1e-12) and phase.tolist() == pytest.approx([45] * 3, rel=1e-12)


@pytest.mark.parametrize("outputs", ["apparent", "impedance"])
@pytest.mark.parametrize("solver", ["splu", "block"])
def test_jacobian_against_central_differences(mesh, section, solver, outputs):
    """Corner, surface, edge, interior and bottom cells."""
    problem = MT2D(mesh, FREQUENCIES, SITES, ALL, solver=solver, outputs=outputs)
    data, jacobian = problem.jacobian(section)
    assert torch.equal(data, problem(section))
    jacobian = jacobian.view(*problem.shape, -1)
    middle, step = mesh.nx // 2, 1e-3
    for cell in (0, middle, 3 * mesh.nx + 7, 5 * mesh.nx + middle, 8 * mesh.nx, mesh.cells - 1, mesh.cells - middle):
        change = torch.zeros(mesh.cells, dtype=torch.float64)
        change[cell] = step
        change = change.view(mesh.shape)
        central = (problem(section + change) - problem(section - change)).view(problem.shape) / (2 * step)
        for mode in range(len(ALL)):
            derivative, scale = jacobian[mode, ..., cell], data.view(problem.shape)[mode].abs().max()
            assert (central[mode] - derivative).abs().max() <= 1e-4 * derivative.abs().max() + 1e-10 * scale, (
                cell,
                ALL[mode],
            )


@pytest.mark.parametrize("solver", ["splu", "block"])
def test_products_with_the_jacobian(mesh, section, solver):
    problem = MT2D(mesh, FREQUENCIES, SITES, ALL, solver=solver)
    draw = torch.Generator().manual_seed(1)
    change = torch.randn(mesh.shape, generator=draw, dtype=torch.float64)
    weights = torch.randn(problem.size, generator=draw, dtype=torch.float64)
    _, jacobian = problem.jacobian(section)
    forward = problem.jvp(section, change)
    torch.testing.assert_close(forward, jacobian @ change.flatten(), rtol=1e-9, atol=1e-9)
    leaf = section.flatten().requires_grad_()
    (problem(leaf) * weights).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, jacobian.T @ weights, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(problem.vjp(section, weights).flatten(), leaf.grad, rtol=0, atol=0)
    assert (forward @ weights).item() == pytest.approx((leaf.grad @ change.flatten()).item(), rel=1e-10)


def test_solvers_and_threads_agree(mesh, section):
    by_lu = MT2D(mesh, FREQUENCIES, SITES, ALL, threads=1)(section)
    assert torch.equal(by_lu, MT2D(mesh, FREQUENCIES, SITES, ALL, threads=3)(section))
    derivatives = MT2D(mesh, FREQUENCIES, SITES, ALL).jacobian(section)[1]
    for solver in ("block", "block32"):
        data, jacobian = MT2D(mesh, FREQUENCIES, SITES, ALL, solver=solver).jacobian(section)
        torch.testing.assert_close(data, by_lu, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(jacobian, derivatives, rtol=1e-9, atol=1e-9)


def test_helpers_convert_and_check():
    assert log_resistivity([10, 1000]).tolist() == [1, 3]
    z = MT2D(Mesh2D([0, 1e3, 2e3], [0, 10, 100]), [1.0], [500.0], "TM", outputs="impedance")(torch.full((2, 2), 2.0))
    rho, phase = apparent(torch.view_as_complex(z.view(1, 2)), [1.0])
    assert rho.item() == pytest.approx(100, rel=1e-2) and phase.item() == pytest.approx(45, abs=0.1)


@pytest.mark.parametrize("solver", ["splu", "block"])
def test_reciprocity(mesh, section, solver):
    """A source at one node gives at another what a source there gives here."""
    of = MT2D(mesh, FREQUENCIES, SITES, solver=solver)
    for polarisation in of.polarisations(section.device):
        physics = polarisation.physics
        iwmu = torch.tensor([1e-5j, 1e-7j], dtype=torch.complex128)
        factors = polarisation.solver.factor(physics.stencil(section), iwmu)
        here, there = (physics.surface + 1, 12), (physics.surface + 9, 20)
        sources = torch.zeros(2, 2, physics.surface + mesh.nz + 1, mesh.nx + 1, dtype=torch.complex128)
        sources[:, 0, *here] = sources[:, 1, *there] = 1
        fields = factors.solve(sources)
        torch.testing.assert_close(fields[:, 0, *there], fields[:, 1, *here], rtol=1e-9, atol=0)


def test_a_mirrored_section_has_mirrored_data(mesh, section):
    """Also where sites and frequencies are listed in another order."""
    problem = MT2D(mesh, FREQUENCIES, SITES, ALL)
    mirrored = Mesh2D([-x for x in reversed(mesh.x_edges)], mesh.z_edges)
    other = MT2D(mirrored, FREQUENCIES[::-1], [-x for x in reversed(SITES)], ALL)
    data, jacobian = problem.jacobian(section)
    seen, derivatives = other.jacobian(section.flip(1))
    sign = torch.ones(3, 1, 1, 1, dtype=torch.float64)
    sign[0] = -1  # of the tipper
    torch.testing.assert_close(seen.view(other.shape).flip(1, 2), sign * data.view(problem.shape), rtol=1e-9, atol=1e-9)
    derivatives = derivatives.view(*other.shape, *mesh.shape).flip(1, 2, 5)
    expected = sign[..., None, None] * jacobian.view(*problem.shape, *mesh.shape)
    torch.testing.assert_close(derivatives, expected, rtol=1e-7, atol=1e-8)


def test_a_section_ten_times_as_large_has_the_data_of_a_hundredth_of_the_frequency(mesh, section):
    """Induction depends on sigma omega L^2 alone: apparent resistivities, phases and tippers are equal."""
    larger = Mesh2D([10 * x for x in mesh.x_edges], [10 * z for z in mesh.z_edges])
    small, large = MT2D(mesh, FREQUENCIES, SITES, ALL), MT2D(larger, [f / 100 for f in FREQUENCIES],
                                                             [10 * x for x in SITES], ALL)  # fmt: skip
    torch.testing.assert_close(large(section), small(section), rtol=1e-9, atol=1e-9)
    assert small(section).view(small.shape)[0].abs().max() > 0.01, "of the tipper"


@pytest.mark.parametrize("name", ("forward", "layered"))
def test_examples(name):
    results = doctest.testmod(import_module(f"tutti.science.em.mt.response.{name}"))
    assert results.attempted and not results.failed


def test_models_may_be_flat_and_in_single_precision(mesh, section):
    """Responses are in double precision; the gradient is in the shape and precision of the model."""
    problem = MT2D(mesh, FREQUENCIES, SITES)
    flat = section.float().flatten().requires_grad_()
    d = problem(flat)
    assert d.dtype == torch.float64 and torch.equal(d, problem(section.float()))
    d.sum().backward()
    assert flat.grad is not None and flat.grad.shape == flat.shape and flat.grad.dtype == torch.float32
    expected = problem.vjp(section, torch.ones(problem.size)).flatten().float()
    torch.testing.assert_close(flat.grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("solver", ["block", "block32"])
@pytest.mark.filterwarnings("ignore:the left side of the mesh")  # of the published geometry
def test_solvers_agree_where_systems_are_stiff(solver):
    """Cells of 25 km by 2 m, frequencies over six decades."""
    mesh, frequencies, sites = Mesh2D.geometric(750e3, columns=30), [1e3, 1e-3], [0.0, 400e3]
    draw = torch.Generator().manual_seed(0)
    section = 2 + 0.3 * torch.randn(mesh.shape, generator=draw, dtype=torch.float64)
    by_lu, derivatives = MT2D(mesh, frequencies, sites).jacobian(section)
    data, jacobian = MT2D(mesh, frequencies, sites, solver=solver).jacobian(section)
    torch.testing.assert_close(data, by_lu, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(jacobian, derivatives, rtol=1e-9, atol=1e-9 * derivatives.abs().max().item())
