"""Cuts: the slowest stage is as fast as any cut can make it, of those that fit."""

from itertools import combinations

import numpy as np
import pytest
import torch

import tutti
import zoo
from pipelines import function_graph
from tutti.plan.network.sharding_problem import Cost
from tutti.plan.pipeline.cuts import Layer, Layers, split, together


def every(layers, stages):
    return ([0, *rest] for rest in combinations(range(1, layers), stages - 1))


@pytest.mark.parametrize("seed", range(10))
def test_no_other_cut_has_a_faster_slowest_stage(seed):
    draw = np.random.default_rng(seed)
    layers = [Layer(*draw.uniform(0.1, 3.0, 3)) for _ in range(draw.integers(5, 10))]
    stages = int(draw.integers(2, 5))

    def slowest(starts):
        return max(stage.seconds for stage in together(layers, starts))

    cut = split(layers, stages)
    assert len(cut) == stages and slowest(cut) == pytest.approx(min(map(slowest, every(len(layers), stages))))


@pytest.mark.parametrize("seed", range(10))
def test_no_other_cut_that_fits_has_a_faster_slowest_stage(seed):
    """A stage keeps its parameters, and the activations of as many microbatches as it has in flight."""
    draw = np.random.default_rng(seed)
    layers = [Layer(*draw.uniform(0.1, 3.0, 6)) for _ in range(9)]
    stages, in_flight = 3, [3, 2, 1]

    def most(starts):
        merged = together(layers, starts)
        return max(stage.stored + n * stage.activations for stage, n in zip(merged, in_flight, strict=True))

    def slowest(starts):
        return max(stage.seconds for stage in together(layers, starts))

    cuts = list(every(len(layers), stages))
    needs = sorted(map(most, cuts))
    for memory in (needs[0], needs[len(needs) // 2], needs[-1]):
        fitting = [cut for cut in cuts if most(cut) <= memory * (1 + 1e-9)]
        fastest = split(layers, stages, in_flight, memory * (1 + 1e-9))
        assert fastest in fitting and slowest(fastest) == pytest.approx(min(map(slowest, fitting)))
    assert most(split(layers, stages, in_flight, 0.5 * needs[0])) == pytest.approx(needs[0]), "nothing fits"


@pytest.mark.parametrize("seed", range(10))
def test_no_stage_starts_inside_of_layers_that_call_each_other_in_turns(seed):
    draw = np.random.default_rng(seed)
    layers, inside = [Layer(*draw.uniform(0.1, 3.0, 3)) for _ in range(9)], {*draw.integers(1, 9, 4).tolist()}

    def slowest(starts):
        return max(stage.seconds for stage in together(layers, starts))

    cut = split(layers, 3, inside=inside)
    assert not inside.intersection(cut)
    assert slowest(cut) == pytest.approx(min(slowest(c) for c in every(9, 3) if not inside.intersection(c)))
    with pytest.raises(ValueError, match="of 9 layers cannot be cut into 2 stages: they call each other in turns"):
        split(layers, 2, inside=range(1, 9))


class Repeated(torch.nn.Module):
    """A cell and its norm, three times, then a head."""

    def __init__(self):
        super().__init__()
        self.inject, self.cell, self.norm = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        z = x = self.inject(x)
        for _ in range(3):
            z = self.norm(torch.tanh(self.cell(z) + x))
        return self.head(z).square().mean()


def test_layers_that_call_each_other_in_turns_form_one_stage():
    graph = tutti.capture(Repeated(), (torch.randn(4, 6),))
    layers = Layers(graph)
    assert list(layers.members) == ["inject", "cell", "norm", "head"] and layers.inside == {2}
    assert split([Layer(1.0), Layer(2.0), Layer(2.0), Layer(2.0)], 2, inside=layers.inside) == [0, 3]


class Counted(torch.nn.Module):
    """The last layer reads a statistic of the first one's output that the second one's output updates."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        x = self.layers[2](x - self.mean)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layers[3](x).square().mean()


def test_state_that_forward_changes_is_kept_in_one_stage():
    graph = tutti.capture(Counted(), (torch.randn(4, 6),))
    assert Layers(graph).inside == {2}
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 6)
    step = tutti.parallelize(model, optimizer, (x,), cluster="cpu:2", plan="pp2", accumulate=2, level="O0")
    assert step.plan.stages["layers.1"] == step.plan.stages["layers.2"]


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(4)
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))


def test_layers_stand_in_the_order_of_the_forward_pass(graph):
    nodes = {n.meta["label"]: n.meta for n in graph.graph.nodes if "label" in n.meta}
    costs = {label: Cost(meta["flops"], 1.0 if label.startswith("param") else 0.0) for label, meta in nodes.items()}
    layers = Layers(graph).of(costs)
    assert list(layers) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]
    first = layers["model.layers.0"]
    assert first.seconds == layers["model.layers.3"].seconds and first.seconds > layers["model.norm"].seconds
    assert first.stored == 9 and layers["model.norm"].stored == 1, "parameters"
    assert first.rest == pytest.approx(first.forward, rel=0.2), "gradients of matrices cost what their products do"
    whole = sum(meta["flops"] for n in graph.graph.nodes if (meta := n.meta).get("path") and n.op == "call_function")
    assert sum(layer.seconds + layer.update for layer in layers.values()) == pytest.approx(whole, rel=0.01)


def test_layers_stay_with_the_tensors_that_another_function_has_placed():
    placed, new = (torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))) for _ in range(2))

    def both(x):
        return new(placed(x)).detach()

    layers = Layers(function_graph(both, torch.zeros(2, 4), placed=placed, new=new))
    homes = {f"param:placed.{i}.weight": i // 3 for i in (0, 1, 3)}
    costs = {node.meta["label"]: Cost(1.0) for node in layers.reads.step.calls}
    assert layers.around(homes, costs, 2) == {
        "placed.0": 0, "placed.1": 0, "placed.2": 0, "placed.3": 1, "new.0": 0, "new.1": 0, "new.2": 1, "new.3": 1,
    }  # fmt: skip
    assert not layers.inside, "values of a function cross stages in either direction"
