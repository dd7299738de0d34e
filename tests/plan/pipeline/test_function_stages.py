"""Stages of a function: state is at home, and nodes are where their operands are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from pipelines import function_graph
from tutti.ir.step_graph import BACKWARD, UPDATE
from tutti.plan.pipeline.function_stages import function_stages
from tutti.plan.pipeline.reads import Reads

ROWS, WIDTH = 8, 16
HALVES = {"actor": 1, "critic": 0}


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.fixture(scope="module")
def graph():
    """An actor behind its critic, with clipping; the critic's weight is read outside of its module, too."""
    actor, critic = linear(1), linear(2)
    optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()])

    def update(x):
        optimizer.zero_grad()
        loss = critic(actor(x)).square().mean() + F.linear(x, critic[0].weight).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        return loss

    return function_graph(update, torch.zeros(ROWS, WIDTH), actor=actor, critic=critic, optimizer=optimizer)


def homes(graph, stages):
    return {name: stages[node] for name, node in graph.inputs.items() if node in stages}


def test_state_is_at_the_home_of_its_parameter(graph):
    stages = homes(graph, function_stages(Reads(graph), HALVES, {}))
    assert {stage for name, stage in stages.items() if ":actor." in name} == {1}
    assert {stage for name, stage in stages.items() if ":critic." in name} == {0}
    assert {name.partition(":")[0] for name in stages} == {"param", "exp_avg", "exp_avg_sq"}, "others are everywhere"


def test_updates_and_clipping_are_where_their_parameters_are(graph):
    stages = function_stages(Reads(graph), HALVES, {})
    for name in graph.state_names:
        assert stages[graph.outputs[name]] == stages[graph.inputs[name]], name
    scaled = [n for n in stages if n.op == "call_function" and n.target is torch.ops.aten.mul.Tensor
              and n.meta["phase"] not in (BACKWARD, UPDATE) and n.meta["val"].shape == (WIDTH, WIDTH)]  # fmt: skip
    assert scaled and {stages[n] for n in scaled} == {1}, "gradients of the actor, by a number"


def test_values_go_to_earlier_stages_and_gradients_to_later_ones(graph):
    reads = Reads(graph)
    stages = function_stages(reads, HALVES, {})
    crossed = {(x.meta["phase"], stages[x], stages[n]) for n in reads.calls for x in reads.of(n)
               if x.op == "call_function" and stages[x] != stages[n]}  # fmt: skip
    assert ("forward", 1, 0) in crossed and ("backward", 0, 1) in crossed


def test_a_home_that_another_function_has_chosen_stays(graph):
    chosen = {"param:critic.0.weight": 1}
    stages = homes(graph, function_stages(Reads(graph, chosen), HALVES, chosen))
    assert stages["exp_avg:critic.0.weight"] == stages["param:critic.0.weight"] == 1
    assert stages["param:critic.0.bias"] == 0


def test_without_names_everything_is_where_the_tensors_are(graph):
    chosen = {name: int("critic" in name) for name in graph.state_names}
    stages = function_stages(Reads(graph, chosen), {}, chosen)
    assert homes(graph, stages) == chosen
    products = {n.meta["path"]: stages[n] for n in stages if n.target is torch.ops.aten.addmm.default}
    assert products == {"actor.0": 0, "critic.0": 1}


def test_a_name_that_covers_nothing(graph):
    with pytest.raises(ValueError, match="names a stage of 'reward', which computes nothing"):
        function_stages(Reads(graph), {**HALVES, "reward": 1}, {})


def test_random_numbers_are_drawn_where_they_are_read_first():
    model = zoo.gpt2()
    graph = function_graph(lambda x: model(input_ids=x).logits.detach(), zoo.tokens(2)["input_ids"], model=model)
    reads = Reads(graph)
    stages = function_stages(reads, {"model.transformer.h.0": 0, "model.transformer.h.1": 1}, {})
    drawn = [n for n in reads.calls if n.target is torch.ops.tutti.uniform.default]
    assert drawn and all(stages[n] == min(stages[r] for r in reads.calls if n in reads.of(r)) for n in drawn)
