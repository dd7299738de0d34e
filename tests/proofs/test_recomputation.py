"""What is computed again in the backward pass gives the same bits, whatever is chosen, on one device and on several."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

import tutti
import zoo
from cases import crossed, slow
from models import MODELS
from tutti.ir.costs import FREE
from tutti.ir.step_graph import FORWARD, StepGraph
from tutti.lower.variants.vary import vary
from tutti.plan.pipeline.stages import Reads, stages_of
from tutti.plan.planner import Planner
from tutti.plan.variant import Variant

CLUSTER = tutti.Cluster.parse("cpu:1")
FAMILIES = {
    **MODELS,
    "dropout": lambda: (zoo.gpt2(), zoo.tokens(6), None),
    "buffers": lambda: (Tower(), {"x": torch.linspace(-1, 1, 64).view(8, 8)}, None),
}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@cache
def graph(name: str) -> StepGraph:
    model, batch, loss = FAMILIES[name]()
    return tutti.capture(model, batch, adam(model), loss, clip_norm=1.0)


def forward(step: StepGraph) -> list[str]:
    labels = [n.meta["label"] for n in step.calls if n.meta["phase"] == FORWARD and n.target not in FREE]
    return list(dict.fromkeys(labels))


class Counting(torch.nn.Module):
    """Reads what it changes in every forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale.mul_(1.1)
        return x + torch.tanh(self.linear(x) * self.scale) ** 2


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def trained(name: str, plan, devices: int = 1, **options):
    torch.manual_seed(0)
    model, batch, loss = FAMILIES[name]()
    step = tutti.parallelize(model, adam(model), batch, loss=loss, cluster=f"cpu:{devices}", plan=plan, level="O0",
                             clip_norm=1.0, **options)  # fmt: skip
    gradients = step.gradients(batch)
    return [step(batch).item() for _ in range(3)], gradients, step.state_dict()


QUICK = [("llama", 0.3), ("dropout", 1.0), ("mixtral", 0.3), ("vit", 1.0)]


@pytest.mark.parametrize(
    "name, share", crossed(["llama", "dropout", "t5", "unet2d", "mixtral", "vit"], [0.3, 1.0], quick=QUICK)
)
def test_every_bit_is_the_same(name, share):
    draw = random.Random(0)
    again = tuple(label for label in forward(graph(name)) if draw.random() < share)
    varied = vary(graph(name), Variant(recompute=again))
    assert len(varied.calls) > len(graph(name).calls)
    plan = Planner(varied, CLUSTER, variant=Variant(recompute=again)).named("single")
    assert plan.recompute == again
    for ours, theirs in zip(trained(name, plan), trained(name, "single"), strict=True):
        if isinstance(ours, list):
            assert ours == theirs
        else:
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


BY_NAME = [
    ("llama", "recompute", 1), slow("llama", "zero3xrecompute", 2), slow("llama", "pp2xtp2xrecompute", 4),
    slow("llama", "pp2-zb-h1xrecompute", 2), slow("llama", "pp2-seq1f1b2xrecompute", 2),
    ("mixtral", "pp2xrecompute", 2), slow("dropout", "pp2xrecompute", 2), slow("vit", "pp2xrecompute", 2),
    ("buffers", "pp2xrecompute", 2),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "devices"), BY_NAME)
def test_layers_are_computed_again_by_name(family, name, devices):
    options = {"accumulate": 2} if "pp" in name else {}
    one = trained(family, "single", **options)
    ours = trained(family, name, devices, **options)
    assert ours[0] == pytest.approx(one[0], rel=1e-5)
    for mine, whole in zip(ours[1:], one[1:], strict=True):
        for key, tensor in whole.items():
            assert (mine[key] - tensor).norm() <= 1e-5 * tensor.norm() + 1e-7, key


def test_a_pipeline_works_where_it_did():
    """Nodes of the backward pass stay in their stages, though what they read is made anew; dropout, too."""
    plans = []
    for name in ("pp2", "pp2xrecompute"):
        model, batch, loss = FAMILIES["dropout"]()
        step = tutti.parallelize(model, adam(model), batch, loss=loss, cluster="cpu:2", plan=name, level="O0",
                                 accumulate=2)  # fmt: skip
        stages = stages_of(Reads(step.graph), step.plan.stages)
        plans.append({node.meta["name"]: stage for node, stage in stages.items() if node.op == "call_function"})
    without, recomputed = plans
    again = {name: stage for name, stage in recomputed.items() if "/recompute/" in name}
    rest = {name: stage for name, stage in recomputed.items() if name not in again}
    assert set(again.values()) == {0, 1}
    assert rest.items() <= without.items()
    assert all("/forward/getitem" in name for name in without.keys() - rest.keys()), "results that nothing reads now"
