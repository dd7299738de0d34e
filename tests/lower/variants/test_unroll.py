"""A step whose sequence is cut into chunks gives the same numbers, and no chunk reads of one that is computed later."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

import tutti
import zoo
from cases import crossed, slow
from models import MODELS
from tutti.ir.step_graph import BACKWARD, FORWARD
from tutti.lower.variants.unroll import unroll
from tutti.plan.pipeline.stages import Reads

FAMILIES = {**MODELS, "gpt2": lambda: (zoo.gpt2(attention=0.0), zoo.tokens(6), None)}  # with dropout elsewhere
CAUSAL = ["gpt2", "llama", "qwen3", "mixtral", "qwen3_moe", "deepseek"]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@cache
def graph(name: str):
    model, batch, loss = FAMILIES[name]()
    return tutti.capture(model, batch, adam(model), loss, clip_norm=1.0)


def numbers(step, seed: int = 3) -> dict[str, torch.Tensor]:
    """What a step computes of random inputs."""
    draw = torch.Generator().manual_seed(seed)
    values = {}
    for name in sorted(step.inputs):
        spec, kind = step.spec(name), name.partition(":")[0]
        if kind in ("step", "seed"):
            values[name] = torch.tensor(1)
        elif kind == "constant":
            values[name] = step.constants[name]
        elif not spec.dtype.is_floating_point:
            values[name] = torch.randint(0, 8, spec.shape, generator=draw, dtype=spec.dtype)
        else:
            values[name] = 0.1 * torch.rand(spec.shape, generator=draw, dtype=spec.dtype)
    module = torch.fx.GraphModule(torch.nn.Module(), step.graph)
    names = {node: name for name, node in step.inputs.items()}
    placeholders = [n for n in step.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        return dict(zip(step.outputs, module(*(values[names[n]] for n in placeholders)), strict=True))


@pytest.mark.parametrize("name, slices", crossed(CAUSAL, [2, 4]))
def test_numbers_are_those_of_the_whole_sequence(name, slices):
    expected, unrolled = numbers(graph(name)), numbers(unroll(graph(name), slices))
    assert unrolled.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith(("loss", "grad", "exp_avg:")):
            assert (unrolled[key] - value).norm() <= 2e-5 * value.norm() + 1e-9, key


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_chunks_are_computed_in_order(name):
    unrolled = unroll(graph(name), 4)
    reads, ways = Reads(unrolled), {FORWARD: 1, BACKWARD: -1}
    assert unrolled.sequence_chunks == 4 and graph(name).sequence_chunks == 1
    crossing = 0
    for node in reads.calls:
        phase = node.meta["phase"]
        for x in reads.of(node):
            if phase in ways and x.op == "call_function" and x.meta["phase"] == phase:
                assert ways[phase] * (node.meta["slice"] - x.meta["slice"]) >= 0, (node, x)
                crossing += node.meta["slice"] != x.meta["slice"]
    assert crossing


def test_work_is_shared_out():
    """Each chunk has a quarter of the matrix products, the last of four 7 / 16 of the attention."""
    whole, unrolled = graph("llama"), unroll(graph("llama"), 4)
    assert unrolled.flops == pytest.approx(whole.flops, rel=0.1)
    products = [
        sum(n.meta["flops"] for n in unrolled.calls if "mm" in n.name and n.meta["slice"] == i) for i in range(4)
    ]
    assert products == [products[0]] * 4
    scores = [
        sum(n.meta["flops"] for n in unrolled.calls if "attention" in str(n.target) and n.meta["slice"] == i)
        for i in range(4)
    ]
    assert [s / sum(scores) for s in scores] == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16])


def test_labels_are_those_of_equal_layers():
    inputs = {node.meta["label"] for node in unroll(graph("llama"), 2).inputs.values()}
    assert inputs == {node.meta["label"] for node in graph("llama").inputs.values()}


@pytest.mark.parametrize("name", ["bert", slow("t5"), "lstm"])
def test_where_tokens_see_later_ones_it_is_an_error(name):
    with pytest.raises(ValueError, match="cannot be cut into chunks"):
        unroll(graph(name), 2)


def test_a_length_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="input_ids: its sequence does not divide into 5 chunks"):
        unroll(graph("llama"), 5)


def test_one_chunk_is_the_step_itself():
    assert unroll(graph("llama"), 1) is graph("llama")


class Positions(torch.nn.Module):
    """Learned for each place, layers of norms without weights, and a target that does not depend on the input."""

    def __init__(self, length: int, width: int = 8):
        super().__init__()
        self.places = torch.nn.Parameter(torch.randn(1, length, width))
        self.scale = torch.nn.Parameter(torch.randn(width))
        norms = [torch.nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)]
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(norm, torch.nn.Linear(width, width)) for norm in norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.places
        for layer in self.layers:
            y = y + layer(y).relu()
        target = torch.ones_like(x) * self.scale
        return y.square().mean() + torch.nn.functional.mse_loss(target, torch.zeros_like(x))


@pytest.mark.parametrize("length", [8, 1024])
@pytest.mark.parametrize("plan", ["cp2", "pp2-seq1f1b2", "pp2-seq1f1b4"])
def test_parameters_of_the_sequence_and_of_nothing(plan, length):
    model, x = Positions(length), torch.randn(4, length, 8)
    one = copy.deepcopy(model)
    options = {"loss": lambda model, batch: model(*batch), "level": "O0", "accumulate": 2}
    ours = tutti.parallelize(model, adam(model), (x,), cluster="cpu:2", plan=plan, **options)
    whole = tutti.parallelize(one, adam(one), (x,), cluster="cpu:1", plan="single", **options)
    gradients = ours.gradients((x,))
    for key, value in whole.gradients((x,)).items():
        assert (gradients[key] - value).norm() <= 1e-5 * value.norm() + 1e-9, key
    assert [ours((x,)).item() for _ in range(2)] == pytest.approx([whole((x,)).item() for _ in range(2)], rel=1e-5)


@pytest.mark.parametrize("plan, devices", [("cp2", 2), slow("pp2-seq1f1b4", 2), slow("pp2-seq1f1b2xdp2", 4)])
@pytest.mark.parametrize("name", ["gpt2", slow("llama")])
def test_a_plan_by_its_name(name, plan, devices):
    model, batch, loss = FAMILIES[name]()
    one = copy.deepcopy(model)
    ours = tutti.parallelize(model, adam(model), batch, loss=loss, cluster=f"cpu:{devices}", plan=plan, level="O0",
                             accumulate=1 if devices == 4 else 2)  # fmt: skip
    whole = tutti.parallelize(one, adam(one), batch, loss=loss, cluster="cpu:1", level="O0", accumulate=ours.accumulate)
    for key, value in whole.gradients(batch).items():
        assert (ours.gradients(batch)[key] - value).norm() <= 1e-5 * value.norm() + 1e-9, key
    for _ in range(3):
        assert ours(batch).item() == pytest.approx(whole(batch).item(), rel=1e-5)
    assert ours.evaluate(batch).item() == pytest.approx(whole.evaluate(batch).item(), rel=1e-5)
    assert tutti.Plan.from_json(ours.plan.to_json()) == ours.plan
