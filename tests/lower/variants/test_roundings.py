"""Roundings of operands in low precision: how often each tensor is rounded, and what is kept."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import tutti
import zoo
from tutti.hardware import Cluster
from tutti.ir.step_graph import BACKWARD, FORWARD
from tutti.lower.shard import shard
from tutti.lower.variants.low_precision import in_low_precision
from tutti.lower.variants.round_once import round_once
from tutti.lower.variants.vary import vary
from tutti.nn.linear.scaled_mm import FORMATS
from tutti.ops.products.scaled_mm import ROUND_BOTH, ROUND_OPERAND, SCALED_MM
from tutti.plan.planner import Planner
from tutti.plan.search.recompute import made_by
from tutti.plan.variant import Variant
from tutti.sim.dryrun import dry_run

CLUSTER = Cluster.parse("h100:1")
ops = torch.ops.tutti


@pytest.fixture(scope="module")
def step():
    model, data = zoo.llama(2), zoo.tokens(16, 16)
    return tutti.capture(model, data, torch.optim.AdamW(model.parameters(), lr=1e-3))


def roundings(step):
    return [node for node in step.calls if node.target is ROUND_OPERAND]


def test_products_share_roundings(step):
    """In a layer, the forward pass rounds 7 weights and the inputs of q, k and v, of o, of gate and up, and of down.
    The backward pass rounds weights and the gradients of 7 results; along both dims."""
    low_precision = in_low_precision(step, "float8")
    layer = [node for node in roundings(low_precision) if "layers.0" in node.meta["path"]]
    assert len({(node.args[0], node.args[1]) for node in layer}) == len(layer), "none is rounded twice"
    kinds = Counter((node.meta["phase"], made_by(node.args[0])[0].op, node.args[1]) for node in layer)
    assert kinds[FORWARD, "placeholder", 1] == kinds[BACKWARD, "placeholder", 0] == 7
    assert kinds[FORWARD, "call_function", 1] == 4
    assert kinds[BACKWARD, "call_function", 1] == 7
    assert kinds[FORWARD, "call_function", 0] + kinds[BACKWARD, "call_function", 0] == 4 + 7


def test_the_backward_pass_keeps_inputs_in_the_format(step):
    """It reads the result of attention for other reasons, so that it rounds that again."""
    low_precision = in_low_precision(step, "float8")
    read = {made_by(x) for node in low_precision.calls if node.meta["phase"] == BACKWARD for x in node.all_input_nodes}
    early = [node for node in roundings(low_precision) if node.meta["phase"] == FORWARD and node.args[1] == 0]
    assert {made_by(node.args[0])[0].target for node in early} == {ops.rms_norm.default, ops.glu.default}
    assert not {made_by(node.args[0]) for node in early} & read
    late = {made_by(node.args[0])[0] for node in roundings(low_precision) if node.meta["phase"] == BACKWARD}
    assert any("attention" in str(node.target) and node.meta["phase"] == FORWARD for node in late)


def test_both_dims_are_rounded_in_one_read(step):
    low_precision = in_low_precision(step, "float8")
    program = shard(low_precision, Planner(low_precision, CLUSTER).named("single"), 0)
    before = Counter(node.target for node in program.graph.nodes)
    round_once(program.graph)
    program.graph.lint()
    after = Counter(node.target for node in program.graph.nodes)
    pairs = after[ROUND_BOTH]
    assert pairs == 2 * (7 + 3), "gradients, and inputs but that of o"
    assert after[ROUND_OPERAND] + 2 * pairs == before[ROUND_OPERAND] and after[SCALED_MM] == before[SCALED_MM]
    for node in program.graph.find_nodes(op="call_function", target=SCALED_MM):
        a, a_scales, b, b_scales = (x.meta["val"].shape for x in node.all_input_nodes)
        assert (a[0], a[1]) == (a_scales[0], b[1]) and b[0] == b_scales[0] and node.meta["val"].shape == (a[0], b[0])


@pytest.mark.parametrize("name", FORMATS)
def test_one_read_rounds_as_two(name):
    x = torch.randn(48, 200, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    both = ops.round_both(x, name)
    apart = *ops.round_operand(x, 1, name), *ops.round_operand(x, 0, name)
    assert all(torch.equal(a, b) for a, b in zip(both, apart, strict=True))


def test_what_is_computed_again_is_rounded_again(step):
    """The backward pass keeps neither the result nor its rounded form; the forward pass rounds it along one dim."""
    varied = vary(step, Variant(recompute=("glu",), matmul_dtype="float8"))
    of_glu = [node for node in roundings(varied) if made_by(node.args[0])[0].target is ops.glu.default]
    assert Counter((node.meta["phase"], node.args[1]) for node in of_glu) == {(FORWARD, 1): 2, (BACKWARD, 0): 2}


def test_activations_take_less_memory():
    model = zoo.llama(4)
    captured = tutti.capture(model, zoo.tokens(64, 32), torch.optim.AdamW(model.parameters(), lr=1e-3))
    peaks = []
    for variant in (Variant(), Variant(matmul_dtype="float8")):
        varied = vary(captured, variant)
        peaks.append(dry_run(varied, Planner(varied, CLUSTER, variant=variant).named("single"), CLUSTER).memory.peak)
    assert peaks[1] < peaks[0]
