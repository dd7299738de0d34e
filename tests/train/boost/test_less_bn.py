"""Less batch norm: which ones are removed from residual networks, and the normalized head."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

import tutti
from resnets import BasicBlock, Bottleneck, ResNet
from tutti.train.boost import Boost
from tutti.train.boost.algorithm import NothingToDo
from tutti.train.boost.less_bn import LessBN, NormalizedLinear, first_multiplier, inner_norms


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_of(size=8, rows=2):
    return torch.randn(rows, 3, size, size), torch.arange(rows) % 4


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize(("block", "inner"), [(BasicBlock, ["bn1"]), (Bottleneck, ["bn1", "bn2"])])
def test_torchvision_blocks(block, inner, pool):
    """The stem, the last norm of each branch and the projections of shortcuts keep theirs."""
    model = ResNet(block, (2, 1), width=4, classes=4, pool=pool)
    wanted = {f"{layer}.{name}" for layer in ("layer1.0", "layer1.1", "layer2.0") for name in inner}
    assert set(inner_norms(model, batch_of(), loss)) == wanted


@pytest.mark.parametrize(("kind", "inner"), [("basic", [0]), ("bottleneck", [0, 1])])
def test_transformers_resnet(kind, inner):
    config = ResNetConfig(embedding_size=4, hidden_sizes=[8, 12], depths=[2, 2], layer_type=kind, num_labels=4)
    model = ResNetForImageClassification(config)
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    norms = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    boost = Boost.parse(["less_bn"])
    assert boost.prepare_model(model, batch) is model
    removed = [name for name in norms if isinstance(model.get_submodule(name), nn.Identity)]
    assert removed == [f"resnet.encoder.stages.{s}.layers.{i}.layer.{j}.normalization"
                       for s in (0, 1) for i in (0, 1) for j in inner]  # fmt: skip
    assert isinstance(model.classifier[-1], NormalizedLinear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = boost.make_step(model, optimizer, batch, cluster="cpu:2", plan="dp", level="O0")
    assert step(batch).isfinite()


def test_resnet_50_loses_two_of_three_in_each_branch():
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=4))
    batch = {
        "pixel_values": torch.randn(1, 3, 32, 32, device="meta"),
        "labels": torch.zeros(1, dtype=torch.int64, device="meta"),
    }
    assert len(inner_norms(model, batch)) == 2 * 16


def test_the_head_is_the_formula():
    linear, x = nn.Linear(5, 3), torch.randn(2, 5)
    with torch.no_grad():
        linear.bias.copy_(torch.randn(3))
    unit = linear.weight / linear.weight.norm(dim=1, keepdim=True)
    cosines = (x / x.norm(dim=1, keepdim=True)) @ unit.T
    torch.testing.assert_close(NormalizedLinear(linear, 4.0)(x), 4 * cosines)
    torch.testing.assert_close(NormalizedLinear(linear, 4.0, bias=True)(x), 4 * (cosines + linear.bias))
    assert [name for name, _ in NormalizedLinear(linear).named_parameters()] == ["weight", "multiplier"]


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_the_scale_begins_where_a_small_loss_can_be_reached(classes):
    """With weights and features in the best position, a simplex, the loss is 1e-4."""
    centers = torch.eye(classes, dtype=torch.float64) - 1 / classes
    head = NormalizedLinear(nn.Linear(classes, classes).double(), first_multiplier(classes))
    head.weight.data = centers
    assert F.cross_entropy(head(centers), torch.arange(classes)).item() == pytest.approx(1e-4, rel=1e-3)
    model = ResNet(BasicBlock, (1,), width=4, classes=classes)
    LessBN().prepare_model(model, batch_of(), loss)
    assert model.fc.multiplier.item() == pytest.approx(first_multiplier(classes))


def test_the_scale_for_one_output():
    assert first_multiplier(1) == 1


def test_a_network_without_a_linear_layer():
    model = ResNet(BasicBlock, (1,), width=4, classes=4)
    model.fc = nn.Identity()
    with pytest.raises(ValueError, match="normalizes the last linear layer, and ResNet has none: give head=False"):
        LessBN().prepare_model(model, batch_of(), loss)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 3
    LessBN(head=False).prepare_model(model, batch_of(), loss)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 2


def test_the_model_keeps_its_modes():
    model = ResNet(BasicBlock, (1,), width=4, classes=4)
    model.layer1.eval()
    model.fc.weight.requires_grad_(False)
    before = [m.training for m in model.modules()]
    counts = [b.clone() for b in model.buffers()]
    inner_norms(model, batch_of(), loss)
    assert [m.training for m in model.modules()] == before and not model.fc.weight.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(counts, model.buffers(), strict=True))


def test_a_plain_network_has_nothing_to_remove():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
                          nn.Flatten(), nn.Linear(64, 4))  # fmt: skip
    with pytest.raises(NothingToDo, match=r"less_bn found no residual branch .* in Sequential; leave it out"):
        LessBN().prepare_model(model, batch_of(), loss)
    boost = Boost.parse("O1")
    boost.prepare_model(model, batch_of(), loss, steps=10)
    assert not boost.algorithms and "no residual branch" in boost.left_out["less_bn"]


def test_trains_under_a_plan_like_on_one_device():
    torch.manual_seed(0)
    model, batch = ResNet(BasicBlock, (1,), width=4, classes=4), batch_of(size=4, rows=8)
    LessBN(multiplier=4.0).prepare_model(model, batch, loss)
    states = {}
    for cluster, plan in (("cpu:1", "single"), ("cpu:2", "zero3")):
        own = copy.deepcopy(model)
        step = tutti.parallelize(own, torch.optim.SGD(own.parameters(), lr=0.1), batch, loss=loss, cluster=cluster,
                                 plan=plan, level="O0")  # fmt: skip
        for _ in range(3):
            step(batch)
        states[plan] = step.state_dict()
    for name, exact in states["single"].items():
        torch.testing.assert_close(states["zero3"][name], exact, rtol=1e-4, atol=1e-5)
