"""Corresponding nodes of repeated layers share a label; phases and module paths are those of the model."""

from collections import Counter

import pytest
import torch
from torch import nn

import tutti
import zoo


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
    assert len({"param:h.*.weight", *labels}) == 3 and labels[2] != labels[1]


def test_every_node_has_phase_and_path_of_its_module():
    model = zoo.llama(2)
    modules, graph = dict(model.named_modules()), graph_of(model)
    assert {n.meta["phase"] for n in graph.calls} == {"forward", "backward", "update"}
    assert all(n.meta["path"] in modules for n in graph.calls)
    products = Counter((n.meta["phase"], n.meta["path"]) for n in graph.calls if n.target == torch.ops.aten.mm.default)
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            assert products["forward", name] == 1 and products["backward", name] == 2, name
