"""Slabs among processes: results and gradients have the bits of one process."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fdtd_cases import case

from tutti.hardware import Cluster
from tutti.science.em.fdtd import (
    CPML,
    Current,
    Energy,
    Grid,
    PlaneWave,
    Probe,
    Simulation,
    Snapshots,
    gaussian_up_to,
    predict,
)
from tutti.science.em.fdtd.stepping.slabs import widths

pytestmark = [
    pytest.mark.starts,
    pytest.mark.filterwarnings("ignore:.* cells per wavelength"),
    pytest.mark.filterwarnings("ignore:a source at node"),
    pytest.mark.filterwarnings("ignore:monitor .*(nothing arrives|absorbing layers|not decayed)"),
]


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def grouped(ranks: int):
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, dist.get_world_size(), ranks)]
    return groups[dist.get_rank() // ranks]


def answers(mode: str, dtype: torch.dtype, checkpoints: int, **sharing) -> list[torch.Tensor]:
    """Results, then gradients of eps_r, sigma, the strength of a pole and a waveform."""
    simulation, medium, wanted = case(mode, dtype)
    simulation = replace(simulation, **sharing)
    result = simulation.run(**medium, steps=40, checkpoints=checkpoints)
    draw, loss = torch.Generator().manual_seed(1), torch.zeros(())
    for name in ("points", "pictures", "spectrum"):
        x = torch.view_as_real(result[name]) * 1e9 if result[name].is_complex() else result[name]
        loss = loss + (x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum()
    results = [result[name].detach() for name in ("points", "pictures", "spectrum")]
    return [*results, *torch.autograd.grad(loss, wanted)]


def among(ranks: int, mode: str, dtype: torch.dtype, checkpoints: int, halo: int, slabs: tuple[int, ...]):
    return answers(mode, dtype, checkpoints, group=grouped(ranks), halo=halo, slabs=slabs)


@pytest.mark.parametrize("ranks, mode, dtype, checkpoints, halo, slabs", [
    (2, "TM", torch.float32, 1, 4, ()), (4, "TM", torch.float64, 3, 2, ()), (2, "TE", torch.float64, 1, 3, (4, 10)),
    (2, "3D", torch.float32, 4, 4, ()), (4, "3D", torch.float64, 1, 2, (2, 2, 4, 2)),
    (4, "3D", torch.float32, 1, 1, ()),
])  # fmt: skip
def test_processes_have_the_bits_of_one(pool, ranks, mode, dtype, checkpoints, halo, slabs):
    pool.run(start)
    expected = answers(mode, dtype, checkpoints)
    for tensors in pool.run(among, ranks, mode, dtype, checkpoints, halo, slabs):
        for ours, theirs in zip(tensors, expected, strict=True):
            assert torch.equal(ours, theirs) and theirs.abs().max() > 0


def scattered(group=None) -> list[torch.Tensor]:
    """Fields around a box that a plane wave meets, in two runs, the second of which goes on after the first."""
    grid = Grid((30, 16, 14), 0.01)
    monitors = [
        Snapshots("E", "Ez", (slice(0, 31), 6, slice(0, 13)), every=5),
        Probe("H", "Hy", [(4, 7, 6), (25, 7, 6)]),
        Energy("W", 20),
    ]
    wave = PlaneWave([(8, 22), (5, 11), (4, 9)], "-x", "Ez", gaussian_up_to(3e9))
    simulation = Simulation(grid, CPML(4, alpha=0.01), [wave], monitors, group=group, **({"halo": 3} if group else {}))
    eps, metal = torch.ones(grid.shape), torch.zeros(grid.shape, dtype=torch.bool)
    eps[10:20, 6:10, 5:8], metal[14:16, 7:9, 5:7] = 3.0, True
    first = simulation.run(eps, 70, pec=metal)
    second = simulation.run(eps, 33, pec=metal, after=first)
    return [x[name] for x in (first, second) for name in ("E", "H", "W")]


def scattered_among(ranks: int) -> list[torch.Tensor]:
    return scattered(grouped(ranks))


def test_a_plane_wave_crosses_slabs(pool):
    """Total and scattered fields, conductors, layers; a run goes on from the state of each process."""
    pool.run(start)
    expected = scattered()
    for ranks in (2, 4):
        for tensors in pool.run(scattered_among, ranks):
            for x, y in zip(tensors, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0 if x.dtype == torch.float32 else 1e-13, atol=0)
                assert y.abs().max() > 0


def errors() -> list[str]:
    messages, grid = [], Grid((20, 8), 0.01)
    for asked in ({"halo": 6}, {"slabs": (2, 7, 6, 6)}, {"halo": 0}):
        with pytest.raises(ValueError) as error:
            Simulation(grid, group=dist.group.WORLD, **asked).run(1.0, 4)
        messages.append(str(error.value))
    probe = Simulation(grid, monitors=[Probe("x", "Ez", [(9, 4)])], group=dist.group.WORLD)
    with pytest.raises(ValueError) as error:
        probe.run(torch.ones(grid.shape, requires_grad=True), 4, memory=100)
    return [*messages, str(error.value)]


def test_errors_are_those_of_all_processes(pool):
    pool.run(start)
    for messages in pool.run(errors):
        assert "21 planes are too few for 4 slabs with halos of 6: use at most 3 processes" in messages[0]
        assert "4 numbers of planes, each at least the 4 of a halo, whose sum is 21" in messages[1]
        assert "halo: at least one plane, not 0" in messages[2]
        assert "needs at least" in messages[3]


def test_widths_even_out_what_is_computed():
    assert widths(100, 4, 4) == (27, 23, 23, 27)
    assert widths(101, 1, 4) == (101,) and sum(widths(103, 5, 3)) == 103
    assert widths(17, 4, 4) == (5, 4, 4, 4)
    with pytest.raises(ValueError, match="use at most 4 processes"):
        widths(17, 5, 4)


GRIDS = {"TM": Grid((40, 30), 0.01), "TE": Grid((40, 30), 0.01, "TE"), "3D": Grid((24, 9, 8), 0.01)}


def counted(ranks: int, mode: str) -> tuple[int, int]:
    return Simulation(GRIDS[mode], CPML(3), group=grouped(ranks), halo=3).run(1.0, 10).sent


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["TM", "TE", "3D"])
def test_predicted_bytes_are_those_sent(pool, ranks, mode):
    pool.run(start)
    counts = pool.run(counted, ranks, mode)[:ranks]
    prediction = predict(GRIDS[mode], 10, ranks, cluster=Cluster.parse("cpu:4"), cpml=CPML(3), halo=3)
    assert [10 * x for x in prediction.sent] == pytest.approx([sent for _, sent in counts], rel=1e-12)
    assert 10 * prediction.messages == pytest.approx(max(messages for messages, _ in counts), rel=1e-12)


def test_splitting_pays_for_large_grids():
    cluster = Cluster.parse("cpu:4")
    small = predict(Grid((40, 20), 0.01), 1000, 4, cluster=cluster, rate=2e8)
    large = predict(Grid((400, 200, 200), 0.01), 1000, 4, cluster=cluster, rate=2e8, cpml=CPML(10))
    assert not small.pays and small.alone < small.seconds
    assert large.pays and 2.5 < large.alone / large.seconds < 4
    assert sum(large.slabs) == 401 and large.slabs[0] > large.slabs[1]
    one = predict(Grid((400, 200, 200), 0.01), 1000, 1, cluster=cluster, rate=2e8, cpml=CPML(10))
    assert one.seconds == one.alone and one.memory > 1.5 * large.memory
    for devices, steps, options, message in ((5, 10, {}, "devices: from 1 to the 4"), (2, -10, {}, "steps: at least 1"),
                                             (2, 10, {"slabs": (1, 2)}, "whose sum is 41, not .1, 2."),
                                             (2, 10, {"halo": 0}, "halo: at least one plane")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            predict(Grid((40, 20), 0.01), steps, devices, cluster=cluster, **options)


def warned() -> list[str]:
    source = Current("Ez", (6, 6), gaussian_up_to(20e9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Simulation(Grid((12, 12), 0.01), sources=[source], group=grouped(2)).run(1.0, 2)
    return [str(x.message) for x in caught]


def test_the_first_process_of_a_group_warns(pool):
    pool.run(start)
    first, second = pool.run(warned)[:2]
    assert "cells per wavelength" in first[0] and not second
