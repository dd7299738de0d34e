"""Long runs advance in pieces, which changes no bit, and tell how far they are."""

from __future__ import annotations

import pytest
import torch

from tutti.launch.progress import told_by
from tutti.science.em.fdtd import CPML, Current, Energy, Grid, Probe, Simulation, Snapshots, Spectrum, drude
from tutti.science.em.fdtd import gaussian_up_to as gaussian
from tutti.science.em.fdtd.stepping import pieces

pytestmark = [
    pytest.mark.starts,
    pytest.mark.filterwarnings("ignore:monitor .*(nothing arrives|absorbing layers|not decayed)"),
]


@pytest.mark.parametrize(
    "options", [{}, {"checkpoints": 1}, {"checkpoints": 4}], ids=["no gradient", "stored", "again"]
)
def test_pieces_change_nothing(options, monkeypatch):
    grid = Grid((30, 24), 0.01)
    monitors = [
        Probe("x", "Ez", [(20, 12), (8, 8)]),
        Snapshots("every third", "Hx", (slice(5, 9), 7), every=3),
        Spectrum("f", "Ez", (12, slice(3, 20)), torch.tensor([5e8, 1e9]), every=2),
        Energy("W", every=4),
    ]
    simulation = Simulation(grid, CPML(6), [Current("Ez", (12, 12), gaussian(1.5e9))], monitors)
    poles = [drude(1e10, 1e9, torch.arange(30)[:, None].expand(30, 24) > 16)]

    def run():
        eps = torch.full(grid.shape, 1.5, requires_grad=bool(options))
        result = simulation.run(eps, 90, poles=poles, **options)
        if options:
            (result["x"].square().sum() + result["f"].abs().square().sum() * 1e18).backward()
        return [result[x.name].detach() for x in monitors], eps.grad

    expected, gradient = run()
    monkeypatch.setattr(pieces, "PIECE", 7 * 31 * 25)
    monkeypatch.setattr(pieces, "LONG", 0)
    lines: list[str] = []
    with told_by(lines.append):
        values, again = run()
    assert all(torch.equal(x, y) for x, y in zip(expected, values, strict=True))
    assert "FDTD: 7 of 90" in lines and "FDTD: 90 of 90" in lines
    if options:
        assert torch.equal(gradient, again) and "FDTD, gradient: 90 of 90" in lines
