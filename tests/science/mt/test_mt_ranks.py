"""Frequencies and sites among the processes of a job: results are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tutti.science.em.mt.mesh import Mesh2D
from tutti.science.em.mt.response.forward import MT2D

SITES, MODES = [-900.0, 0.0, 300.0, 1500.0, 2000.0], ("TE", "tipper", "TM")
FREQUENCIES = {1: [1.0], 5: [100.0, 10.0, 1.0, 0.3, 0.1]}


def answers(count: int, solver: str, group=None) -> list[torch.Tensor]:
    """Response, gradient, product and Jacobian."""
    mesh = Mesh2D.for_survey(FREQUENCIES[5], SITES, (10, 1000), growth=1.6, width=500)
    draw = torch.Generator().manual_seed(3)
    section = 2 + 0.5 * torch.randn(mesh.shape, generator=draw, dtype=torch.float64)
    problem = MT2D(mesh, FREQUENCIES[count], SITES, MODES, solver=solver, threads=1, group=group)
    weights = torch.randn(problem.size, generator=draw, dtype=torch.float64)
    leaf = section.clone().requires_grad_()
    data = problem(leaf)
    (data * weights).sum().backward()
    assert leaf.grad is not None
    again, jacobian = problem.jacobian(section)
    assert torch.equal(again, data)
    linearized = problem.linearize(section)
    assert torch.equal(linearized.jacobian(), jacobian)
    return [data.detach(), leaf.grad, linearized.jvp(section), jacobian]


def among(ranks: int, count: int, solver: str) -> list[torch.Tensor]:
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, dist.get_world_size(), ranks)]
    return answers(count, solver, groups[dist.get_rank() // ranks])


def start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


@pytest.mark.parametrize("ranks, count, solver", [(2, 5, "splu"), (4, 5, "splu"), (4, 5, "block"), (4, 1, "splu")])
def test_processes_equal_one(pool, ranks, count, solver):
    """(4, 1): more processes than frequencies, which share sites."""
    pool.run(start)
    expected = answers(count, solver)
    for tensors in pool.run(among, ranks, count, solver):
        for ours, theirs in zip(tensors, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12 if solver == "splu" else 1e-9, atol=1e-12)


def refused() -> str:
    with pytest.raises(ValueError) as error:
        MT2D(Mesh2D([0, 1, 2], [0, 1, 2]), [1.0], [1.0, 1.5], group=dist.group.WORLD)
    return str(error.value)


def test_too_many_processes(pool):
    pool.run(start)
    assert "4 processes cannot share 1 frequencies and 2 sites: use at most 2" in pool.run(refused)[0]
