"""Physics-informed networks: derivatives, residuals of known solutions, and errors that were published."""

import math

import pytest
import torch
from torch import nn

from tutti.launch.progress import told_by
from tutti.science.em.pinn.helmholtz import Helmholtz
from tutti.science.em.pinn.maxwell import Fields, PointSource
from tutti.science.em.pinn.network import MultiScale, along, second

PUBLISHED = 0.01733  # MindElec, k = 2


class Exact(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_derivatives_of_a_known_function():
    x = torch.rand(20, 3, dtype=torch.float64)
    value, slope = along(lambda x: torch.sin(3 * x[:, :1]) * x[:, 1:2], x, 0)
    assert torch.allclose(value, torch.sin(3 * x[:, :1]) * x[:, 1:2])
    assert torch.allclose(slope, 3 * torch.cos(3 * x[:, :1]) * x[:, 1:2])
    assert torch.allclose(second(lambda x: torch.sin(3 * x[:, :1]), x, 0), -9 * torch.sin(3 * x[:, :1]))


def test_derivatives_of_a_network_are_those_of_autograd():
    torch.manual_seed(0)
    model = MultiScale(3, 2, layers=3, width=8).double()
    x = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    (by_autograd,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    for axis in range(3):
        assert torch.allclose(along(model, x, axis)[1][:, 1], by_autograd[:, axis])
    (first,) = torch.autograd.grad(model(x)[:, 1].sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(first[:, 2].sum(), x)
    assert torch.allclose(second(model, x, 2)[:, 1], twice[:, 2])


def test_the_solution_has_no_helmholtz_loss():
    problem = Helmholtz(k=3.0)
    batch = problem.batch(64, torch.Generator().manual_seed(0))
    assert float(problem.loss(Exact(problem.solution), batch)) < 1e-9
    assert problem.error(Exact(lambda x: 1.1 * problem.solution(x))) == pytest.approx(0.1, rel=1e-3)


def test_a_plane_wave_has_no_residual_away_from_the_source():
    problem = PointSource(radius=1e-3)

    def wave(x):  # along +x: Ey = Hz
        f = torch.sin(5 * (x[:, 0] - x[:, 2]))
        return torch.stack([torch.zeros_like(f), f, f], 1)

    x = 0.3 + 0.2 * torch.rand(50, 3, dtype=torch.float64)
    assert problem.residuals(Exact(wave), x).abs().max() < 1e-10
    batch = problem.batch(400, torch.Generator().manual_seed(1))
    assert all(bool((batch[name][:, :2].abs() <= 0.5).all()) for name in ("interior", "edge", "source"))
    normal, edge = batch["normal"], batch["edge"][:, :2]
    assert normal.unique(dim=0).tolist() == [[-1, 0], [0, -1], [0, 1], [1, 0]]
    assert torch.equal((normal * edge).sum(1), torch.full((100,), 0.5)), "each is on the edge that its normal leaves"


@pytest.mark.parametrize("side", [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)])
def test_edges_reflect_in_the_fourth_order_of_the_angle(side):
    """A plane wave at an angle a to the normal leaves (1 - cos a)^2 / 2 of d/dt."""
    normal = torch.tensor(side, dtype=torch.float64).expand(30, 2)
    x = torch.rand(30, 3, dtype=torch.float64)
    for angle in (0.0, 0.3, -0.7):
        outward = math.atan2(side[1], side[0]) + angle
        c, s = math.cos(outward), math.sin(outward)

        def wave(x, c=c, s=s):
            f = torch.sin(5 * (c * x[:, 0] + s * x[:, 1] - x[:, 2]))
            return torch.stack([-s * f, c * f, f], 1)

        change = -5 * torch.cos(5 * (c * x[:, 0] + s * x[:, 1] - x[:, 2]))
        expected = (1 - math.cos(angle)) ** 2 / 2 * change
        torch.testing.assert_close(PointSource().outgoing(Exact(wave), x, normal), expected, rtol=1e-9, atol=1e-12)


def test_fields_begin_at_rest():
    model = Fields(MultiScale(3, 3, layers=2, width=8))
    x = torch.rand(10, 3)
    x[:, 2] = 0
    assert float(model(x).detach().abs().max()) == 0


@pytest.mark.starts
def test_reference_of_the_point_source_is_symmetric_and_converges():
    problem = PointSource()
    coarse, fine = problem.reference(25, 5), problem.reference(50, 5)
    points, hz = fine["Hz"]
    field = hz.reshape(5, 50, 50)
    assert torch.allclose(field, field.transpose(1, 2)) and torch.allclose(field, field.flip(1), atol=1e-9)
    ex = fine["Ex"][1].reshape(5, 50, 51)
    assert torch.allclose(ex, -fine["Ey"][1].reshape(5, 51, 50).transpose(1, 2), atol=1e-9)
    assert points.shape == (5 * 2500, 3) and 0.98 < float(points[:, 2].max()) < 1.0
    early, far = points[:, 2] < 0.25, points[:, :2].norm(dim=1) > 0.6
    assert hz[early & far].abs().max() < 1e-3 * hz.abs().max()
    averaged = ex[:, :, ::2].reshape(5, 25, 2, 26).mean(2)
    assert float((coarse["Ex"][1].reshape(5, 25, 26) - averaged).norm() / averaged.norm()) < 0.1


def test_helmholtz_learns():
    problem = Helmholtz()
    torch.manual_seed(0)
    before = problem.error(MultiScale(2, 1, scales=(1.0,), layers=2, width=16))
    model = problem.fit(steps=120, count=64, rate=1e-2, model=MultiScale(2, 1, scales=(1.0,), layers=2, width=16))
    assert problem.error(model) < 0.25 < before


@pytest.mark.slow
def test_helmholtz_reaches_the_published_error():
    problem = Helmholtz()
    error = problem.error(problem.fit())
    assert error <= PUBLISHED, f"relative L2 error {error:.5f}"


@pytest.mark.parametrize("call, message", [
    (lambda: Helmholtz(k=math.nan), "k of the Helmholtz equation: positive and finite, not nan"),
    (lambda: Helmholtz(k="a"), "k of the Helmholtz equation: positive and finite, not 'a'"),
    (lambda: Helmholtz().error(MultiScale(2, 1), 0), "n of the error: a whole number from 2"),
    (lambda: Helmholtz(k=0), "k of the Helmholtz equation"),
    (lambda: Helmholtz(weight=-1), "weight of the Helmholtz equation"),
    (lambda: Helmholtz().fit(steps=0), "steps of the training: a whole number from 1, not 0"),
    (lambda: Helmholtz().fit(count=0), "count of the training: a whole number from 4, not 0"),
    (lambda: Helmholtz().fit(rate=-1e-3), "rate of the training: positive"),
    (lambda: PointSource(radius=0), "radius of the source"),
    (lambda: PointSource().fit(steps=0), "steps of the training"),
    (lambda: PointSource().fit(count=2), "count of the training: a whole number from 4"),
    (lambda: PointSource().reference(0), "n of the reference"),
    (lambda: MultiScale(2, 1, layers=0), "layers of the network"),
    (lambda: MultiScale(2, 1, scales=()), "scales of the network"),
])  # fmt: skip
def test_numbers_that_mean_nothing(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_training_tells_how_far_it_is():
    shown, steps = [], []
    with told_by(shown.append):
        Helmholtz().fit(steps=101, count=8, model=MultiScale(2, 1, scales=(1.0,), layers=1, width=4),
                        after=lambda step, loss: steps.append((step, loss > 0)))  # fmt: skip
    assert steps == [(0, True), (100, True)]
    assert any(x.startswith("training a network: 100 of 101, loss ") for x in shown)


def test_divergence_is_an_error():
    with pytest.raises(ValueError, match="training diverged: lower the rate"):
        Helmholtz().fit(steps=3, count=16, rate=math.inf, model=MultiScale(2, 1, scales=(1.0,), layers=1, width=4))
