"""Cuts: the slowest stage is as fast as any cut can make it."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

import tutti
import zoo
from tutti.plan.cuts import balanced, layers_of, split


@pytest.mark.parametrize("seed", range(10))
def test_no_other_cut_has_a_faster_slowest_stage(seed):
    draw = np.random.default_rng(seed)
    costs, stages = list(draw.uniform(0.1, 3.0, draw.integers(5, 10))), int(draw.integers(2, 5))

    def slowest(starts):
        return max(sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)]))

    every = ([0, *rest] for rest in combinations(range(1, len(costs)), stages - 1))
    found = split(costs, stages)
    assert len(found) == stages and slowest(found) == pytest.approx(min(map(slowest, every)))


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(4)
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))


def test_layers_stand_in_the_order_of_the_forward_pass(graph):
    layers = layers_of(graph, lambda node: node.meta["flops"])
    assert list(layers) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]
    assert layers["model.layers.0"] == layers["model.layers.3"] > layers["model.norm"]


def test_a_model_is_cut_between_its_layers(graph):
    def flops(node):
        return node.meta["flops"]

    stages = balanced(graph, flops, 3)
    assert list(stages.values()) == sorted(stages.values()) and set(stages.values()) == {0, 1, 2}
    layers = layers_of(graph, flops)

    def slowest(stages):
        return max(sum(layers[path] for path in stages if stages[path] == i) for i in range(3))

    assert slowest(stages) < slowest({path: min(2, i) for i, path in enumerate(stages)})


def test_more_stages_than_layers(graph):
    with pytest.raises(ValueError, match="a model of 7 layers and modules beside them cannot be cut into 8 stages"):
        balanced(graph, lambda node: 1.0, 8)
