"""A loss scale for each group of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tutti.train.boost import Boost
from tutti.train.boost.loss_scale_group import SCALES, LossScaleGroup


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        for p in self.parameters():
            p.data = (torch.randn(p.shape, generator=generator) / 3).to(dtype)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x).float().square().mean()


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 4, generator=generator).to(dtype)} for _ in range(count)]


def boosted(dtype=torch.float32, plan="dp", **options):
    boost = Boost.parse({"loss_scale_group": {"groups": 2, **options}})
    model = boost.prepare_model(Net(dtype), batches(1, dtype)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return boost.make_step(model, optimizer, batches(1, dtype)[0], cluster="cpu:2", plan=plan, level="O0")


def scales(step):
    return step.store.whole(f"buffer:{SCALES}").tolist()


@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_scales_do_not_change_float32_training(plan):
    step, model = boosted(plan=plan, first=2.0**10), Net()
    step.store.place(f"buffer:{SCALES}", torch.tensor([2.0**4, 2.0**12]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches(5):
        optimizer.zero_grad()
        wanted = model(**batch)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), wanted.detach(), rtol=1e-5, atol=1e-7)
    for name, p in model.named_parameters():
        torch.testing.assert_close(step.state_dict()[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_an_overflow_in_one_group_changes_its_scale_only():
    """In float16, 2^30 is too large for the gradients of the first group; those of the second are computed before."""
    step = boosted(torch.float16, first=2.0**4)
    step.store.place(f"buffer:{SCALES}", torch.tensor([2.0**30, 2.0**4]))
    before = step.state_dict()
    step(batches(1, torch.float16)[0])
    assert step.skipped == 1 and scales(step) == [2.0**29, 2.0**4]
    assert all(torch.equal(x, before[name]) for name, x in step.state_dict().items())
    assert not step.recaptures
    for _ in range(20):
        step(batches(1, torch.float16)[0])
    low, high = scales(step)
    assert 2.0**4 < low < 2.0**29 and high == 2.0**4 and step.skipped < 20


def test_scales_are_doubled():
    step = boosted(first=2.0**4, interval=3, largest=2.0**5)
    for batch in batches(7):
        step(batch)
    assert scales(step) == [2.0**5] * 2


def test_scales_are_state():
    step, again = boosted(first=2.0**4, interval=1), boosted()
    step(batches(1)[0])
    again.load_training_state(step.training_state())
    assert scales(again) == scales(step) == [2.0**5] * 2
    assert not any(SCALES in name for name in step.state_dict())


def test_groups_of_parameters():
    algorithm = LossScaleGroup(groups=2)
    algorithm.prepare_model(Net(), batches(1)[0], lambda model, batch: model(**batch))
    second = {name for name, group in algorithm._group_of.items() if group == 1}
    assert second == {f"{layer}.{kind}" for layer in ("layers.2", "layers.3", "last") for kind in ("weight", "bias")}


def test_errors():
    with pytest.raises(ValueError, match="must be positive"):
        LossScaleGroup(first=0)
    with pytest.raises(ValueError, match="loss_scale_group has 9 groups for 4 layers"):
        Boost.parse({"loss_scale_group": {"groups": 9}}).prepare_model(Net(), batches(1)[0])
    tied = Net()
    tied.layers[3].weight = tied.layers[0].weight
    with pytest.raises(ValueError, match=r"modules of two groups share parameter 'layers.0.weight'"):
        Boost.parse(["loss_scale_group"]).prepare_model(tied, batches(1)[0])
