"""What the textbook takes for experts, and what `ep` may do to them."""

import pytest
import torch

import models
import tutti
from cases import slow
from tutti.nn import MoE
from tutti.plan.layouts.experts import Experts
from tutti.plan.layouts.problem import problem_of
from tutti.plan.planner import Planner
from tutti.plan.title import title


def graph_of(name: str):
    model, batch, loss = models.case(name)
    return tutti.capture(model, batch, torch.optim.AdamW(model.parameters()), loss)


def experts_of_model(name: str):
    return Experts(problem_of(graph_of(name)))


def test_experts_are_found_by_who_reads_them():
    fused = experts_of_model("mixtral")
    names = {f"param:model.layers.*.mlp.experts.{kind}_proj" for kind in ("gate_up", "down")}
    assert {label for label in fused.matrices if label.startswith("param:")} == names
    assert fused.shapes == {(6, 96, 48), (6, 48, 48)} and set(fused.factors.values()) == {"e"}
    both = experts_of_model("mixture")
    assert {label for label in both.matrices if label.startswith("param:")} == {
        f"param:layers.{i}.{kind}" for i in range(2) for kind in ("gate_up", "down")
    }
    assert sorted(set(both.factors.values())) == ["b", "e"]


@pytest.mark.parametrize("name", ["llama", slow("t5"), "mamba"])
def test_dense_models_have_none(name):
    assert not experts_of_model(name).matrices and not experts_of_model(name).factors


@pytest.mark.parametrize(("plan", "shown"), [("ep2", "ep2"), ("tp2", "tp2"), ("dp2", "dp2")])
def test_titles(plan, shown):
    planner = Planner(graph_of("mixtral"), tutti.Cluster.parse("cpu:2"))
    assert title(planner.named(plan), planner.problem) == shown


def test_what_does_not_divide_is_named():
    planner = Planner(graph_of("mixtral"), tutti.Cluster.parse("cpu:4"))
    with pytest.raises(ValueError, match=r"experts\.\w+_proj: 6 experts do not divide over 4 expert-parallel devices"):
        planner.named("ep4")

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = MoE(4, 8, 10, 1)

        def forward(self, x):
            return self.experts(x)[0].sum()

    model, x = Tokens(), torch.ones(4, 3, 4)
    graph = tutti.capture(model, (x,), torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="a batch of 4 does not divide over 5 expert-parallel devices"):
        Planner(graph, tutti.Cluster.parse("cpu:5")).named("ep5")


def test_a_dense_model_has_nothing_to_split():
    planner = Planner(graph_of("llama"), tutti.Cluster.parse("cpu:2"))
    with pytest.raises(ValueError, match="plan 'ep2': the model has no experts that axis 'ep' could split"):
        planner.named("ep2")
