"""Simulations drawn at random against the reference: grids down to a few cells, layers of any thickness, sources and
monitors anywhere, partial designs, and any choice of materials with and without gradients."""

from __future__ import annotations

import random

import pytest
import torch
from test_fdtd_gradients import by_reference

from tutti.science.em.fdtd import CPML, Current, Grid, Pole, Probe, Simulation, Spectrum

pytestmark = [
    pytest.mark.starts,  # the compiler
    pytest.mark.filterwarnings("ignore:a source at node"),
    pytest.mark.filterwarnings("ignore:monitor .*(nothing arrives|absorbing layers|not decayed)"),
]
STEPS = 12


def drawn(seed: int, mode: str):
    rng, generator = random.Random(f"{mode} {seed}"), torch.Generator().manual_seed(seed)
    shape = tuple(rng.choice((3, 5, 9, 17, 33, 40)) for _ in range(3 if mode == "3D" else 2))
    grid = Grid(shape, 0.01, mode)
    thick = tuple((rng.randint(0, n // 2), rng.randint(0, n // 2 - 1)) for n in shape)

    def uniform(*sizes):
        return torch.rand(sizes, generator=generator, dtype=torch.float64)

    def where():
        return tuple(rng.randrange(n + 1) for n in shape)

    def current(name, **rest):
        """Where the component changes."""
        low = [0 if ("xyz"[axis] == name[1]) == (name[0] == "E") else 1 for axis in range(len(shape))]
        place = tuple(rng.randrange(a, n) for a, n in zip(low, shape, strict=True))
        return Current(name, place, uniform(STEPS) - 0.5, **rest)

    shots = rng.choice((1, 1, 3))
    sources = [current(rng.choice(grid.components), shot=rng.randrange(shots)) for _ in range(4)]
    sources.append(current(grid.components[0], shot=shots - 1, hard=mode != "TE"))
    waves = [x.waveform.requires_grad_() for x in sources]
    monitors = [Probe(f"p{x}", x, [where() for _ in range(3)]) for x in grid.components]
    monitors.append(Spectrum("s", rng.choice(grid.components), (slice(None),) * len(shape), (1e9, 3e9)))
    design = None
    if rng.random() < 0.6:
        low = [rng.randrange(n) for n in shape]
        design = tuple(slice(a, rng.randint(a + 1, n)) for a, n in zip(low, shape, strict=True))
    medium, wanted = {}, list(waves)
    medium["eps_r"] = 1.0 if rng.random() < 0.3 else (1 + uniform(*shape)).requires_grad_()
    if rng.random() < 0.5:
        medium["sigma"] = (0.1 * uniform(*shape)).requires_grad_()
    wanted += [x for x in medium.values() if isinstance(x, torch.Tensor)]
    if rng.random() < 0.4:
        low = [rng.randrange(n) for n in shape]
        box = tuple(slice(a, rng.randint(a + 1, n)) for a, n in zip(low, shape, strict=True))
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[box] = True
        medium["poles"] = [Pole(torch.as_tensor(1e20), 1e10, 1e9, mask)]
    simulation = Simulation(grid, CPML(thick, alpha=0.01), sources, monitors, design=design, dtype=torch.float64)
    return simulation, medium, wanted


@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
@pytest.mark.parametrize("seed", range(8))
def test_any_simulation_is_that_of_the_reference(mode, seed):
    simulation, medium, wanted = drawn(seed, mode)
    result, expected = simulation.run(**medium, steps=STEPS), by_reference(simulation, medium, STEPS)
    losses = []
    for values in (result, expected):
        weights, total = torch.Generator().manual_seed(1), 0
        for name, x in expected.items():
            y = torch.view_as_real(values[name]) * 1e9 if x.is_complex() else values[name]
            total = total + (y * torch.randn(y.shape, generator=weights, dtype=y.dtype)).sum()
        losses.append(total)
    for name, x in expected.items():
        torch.testing.assert_close(result[name], x, rtol=1e-10, atol=1e-12 * float(x.detach().abs().max()))
    if not losses[1].requires_grad:
        return
    ours = torch.autograd.grad(losses[0], wanted, allow_unused=True)
    theirs = torch.autograd.grad(losses[1], wanted, allow_unused=True)
    for x, y in zip(ours, theirs, strict=True):
        y = torch.zeros_like(x) if y is None else y
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11 * float(y.abs().max()))
