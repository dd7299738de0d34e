"""What one rank computes: local shapes, collectives, and errors of plans that cannot be."""

import pytest
import torch
import torch.nn.functional as F

import tutti
import zoo
from tutti.lower.collectives import COLLECTIVES
from tutti.lower.shard import dense, shard
from tutti.plan.layouts.choice import Choice
from tutti.plan.layouts.layout import Layout, Split
from tutti.plan.plan import Plan
from tutti.plan.planner import Planner, replan

CLUSTER = tutti.Cluster.parse("cpu:4")


@pytest.fixture(scope="module")
def graph():
    model = zoo.llama(1)
    return tutti.capture(model, zoo.tokens(), torch.optim.AdamW(model.parameters()))


def trained(graph):
    return graph.keep([name for name in graph.outputs if name not in graph.gradient_names])


def test_without_choices_nothing_is_communicated(graph):
    program = shard(graph, Plan({"dp": 1}), 0)
    assert program.collectives == [] and program.sent == 0
    arranged = (dense, torch.ops.aten.contiguous.default)
    assert len([n for n in program.graph.nodes if n.op == "call_function" and n.target not in arranged]) <= len(
        graph.calls
    )


def test_zero_stages_are_layouts_of_inputs(graph):
    whole = sum(graph.spec(f"param:{n}").bytes for n in graph.names("param"))
    for name, parameters, state in (("dp4", 1, 1), ("zero1", 1, 4), ("zero3", 4, 4)):
        program = shard(trained(graph), Planner(graph, CLUSTER).named(name), 0)
        assert program.input_bytes("param") == whole / parameters
        assert program.input_bytes("exp_avg", "exp_avg_sq") == 2 * whole / state
        assert program.input_bytes() > program.input_bytes("param", "exp_avg", "exp_avg_sq")


def test_data_parallelism_reduces_each_gradient_once(graph):
    program = shard(trained(graph), Planner(graph, CLUSTER).named("dp4"), 0)
    whole = sum(graph.spec(f"param:{n}").bytes for n in graph.names("param"))
    reduced = [c for c in program.collectives if c.bytes > 16]
    assert {(c.kind, c.axis) for c in reduced} == {("all_reduce", "dp")}
    assert sum(c.bytes for c in reduced) == pytest.approx(2 * 3 / 4 * whole)


def test_a_zero_3_weight_is_gathered_in_the_forward_pass_and_again_in_the_backward_pass(graph):
    program = shard(trained(graph), Planner(graph, CLUSTER).named("zero3"), 0)
    layer = [graph.spec(f"param:{n}").bytes for n in graph.names("param") if ".layers." in n and "_proj" in n]
    gathered = {"forward": 0, "backward": 0}
    for c in program.collectives:
        if c.kind == "all_gather" and "_proj" in c.label:
            gathered["forward" if c.label.startswith("param:") or "/forward/" in c.label else "backward"] += c.bytes
    assert sum(gathered.values()) == 2 * sum(layer) * 3 / 4
    nodes = [n for n in program.graph.nodes if n.target in COLLECTIVES and "_proj" in n.meta["label"]]
    phases = [n.meta["phase"] for n in nodes if "all_gather" in str(n.target)]
    assert phases.count("forward") == phases.count("backward") == len(layer)


def test_evaluation_of_replicated_weights_gathers_nothing(graph):
    plan = Planner(graph, CLUSTER).named("zero1")
    evaluation = tutti.capture(zoo.llama(1).eval(), zoo.tokens(), gradients=False)
    program = shard(evaluation, replan(evaluation, plan, CLUSTER), 0)
    assert {c.kind for c in program.collectives} == {"all_reduce"} and program.sent < 64


def test_ranks_differ_only_in_numbers(graph):
    plan = Planner(graph, CLUSTER).named("dp2xtp2")
    programs = [shard(trained(graph), plan, rank) for rank in range(4)]
    targets = [[str(n.target) for n in p.graph.nodes] for p in programs]
    assert targets[0] == targets[1] == targets[2] == targets[3]
    assert len({p.sent for p in programs}) == 1


def test_outputs_lie_as_asked(graph):
    plan = Planner(graph, CLUSTER).named("dp4")
    name = "grad:model.layers.0.mlp.up_proj.weight"
    program = shard(graph.keep([name]), plan, 0, {name: Layout.of({"dp": Split(0)})})
    (result,) = next(n for n in program.graph.nodes if n.op == "output").args[0]
    assert result.meta["val"].shape == (96 // 4, 64)
    assert [c.kind for c in program.collectives if c.bytes > 64] == ["reduce_scatter"]  # beside the number of labels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": {"param:model.norm.weight": Layout.of({"a": Split(0)})}},
         r"param:model.norm.weight of shape \(64,\): dim 0 of size 64 cannot be split"),
        ({"operators": {"model.layers.*.mlp.up_proj/forward/mm": {"a": Choice("q")}}}, "mm: no factor 'q'"),
        ({"operators": {"model.layers.*.mlp.up_proj/forward/mm": {"a": Choice("k", 5)}}}, "does not divide into 5 x 3"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be(graph, changes, message):
    with pytest.raises(ValueError, match=message):
        shard(graph, Plan({"a": 3}, **changes), 0)


def test_an_operator_without_a_rule_cannot_be_split():
    model = torch.nn.Linear(4, 4)
    graph = tutti.capture(model, (torch.ones(4, 4),), loss=lambda m, b: zoo.ruleless(m(b[0])).sum())
    label = next(n.meta["label"] for n in graph.calls if "ruleless" in str(n.target))
    with pytest.raises(ValueError, match=r"tutti_tests\.ruleless\.default has no rule, so the plan cannot split it"):
        shard(graph, Plan({"a": 2}, operators={label: {"a": Choice("a")}}), 0)


def test_layer_norm_gets_statistics_without_holes():
    """A split of the sequence makes slices of mean and deviation, whose strides torch's kernel overlooks."""
    model = torch.nn.LayerNorm(6)
    batch = (torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0)),)
    loss = lambda m, b: F.silu(m(b[0])).sum()  # noqa: E731
    plan = Plan({"a": 2}, operators={"/backward/native_layer_norm_backward": {"a": Choice("b")}})
    gradients = []
    for cluster, chosen in (("cpu:1", "single"), ("cpu:2", plan)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = tutti.parallelize(model, optimizer, batch, loss=loss, cluster=cluster, plan=chosen, level="O0")
        gradients.append(step.gradients(batch))
    torch.testing.assert_close(gradients[1], gradients[0])
