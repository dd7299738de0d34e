"""Stages: what is not named follows from what it reads, and values only ever go on."""

import pytest
import torch

import tutti
import zoo
from pipelines import random_stages
from tutti.ir.step_graph import BACKWARD, FORWARD
from tutti.plan.pipeline.reads import Reads
from tutti.plan.pipeline.stages import stages_of

HALVES = {"transformer.wte": 0, "transformer.h.0": 0, "transformer.h.1": 1}


@pytest.fixture(scope="module")
def graph():
    model = zoo.gpt2()
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()), clip_norm=1.0)


def by_input(graph, named):
    stages = stages_of(Reads(graph), named)
    return {name: stages.get(node) for name, node in graph.inputs.items()}


def test_parameters_are_at_home_where_they_are_first_read(graph):
    homes = by_input(graph, HALVES)
    assert homes["param:transformer.wte.weight"] == 0, "the head reads it, too"
    assert homes["exp_avg:transformer.h.1.mlp.c_fc.weight"] == homes["param:transformer.h.1.mlp.c_fc.weight"] == 1
    assert homes["param:transformer.ln_f.weight"] == 1, "not named: where its input comes from"
    assert homes["batch:input_ids"] is None and homes["seed"] is None, "everywhere"


@pytest.mark.parametrize("seed", range(8))
def test_values_go_on_and_gradients_go_back(graph, seed):
    reads = Reads(graph)
    stages = stages_of(reads, random_stages(graph, 4, seed))
    for node in reads.calls:
        for x in reads.of(node):
            if node.meta["phase"] == FORWARD and x.op == "call_function":
                assert stages[x] <= stages[node]
            if node.meta["phase"] == BACKWARD and x.op == "call_function" and x.meta["phase"] == BACKWARD:
                assert stages[x] >= stages[node]


def test_a_value_of_a_later_stage_cannot_be_read(graph):
    with pytest.raises(ValueError, match=r"of stage 0 reads transformer\.h\.0.* of stage 1: values of"):
        stages_of(Reads(graph), {"transformer.h.0": 1, "transformer.h.1": 0})


def test_a_name_that_covers_nothing(graph):
    with pytest.raises(ValueError, match=r"names a stage of 'transformer\.h\.7', which computes nothing"):
        stages_of(Reads(graph), {**HALVES, "transformer.h.7": 1})


def test_the_longest_name_counts(graph):
    homes = by_input(graph, {"transformer.wte": 0, "transformer.h": 1, "transformer.h.0.ln_1": 0})
    assert homes["param:transformer.h.0.ln_1.weight"] == 0
    assert homes["param:transformer.h.0.attn.c_attn.weight"] == 1
