"""Modules of torch.nn, each a model of its own: every operator has a rule, and random plans change no number."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from cases import some
from tutti.ops import rule_of

IMAGES, VOLUMES, STEPS = (4, 4, 8, 8), (4, 2, 4, 4, 8), (8, 4, 8)


class Scored(nn.Module):
    """A module behind weights of its own, so that a gradient goes through it; the mean square is the loss."""

    def __init__(self, inner: nn.Module, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.scale)
        return (y[0] if isinstance(y, tuple) else y).square().mean()


class Solved(nn.Module):
    """Linear systems: behind `torch.linalg.solve` stands a check of values that returns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(x.mT @ x + torch.eye(x.shape[-1]), x.mT)


class Warped(nn.Module):
    """An image read at given positions."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.linspace(-1, 1, 6)
        grid = torch.stack(torch.meshgrid(rows, rows, indexing="xy"), -1) + x.mean((1, 2, 3)).view(-1, 1, 1, 1)
        return F.grid_sample(x, grid, align_corners=False)


class Spread(nn.Module):
    """Distances of all pairs of rows, and the one in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pdist(x.flatten(0, -2)).mean() + x.median()


CASES = {
    "a frozen batch norm": (lambda: nn.BatchNorm2d(4).eval(), IMAGES),
    "an instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES),
    "a GRU": (lambda: nn.GRU(8, 8, bidirectional=True), STEPS),
    "bicubic up-sampling": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGES),
    "an adaptive maximum pool": (lambda: nn.AdaptiveMaxPool2d((2, 4)), IMAGES),
    "a mean pool of volumes": (lambda: nn.AvgPool3d(2), VOLUMES),
    "a warped image": (Warped, IMAGES),
    "linear systems": (Solved, STEPS),
    "distances": (Spread, STEPS),
}


@pytest.mark.parametrize("what", some(CASES, ["bicubic up-sampling", "linear systems", "distances"]))
def test_a_module_is_split_as_one_device_has_it(what):
    make, shape = CASES[what]
    torch.manual_seed(0)
    model, batch = Scored(make(), shape[-1]), (torch.randn(shape),)
    graph = tutti.capture(model, batch)
    without = {str(n.target) for n in graph.calls if isinstance(n.target, torch._ops.OpOverload) and not rule_of(n)}
    assert without == set()

    def trained(cluster: str, plan) -> tuple[Tensor, dict[str, Tensor], tutti.Step]:
        ours = copy.deepcopy(model)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        step = tutti.parallelize(ours, optimizer, batch, cluster=cluster, plan=plan, level="O0")
        return step(batch), step.state_dict(), step

    loss, state, single = trained("cpu:1", "single")
    for plan in ("dp", *(tutti.random_plan(single, 4, seed) for seed in range(3))):
        split_loss, after, _ = trained("cpu:4", plan)
        torch.testing.assert_close(split_loss, loss)
        torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-5)
