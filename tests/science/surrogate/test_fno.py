"""Fourier neural operators: their layer is a circular convolution, and they take grids of any resolution."""

import pytest
import torch

from tutti.api.step import parallelize
from tutti.science.em.surrogate.cavity import Cavity
from tutti.science.em.surrogate.fno import FNO, Spectral, relative


def test_a_layer_is_a_circular_convolution():
    torch.manual_seed(0)
    layer = Spectral(1, 1, (3,)).double()
    x = torch.randn(1, 1, 16, dtype=torch.float64)
    unit = torch.zeros_like(x)
    unit[..., 0] = 1
    kernel = layer(unit)[0, 0]
    wanted = torch.stack([sum(kernel[(i - j) % 16] * x[0, 0, j] for j in range(16)) for i in range(16)])
    torch.testing.assert_close(layer(x)[0, 0], wanted)


def test_two_axes_shift_with_their_argument():
    torch.manual_seed(0)
    layer = Spectral(2, 3, (3, 2)).double()
    x = torch.randn(2, 2, 12, 10, dtype=torch.float64)
    shifted = layer(x.roll((5, 3), (2, 3)))
    torch.testing.assert_close(shifted, layer(x).roll((5, 3), (2, 3)))


def test_a_finer_grid_gives_the_same_function():
    """Of band-limited fields, at the common points."""
    torch.manual_seed(0)
    layer = Spectral(1, 1, (3, 3)).double()

    def field(n):
        t = torch.arange(n, dtype=torch.float64) * 2 * torch.pi / n
        return (torch.cos(t[:, None] + 0.3) * torch.sin(2 * t) + torch.cos(2 * t[:, None]))[None, None]

    coarse, fine = layer(field(16)), layer(field(32))
    torch.testing.assert_close(fine[..., ::2, ::2], coarse)


def test_the_cavity_follows_its_equation():
    """Solutions converge by second order."""
    cavity = Cavity()
    u = [cavity.solve(cavity.fillings(1, n))[0, :: n // 16, :: n // 16] for n in (16, 32, 64, 128)]
    errors = [float((a - b).norm()) for a, b in zip(u[:-1], u[1:], strict=True)]
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.2)
    with pytest.raises(ValueError, match="must be positive"):
        cavity.solve(-cavity.fillings(1, 8))


@pytest.mark.slow
def test_an_operator_learns_fields_of_cavities_and_takes_finer_grids():
    torch.set_num_threads(1)
    cavity = Cavity()
    fillings, fields = cavity.pairs(400, 32, seed=1)
    torch.manual_seed(0)
    model = FNO(1, 2, (8, 8), width=24, layers=3)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1200)
    generator = torch.Generator().manual_seed(0)

    def batch():
        rows = torch.randint(400, (16,), generator=generator)
        return fillings[rows], fields[rows]

    step = parallelize(model, optimizer, batch(), plan="single", level="O0", loss=lambda m, b: m(*b)["loss"])
    for _ in range(1200):
        step(batch())
        schedule.step()
    model.load_state_dict(step.state_dict())
    with torch.no_grad():
        errors = [
            relative(model.operate(x), y).mean().item() for x, y in (cavity.pairs(40, n, seed=9) for n in (32, 64))
        ]
    assert errors[0] < 0.15 and errors[1] < 0.2


@pytest.mark.parametrize(("modes", "shape", "message"), [
    ((1, 2, 3), (1, 1, 8, 8), "one or two"),
    ((5,), (1, 1, 8), "twice as many points"),
    ((2,), (1, 1, 8, 8), "a field of 2 axes"),
])  # fmt: skip
def test_bad_input(modes, shape, message):
    with pytest.raises(ValueError, match=message):
        Spectral(1, 1, modes)(torch.zeros(shape))
