"""Parameter groups by pattern, layer-wise learning rates, freezing."""

from __future__ import annotations

import pytest
import torch

import tutti


def network():
    """Parameters: embed.weight, layers.0 .. layers.2 with weight and bias, head.weight."""
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(3, 2)
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    model.head = torch.nn.Linear(2, 3, bias=False)
    return model


def options_by_name(groups):
    return {name: {k: v for k, v in group.items() if k != "params"} for group in groups for name, _ in group["params"]}


def test_patterns():
    groups = tutti.optim.groups(network(), {"*.bias": {"weight_decay": 0.0}, "layers.0.*": {"lr": 1.0}}, lr=0.5)
    by_name = options_by_name(groups)
    assert by_name["layers.0.bias"] == {"lr": 0.5, "weight_decay": 0.0}  # the first pattern decides
    assert by_name["layers.0.weight"] == {"lr": 1.0}
    assert by_name["embed.weight"] == by_name["head.weight"] == {"lr": 0.5}
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert [g["param_names"] for g in optimizer.param_groups][1] == ["layers.0.weight"]


def test_layer_decay():
    by_name = options_by_name(tutti.optim.groups(network(), {"head.*": {"lr": 2.0}}, lr=1.0, layer_decay=0.5))
    rates = {name: options["lr"] for name, options in by_name.items() if not name.endswith("bias")}
    assert rates == {"embed.weight": 1 / 16, "layers.0.weight": 1 / 8, "layers.1.weight": 1 / 4, "layers.2.weight": 0.5,
                     "head.weight": 2.0}  # fmt: skip
    assert by_name["layers.1.bias"]["lr_scale"] == 0.25


def test_frozen_parameters_are_left_out():
    model = network()
    assert tutti.optim.freeze(model, "embed.*", "layers.[01].weight") == [
        "embed.weight", "layers.0.weight", "layers.1.weight"
    ]  # fmt: skip
    left = options_by_name(tutti.optim.groups(model, {"embed.*": {"lr": 1.0}}))
    assert list(left) == ["layers.0.bias", "layers.1.bias", "layers.2.weight", "layers.2.bias", "head.weight"]


def test_groups_train_like_torch():
    """Scaled learning rates reach the captured update."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    batch = (torch.randn(8, 4),)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(tutti.optim.groups(model, {"1.*": {"lr": 0.0}}, lr=0.1))
    step = tutti.parallelize(model, optimizer, batch, loss=lambda m, b: m(b[0]).square().mean(), cluster="cpu:2",
                             plan="zero3", level="O0")  # fmt: skip
    step(batch)
    changed = {name for name, x in step.state_dict().items() if not torch.equal(x, start[name])}
    assert changed == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: tutti.optim.groups(m, {"layer.0.*": {}}), r"'layer.0.\*' matches no .*; the nearest is 'layer"),
        (lambda m: tutti.optim.freeze(m, "embedding.*"), r"pattern 'embedding.\*' matches no .* nearest is 'embed"),
        (lambda m: tutti.optim.groups(m, {"*": {}, "head.*": {}}), r"earlier patterns match all .* 'head.\*' matches"),
        (lambda m: tutti.optim.groups(m, layer_decay=0.5), "layer_decay=0.5 needs lr="),
        (lambda m: tutti.optim.groups(m, lr=1.0, layer_decay=2.0), "layer_decay is 2.0; it must be more than 0"),
        (lambda m: tutti.optim.groups(m.head, lr=1.0, layer_decay=0.5), "needs a model with a list of layers"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(network())
