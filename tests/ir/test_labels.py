"""Corresponding nodes of repeated layers share a label; phases and module paths are those of the model."""

from collections import Counter

import pytest
import torch
from torch import nn

import tutti
import zoo
from tutti.ir.labels import covers, in_layer


def graph_of(model, batch=None, **options):
    return tutti.capture(model, batch or zoo.tokens(4), torch.optim.AdamW(model.parameters()), **options)


@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2])
def test_the_number_of_labels_does_not_grow_with_depth(make):
    labels = [Counter(n.meta["label"] for n in graph_of(make(depth)).calls) for depth in (2, 4)]
    assert labels[0].keys() == labels[1].keys()
    for label, count in labels[0].items():
        assert labels[1][label] == (2 * count if ".*" in label else count), label


def test_inputs_of_layers_share_labels():
    graph = graph_of(zoo.llama(3))
    for kind in ("param", "exp_avg"):
        same = {graph.inputs[f"{kind}:model.layers.{i}.mlp.up_proj.weight"].meta["label"] for i in range(3)}
        assert same == {f"{kind}:model.layers.*.mlp.up_proj.weight"}
    assert graph.inputs["batch:labels"].meta["label"] == "batch:labels" and graph.inputs["step"].meta["label"] == "step"


def test_layers_of_another_shape_are_of_another_kind():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)])

        def forward(self, x):
            for layer in self.h:
                x = torch.tanh(layer(x))
            return x.sum()

    graph = graph_of(Stack(), (torch.ones(2, 4),))
    labels = [graph.inputs[f"param:h.{i}.weight"].meta["label"] for i in range(3)]
    assert labels == ["param:h.0.weight", "param:h.1.weight", "param:h.2.weight"]  # the first has no input gradient


def test_layers_of_modules_inside_of_layers_share_labels_too():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            return x + self.net(x)

    class Stage(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

        def forward(self, x):
            return self.blocks(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.stages = nn.Linear(8, 8), nn.Sequential(Stage(2), Stage(3))

        def forward(self, x):
            return self.stages(self.first(x)).sum()

    graph = graph_of(Model(), (torch.ones(2, 8),))
    label = {name: node.meta["label"] for name, node in graph.inputs.items()}
    assert label["param:stages.0.blocks.1.net.0.weight"] == "param:stages.0.blocks.*.net.0.weight"
    assert label["param:stages.1.blocks.2.net.2.weight"] == "param:stages.1.blocks.*.net.2.weight"
    counts = Counter(n.meta["label"] for n in graph.calls if n.meta["path"].startswith("stages.1.blocks"))
    assert set(counts.values()) == {3}
    names = [n.meta["name"] for n in graph.calls]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("label", "inside"),
    [("h.*.weight", True), ("model.layers.0-2,4.up", True), ("model.h.3.up", True), ("head.weight", False)],
)
def test_in_layer(label, inside):
    assert in_layer(label) == inside


def test_unlike_layers_are_called_by_their_numbers():
    """The batch of a model without a name for its container keeps its own: it is no layer."""
    linears = [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)]
    model, batch = nn.Sequential(*linears), (torch.ones(2, 4), torch.ones(2, 4))
    graph = graph_of(model, batch, loss=lambda model, batch: (model(batch[0]) - batch[1]).square().sum())
    labels = {name: node.meta["label"] for name, node in graph.inputs.items()}
    assert [labels[f"param:{i}.weight"] for i in range(6)] == [f"param:{n}.weight" for n in ("0", *["1-4"] * 4, "5")]
    assert (labels["batch:0"], labels["batch:1"], labels["lr:0"]) == ("batch:0", "batch:1", "lr:0")


@pytest.mark.parametrize(
    ("label", "names", "others"),
    [
        ("h.*.weight", ["h.0.weight", "h.12.weight"], ["h.weight", "h.x.weight", "g.0.weight"]),
        ("h.0-2,4,6-10.up.0", ["h.0.up.0", "h.4.up.0", "h.9.up.0"], ["h.3.up.0", "h.5.up.0", "h.11.up.0", "h.1.up.1"]),
        ("1.bias", ["1.bias"], ["11.bias", "1.weight"]),
        ("a-b.bias", ["a-b.bias"], ["1.bias"]),
    ],
)
def test_a_label_covers_its_layers(label, names, others):
    assert all(covers(label, name) for name in names) and not any(covers(label, name) for name in others)


def test_every_node_has_phase_and_path_of_its_module():
    model = zoo.llama(2)
    modules, graph = dict(model.named_modules()), graph_of(model)
    assert {n.meta["phase"] for n in graph.calls} == {"forward", "backward", "update"}
    assert all(n.meta["path"] in modules for n in graph.calls)
    ops = torch.ops.tutti
    multiplies = {
        torch.ops.aten.mm.default: 1,
        ops.linear_logsumexp.default: 1,
        ops.linear_logsumexp_backward.default: 2,
    }
    products = Counter[tuple[str, str]]()
    for n in graph.calls:
        products[n.meta["phase"], n.meta["path"]] += multiplies.get(n.target, 0)
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            assert products["forward", name] == 1 and products["backward", name] == 2, name
