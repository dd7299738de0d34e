"""Physics-informed networks against the solutions of their equations."""

import math

import pytest
import torch

from tutti.science.em.pinn import Helmholtz
from tutti.science.em.pinn.maxwell import PointSource
from tutti.science.em.pinn.network import MultiScale, along, second


def test_derivatives_of_networks_are_those_of_autograd():
    torch.manual_seed(0)
    net = MultiScale(2, 3, scales=(1.0, 2.0), layers=2, width=8).double()
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    u, first = along(net, x, 1)
    (wanted,) = torch.autograd.grad(u[:, 2].sum(), x, create_graph=True)
    torch.testing.assert_close(first[:, 2], wanted[:, 1])
    (twice,) = torch.autograd.grad(wanted[:, 1].sum(), x)
    torch.testing.assert_close(second(net, x, 1)[:, 2], twice[:, 1])


def test_the_solution_has_no_residual():
    problem, x = Helmholtz(), torch.rand(50, 2, dtype=torch.float64)
    assert problem.residual(problem.solution, x).abs().max() < 1e-12


@pytest.mark.slow
def test_helmholtz_reaches_the_published_error():
    """0.01733 after 10 epochs (MindElec)."""
    problem = Helmholtz()
    assert problem.error(problem.fit()) <= 0.0173


def test_a_short_training_lowers_the_error():
    problem = Helmholtz()
    assert problem.error(problem.fit(steps=150, count=64)) < 0.3


def test_waves_have_no_residual_and_leave_through_the_edge():
    """A plane wave in x is a solution outside of the source, and satisfies the edge's condition on the right."""
    problem = PointSource(radius=1e-3)

    def wave(x):
        f = torch.exp(-(((x[:, 2] - x[:, 0]) / 0.2) ** 2))
        return torch.stack([torch.zeros_like(f), f, f], 1)

    x = torch.rand(40, 3, dtype=torch.float64) + torch.tensor([0.1, 0.1, 0.0], dtype=torch.float64)
    assert problem.residuals(wave, x).abs().max() < 1e-12
    u = wave(x)
    assert (u[:, 1] * 1 - u[:, 0] * 0 - u[:, 2]).abs().max() == 0


@pytest.mark.starts
def test_the_reference_of_the_point_source_obeys_the_equations():
    """Hz of FDTD is symmetric, and vanishes before the wave arrives."""
    points, hz = PointSource().reference(n=30, times=5)["Hz"]
    found = hz.view(5, 30, 30)
    torch.testing.assert_close(found, found.transpose(1, 2), rtol=1e-6, atol=1e-8)
    assert found[-1].abs().max() > 1e-3 and math.isclose(float(points[:, :2].abs().max()), 0.5 - 0.5 / 30, rel_tol=1e-6)
    early = points[:, 2] < 0.25
    far = points[:, :2].norm(dim=1) > 0.6
    assert hz[early & far].abs().max() < 1e-3 * hz.abs().max()
