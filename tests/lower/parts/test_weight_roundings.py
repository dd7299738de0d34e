"""Weights are rounded once a step: the numbers stay, and rounded weights are in memory until the last microbatch."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch

import tutti
import zoo
from cases import slow
from tutti.hardware import Cluster
from tutti.lower.parts.cut import PREPARATION, Place, undivided
from tutti.lower.parts.weight_roundings import weight_roundings
from tutti.lower.variants.vary import vary
from tutti.ops.products.scaled_mm import ROUND_BOTH, ROUND_OPERAND
from tutti.plan.planner import Planner
from tutti.plan.variant import Variant
from tutti.sim.dryrun import dry_run

MICROBATCHES = 4


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def step():
    model = zoo.llama(2)
    return tutti.capture(model, zoo.tokens(4, 32), adam(model))


def variant_of(step, again=()):
    return vary(step, Variant(recompute=again, matmul_dtype="float8"))


@pytest.mark.parametrize("again", [(), ("layers",)])
def test_microbatches_round_no_weights(step, again):
    cutting = undivided(variant_of(step, again), MICROBATCHES)
    before = cutting.parts[Place(0, PREPARATION)]
    assert {node.target for node in before.calls} == {ROUND_OPERAND, operator.getitem}
    assert Counter(node.args[1] for node in weight_roundings(before)) == {0: 14, 1: 14}
    microbatch = cutting.parts[Place(0, "M")]
    assert not weight_roundings(microbatch) and set(before.outputs) == {x for x in microbatch.inputs if "value:" in x}
    assert undivided(variant_of(step, again), 1).parts.keys() == {Place(0, "S")}, "nothing is shared by one microbatch"
    assert undivided(variant_of(step, again), MICROBATCHES, once=False).parts.keys() == {Place(0, "M"), Place(0, "U")}


def trained(plan: str, devices: int):
    model, data = zoo.llama(2), zoo.tokens(16, 16)
    step = tutti.parallelize(model, adam(model), data, cluster=f"cpu:{devices}", plan=plan, level="O0",
                             accumulate=MICROBATCHES)  # fmt: skip
    gradients = step.gradients(data)
    return step, [step(data).item() for _ in range(2)], gradients


@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        ("singlexfp8", 1), ("zero3xrecomputexfp8", 2), ("pp2-zb-vxfp8", 2), slow("dp2xnvfp4", 2), slow("dp2xmxfp8", 2),
        slow("tp2xspxfp8", 2), slow("pp2-interleaved2xfp8", 2), slow("pp2-seq1f1b2xfp8", 2), slow("dp2xsplits2xfp8", 2),
        slow("pp2xdp2xzero1xrecomputexfp8", 4),
    ],
)  # fmt: skip
def test_numbers_are_those_of_rounding_in_every_microbatch(plan, devices):
    step, losses, gradients = trained(plan, devices)
    other, expected, others = trained(f"{plan}xreround", devices)
    assert losses == expected and all(torch.equal(gradients[name], others[name]) for name in others)
    assert other.plan.reround and not step.plan.reround and "in every microbatch" in other.plan.explain()
    assert other.plan.from_json(other.plan.to_json()) == other.plan


def test_rounded_weights_take_time_once_and_memory_throughout(step):
    """FP8 along both dims: two bytes a weight, and a float32 for each block of at most 128."""
    varied, cluster = variant_of(step), Cluster.parse("h100:1")
    planner = Planner(varied, cluster, accumulate=MICROBATCHES, variant=Variant(matmul_dtype="float8"))
    once, again = (dry_run(varied, planner.named(name), cluster) for name in ("singlexfp8", "singlexfp8xreround"))
    preparation, microbatch, _ = once.parts
    assert preparation.runs == 1 and microbatch.runs == MICROBATCHES and len(again.parts) == 2

    def rounded(part):
        nodes = part.program.graph.nodes
        return Counter(node.target for node in nodes if node.target in (ROUND_OPERAND, ROUND_BOTH))

    assert rounded(preparation) == {ROUND_BOTH: 14}
    assert rounded(microbatch)[ROUND_OPERAND] == rounded(again.parts[0])[ROUND_OPERAND] - 28
    weights = sum(step.spec(f"param:{x}").numel for x in step.names("param") if "proj" in x)
    inputs = microbatch.program.graph.find_nodes(op="placeholder")
    rounded_bytes = sum(node.meta["val"].bytes for node in inputs if node.meta["input"].startswith("value:"))
    assert 2 * weights <= rounded_bytes <= 2 * weights * (1 + 4 / 32), "the smallest block has 32 numbers"


def test_microbatches_of_different_graphs_have_their_own():
    """A layer that only some microbatches use is rounded for these."""

    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            layers = [self.layers[0], self.layers[1 if x.sum() > 0 else 2]]
            for layer in layers:
                x = x + torch.tanh(layer(x))
            return x.square().mean() + 0 * sum(layer.weight.sum() + layer.bias.sum() for layer in self.layers)

    def run(plan):
        torch.manual_seed(0)
        model, batch = Branching(), {"x": torch.cat([torch.ones(32, 16), -torch.ones(32, 16)])}
        step = tutti.parallelize(model, adam(model), batch, cluster="cpu:1", plan=plan, level="O0", accumulate=2)
        return [step(batch).item() for _ in range(3)]

    assert run("singlexfp8") == run("singlexfp8xreround")


def test_other_formats_only():
    with pytest.raises(ValueError, match="reround goes with products in low precision; add fp8, mxfp8 or nvfp4"):
        trained("singlexreround", 1)
