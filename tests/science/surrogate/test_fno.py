"""Fourier neural operators against circular convolutions, over resolutions, and trained on fields of a cavity."""

from itertools import pairwise

import pytest
import torch

import tutti
from tutti.science.em.surrogate.cavity import Cavity
from tutti.science.em.surrogate.fno import FNO, Spectral
from tutti.science.em.surrogate.geometry import relative_error


def kernel(weight, n):
    """The convolution's kernel in space, one axis: of coefficients (inputs, outputs, modes)."""
    k, x = torch.arange(weight.shape[-1]), torch.arange(n, dtype=torch.float64) / n
    wave = torch.exp(2j * torch.pi * k[:, None] * x)
    twice = torch.where(k == 0, 1.0, 2.0)
    return torch.einsum("iom,m,mx->iox", weight, twice.to(weight.dtype), wave.to(weight.dtype)).real / n


def test_one_axis_is_a_circular_convolution():
    torch.manual_seed(0)
    layer, n = Spectral(2, 3, (4,)).double(), 11
    x = torch.randn(2, 2, n, dtype=torch.float64)
    of = kernel(torch.view_as_complex(layer.weight)[0], n)
    circle = of[..., (torch.arange(n)[:, None] - torch.arange(n)) % n]  # (inputs, outputs, to, from)
    assert torch.allclose(layer(x), torch.einsum("ioxy,biy->box", circle, x))


def test_two_axes_commute_with_shifts_and_keep_few_frequencies():
    torch.manual_seed(0)
    layer = Spectral(2, 2, (3, 2)).double()
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    y = layer(x)
    assert torch.allclose(layer(x.roll((2, 3), (2, 3))), y.roll((2, 3), (2, 3)))
    spectrum = torch.fft.fft2(y).abs()
    assert spectrum[..., 4:6, :].max() < 1e-12 and spectrum[..., 2:7].max() < 1e-12


def test_resolutions_give_the_same_function():
    """Both grids resolve the field; it is compared in places that are on both."""
    torch.manual_seed(0)
    layer = Spectral(1, 2, (3, 3)).double()

    def field(n):
        x = torch.arange(n, dtype=torch.float64) / n * 2 * torch.pi
        return (torch.sin(x)[:, None] * torch.cos(2 * x) + torch.cos(2 * x)[:, None])[None, None]

    assert torch.allclose(layer(field(32))[..., ::2, ::2], layer(field(16)))


def test_cavity_satisfies_its_equation_and_converges():
    cavity, n = Cavity(), 32
    u = [cavity.solve(cavity.fillings(1, m))[0, :: m // 16, :: m // 16] for m in (16, 32, 64, 128)]
    errors = [float((a - b).norm()) for a, b in pairwise(u)]
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.2)
    eps = cavity.fillings(2, n, 3)
    u = cavity.solve(eps)
    around = u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4 * u[:, 1:-1, 1:-1]
    medium = cavity.k**2 * (1 - 1j * cavity.loss) * eps[:, 1:-1, 1:-1] * u[:, 1:-1, 1:-1]
    assert (around * n**2 + medium + cavity.current(n)[1:-1, 1:-1]).abs().max() < 1e-8


def trained(samples, steps, width, modes):
    fields, labels = Cavity().pairs(samples, 32)
    scale = labels.std()
    torch.manual_seed(0)
    model = FNO(1, 2, modes, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, cycle_momentum=False)
    step = tutti.parallelize(model, optimizer, {"fields": fields[:16], "labels": labels[:16] / scale}, plan="single",
                             level="O0")  # fmt: skip
    for _ in range(steps):
        rows = torch.randint(samples, (16,))
        step({"fields": fields[rows], "labels": labels[rows] / scale})
        schedule.step()
    model.load_state_dict(step.state_dict())
    return model, scale


@torch.no_grad()
def error(model, scale, count, n):
    fields, labels = Cavity().pairs(count, n, seed=1)
    return float(relative_error(model.operate(fields) * scale, labels).mean())


def test_an_operator_learns():
    model, scale = trained(48, 120, 8, (4, 4))
    assert error(model, scale, 16, 32) < 0.7


@pytest.mark.slow
def test_an_operator_generalises_to_other_fillings_and_finer_grids():
    model, scale = trained(600, 1500, 20, (8, 8))
    held_out = error(model, scale, 40, 32)
    assert held_out < 0.10
    assert error(model, scale, 40, 64) < held_out + 0.05


def test_what_an_operator_refuses():
    with pytest.raises(ValueError, match="one or two positive numbers"):
        Spectral(1, 1, (2, 2, 2))
    with pytest.raises(ValueError, match="grids of twice as many points"):
        Spectral(1, 1, (4,))(torch.zeros(1, 1, 6))
    with pytest.raises(ValueError, match="a field of 2 axes, and 1 modes"):
        Spectral(1, 1, (4,))(torch.zeros(1, 1, 6, 6))
    with pytest.raises(ValueError, match="layers of the operator: a whole number from 1, not 0"):
        FNO(1, 1, (4,), layers=0)
    with pytest.raises(ValueError, match="modes: one or two positive numbers, such as"):
        FNO(1, 1, 4)
    with pytest.raises(ValueError, match="width of the operator"):
        FNO(1, 1, (4,), width=-8)
    model, fields = FNO(1, 2, (2, 2), 4, 1), torch.ones(3, 1, 8, 8)
    for x, message in (((3, 2, 8, 8), r"float32 \(3, 2, 8, 8\)"), ((3, 1, 8), r"float32 \(3, 1, 8\)")):
        with pytest.raises(ValueError, match=rf"fields: of shape \(batch, 1, nx, ny\), not {message}"):
            model.operate(torch.ones(x))
    with pytest.raises(ValueError, match=r"fields: torch\.float32 as the weights, not torch\.float64"):
        model.operate(fields.double())
    with pytest.raises(ValueError, match=r"labels: of shape \(3, 2, 8, 8\), not \(3, 1, 8, 8\)"):
        model(fields, fields)
    with pytest.raises(ValueError, match="sample 1 is 0 everywhere: it has no relative error"):
        model(fields, torch.tensor([1.0, 0.0, 1.0])[:, None, None, None].expand(3, 2, 8, 8))
    with pytest.raises(ValueError, match="k of the cavity: positive and finite, not nan"):
        Cavity(k=float("nan"))
    with pytest.raises(ValueError, match="n of fillings: a whole number from 2, not 1"):
        Cavity().fillings(1, 1)
    with pytest.raises(ValueError, match="positive and finite"):
        Cavity().solve(torch.zeros(1, 5, 5))
