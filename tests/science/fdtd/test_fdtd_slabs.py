"""Slabs among processes: results and gradients have the bits of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fdtd_cases import case

from tutti.science.em.fdtd import CPML, Grid, PlaneWave, Probe, Simulation, gaussian_up_to
from tutti.science.em.fdtd.slabs import widths

pytestmark = pytest.mark.starts


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def grouped(ranks: int):
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, dist.get_world_size(), ranks)]
    return groups[dist.get_rank() // ranks]


def answers(mode: str, dtype: torch.dtype, checkpoints: int, **sharing) -> list[torch.Tensor]:
    """Results, then gradients of eps_r, sigma, the strength of a pole and a waveform."""
    simulation, given, wanted = case(mode, dtype)
    simulation = type(simulation)(**{**vars(simulation), **sharing})
    found = simulation.run(**given, steps=40, checkpoints=checkpoints)
    draw, loss = torch.Generator().manual_seed(1), torch.zeros(())
    for name in ("points", "pictures", "spectrum"):
        x = torch.view_as_real(found[name]) * 1e9 if found[name].is_complex() else found[name]
        loss = loss + (x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum()
    results = [found[name].detach() for name in ("points", "pictures", "spectrum")]
    return [*results, *torch.autograd.grad(loss, wanted)]


def among(ranks: int, mode: str, dtype: torch.dtype, checkpoints: int, halo: int, slabs: tuple[int, ...]):
    return answers(mode, dtype, checkpoints, group=grouped(ranks), halo=halo, slabs=slabs)


@pytest.mark.parametrize("ranks, mode, dtype, checkpoints, halo, slabs", [
    (2, "TM", torch.float32, 1, 4, ()), (4, "TM", torch.float64, 3, 2, ()), (2, "TE", torch.float64, 1, 3, (4, 10)),
    (2, "3D", torch.float32, 4, 4, ()), (4, "3D", torch.float64, 1, 2, (2, 2, 4, 2)), (4, "3D", torch.float32, 1, 1, ()),
])  # fmt: skip
def test_processes_have_the_bits_of_one(pool, ranks, mode, dtype, checkpoints, halo, slabs):
    pool.run(start)
    expected = answers(mode, dtype, checkpoints)
    for found in pool.run(among, ranks, mode, dtype, checkpoints, halo, slabs):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs) and theirs.abs().max() > 0
